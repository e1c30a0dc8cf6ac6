"""Chooses the signature of an op for inputs as they lie: the cheapest, boxing counted.

One signature is chosen for each placement axis; all combinations are tried. What counts is, in this order: modelled
seconds of boxing the inputs and of collectives inside the op, seconds of touching the parts (which favours splitting
over copying), and last the order of the rule (all-B first, then splits from the first input's axes on).
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from .boxing_plan import Route, boxing_plan
from .cost import DEFAULT_LINK, Link, memory_seconds, seconds
from .notation import AxisSignature, Rule
from .signature import B, NdSbp, Partial, Split

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Tensors:
    """The inputs of an op as they lie, or its outputs: logical shapes and bytes of an element."""

    shapes: tuple[Shape, ...]
    itemsizes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Choice:
    """What to do: box each input by its route, run the local op, and call the outputs what they are.

    Attributes:
        axes: The signature on each placement axis.
        inputs, outputs: The nd-sbps that follow.
        routes: How each input gets there.
        seconds: Modelled time of everything.
    """

    axes: tuple[AxisSignature, ...]
    inputs: tuple[NdSbp, ...]
    outputs: tuple[NdSbp, ...]
    routes: tuple[Route, ...]
    seconds: float

    @property
    def sent_bytes(self) -> float:
        """What each rank sends for boxing."""
        return sum(route.sent_bytes for route in self.routes)

    def __str__(self) -> str:
        return f"{', '.join(map(str, self.inputs))} -> {', '.join(map(str, self.outputs))}"


def infer(
    rule: Rule,
    held: Sequence[NdSbp],
    inputs: Tensors,
    outputs: Tensors,
    grid: tuple[int, ...],
    links: tuple[Link, ...] | None = None,
    differentiable: bool = False,
) -> Choice:
    """The cheapest choice; see the module's text for what counts.

    Args:
        rule: The op's rule.
        held: The nd-sbp of each input, tensor axes counted from the front.
        inputs, outputs: Shapes and element sizes.
        grid: Sizes of the placement axes.
        links: How fast each placement axis is.
        differentiable: Leave out signatures that have no dual (P of max or min).
    """
    links = links or (DEFAULT_LINK,) * len(grid)
    signatures = rule.signatures(inputs.shapes)
    whole = AxisSignature((B,) * len(inputs.shapes), (B,) * len(outputs.shapes))
    best: Choice | None = None
    for axes in itertools.product(*((whole,) if size == 1 else signatures for size in grid)):
        if differentiable and any(axis.dual() is None for axis in axes):
            continue
        choice = _price(axes, held, inputs, outputs, grid, links)
        if choice is not None and (best is None or choice.seconds < best.seconds):
            best = choice
    assert best is not None  # all-B always fits
    return best


def _price(
    axes: tuple[AxisSignature, ...],
    held: Sequence[NdSbp],
    inputs: Tensors,
    outputs: Tensors,
    grid: tuple[int, ...],
    links: tuple[Link, ...],
) -> Choice | None:
    """One combination with its cost, or None where a split does not fit."""
    wanted = tuple(NdSbp(tuple(axis.inputs[i] for axis in axes)) for i in range(len(held)))
    given = tuple(NdSbp(tuple(axis.outputs[i] for axis in axes)) for i in range(len(outputs.shapes)))
    tensors = [*zip(wanted, inputs.shapes, inputs.itemsizes), *zip(given, outputs.shapes, outputs.itemsizes)]
    if not all(_fits(nd_sbp, shape, grid) for nd_sbp, shape, _ in tensors):
        return None
    parts = [_part_bytes(nd_sbp, shape, itemsize, grid) for nd_sbp, shape, itemsize in tensors]
    total = sum(map(memory_seconds, parts))
    for axis, ranks, link in zip(axes, grid, links):
        if axis.collective and ranks > 1:
            total += 2 * seconds("all-reduce", min(parts), ranks, link)
    routes = []
    for source, target, shape, itemsize in zip(held, wanted, inputs.shapes, inputs.itemsizes):
        routes.append(boxing_plan(source, target, shape, itemsize, grid, links))
        total += routes[-1].seconds
    return Choice(axes, wanted, given, tuple(routes), total)


def _fits(nd_sbp: NdSbp, shape: Shape, grid: tuple[int, ...]) -> bool:
    kinds = {item.kind for item, size in zip(nd_sbp, grid) if isinstance(item, Partial) and size > 1}
    return len(kinds) <= 1 and all(shape[axis] % ways == 0 for axis, ways in _ways(nd_sbp, grid))


def _ways(nd_sbp: NdSbp, grid: tuple[int, ...]) -> Iterator[tuple[int, int]]:
    """For each tensor axis that is split, into how many parts."""
    ways: dict[int, int] = {}
    for item, size in zip(nd_sbp, grid):
        if isinstance(item, Split):
            ways[item.axis] = ways.get(item.axis, 1) * size
    yield from ways.items()


def _part_bytes(nd_sbp: NdSbp, shape: Shape, itemsize: int, grid: tuple[int, ...]) -> float:
    count = float(itemsize)
    for n in shape:
        count *= n
    for item, size in zip(nd_sbp, grid):
        count /= size if isinstance(item, Split) else 1
    return count
