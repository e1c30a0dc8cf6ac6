"""Layout: the jax sharding of a tensor with a placement and an nd-sbp of S and B.

The checks, and the sizes of the parts, are in `extent.py`, which needs no jax.
"""

from collections.abc import Sequence
from typing import Any

from jax.sharding import NamedSharding, PartitionSpec

from .errors import SbpError
from .extent import check_layout, partial_faults, split_over
from .grid import Placement
from .signature import NdSbp, as_nd_sbp, axis_faults


def partition_spec(nd_sbp: Any, placement: Placement, ndim: int) -> PartitionSpec:
    """Gives the ``PartitionSpec`` of an nd-sbp, in normal form: equal layouts give equal specs.

    Several placement axes on one tensor axis stand from major to minor, in the order of the placement axes.
    Placement axes of size 1 are left out, and so is every None at the end.

    Args:
        nd_sbp: Any form that :func:`as_nd_sbp` reads.
        placement: Gives the axis names of the spec.
        ndim: The number of tensor axes.

    Raises:
        SbpError: The nd-sbp does not fit the placement, splits a tensor axis that is not there, or has a P.

    Example:
        >>> from oneflax.sbp import partition_spec, placement
        >>> grid = placement("cpu", [[0, 1], [2, 3]], axes=("data", "model"))
        >>> spec = partition_spec("(S(0), S(0))", grid, ndim=2)
        >>> tuple(spec)
        (('data', 'model'),)
    """
    value = as_nd_sbp(nd_sbp, placement, "partition_spec")
    given = f"nd-sbp {value}    placement {placement}"
    faults = axis_faults(value, ndim, "partition_spec", (given,), placement)
    faults += partial_faults(value, placement, "partition_spec", given)
    if faults:
        raise SbpError(faults)
    return _spec(value, placement, ndim)


def named_sharding(shape: Sequence[int], nd_sbp: Any, placement: Placement, name: str = "tensor") -> NamedSharding:
    """Gives the ``NamedSharding`` under which a ``jax.Array`` is laid out as the nd-sbp says. It moves no data.

    Args:
        shape: The logical shape.
        nd_sbp: Any form that :func:`as_nd_sbp` reads.
        placement: Where the tensor lives; its ranks must exist here.
        name: What messages call the tensor.

    Raises:
        SbpError: The nd-sbp does not fit shape and placement, a split is uneven, there is a P, or ranks do not exist.

    Example:
        >>> from oneflax.sbp import S, named_sharding, placement
        >>> named_sharding((8, 6), S(0), placement("cpu", [0])).shard_shape((8, 6))
        (8, 6)
    """
    faults = check_layout(shape, nd_sbp, placement, name, "named_sharding")
    if faults:
        raise SbpError(faults)
    return NamedSharding(placement.mesh, _spec(as_nd_sbp(nd_sbp, placement), placement, len(shape)))


def _spec(nd_sbp: NdSbp, placement: Placement, ndim: int) -> PartitionSpec:
    names = placement.axis_names
    entries: list[Any] = []
    for axes in split_over(nd_sbp, placement, ndim):
        # One axis alone is written without a tuple: jax tells ("x",) and "x" apart.
        entries.append(None if not axes else names[axes[0]] if len(axes) == 1 else tuple(names[i] for i in axes))
    while entries and entries[-1] is None:
        entries.pop()
    return PartitionSpec(*entries)
