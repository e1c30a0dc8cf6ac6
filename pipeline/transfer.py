"""Moves values between the devices of two stages."""

from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec


def send(values: Sequence[Any], mesh: Mesh) -> list[Any]:
    """Copies arrays onto another stage's devices, each laid out there as it was at home.

    An unchanged layout is what lets JAX start the copy without waiting for the value, and every device receives
    only the part that it keeps. A layout that names an axis the target lacks is gathered there.
    """
    if not values:
        return []
    return jax.device_put(list(values), [_same_layout(value, mesh) for value in values])


def _same_layout(value: Any, mesh: Mesh) -> NamedSharding:
    sharding = value.sharding
    if isinstance(sharding, NamedSharding) and sharding.mesh.shape == mesh.shape:
        return NamedSharding(mesh, sharding.spec)
    return NamedSharding(mesh, PartitionSpec())
