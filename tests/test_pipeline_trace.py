"""Traces and simulations: figures, text, Chrome's format."""

import json
from pathlib import Path

import pytest

from oneflax.pipeline.schedules import forward_only, gpipe, one_f_one_b
from oneflax.pipeline.simulate import Simulation, simulate
from oneflax.pipeline.table import ScheduleTable
from oneflax.pipeline.trace import TimedAction, TimedTransfer, Trace, bytes_text, seconds_text
from oneflax.sbp.errors import ScheduleError

MEASURED = Trace(
    (
        TimedAction(0, 0, "F", 0, 5.000, 5.010),
        TimedAction(0, 0, "B", 0, 5.025, 5.040),
        TimedAction(1, 1, "F", 0, 5.010, 5.020),
        TimedAction(1, 1, "B", 0, 5.015, 5.025),  # overlaps with the forward
    ),
    workers=3,
    name="measured",
    transfers=(
        TimedTransfer(0, 1, 0, "F", 5.009, 5.010, 2048),
        TimedTransfer(1, 0, 0, "B", 5.025, 5.026, 1024),
    ),
    peak_bytes=(3 << 20, 1500, 0),
)


def test_figures_of_a_measured_trace() -> None:
    assert MEASURED.makespan_s == pytest.approx(0.040)
    assert MEASURED.busy_s == pytest.approx((0.025, 0.015, 0.0))
    assert MEASURED.busy == pytest.approx((0.625, 0.375, 0.0))
    assert MEASURED.bubble == pytest.approx(1 - 0.040 / (3 * 0.040))


def test_an_empty_trace() -> None:
    trace = Trace((), workers=2)
    assert (trace.makespan_s, trace.bubble, trace.busy) == (0.0, 0.0, (0.0, 0.0))
    assert str(trace).startswith("trace: 2 workers, 0 s, bubble 0.0 %")


def test_text_of_a_trace() -> None:
    assert str(MEASURED) == (
        "measured: 3 workers, 40.000 ms, bubble 66.7 %\n"
        "worker  stages    busy     F mean     B mean     peak\n"
        "0       0       62.5 %  10.000 ms  15.000 ms  3.0 MiB\n"
        "1       1       37.5 %  10.000 ms  10.000 ms  1.5 KiB\n"
        "2       -        0.0 %          -          -      0 B"
    )


def test_units() -> None:
    assert [seconds_text(s) for s in (2.0, 0.0015, 2e-6, 0.0)] == ["2.000 s", "1.500 ms", "2.0 us", "0 s"]
    assert [bytes_text(n) for n in (12, 1536, 5 << 20, 3 << 31)] == ["12 B", "1.5 KiB", "5.0 MiB", "6.0 GiB"]


def test_chrome_events(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    MEASURED.to_chrome(path)
    events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    named = [(e["name"], e["pid"], e["tid"], e["args"]["name"]) for e in events if e["ph"] == "M"]
    assert named == [
        ("process_name", 0, 0, "measured: workers"),
        *(("thread_name", 0, worker, f"worker {worker}") for worker in range(3)),
        ("process_name", 1, 0, "measured: transfers"),
        ("thread_name", 1, 0, "stage 0 -> 1"),
        ("thread_name", 1, 1, "stage 1 -> 0"),
    ]
    complete = [e for e in events if e["ph"] == "X"]
    assert [(e["name"], e["pid"], e["tid"]) for e in complete[:4]] == [
        ("0F0", 0, 0),
        ("0B0", 0, 0),
        ("1F0", 0, 1),
        ("1B0", 0, 1),
    ]
    assert complete[1]["ts"] == pytest.approx(25_000)
    assert complete[1]["dur"] == pytest.approx(15_000)
    assert complete[1]["args"] == {"stage": 0, "kind": "B", "microbatch": 0}
    assert complete[5]["args"] == {"src_stage": 1, "dst_stage": 0, "microbatch": 0, "direction": "B", "bytes": 1024}
    assert len(complete) == 6


def test_a_simulation_is_a_trace() -> None:
    simulation = simulate(one_f_one_b(2).table(workers=2))
    assert isinstance(simulation, Trace)
    assert isinstance(simulation, Simulation)
    assert [(a.worker, str(a), a.start_s, a.end_s) for a in simulation.actions] == [
        (0, "0F0", 0, 1),
        (1, "1F0", 1, 2),
        (0, "0F1", 1, 2),
        (1, "1B0", 2, 4),
        (0, "0B0", 4, 6),
        (1, "1F1", 4, 5),
        (1, "1B1", 5, 7),
        (0, "0B1", 7, 9),
    ]


def test_costs_by_kind_and_by_action() -> None:
    table = forward_only(2).table(workers=2)
    assert table.simulate({"F": 0.5}).makespan_s == 1.5
    slow = table.simulate(lambda action: 3.0 if action.stage == 1 else 1.0)
    assert slow.makespan_s == 7.0
    assert slow.busy_s == (2.0, 6.0)


def test_edges_decide_what_waits() -> None:
    table = forward_only(1).table(workers=3)
    assert table.simulate().makespan_s == 3.0
    assert table.simulate(edges={(0, 2), (1, 2)}).makespan_s == 2.0


def test_pairs_take_the_sum_of_their_costs_once() -> None:
    table = ScheduleTable.of([["0F0", "0F1;0B0", "0B1"]])
    simulation = table.simulate()
    assert simulation.makespan_s == 6.0
    assert simulation.busy == (1.0,)
    assert simulation.bubble == 0.0


def test_a_table_that_cannot_run_is_refused() -> None:
    with pytest.raises(ScheduleError, match="wait for one another"):
        ScheduleTable.of([["0F0", "0B0"], ["1B0", "1F0"]]).simulate()


def test_timed_action_gives_its_action() -> None:
    action = gpipe(1).table(workers=1).simulate().actions[0]
    assert str(action.action) == str(action) == "0F0"
