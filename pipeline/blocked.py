"""What a stuck pipeline says: who waits for what, on which edge, who holds it, and the cycle."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from oneflax.sbp.errors import Fault

from .actions import Action
from .registers import Edge
from .text_grid import step_grid

if TYPE_CHECKING:
    from .table import ScheduleTable


SLOT = "for a slot of"  # how the need of a register begins


@dataclass(frozen=True, slots=True)
class Wait:
    """One reason why a worker cannot go on.

    Args:
        worker: Who waits.
        step: At which step of its row, counted from 0.
        action: With which action.
        needs: What it waits for, worded: ``"for 1B0"``.
        edge: The edge between stages over which it would come; None inside one stage.
        holder: Worker and step that would send it or free it; None if nobody in the table does.
    """

    worker: int
    step: int
    action: Action
    needs: str
    edge: Edge | None
    holder: tuple[int, int] | None

    def __str__(self) -> str:
        edge = f" over edge {self.edge[0]} -> {self.edge[1]}" if self.edge else ""
        does = "frees" if self.needs.startswith(SLOT) else "does"
        who = f"worker {self.holder[0]} {does} at step {self.holder[1]}" if self.holder else f"no worker {does}"
        return f"worker {self.worker}, step {self.step}: {self.action} waits {self.needs}{edge}, which {who}"


@dataclass(frozen=True, slots=True)
class Blocked:
    """Why a system of actors stands still.

    Args:
        waits: Everything that the workers wait for.
        cycle: The waits that close a circle, each worker waiting for the next and the last for the first; or empty.
    """

    waits: tuple[Wait, ...]
    cycle: tuple[Wait, ...]

    def __str__(self) -> str:
        return "\n".join(map(str, self.cycle or self.waits))


def find_cycle(waits: Iterable[Wait]) -> tuple[Wait, ...]:
    """The first circle of workers that wait for one another, from the lowest worker in it; empty if there is none."""
    by_worker: dict[int, list[Wait]] = {}
    for wait in waits:
        if wait.holder:
            by_worker.setdefault(wait.worker, []).append(wait)
    dead: set[int] = set()  # workers from which no circle is reached
    for first in sorted(by_worker):
        path = _walk(first, by_worker, dead)
        if path:
            lowest = min(range(len(path)), key=lambda at: path[at].worker)
            return tuple(path[lowest:] + path[:lowest])
    return ()


def _walk(first: int, by_worker: dict[int, list[Wait]], dead: set[int]) -> list[Wait]:
    """Depth first from one worker until a worker comes up again."""
    path: list[Wait] = []
    on_path = [first]
    choices = [iter(by_worker.get(first, ()))]
    while choices:
        wait = next(choices[-1], None)
        if wait is None:
            dead.add(on_path.pop())
            choices.pop()
            if path:
                path.pop()
            continue
        assert wait.holder is not None
        holder = wait.holder[0]
        if holder in on_path:
            return [*path, wait][on_path.index(holder) :]
        if holder not in dead:
            path.append(wait)
            on_path.append(holder)
            choices.append(iter(by_worker.get(holder, ())))
    return []


def stall_fault(table: "ScheduleTable", blocked: Blocked) -> Fault:
    """Words a standstill: the cycle, or everything awaited, and the grid with the stuck cells marked."""
    shown: Sequence[Wait] = blocked.cycle or blocked.waits
    if blocked.cycle:
        what = "the workers wait for one another and none can go on."
        first = shown[0]
        mend = f"move what {first.action} waits for before what waits for it, or let {first.action} come later."
    else:
        what = "the workers wait for what never comes."
        mend = "table.validate() lists what is missing."
    lines = [*map(str, shown), *step_grid(table.cells, {(w.worker, w.step) for w in shown})]
    return Fault(f"table {table.name!r}", what, ("\n  ".join(lines),), mend)
