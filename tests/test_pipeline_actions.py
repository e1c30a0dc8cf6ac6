"""Actions and cells: text both ways, and refusals."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oneflax.pipeline.actions import KINDS, Action, as_cell, cell_text, parse_cell
from oneflax.sbp.errors import ScheduleError

actions = st.builds(Action, st.integers(0, 10**6), st.sampled_from(KINDS), st.integers(0, 10**6))


@given(actions)
def test_action_text_parses_back(action: Action) -> None:
    assert Action.parse(str(action)) == action
    assert Action.parse(f"  {action} ") == action


@given(st.lists(actions, max_size=3).map(tuple))
def test_cell_text_parses_back(cell: tuple[Action, ...]) -> None:
    assert parse_cell(cell_text(cell)) == cell


@pytest.mark.parametrize("text", ["4F2;5B1", "(4F2;5B1)OVERLAP_F_B", "(4F2;5B1)", " 4F2 ; 5B1 "])
def test_pair_reads_in_every_spelling(text: str) -> None:
    assert parse_cell(text) == (Action(4, "F", 2), Action(5, "B", 1))


def test_as_cell_takes_action_text_or_several() -> None:
    action = Action(0, "F", 1)
    assert as_cell(action) == as_cell("0F1") == as_cell([action]) == (action,)
    assert as_cell("") == ()


@pytest.mark.parametrize("text", ["", "F0", "0X0", "0F", "-1F0", "0F0;", "0f0", "0F0 0F1", "0F" + "9" * 5000, "٣F0"])
def test_malformed_text_is_refused(text: str) -> None:
    with pytest.raises(ScheduleError):
        Action.parse(text)


def test_message_of_a_malformed_text() -> None:
    with pytest.raises(ScheduleError) as caught:
        Action.parse("2G0")
    assert str(caught.value) == (
        "Action.parse(text): an action is a stage, one of the letters F, B, I, W, and a microbatch.\n"
        "  text: '2G0'\n"
        '  Mend: Action.parse("2F0")'
    )


@pytest.mark.parametrize(("stage", "kind", "microbatch"), [(-1, "F", 0), (0, "X", 0), (0, "F", -1)])
def test_action_checks_its_fields(stage: int, kind: str, microbatch: int) -> None:
    with pytest.raises(ScheduleError, match="count from 0"):
        Action(stage, kind, microbatch)  # pyright: ignore[reportArgumentType]
