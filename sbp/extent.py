"""Sizes of parts: what an nd-sbp makes of a shape on a placement, and everything that can be wrong with that.

The pure half of the layout: it imports no jax, so plans can be checked for machines that are not there.
`layout.py` makes shardings out of it.
"""

import math
from collections.abc import Sequence
from typing import Any

from .errors import Fault, SbpError, describe
from .grid import Placement
from .signature import B, NdSbp, Partial, Split, as_nd_sbp, axis_faults


def canonical(
    shape: Sequence[int], nd_sbp: Any, placement: Placement, name: str = "tensor", dtype: object = ""
) -> NdSbp:
    """Gives the nd-sbp with non-negative tensor axes, checked against a shape.

    Args:
        shape: The logical shape.
        nd_sbp: Any form that :func:`as_nd_sbp` reads.
        placement: Where the tensor lives.
        name: What messages call the tensor. dtype: Its dtype in messages, where it is known.

    Raises:
        SbpError: The nd-sbp does not fit the placement, or splits a tensor axis that is not there.
    """
    where = f"sbp of {name}"
    value = as_nd_sbp(nd_sbp, placement, where)
    faults = axis_faults(value, len(shape), where, (describe(name, dtype, shape, value, placement),), placement)
    if faults:
        raise SbpError(faults)
    return value.resolve(len(shape))


def split_over(nd_sbp: NdSbp, placement: Placement, ndim: int) -> tuple[tuple[int, ...], ...]:
    """Gives for each tensor axis the placement axes that split it, from major to minor.

    Placement axes of size 1 are left out: on them split, broadcast and partial are one thing.

    Args:
        nd_sbp: The nd-sbp; its tensor axes may be negative.
        placement: The placement it is for.
        ndim: The number of tensor axes.
    """
    over: list[list[int]] = [[] for _ in range(ndim)]
    for i, item in enumerate(nd_sbp.resolve(ndim)):
        if isinstance(item, Split) and placement.shape[i] > 1:
            over[item.axis].append(i)
    return tuple(map(tuple, over))


def check_layout(
    shape: Sequence[int],
    nd_sbp: Any,
    placement: Placement,
    name: str = "tensor",
    where: str = "layout",
    partial: bool = False,
    dtype: object = "",
) -> list[Fault]:
    """Gives all that keeps a tensor from being laid out so; an empty list when nothing does.

    Checked are the form of the nd-sbp, the tensor axes it names, that splits are even, and that there is no P.

    Args:
        shape: The logical shape.
        nd_sbp: Any form that :func:`as_nd_sbp` reads.
        placement: Where the tensor lives.
        name: What messages call the tensor. dtype: Its dtype in messages, where it is known.
        where: The call, for messages.
        partial: P is allowed.
    """
    call = f"{where}({name})"
    try:
        value = as_nd_sbp(nd_sbp, placement, call)
    except SbpError as error:
        return list(error.faults)
    given = describe(name, dtype, shape, value, placement)
    faults = axis_faults(value, len(shape), call, (given,), placement)
    if not faults:
        faults += _uneven_faults(shape, value.resolve(len(shape)), placement, name, call, given)
    if not partial:
        faults += partial_faults(value, placement, call, given)
    return faults


def partial_faults(nd_sbp: NdSbp, placement: Placement, where: str, given: str) -> list[Fault]:
    """Gives a fault for each P that would need partial-sum storage; on a placement axis of size 1 it needs none."""
    whole = NdSbp(tuple(B if isinstance(item, Partial) else item for item in nd_sbp))
    return [
        Fault(
            where,
            f"{item} over {placement.describe_axis(i)} is not a sharding: every rank holds "
            f"{'an addend' if item.kind == 'sum' else 'an operand'} as large as the whole, and this call "
            "gives no such storage.",
            (given,),
            f"sbp={whole} for the value itself.",
        )
        for i, item in enumerate(nd_sbp)
        if isinstance(item, Partial) and placement.shape[i] > 1
    ]


def part_shape(
    shape: Sequence[int], nd_sbp: Any, placement: Placement, name: str = "tensor", dtype: object = ""
) -> tuple[int, ...]:
    """Gives the shape of the part that each rank holds. P does not change it: an addend is as large as the whole.

    Args:
        shape: The logical shape.
        nd_sbp: Any form that :func:`as_nd_sbp` reads.
        placement: Where the tensor lives; its ranks need not exist here.
        name: What messages call the tensor. dtype: Its dtype in messages, where it is known.

    Raises:
        SbpError: The nd-sbp does not fit shape and placement, or a split is uneven.

    Example:
        >>> from oneflax.sbp import part_shape, placement
        >>> grid = placement("cpu", [[0, 1], [2, 3]], axes=("data", "model"))
        >>> part_shape((8, 6), {"data": "S(0)", "model": "S(1)"}, grid)
        (4, 3)
    """
    faults = check_layout(shape, nd_sbp, placement, name, "part_shape", partial=True, dtype=dtype)
    if faults:
        raise SbpError(faults)
    over = split_over(as_nd_sbp(nd_sbp, placement), placement, len(shape))
    return tuple(n // _ways(axes, placement) for n, axes in zip(shape, over))


def _ways(axes: Sequence[int], placement: Placement) -> int:
    return math.prod(placement.shape[i] for i in axes)


def _uneven_faults(
    shape: Sequence[int], nd_sbp: NdSbp, placement: Placement, name: str, where: str, given: str
) -> list[Fault]:
    faults: list[Fault] = []
    for axis, axes in enumerate(split_over(nd_sbp, placement, len(shape))):
        ways = _ways(axes, placement)
        if shape[axis] % ways:
            over = " and ".join(placement.describe_axis(i) for i in axes)
            product = "" if len(axes) == 1 else f", {ways} parts together"
            what = f"tensor axis {axis} of {name} (size {shape[axis]}) does not split evenly over {over}{product}."
            padded = -(-shape[axis] // ways) * ways
            mend = f"sbp={_even(shape, nd_sbp, placement)}, or pad tensor axis {axis} to {padded}."
            faults.append(Fault(where, what, (given,), mend))
    return faults


def _even(shape: Sequence[int], nd_sbp: NdSbp, placement: Placement) -> NdSbp:
    """The nd-sbp with B for each split that is not even, as the mend shows it."""
    left = list(shape)
    items = list(nd_sbp)
    for i, item in enumerate(items):
        if isinstance(item, Split):
            if left[item.axis] % placement.shape[i]:
                items[i] = B
            else:
                left[item.axis] //= placement.shape[i]
    return NdSbp(tuple(items))
