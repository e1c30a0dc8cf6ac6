"""The cheapest way from one nd-sbp to another on one placement, as a sequence of collectives.

A step changes the sbp of one placement axis. Where several placement axes split one tensor axis, parts nest: the
earlier placement axis is the major one. So a split may be added or removed only while no later placement axis splits
the same tensor axis; a search over all nd-sbps finds the cheapest legal order.
"""

import heapq
import itertools
from dataclasses import dataclass
from functools import lru_cache

from .cost import DEFAULT_LINK, Link, memory_seconds, seconds, sent_bytes
from .signature import B, NdSbp, Partial, Sbp, Split


@dataclass(frozen=True, slots=True)
class Step:
    """One change: `placement_axis` goes from `source` to `target`.

    Attributes:
        collective: The operation it needs, None where every rank can do it alone.
        sent_bytes: What each rank sends.
        seconds: Modelled time.
    """

    placement_axis: int
    source: Sbp
    target: Sbp
    collective: str | None
    sent_bytes: float
    seconds: float

    def __str__(self) -> str:
        how = f"{self.collective}, {self.sent_bytes:.0f} B a rank" if self.collective else "local"
        return f"placement axis {self.placement_axis}: {self.source} -> {self.target} ({how})"


@dataclass(frozen=True, slots=True)
class Route:
    """Steps in order, with what they cost in all."""

    steps: tuple[Step, ...]

    @property
    def sent_bytes(self) -> float:
        """What each rank sends."""
        return sum(step.sent_bytes for step in self.steps)

    @property
    def seconds(self) -> float:
        """Modelled time."""
        return sum(step.seconds for step in self.steps)

    @property
    def collectives(self) -> tuple[str, ...]:
        """The operations in order."""
        return tuple(step.collective for step in self.steps if step.collective is not None)

    def __str__(self) -> str:
        return "\n".join(map(str, self.steps)) if self.steps else "nothing to do"


@lru_cache(maxsize=65536)
def boxing_plan(
    source: NdSbp,
    target: NdSbp,
    shape: tuple[int, ...],
    itemsize: int,
    grid: tuple[int, ...],
    links: tuple[Link, ...] | None = None,
) -> Route:
    """The cheapest route.

    Args:
        source, target: nd-sbps with tensor axes counted from the front, one sbp for each placement axis.
        shape: The logical shape. itemsize: Bytes of an element.
        grid: Sizes of the placement axes.
        links: How fast each placement axis is; all alike unless told.

    Returns:
        The route; empty where source and target hold the same on every rank. Of equally cheap routes the one whose
        steps come first in the order of placement axes and sbps.
    """
    links = links or (DEFAULT_LINK,) * len(grid)
    source, target = _plain(source, grid), _plain(target, grid)
    order = itertools.count()
    best: dict[NdSbp, float] = {source: 0.0}
    queue: list[tuple[float, int, NdSbp, tuple[Step, ...]]] = [(0.0, next(order), source, ())]
    while queue:
        cost, _, here, steps = heapq.heappop(queue)
        if here == target:
            return Route(steps)
        if cost > best[here]:
            continue
        for step in _steps(here, target, shape, itemsize, grid, links):
            there = _replace(here, step.placement_axis, step.target)
            total = cost + step.seconds
            if total < best.get(there, float("inf")):
                best[there] = total
                heapq.heappush(queue, (total, next(order), there, (*steps, step)))
    raise AssertionError(f"no route from {source} to {target}")  # every nd-sbp reaches B and is reached from it


def _plain(nd_sbp: NdSbp, grid: tuple[int, ...]) -> NdSbp:
    """On a placement axis of size 1 every sbp is the same thing: B stands for it."""
    return NdSbp(tuple(B if size == 1 else item for item, size in zip(nd_sbp, grid)))


def _replace(nd_sbp: NdSbp, axis: int, item: Sbp) -> NdSbp:
    return NdSbp((*nd_sbp.items[:axis], item, *nd_sbp.items[axis + 1 :]))


def _steps(
    here: NdSbp, target: NdSbp, shape: tuple[int, ...], itemsize: int, grid: tuple[int, ...], links: tuple[Link, ...]
) -> list[Step]:
    steps = []
    local_bytes = float(itemsize)
    for n in shape:
        local_bytes *= n
    for item, size in zip(here, grid):
        local_bytes /= size if isinstance(item, Split) else 1
    for axis, size in enumerate(grid):
        if size == 1 or not _free_to_change(here, axis, here[axis]):
            continue
        for goal in _goals(here, target, axis, len(shape)):
            if (
                goal == here[axis]
                or not _free_to_change(here, axis, goal)
                or not _divides(here, axis, goal, shape, grid)
            ):
                continue
            steps.append(_step(axis, here[axis], goal, local_bytes, size, links[axis]))
    return steps


def _goals(here: NdSbp, target: NdSbp, axis: int, ndim: int) -> list[Sbp]:
    """Where a placement axis may go: its target, B, or a split. P comes only at the end, from B or S."""
    goals: list[Sbp] = [B, *(Split(i) for i in range(ndim))]
    if isinstance(target[axis], Partial) and not isinstance(here[axis], Partial):
        goals.append(target[axis])
    return goals


def _free_to_change(nd_sbp: NdSbp, axis: int, item: Sbp) -> bool:
    """Whether a split on `axis` would be the innermost of its tensor axis."""
    return not isinstance(item, Split) or all(later != item for later in nd_sbp.items[axis + 1 :])


def _divides(here: NdSbp, axis: int, goal: Sbp, shape: tuple[int, ...], grid: tuple[int, ...]) -> bool:
    if not isinstance(goal, Split):
        return True
    parts = grid[axis]
    for i, item in enumerate(here):
        parts *= grid[i] if i != axis and item == goal else 1
    return shape[goal.axis] % parts == 0


def _step(axis: int, source: Sbp, target: Sbp, local_bytes: float, ranks: int, link: Link) -> Step:
    match source, target:
        case Partial(), Split():
            collective = "reduce-scatter" if source == Partial() else "all-to-all"
        case Partial(), _:  # max and min gather: XLA's own reduction drops NaN on CPU
            collective = "all-reduce" if source == Partial() else "all-gather"
        case Split(), Split():
            collective = "all-to-all"
        case Split(), Partial():
            collective = None
        case Split(), _:
            collective = "all-gather"
        case _:
            collective = None
    if collective is None:
        grown = local_bytes * ranks if isinstance(source, Split) else local_bytes
        return Step(axis, source, target, None, 0.0, memory_seconds(grown))
    cost = seconds(collective, local_bytes, ranks, link) + memory_seconds(local_bytes)
    return Step(axis, source, target, collective, sent_bytes(collective, local_bytes, ranks), cost)
