"""The registers of one step: all that waits for somebody lies in a pool, and no pool is larger than its table needs.

Three kinds of things wait: a microbatch in its stage, from its forward to its backward (arguments and residuals);
values on an edge, from their arrival to the action that reads them (cotangents take the edges backwards); and
gradients that came out of the order of microbatches, until those before them have been added.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .actions import Action
from .registers import Edge, RegisterPool


@dataclass(frozen=True, slots=True)
class Bounds:
    """The least number of slots that each pool needs; what never waits has none.

    Attributes:
        stages: Microbatches that each stage holds.
        edges: (giver, reader) → values that wait. For cotangents the giver is the later stage.
        parked: Stage → gradients that wait for their turn.
    """

    stages: tuple[int, ...]
    edges: Mapping[Edge, int]
    parked: Mapping[int, int]

    @classmethod
    def of(
        cls, order: Iterable[Action], stages: int, edges: Iterable[Edge], returning: Iterable[Edge], forward_only: bool
    ) -> "Bounds":
        """Walks actions in the order in which they are dispatched, and counts.

        Args:
            order: Every action of the step.
            stages: How many stages there are.
            edges: Forward edges (source, target). returning: Those over which a cotangent comes back.
            forward_only: There is no backward, so a forward gives its microbatch back.

        >>> order = [Action.parse(text) for text in "0F0 0F1 1F0 1B0 0B0 1F1 1B1 0B1".split()]
        >>> bounds = Bounds.of(order, 2, {(0, 1)}, {(0, 1)}, False)
        >>> bounds.stages, bounds.edges, bounds.parked
        ((2, 1), {(0, 1): 2, (1, 0): 1}, {})
        """
        walk = _Walk()
        edges, returning = tuple(edges), tuple(returning)
        for action in order:
            stage = action.stage
            if action.kind == "F":
                walk.give_back((src, dst) for src, dst in edges if dst == stage)
                walk.take([stage])
                walk.take((src, dst) for src, dst in edges if src == stage)
                walk.give_back([stage] if forward_only else ())
            else:
                walk.give_back((dst, src) for src, dst in returning if src == stage)
                walk.give_back([stage])
                walk.add(stage, action.microbatch)
                walk.take((dst, src) for src, dst in returning if dst == stage)
        peaks = walk.peaks
        edge_peaks = {key: count for key, count in peaks.items() if isinstance(key, tuple)}
        return cls(tuple(peaks[stage] for stage in range(stages)), edge_peaks, walk.parked_peaks)


class _Walk:
    """What is held while the actions are walked: by stage (a number) and by edge (a pair)."""

    def __init__(self) -> None:
        self.peaks: Counter[int | Edge] = Counter()
        self.parked_peaks: dict[int, int] = {}
        self._now: Counter[int | Edge] = Counter()
        self._added: Counter[int] = Counter()
        self._parked: dict[int, set[int]] = {}

    def take(self, keys: Iterable[int | Edge]) -> None:
        for key in keys:
            self._now[key] += 1
            self.peaks[key] = max(self.peaks[key], self._now[key])

    def give_back(self, keys: Iterable[int | Edge]) -> None:
        self._now.subtract(keys)

    def add(self, stage: int, microbatch: int) -> None:
        parked = self._parked.setdefault(stage, set())
        if microbatch != self._added[stage]:
            parked.add(microbatch)
            self.parked_peaks[stage] = max(self.parked_peaks.get(stage, 0), len(parked))
            return
        self._added[stage] += 1
        while self._added[stage] in parked:
            parked.remove(self._added[stage])
            self._added[stage] += 1


class StepRegisters:
    """The pools of one step.

    Attributes:
        stages: For each stage, what its backward needs, by microbatch.
        edges: (giver, reader) → values that have arrived and wait, by microbatch; from a later to an earlier stage
            they are cotangents.
        parked: Stage → gradients that came out of order, by microbatch; only for stages that meet such.
    """

    __slots__ = ("edges", "parked", "stages")

    def __init__(self, bounds: Bounds) -> None:
        self.stages = [RegisterPool[int](n, f"stage {stage}") for stage, n in enumerate(bounds.stages)]
        self.edges = {edge: RegisterPool[int](n, f"edge {edge[0]} -> {edge[1]}") for edge, n in bounds.edges.items()}
        self.parked = {s: RegisterPool[int](n, f"gradients of stage {s}") for s, n in bounds.parked.items()}

    @property
    def pools(self) -> Sequence[RegisterPool[int]]:
        """All pools."""
        return (*self.stages, *self.edges.values(), *self.parked.values())

    def arrived(self, routes: Iterable[tuple[int, tuple[int, ...]]], reader: int, microbatch: int) -> list[Any]:
        """Takes from the edges what came for an action, in the order in which its function wants it.

        Args:
            routes: Givers, each with the positions of what it gives.
            reader: The stage that reads.
            microbatch: Whose values.
        """
        found: dict[int, Any] = {}
        for giver, positions in routes:
            found.update(zip(positions, self.edges[giver, reader].release(microbatch)))
        return [found[i] for i in range(len(found))]
