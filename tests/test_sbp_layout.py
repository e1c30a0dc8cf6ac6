"""Shardings and part shapes, against numpy slicing computed here."""

import itertools
import math

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec

from oneflax.sbp import (
    B,
    NdSbp,
    P,
    Placement,
    S,
    Sbp,
    SbpError,
    Split,
    canonical,
    check_layout,
    named_sharding,
    part_shape,
    partition_spec,
    placement,
    split_over,
)

GRID = placement("cpu", [[3, 1], [0, 2]], axes=("data", "model"))
GRIDS = [
    placement("cpu", [0, 1, 2, 3]),
    placement("cpu", [2, 0, 3]),
    placement("cpu", [5]),
    GRID,
    placement("cpu", [[0, 1, 2, 3]]),
    placement("cpu", [[7, 6], [5, 4], [3, 2]], axes=("a", "b")),
    placement("cpu", [[[0, 4], [2, 6]], [[1, 5], [3, 7]]], axes=("stage", "data", "model")),
]


def expected_part(value: np.ndarray, nd_sbp: tuple[Sbp, ...], grid: Placement, place: tuple[int, ...]) -> np.ndarray:
    """The part at one place of the grid: cut in halves, thirds, ... one placement axis after the other."""
    for sbp, size, index in zip(nd_sbp, grid.shape, place):
        if isinstance(sbp, Split):
            value = np.split(value, size, axis=sbp.axis)[index]
    return value


def layouts(grid: Placement, ndim: int) -> list[tuple[Sbp, ...]]:
    choices = [B, *(S(axis) for axis in range(-ndim, ndim))]
    return list(itertools.product(choices, repeat=grid.ndim))


@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize("shape", [(24,), (24, 12)], ids=str)
def test_every_rank_holds_the_part_that_numpy_cuts(grid: Placement, shape: tuple[int, ...]) -> None:
    value = np.arange(math.prod(shape)).reshape(shape)
    for nd_sbp in layouts(grid, len(shape)):
        if any(n % w for n, w in zip(shape, ways(nd_sbp, grid, len(shape)))):
            continue
        array = jax.device_put(value, named_sharding(shape, nd_sbp, grid))
        shards = {shard.device: np.asarray(shard.data) for shard in array.addressable_shards}
        assert len(shards) == grid.size
        for place in np.ndindex(grid.shape):
            rank = int(np.array(grid.ranks)[place])
            want = expected_part(value, nd_sbp, grid, place)
            np.testing.assert_array_equal(shards[jax.devices("cpu")[rank]], want, err_msg=f"{nd_sbp} rank {rank}")
            assert part_shape(shape, nd_sbp, grid) == want.shape


def ways(nd_sbp: tuple[Sbp, ...], grid: Placement, ndim: int) -> list[int]:
    found = [1] * ndim
    for sbp, size in zip(nd_sbp, grid.shape):
        if isinstance(sbp, Split):
            found[sbp.axis] *= size
    return found


def test_placement_axes_on_one_tensor_axis_stand_from_major_to_minor() -> None:
    array = jax.device_put(np.arange(4), named_sharding((4,), (S(0), S(0)), GRID))
    held = {shard.device.id: int(shard.data[0]) for shard in array.addressable_shards}
    assert held == {3: 0, 1: 1, 0: 2, 2: 3}


@pytest.mark.parametrize(
    ("nd_sbp", "ndim", "spec"),
    [
        ((B, B), 2, ()),
        ((S(0), B), 2, ("data",)),
        ((B, S(0)), 3, ("model",)),
        ((B, S(-1)), 3, (None, None, "model")),
        ((S(1), S(0)), 3, ("model", "data")),
        ((S(1), S(1)), 3, (None, ("data", "model"))),
        ((B, B), 0, ()),
    ],
)
def test_partition_spec_is_in_normal_form(nd_sbp: tuple[Sbp, ...], ndim: int, spec: tuple[object, ...]) -> None:
    assert partition_spec(nd_sbp, GRID, ndim) == PartitionSpec(*spec)


def test_placement_axes_of_size_one_leave_no_trace() -> None:
    grid = placement("cpu", [[0, 1]], axes=("one", "two"))
    for sbp in (S(0), B, P, P("max")):
        assert partition_spec((sbp, S(1)), grid, 2) == PartitionSpec(None, "two")
        assert part_shape((3, 4), (sbp, S(1)), grid) == (3, 2)
        assert check_layout((3, 4), (sbp, S(1)), grid) == []
    assert split_over(NdSbp((S(0), S(0))), grid, 2) == ((1,), ())


def test_every_user_form_of_an_nd_sbp_works() -> None:
    wanted = named_sharding((4, 4), (B, S(1)), GRID)
    for form in ("(B, S(1))", {"model": S(-1)}, [B, "S(1)"], NdSbp((B, S(1)))):
        assert named_sharding((4, 4), form, GRID) == wanted
    assert canonical((4, 4), {"model": S(-1)}, GRID) == (B, S(1))


def test_part_shape_with_partial_is_the_whole_along_that_placement_axis() -> None:
    assert part_shape((4, 6), (P, S(1)), GRID) == (4, 3)


def test_part_shape_needs_no_devices() -> None:
    grid = placement("tpu", np.arange(4096).reshape(64, 64))
    assert part_shape((128, 64 * 64 * 3), (S(1), S(1)), grid) == (128, 3)


def test_empty_tensors_split_evenly() -> None:
    assert part_shape((0, 4), (S(0), S(1)), GRID) == (0, 2)
    assert jax.device_put(np.zeros((0, 4)), named_sharding((0, 4), (S(0), S(1)), GRID)).shape == (0, 4)


@given(
    st.sampled_from(GRIDS),
    st.lists(st.integers(0, 30), min_size=1, max_size=3),
    st.data(),
)
def test_check_layout_finds_a_fault_exactly_when_a_split_is_uneven(
    grid: Placement, shape: list[int], data: st.DataObject
) -> None:
    nd_sbp = data.draw(st.sampled_from(layouts(grid, len(shape))))
    uneven = [axis for axis, (n, w) in enumerate(zip(shape, ways(nd_sbp, grid, len(shape)))) if n % w]
    faults = check_layout(shape, nd_sbp, grid)
    assert len(faults) == len(uneven)
    if uneven:
        with pytest.raises(SbpError):
            named_sharding(shape, nd_sbp, grid)
