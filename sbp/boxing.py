"""Runs a boxing route inside ``shard_map``: each step on the part that a rank holds."""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from .boxing_plan import Route, Step, boxing_plan
from .grid import Placement
from .signature import Broadcast, NdSbp, Partial, Split
from .storage import lead_axes, storage_spec


def box_local(part: jax.Array, route: Route, axis_names: Sequence[str]) -> jax.Array:
    """Takes one rank's part from a route's source to its target.

    Args:
        part: What the rank holds, leading storage axes dropped.
        route: The steps.
        axis_names: Mesh names of the placement axes.
    """
    for step in route.steps:
        part = _box(part, step, axis_names[step.placement_axis])
    return part


def _box(x: jax.Array, step: Step, name: str) -> jax.Array:
    match step.source, step.target:
        case Partial(kind), Broadcast():
            return lax.psum(x, name) if kind == "sum" else _extreme(lax.all_gather(x, name), kind, 0)
        case Partial("sum"), Split(axis):
            return lax.psum_scatter(x, name, scatter_dimension=axis, tiled=True)
        case Partial(kind), Split(axis):
            return _scatter_extreme(x, kind, axis, name)
        case Split(axis), Broadcast():
            return lax.all_gather(x, name, axis=axis, tiled=True)
        case Split(axis), Split(new):
            return lax.all_to_all(x, name, split_axis=new, concat_axis=axis, tiled=True)
        case Broadcast(), Split(axis):
            size = x.shape[axis] // lax.axis_size(name)
            return lax.dynamic_slice_in_dim(x, lax.axis_index(name) * size, size, axis)
        case Broadcast(), Partial(kind):
            return jnp.where(lax.axis_index(name) == 0, x, identity(kind, x.dtype))
        case Split(axis), Partial(kind):
            return _embed(x, kind, axis, name)
    raise AssertionError(f"no such step: {step}")


def identity(kind: str, dtype: Any) -> Any:
    """What adds nothing to a partial value: 0 for sums, the lowest or highest number for max and min."""
    if kind == "sum":
        return jnp.zeros((), dtype)
    if dtype == jnp.bool_:
        return jnp.asarray(kind == "min")
    if jnp.issubdtype(dtype, jnp.floating):
        return jnp.asarray(-jnp.inf if kind == "max" else jnp.inf, dtype)
    info = jnp.iinfo(dtype)
    return jnp.asarray(info.min if kind == "max" else info.max, dtype)


def _extreme(x: jax.Array, kind: str, axis: int) -> jax.Array:
    """Max or min over an array axis. Not ``lax.pmax``: XLA's CPU collective drops NaN."""
    return jnp.max(x, axis) if kind == "max" else jnp.min(x, axis)


def _scatter_extreme(x: jax.Array, kind: str, axis: int, name: str) -> jax.Array:
    ranks = lax.axis_size(name)
    parts = jnp.stack(jnp.split(x, ranks, axis))  # (ranks, ..., part, ...)
    return _extreme(lax.all_to_all(parts, name, split_axis=0, concat_axis=0, tiled=True), kind, 0)


def _embed(x: jax.Array, kind: str, axis: int, name: str) -> jax.Array:
    size = x.shape[axis]
    shape = (*x.shape[:axis], size * lax.axis_size(name), *x.shape[axis + 1 :])
    whole = jnp.full(shape, identity(kind, x.dtype))
    return lax.dynamic_update_slice_in_dim(whole, x, lax.axis_index(name) * size, axis)


@lru_cache(maxsize=4096)
def boxing_executable(
    source: NdSbp, target: NdSbp, shape: tuple[int, ...], dtype: Any, placement: Placement
) -> tuple[Any, Route]:
    """The jitted function that takes storage from one nd-sbp to another on the same placement, and its route.

    Args:
        source, target: nd-sbps with tensor axes counted from the front; every split is even.
        shape: The logical shape. dtype: Of the elements.
        placement: Where the tensor lives.
    """
    route = boxing_plan(source, target, shape, jnp.dtype(dtype).itemsize, placement.shape)
    lead_in, lead_out = len(lead_axes(source, placement)), len(lead_axes(target, placement))

    def body(storage: jax.Array) -> jax.Array:
        part = box_local(storage.reshape(storage.shape[lead_in:]), route, placement.axis_names)
        return part.reshape((1,) * lead_out + part.shape)

    # check_vma=False: with True, jax sums over ranks where a value goes from one copy on each to its gradient.
    mapped = jax.shard_map(
        body,
        mesh=placement.mesh,
        in_specs=storage_spec(source, placement, len(shape)),
        out_specs=storage_spec(target, placement, len(shape)),
        check_vma=False,
    )
    return jax.jit(mapped), route
