"""Storage: the ``jax.Array`` that holds a global tensor, P included.

S and B are a plain sharding. Each placement axis that is P adds one leading axis to the array, of the axis's size and
split over it: entry r is the addend of rank r. So storage has no state that jax does not understand, and every rank's
part, its leading axes dropped, is what the rank computes with. Placement axes of size 1 add nothing.
"""

from collections.abc import Sequence

from jax.sharding import NamedSharding, PartitionSpec

from .grid import Placement
from .layout import partition_spec
from .signature import B, NdSbp, Partial


def lead_axes(nd_sbp: NdSbp, placement: Placement) -> tuple[int, ...]:
    """The placement axes that are P, in order: one leading storage axis each."""
    return tuple(i for i, item in enumerate(nd_sbp) if isinstance(item, Partial) and placement.shape[i] > 1)


def storage_shape(shape: Sequence[int], nd_sbp: NdSbp, placement: Placement) -> tuple[int, ...]:
    """The shape of the array that holds a tensor of logical shape `shape`."""
    return (*(placement.shape[i] for i in lead_axes(nd_sbp, placement)), *shape)


def storage_spec(nd_sbp: NdSbp, placement: Placement, ndim: int) -> PartitionSpec:
    """The ``PartitionSpec`` of storage; `ndim` counts the logical tensor axes."""
    lead = lead_axes(nd_sbp, placement)
    rest = NdSbp(tuple(B if i in lead else item for i, item in enumerate(nd_sbp)))
    names = placement.axis_names
    return PartitionSpec(*(names[i] for i in lead), *partition_spec(rest, placement, ndim))


def storage_sharding(nd_sbp: NdSbp, placement: Placement, ndim: int) -> NamedSharding:
    """How storage lies on the placement's devices."""
    return NamedSharding(placement.mesh, storage_spec(nd_sbp, placement, ndim))
