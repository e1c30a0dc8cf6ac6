"""Actions, the words of a schedule: what one worker does next, as ``2F0`` (stage 2, forward, microbatch 0).

Kinds: ``F`` forward; ``B`` full backward; ``I`` gradient of the inputs only; ``W`` gradient of the weights only. ``I``
followed by ``W`` does the work of ``B``. A *cell* holds the actions that one worker runs together: usually one, two
where a forward and a backward overlap (``4F2;5B1``).
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, cast, get_args

from oneflax.sbp.errors import Fault, ScheduleError

Kind = Literal["F", "B", "I", "W"]
KINDS: tuple[Kind, ...] = get_args(Kind)

_ACTION = re.compile(r"([0-9]{1,9})([FBIW])([0-9]{1,9})")
_OVERLAP = re.compile(r"\((.*)\)(?:OVERLAP_F_B)?")  # how torch writes a pair


@dataclass(frozen=True, slots=True)
class Action:
    """One unit of a worker's work: one kind of pass of one stage over one microbatch.

    Args:
        stage: The stage, counted from 0 along the data.
        kind: ``"F"``, ``"B"``, ``"I"`` or ``"W"``.
        microbatch: The microbatch, counted from 0.

    Raises:
        ScheduleError: A negative number or an unknown kind.

    >>> str(Action(2, "F", 0))
    '2F0'
    >>> Action.parse("2F0") == Action(2, "F", 0)
    True
    """

    stage: int
    kind: Kind
    microbatch: int

    def __post_init__(self) -> None:
        if self.kind not in KINDS or self.stage < 0 or self.microbatch < 0:
            raise _bad_action(self)

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"

    @classmethod
    def parse(cls, text: str) -> "Action":
        """Reads ``"2F0"``; spaces around it are ignored.

        Raises:
            ScheduleError: `text` is not a stage, a kind and a microbatch.
        """
        match = _ACTION.fullmatch(text.strip())
        if match is None:
            raise _bad_text(text)
        stage, kind, microbatch = match.groups()
        return cls(int(stage), cast(Kind, kind), int(microbatch))


Cell = tuple[Action, ...]


def cell_text(cell: Iterable[Action]) -> str:
    """Words a cell as a CSV file holds it.

    >>> cell_text((Action(4, "F", 2), Action(5, "B", 1)))
    '4F2;5B1'
    """
    return ";".join(map(str, cell))


def parse_cell(text: str) -> Cell:
    """Reads a CSV cell: ``"4F2"``, ``"4F2;5B1"``, torch's ``"(4F2;5B1)OVERLAP_F_B"``, or blank, which is no action.

    Raises:
        ScheduleError: A part of the cell is not an action.

    >>> parse_cell("4F2;5B1")
    (Action(stage=4, kind='F', microbatch=2), Action(stage=5, kind='B', microbatch=1))
    >>> parse_cell(" ")
    ()
    """
    text = text.strip()
    if not text:
        return ()
    overlap = _OVERLAP.fullmatch(text)
    return tuple(Action.parse(part) for part in (overlap[1] if overlap else text).split(";"))


def as_cell(value: "Action | str | Iterable[Action]") -> Cell:
    """Takes a cell as an action, its text, or several actions."""
    if isinstance(value, Action):
        return (value,)
    return parse_cell(value) if isinstance(value, str) else tuple(value)


def _bad_action(action: Action) -> ScheduleError:
    return ScheduleError(
        Fault(
            "Action(stage, kind, microbatch)",
            "stage and microbatch count from 0, and kind is one of F, B, I, W.",
            (f"stage: {action.stage!r}", f"kind: {action.kind!r}", f"microbatch: {action.microbatch!r}"),
            'Action(2, "F", 0)',
        )
    )


def _bad_text(text: str) -> ScheduleError:
    what = "an action is a stage, one of the letters F, B, I, W, and a microbatch."
    return ScheduleError(Fault("Action.parse(text)", what, (f"text: {text!r}",), 'Action.parse("2F0")'))
