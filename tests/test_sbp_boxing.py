"""Boxing between any two nd-sbps of one placement: values, the collectives that XLA runs, and the cheapest route."""

import itertools
import re
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import pytest

from oneflax.sbp import B, NdSbp, P, Partial, S, Split, placement
from oneflax.sbp.boxing import boxing_executable
from oneflax.sbp.boxing_plan import boxing_plan
from oneflax.sbp.cost import COLLECTIVES
from oneflax.sbp.storage import lead_axes, storage_shape, storage_sharding

SHAPE = (8, 16)
VALUE = np.random.default_rng(0).standard_normal(SHAPE).astype(np.float32)
ONE_AXIS = [S(0), S(1), B, P, P("max"), P("min")]
TWO_AXES = [S(0), S(1), B, P]
GRIDS = {"4": (4,), "2x2": (2, 2), "2x4": (2, 4), "1x4": (1, 4)}
REDUCE = {"sum": np.sum, "max": np.max, "min": np.min}


def grid_of(sizes: tuple[int, ...]) -> placement:
    return placement("cpu", np.arange(int(np.prod(sizes))).reshape(sizes).tolist())


def parts_of(value: np.ndarray, items: tuple[Any, ...], sizes: tuple[int, ...], rng: Any) -> list[np.ndarray]:
    """One part a rank, worked out with numpy: an earlier placement axis is the major one."""
    if not items:
        return [value]
    item, size = items[0], sizes[0]
    if isinstance(item, Split):
        pieces = np.split(value, size, item.axis)
    elif isinstance(item, Partial) and item.kind == "sum":
        addends = rng.standard_normal((size - 1, *value.shape)).astype(np.float32)
        pieces = [*addends, value - addends.sum(0)]
    elif isinstance(item, Partial):
        sign = -1 if item.kind == "max" else 1
        pieces = [value + sign * np.abs(rng.standard_normal(value.shape)).astype(np.float32) for _ in range(size)]
        pieces[int(rng.integers(size))] = value
    else:
        pieces = [value] * size
    return [part for piece in pieces for part in parts_of(piece, items[1:], sizes[1:], rng)]


def value_of(parts: list[np.ndarray], items: tuple[Any, ...], sizes: tuple[int, ...]) -> np.ndarray:
    """The logical value that parts stand for; copies must agree."""
    if not items:
        return parts[0]
    item, size = items[0], sizes[0]
    each = len(parts) // size
    pieces = [value_of(parts[i * each : (i + 1) * each], items[1:], sizes[1:]) for i in range(size)]
    if isinstance(item, Split):
        return np.concatenate(pieces, item.axis)
    if isinstance(item, Partial):
        return REDUCE[item.kind](np.stack(pieces), 0)
    for piece in pieces[1:]:
        np.testing.assert_allclose(piece, pieces[0], atol=2e-6)
    return pieces[0]


def store(parts: list[np.ndarray], nd_sbp: NdSbp, grid: placement) -> jax.Array:
    lead = (1,) * len(lead_axes(nd_sbp, grid))
    devices = grid.mesh.devices.flat
    arrays = [jax.device_put(part.reshape(lead + part.shape), device) for part, device in zip(parts, devices)]
    sharding = storage_sharding(nd_sbp, grid, len(SHAPE))
    return jax.make_array_from_single_device_arrays(storage_shape(SHAPE, nd_sbp, grid), sharding, arrays)


def parts_in(storage: jax.Array, nd_sbp: NdSbp, grid: placement) -> list[np.ndarray]:
    by_device = {shard.device: np.asarray(shard.data) for shard in storage.addressable_shards}
    lead = len(lead_axes(nd_sbp, grid))
    return [by_device[device].reshape(by_device[device].shape[lead:]) for device in grid.mesh.devices.flat]


def check(source: NdSbp, target: NdSbp, sizes: tuple[int, ...]) -> None:
    grid = grid_of(sizes)
    storage = store(parts_of(VALUE, source.items, sizes, np.random.default_rng(1)), source, grid)
    run, route = boxing_executable(source, target, SHAPE, np.dtype(np.float32), grid)
    got = value_of(parts_in(run(storage), target, grid), target.items, sizes)
    np.testing.assert_allclose(got, VALUE, atol=5e-6, err_msg=f"{source} -> {target}")  # sums of up to 8 addends
    text = run.lower(storage).compile().as_text()
    found = re.findall(rf" ({'|'.join(COLLECTIVES)})(?:-start)?\(", text)
    assert sorted(found) == sorted(route.collectives), f"{source} -> {target}: {found}, planned {route.collectives}"


@pytest.mark.newest
@pytest.mark.parametrize("source", ONE_AXIS, ids=str)
def test_every_pair_on_one_axis(source: Any) -> None:
    for target in ONE_AXIS:
        if not (isinstance(source, Partial) and isinstance(target, Partial) and source != target):
            check(NdSbp((source,)), NdSbp((target,)), (4,))


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(2, 2), (2, 4)], ids=str)
@pytest.mark.parametrize("source", list(itertools.product(TWO_AXES, repeat=2)), ids=str)
def test_every_pair_on_two_axes(source: tuple[Any, ...], sizes: tuple[int, ...]) -> None:
    for target in itertools.product(TWO_AXES, repeat=2):
        check(NdSbp(source), NdSbp(target), sizes)


def test_an_axis_of_size_one_needs_nothing() -> None:
    for source, target in itertools.product(TWO_AXES, repeat=2):
        assert boxing_plan(NdSbp((source, S(0))), NdSbp((target, S(0))), SHAPE, 4, (1, 4)).steps == ()


def test_nan_survives_max_and_min() -> None:
    grid = grid_of((4,))
    value = VALUE.copy()
    value[3, 5] = np.nan
    for kind, target in itertools.product(("max", "min"), (B, S(0))):
        source = NdSbp((P(kind),))
        run, _ = boxing_executable(source, NdSbp((target,)), SHAPE, np.dtype(np.float32), grid)
        storage = store(parts_of(value, source.items, (4,), np.random.default_rng(1)), source, grid)
        np.testing.assert_array_equal(value_of(parts_in(run(storage), NdSbp((target,)), grid), (target,), (4,)), value)


def routes(here: NdSbp, target: NdSbp, sizes: tuple[int, ...], most: int) -> Iterator[float]:
    """Bytes that a rank sends on every route of at most `most` one-axis changes, by brute force."""
    if here == target:
        yield 0.0
    if most == 0:
        return
    for axis, item in itertools.product(range(len(sizes)), TWO_AXES):
        there = NdSbp((*here.items[:axis], item, *here.items[axis + 1 :]))
        if isinstance(item, Partial) and item != target[axis]:
            continue  # making addends of zeros only to sum them again is no route: it loses the sign of -0.0
        if item == here[axis] or not _nests(here, axis, here[axis]) or not _nests(here, axis, item):
            continue
        sent = _sent(here, axis, item, sizes)
        if sent is not None:
            yield from (sent + rest for rest in routes(there, target, sizes, most - 1))


def _nests(nd_sbp: NdSbp, axis: int, item: Any) -> bool:
    return not isinstance(item, Split) or item not in nd_sbp.items[axis + 1 :]


def _sent(here: NdSbp, axis: int, item: Any, sizes: tuple[int, ...]) -> float | None:
    """Ring algorithms: a rank sends (k - 1) / k of what it holds to scatter, (k - 1) times its part to gather."""
    held = VALUE.nbytes / np.prod([size for i, size in zip(here, sizes) if isinstance(i, Split)])
    k = sizes[axis]
    match here[axis], item:
        case Partial(), Split():
            return held * (k - 1) / k
        case Partial(), _:
            return 2 * held * (k - 1) / k
        case Split(), Split():
            return held * (k - 1) / k
        case Split(), b if b == B:
            return held * (k - 1)
        case b, Partial() if b == B or isinstance(b, Split):
            return 0.0
        case b, Split() if b == B:
            return 0.0
    return None


@pytest.mark.parametrize("source", list(itertools.product(TWO_AXES, repeat=2)), ids=str)
def test_no_route_of_four_changes_sends_less(source: tuple[Any, ...]) -> None:
    for target in itertools.product(TWO_AXES, repeat=2):
        route = boxing_plan(NdSbp(source), NdSbp(target), (8192, 16384), 4, (2, 2))  # large: bytes decide
        scale = 8192 * 16384 / VALUE.size
        least = min(routes(NdSbp(source), NdSbp(target), (2, 2), 4)) * scale
        assert route.sent_bytes <= least * (1 + 1e-9), f"{source} -> {target}: {route}"
