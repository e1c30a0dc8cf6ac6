"""Schedule tables: the validator, CSV files, grids."""

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oneflax.pipeline.actions import KINDS, Action
from oneflax.pipeline.schedules import forward_only, gpipe, one_f_one_b
from oneflax.pipeline.table import ScheduleTable, from_csv
from oneflax.sbp.errors import ScheduleError

CASES = json.loads((Path(__file__).parent / "oracles/schedules/negative_cases.json").read_text(encoding="utf-8"))


def message(table: ScheduleTable, **given: Any) -> str:
    with pytest.raises(ScheduleError) as caught:
        table.validate(**given)
    return str(caught.value)


def faults(table: ScheduleTable, **given: Any) -> list[str]:
    with pytest.raises(ScheduleError) as caught:
        table.validate(**given)
    return [fault.what for fault in caught.value.faults]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["case"])
def test_negative_cases(case: dict[str, Any]) -> None:
    table = ScheduleTable.of(case["actions"], case["case"], case["m"], case["num_stages"])
    if case["must_be"] == "accepted":
        table.validate()
        simulated = case["my_simulator"]["makespan"]
        assert table.simulate().makespan_s == simulated
    else:
        assert case["must_be"] == "refused"
        assert message(table).count("worker 1") >= 1


def test_message_of_a_backward_before_its_forward() -> None:
    table = ScheduleTable.of([["0F0", "0F1", "0B0", "0B1"], ["1B0", "1F0", "1F1", "1B1"]], "hand")
    assert message(table) == (
        "table 'hand', worker 1, step 0: 1B0 needs 1F0, which the same worker runs only at step 1.\n"
        "  step       0    1    2    3\n"
        "  worker 0  0F0  0F1  0B0  0B1\n"
        "  worker 1 [1B0][1F0] 1F1  1B1\n"
        "  Mend: move 1F0 before 1B0."
    )


def test_message_of_a_cycle() -> None:
    table = ScheduleTable.of([["0F0", "0B0", "0F1", "0B1"], ["1F0", "1F1", "1B0", "1B1"]], "hand")
    assert message(table) == (
        "table 'hand': the workers wait for one another and none can go on.\n"
        "  worker 0, step 1: 0B0 waits for 1B0 over edge 1 -> 0, which worker 1 does at step 2\n"
        "  worker 1, step 1: 1F1 waits for 0F1 over edge 0 -> 1, which worker 0 does at step 2\n"
        "  step       0    1    2    3\n"
        "  worker 0  0F0 [0B0] 0F1  0B1\n"
        "  worker 1  1F0 [1F1] 1B0  1B1\n"
        "  Mend: move what 0B0 waits for before what waits for it, or let 0B0 come later."
    )


def test_message_of_many_faults_has_them_all_and_one_grid() -> None:
    table = ScheduleTable.of([["0F0", "0F0", "0W0", "0I0"], ["1F0", "1B0", "1I0", "1B0"]], "hand", microbatches=3)
    assert message(table) == (
        "table 'hand': 8 faults\n"
        "1. table 'hand', worker 0, step 0: 0F0 runs again at step 1; every pass runs once.\n"
        "     Mend: keep one 0F0.\n"
        "2. table 'hand', worker 0, step 2: 0W0 needs 0I0, which the same worker runs only at step 3.\n"
        "     Mend: move 0I0 before 0W0.\n"
        "3. table 'hand', stage 0: forward of stage 0 is missing for microbatch 1-2.\n"
        "     Mend: add 0F1 and so on.\n"
        "4. table 'hand', stage 0: backward of stage 0 is missing for microbatch 1-2.\n"
        "     Mend: add 0B1 and so on.\n"
        "5. table 'hand', worker 1, step 1: 1B0 runs again at step 3; every pass runs once.\n"
        "     Mend: keep one 1B0.\n"
        "6. table 'hand', worker 1, step 1: microbatch 0 of stage 1 has a full backward B and a split one (I, W).\n"
        "     Mend: keep B, or I and W.\n"
        "7. table 'hand', stage 1: forward of stage 1 is missing for microbatch 1-2.\n"
        "     Mend: add 1F1 and so on.\n"
        "8. table 'hand', stage 1: backward of stage 1 is missing for microbatch 1-2.\n"
        "     step       0    1    2    3\n"
        "     worker 0 [0F0][0F0][0W0][0I0]\n"
        "     worker 1  1F0 [1B0][1I0][1B0]\n"
        "     Mend: add 1B1 and so on."
    )


def test_a_fault_and_a_cycle_are_reported_together() -> None:
    rows = [["0F0", "0B0", "0F1", "0B1", "0B1"], ["1F0", "1F1", "1B0", "1B1"]]
    assert faults(ScheduleTable.of(rows)) == [
        "0B1 runs again at step 4; every pass runs once.",
        "the workers wait for one another and none can go on.",
    ]


def test_stages_that_are_unknown_missing_or_on_two_workers() -> None:
    rows = [["0F0", "0B0"], ["2F0", "2B0", "0F1"]]
    assert faults(ScheduleTable.of(rows, stages=2, microbatches=1)) == [
        "2F0 names stage 2; the table has stages 0 to 1.",
        "2B0 names stage 2; the table has stages 0 to 1.",
        "0F1 names microbatch 1; a step has 0.",
        "stage 0 is also on worker 1 (step 2); a stage has one worker, which holds its weights.",
        "no worker runs stage 1.",
    ]


@pytest.mark.parametrize(
    ("row", "what"),
    [
        (["0F0", "0I0"], "W, the other half of a split backward, of stage 0 is missing for microbatch 0."),
        (["0F0", "0W0"], "I, the other half of a split backward, of stage 0 is missing for microbatch 0."),
        (["0F0", "0B0", "0W0"], "microbatch 0 of stage 0 has a full backward B and a split one (I, W)."),
        (["0B0"], "forward of stage 0 is missing for microbatch 0."),
        (["0F0;0B0"], "0B0 needs 0F0, which the same worker runs only at step 0."),
    ],
)
def test_halves_of_a_split_backward(row: list[str], what: str) -> None:
    assert faults(ScheduleTable.of([row])) == [what]


def test_forward_only_tables_have_no_backward() -> None:
    table = ScheduleTable.of([["0F0", "0B0"]], forward_only=True)
    assert faults(table) == ["a forward-only table has a backward of stage 0, microbatch 0."]
    assert ScheduleTable.of([["0F0"]]).forward_only
    assert faults(ScheduleTable.of([["0F0"]], forward_only=False)) == [
        "backward of stage 0 is missing for microbatch 0."
    ]


def test_tables_without_enough_actions_are_refused_fast() -> None:
    assert faults(ScheduleTable.of([])) == ["the table has no actions."]
    huge = ScheduleTable.of([["999999999F0", "0F999999999"]])
    assert faults(huge) == [
        "1000000000 stages need more than the table's 2 different actions.",
        "1000000000 microbatches need more than the table's 2 different actions.",
    ]
    assert "cannot run" in str(huge)


def test_edges_may_skip_and_form_a_dag_but_lead_forward() -> None:
    table = gpipe(2).table(workers=4)
    table.validate(edges={(0, 1), (1, 2), (2, 3), (0, 3)})
    table.validate(edges={(0, 2), (1, 2), (2, 3)})  # two towers
    table.validate(edges=())
    assert faults(table, edges={(0, 1), (2, 1), (3, 7)}) == [
        "edge 2 -> 1 does not lead from one of the stages 0 to 3 to a later one.",
        "edge 3 -> 7 does not lead from one of the stages 0 to 3 to a later one.",
    ]


def test_a_cycle_that_only_a_skip_edge_closes() -> None:
    rows = [["0F0", "0B0"], ["2F0", "2B0", "1F0", "1B0"]]
    ScheduleTable.of(rows).validate(edges={(0, 2), (0, 1)})
    assert faults(ScheduleTable.of(rows)) == ["the workers wait for one another and none can go on."]


def test_too_few_credits_name_the_least_that_works() -> None:
    table = one_f_one_b(4).table(workers=3)
    table.validate(credits=[3, 2, 1])
    table.validate(credits=3)
    assert message(table, credits=[2, 2, 1]) == (
        "table '1f1b', stage 0: the stage holds 3 microbatches at once and has 2 credits.\n"
        "  Mend: credits=[3, 2, 1], the least that works."
    )
    assert len(faults(table, credits=1)) == 2
    assert faults(table, credits=[1]) == ["credits has 1 numbers for 3 stages."]


def test_too_few_slots_name_the_least_that_works() -> None:
    rows = [[f"0F{i}" for i in range(5)], [f"1F{i}" for i in reversed(range(5))]]
    table = ScheduleTable.of(rows, "hand")
    table.validate(slots={(0, 1): 5})
    for slots in range(5):
        assert message(table, slots={(0, 1): slots}) == (
            f"table 'hand', edge 0 -> 1: {slots} slots are too few: the workers wait for one another.\n"
            "  Mend: slots={(0, 1): 5}, the least that works."
        )


def test_a_long_grid_shows_the_marked_steps_only() -> None:
    rows = [[str(action) for action in row] for row in gpipe(20).table(workers=2).actions]
    rows[1].insert(18, "1F3")
    assert message(ScheduleTable.of(rows, "long")) == (
        "table 'long', worker 1, step 3: 1F3 runs again at step 18; every pass runs once.\n"
        "  step       0    1    2    3    4    5   ..   16    17    18    19    20\n"
        "  worker 0  0F0  0F1  0F2  0F3  0F4  0F5  ..  0F16  0F17  0F18  0F19  0B0\n"
        "  worker 1  1F0  1F1  1F2 [1F3] 1F4  1F5  ..  1F16  1F17 [1F3]  1F18  1F19\n"
        "  Mend: keep one 1F3."
    )


@given(st.data())
@settings(max_examples=200, deadline=None)
def test_mutated_tables_are_valid_or_refused(data: st.DataObject) -> None:
    make = data.draw(st.sampled_from([gpipe, one_f_one_b, forward_only]))
    microbatches = data.draw(st.integers(1, 4))
    rows = [list(row) for row in make(microbatches).table(data.draw(st.integers(1, 3))).actions]
    for _ in range(data.draw(st.integers(0, 3))):
        row = data.draw(st.sampled_from(rows))
        if not row:
            continue
        one, other = (data.draw(st.integers(0, len(row) - 1)) for _ in range(2))
        change = data.draw(st.sampled_from(["swap", "drop", "double", "other"]))
        if change == "swap":
            row[one], row[other] = row[other], row[one]
        elif change == "drop":
            del row[one]
        elif change == "double":
            row.insert(other, row[one])
        else:
            row[one] = Action(data.draw(st.integers(0, 3)), data.draw(st.sampled_from(KINDS)), other)
    table = ScheduleTable.of(rows, microbatches=microbatches)
    str(table)
    with contextlib.suppress(ScheduleError):
        table.validate()
        # What the validator passes runs to its end, with every action once and none missing.
        simulated = sorted(str(action) for action in table.simulate().actions)
        assert simulated == sorted({str(action) for row in rows for action in row})
        kinds = ["F"] if table.forward_only else ["F", "B"]
        every = {f"{s}{k}{m}" for s in range(table.stages) for k in kinds for m in range(table.microbatches)}
        assert every <= {text.replace("I", "B") for text in simulated}


tables = st.builds(
    lambda rows: ScheduleTable.of(rows, "some"),
    st.lists(
        st.lists(
            st.lists(
                st.builds(Action, st.integers(0, 5), st.sampled_from(KINDS), st.integers(0, 9)), min_size=1, max_size=2
            ),
            max_size=6,
        ),
        min_size=1,
        max_size=4,
    ),
)


@given(tables)
def test_csv_reads_back(tmp_path_factory: pytest.TempPathFactory, table: ScheduleTable) -> None:
    path = tmp_path_factory.mktemp("csv") / "some.csv"
    table.to_csv(path)
    assert from_csv(path) == ScheduleTable.from_csv(path) == table


def test_csv_of_a_table(tmp_path: Path) -> None:
    path = tmp_path / "hand.csv"
    ScheduleTable.of([["4F2;5B1", "4F3"], []]).to_csv(path)
    assert path.read_text(encoding="utf-8") == '4F2;5B1,4F3\n""\n'


def test_blank_cells_are_no_ops(tmp_path: Path) -> None:
    path = tmp_path / "torch.csv"
    path.write_text("0F0,0F1,,,0B0,,0B1\r\n,1F0,1B0,1F1,1B1,,\r\n", encoding="utf-8")
    table = from_csv(path)
    assert table == ScheduleTable.of([["0F0", "0F1", "0B0", "0B1"], ["1F0", "1B0", "1F1", "1B1"]], "torch")
    table.validate()
    assert from_csv(path, microbatches=3).microbatches == 3


def test_message_of_malformed_cells(tmp_path: Path) -> None:
    path = tmp_path / "bad.csv"
    path.write_text("0F0,0X0\n\n1F0;,1B0\n", encoding="utf-8")
    with pytest.raises(ScheduleError) as caught:
        from_csv(path)
    mend = "     Mend: write stage, F, B, I or W, and microbatch, as 2F0; a pair as 4F2;5B1; nothing for a no-op."
    assert str(caught.value) == (
        "from_csv('bad.csv'): 2 faults\n"
        f"1. from_csv('bad.csv'), line 1, cell 2: '0X0' is not an action.\n{mend}\n"
        f"2. from_csv('bad.csv'), line 3, cell 1: '1F0;' is not an action.\n{mend}"
    )


def test_a_table_serves_as_its_own_schedule() -> None:
    table = gpipe(2).table(workers=2)
    assert table.table(workers=2) is table
    with pytest.raises(ScheduleError, match="laid out for 2 workers"):
        table.table(workers=4)


def test_peaks_count_a_split_backward_until_its_weight_gradient() -> None:
    table = ScheduleTable.of([["0F0", "0I0", "0F1", "0W0", "0I1", "0W1"]])
    assert table.peak_activations == (2,)
    chunks = ScheduleTable.of([["0F0", "1F0", "1B0", "0B0"]])
    assert chunks.peak_activations == (2,)
    assert chunks.chunks == 2


def test_the_grid_by_time() -> None:
    assert str(one_f_one_b(2).table(workers=2)) == (
        "1f1b: 2 workers, 2 stages, 2 microbatches\n"
        "time      0   1   2   3   4   5   6   7   8\n"
        "worker 0  0F0 0F1  .   .  0B0----  .  0B1----\n"
        "worker 1   .  1F0 1B0---- 1F1 1B1----  .   ."
    )


def test_the_grid_of_a_table_that_cannot_run() -> None:
    assert str(ScheduleTable.of([["0F0", "0B0"], ["1B0", "1F0"]], "hand")) == (
        "hand: 2 workers, 2 stages, 1 microbatch, cannot run\n"
        "step       0    1\n"
        "worker 0  0F0 [0B0]\n"
        "worker 1 [1B0] 1F0"
    )
