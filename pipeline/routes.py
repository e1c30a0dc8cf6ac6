"""Which values a stage exchanges with each other stage, by position in the lists that its functions take and give.

Values between two stages travel together, in the order of their numbers, so that one copy a pair of stages serves and
one register holds what came.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from .stage_functions import is_float
from .stages import Cut, StageGraph

#: The other stage, and the positions of what it gives or gets.
Route = tuple[int, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Routes:
    """The routes of one stage. Only floating values have cotangents.

    Attributes:
        consumers: For each edge that leaves, how many stages read it.
        arrivals: By source, positions among the edges in. sends: By reader, positions among the edges out.
        cotangents: By reader, positions among the cotangents that the backward takes: one a floating edge and reader.
        returns: By source, positions among the cotangents that the backward gives.
    """

    consumers: tuple[int, ...]
    arrivals: tuple[Route, ...]
    sends: tuple[Route, ...]
    cotangents: tuple[Route, ...]
    returns: tuple[Route, ...]


def routes_of(cut: Cut) -> list[Routes]:
    """The routes of every stage."""
    source = {edge.value: edge.source for edge in cut.edges}
    return [_routes(cut, stage, source) for stage in cut.stages]


def _routes(cut: Cut, stage: StageGraph, source: dict[int, int]) -> Routes:
    readers = {value: [] for value in stage.edges_out}
    for edge in cut.edges:
        if edge.source == stage.index:
            readers[edge.value].append(edge.target)
    floating_out = [v for v in stage.edges_out if is_float(cut.graph.avals[v])]
    floating_in = [v for v in stage.edges_in if is_float(cut.graph.avals[v])]
    pairs = [(position, reader) for position, v in enumerate(stage.edges_out) for reader in sorted(readers[v])]
    return Routes(
        consumers=tuple(len(readers[v]) for v in stage.edges_out),
        arrivals=_grouped((i, source[v]) for i, v in enumerate(stage.edges_in)),
        sends=_grouped(pairs),
        cotangents=_grouped(enumerate(reader for v in floating_out for reader in sorted(readers[v]))),
        returns=_grouped((i, source[v]) for i, v in enumerate(floating_in)),
    )


def _grouped(pairs: Iterable[tuple[int, int]]) -> tuple[Route, ...]:
    """Positions by stage."""
    by_stage: dict[int, list[int]] = {}
    for position, stage in pairs:
        by_stage.setdefault(stage, []).append(position)
    return tuple((stage, tuple(positions)) for stage, positions in by_stage.items())
