"""Placements as values, and the meshes they give."""

import copy
import itertools
import pickle

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import oneflax as flow
from oneflax.sbp import Placement, SbpError, default_type, devices_of, placement


@st.composite
def placements(draw: st.DrawFn) -> Placement:
    shape = draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
    count = int(np.prod(shape))
    ranks = draw(st.lists(st.integers(0, 999), min_size=count, max_size=count, unique=True))
    named = draw(st.booleans())
    axes = ("data", "model", "stage")[: len(shape)] if named else None
    kind = draw(st.sampled_from(["cpu", "cuda", "tpu"]))
    return placement(kind, np.array(ranks, dtype=np.int64).reshape(shape), axes=axes)


def test_attributes() -> None:
    grid = flow.placement("cpu", [[3, 1, 5], [0, 2, 4]], axes=("data", "model"))
    assert grid.type == "cpu"
    assert grid.ranks == ((3, 1, 5), (0, 2, 4))
    assert grid.flat == (3, 1, 5, 0, 2, 4)
    assert (grid.shape, grid.size, grid.ndim) == ((2, 3), 6, 2)
    assert grid.axes == grid.axis_names == ("data", "model")
    assert [grid.axis_index(a) for a in ("data", "model", 0, 1, -1)] == [0, 1, 0, 1, 1]
    assert flow.placement is flow.sbp.placement is Placement


def test_unnamed_axes_have_names_to_address_them() -> None:
    cube = placement("cpu", [[[0], [1]]])
    assert cube.axes is None
    assert cube.axis_names == ("axis0", "axis1", "axis2")
    assert cube.axis_index("axis1") == 1
    assert cube.at(axis1=1) == placement("cpu", [[1]])


@pytest.mark.parametrize(
    "ranks", [[0, 1, 2], (0, 1, 2), range(3), np.arange(3), np.arange(3, dtype=np.int32), [np.int64(0), 1, 2]]
)
def test_ranks_in_every_form(ranks: object) -> None:
    assert placement("cpu", ranks) == placement(type="cpu", ranks=[0, 1, 2])
    assert type(placement("cpu", ranks).flat[0]) is int


def test_one_rank_may_be_bare() -> None:
    assert placement("cpu", 3) == placement("cpu", [3])
    assert placement("cpu", np.array(3)) == placement("cpu", [3])


def test_order_shape_names_and_type_tell_placements_apart() -> None:
    different = [
        placement("cpu", [0, 1]),
        placement("cpu", [1, 0]),
        placement("cpu", [[0, 1]]),
        placement("cpu", [[0], [1]]),
        placement("cpu", [0, 1], axes=("data",)),
        placement("cpu", [0, 1], axes="model"),
        placement("tpu", [0, 1]),
        placement("cuda", [0, 1]),
    ]
    for a, b in itertools.combinations(different, 2):
        assert a != b
    assert len({*different, *copy.deepcopy(different)}) == len(different)
    assert placement("gpu", [0, 1]) == placement("cuda", [0, 1])
    assert placement("cpu", [0]) != "cpu[0]"


def test_a_placement_does_not_change() -> None:
    grid = placement("cpu", [0, 1])
    with pytest.raises(AttributeError):
        grid.type = "tpu"  # type: ignore[misc]


@given(placements())
def test_repr_evaluates_back_and_copies_are_equal(grid: Placement) -> None:
    assert eval(repr(grid), {"placement": placement}) == grid
    for other in (copy.copy(grid), copy.deepcopy(grid), pickle.loads(pickle.dumps(grid))):
        assert other == grid
        assert hash(other) == hash(grid)


def test_text() -> None:
    grid = placement("cpu", [[0, 1], [2, 3]], axes=("data", "model"))
    assert repr(grid) == 'placement("cpu", [[0, 1], [2, 3]], axes=("data", "model"))'
    assert str(grid) == "cpu[[0, 1], [2, 3]] (data=2, model=2)"
    assert repr(placement("cpu", [1], axes=("x",))) == 'placement("cpu", [1], axes=("x",))'
    assert str(placement("cpu", [[0, 1], [2, 3]])) == "cpu[[0, 1], [2, 3]]"
    many = np.arange(4096).reshape(64, 64)
    assert str(placement("tpu", many)) == "tpu[0, ..., 4095] (shape 64x64)"
    assert str(placement("tpu", many, axes=("data", "model"))) == "tpu[0, ..., 4095] (data=64, model=64)"
    assert len(repr(placement("tpu", many))) > 4096


def test_all_ranks() -> None:
    everything = placement("cpu", [0, 1, 2, 3, 4, 5, 6, 7])
    assert placement("auto") == placement("cpu") == Placement.all("cpu") == Placement.all() == everything
    assert placement("auto", [1, 0]) == placement("cpu", [1, 0])
    assert placement("auto", axes="data") == placement("cpu", range(8), axes=("data",))
    assert default_type() == "cpu"


@pytest.mark.parametrize(
    ("sizes", "shape"),
    [
        ({"data": 4, "model": 2}, (4, 2)),
        ({"data": -1, "model": 2}, (4, 2)),
        ({"data": 2, "model": -1}, (2, 4)),
        ({"data": 8, "model": -1}, (8, 1)),
        ({"stage": 2, "data": 2, "model": 2}, (2, 2, 2)),
        ({"stage": 1, "data": 4, "model": -1}, (1, 4, 2)),
        ({"everything": -1}, (8,)),
        ({"one": 1, "rest": -1}, (1, 8)),
    ],
)
def test_sizes_over_all_ranks(sizes: dict[str, int], shape: tuple[int, ...]) -> None:
    grid = placement("auto", axes=None, **sizes)
    assert grid.axes == tuple(sizes)
    assert grid.shape == shape
    np.testing.assert_array_equal(np.array(grid.ranks), np.arange(8).reshape(shape))


def test_at_is_numpy_indexing() -> None:
    ranks = np.random.default_rng(0).permutation(24).reshape(2, 3, 4)
    grid = placement("cpu", ranks, axes=("stage", "data", "model"))
    for i, j, k in itertools.product(range(-2, 2), range(-3, 3), range(-4, 4)):
        assert grid.at(stage=i) == placement("cpu", ranks[i], axes=("data", "model"))
        assert grid.at(data=j) == placement("cpu", ranks[:, j], axes=("stage", "model"))
        assert grid.at(model=k) == placement("cpu", ranks[:, :, k], axes=("stage", "data"))
        assert grid.at(stage=i, model=k) == placement("cpu", ranks[i, :, k], axes=("data",))
        assert grid.at(model=k, data=j, stage=i) == placement("cpu", [ranks[i, j, k]])
    assert grid.at() == grid


@pytest.mark.parametrize("ranks", [[0, 1, 2, 3], [[3, 1], [0, 2]], [[[7], [5]], [[6], [4]]]])
def test_mesh_holds_the_devices_in_the_order_given(ranks: list[object]) -> None:
    grid = placement("cpu", ranks)
    devices = jax.devices("cpu")
    assert grid.mesh.axis_names == grid.axis_names
    assert set(grid.mesh.axis_types) == {jax.sharding.AxisType.Auto}
    assert grid.mesh.devices.shape == np.array(ranks).shape
    assert [d.id for d in grid.mesh.devices.flat] == [devices[r].id for r in np.array(ranks).flat]
    assert grid.mesh is grid.mesh


def test_devices_of_gives_the_device_of_each_rank() -> None:
    assert devices_of("cpu") == jax.devices("cpu")


def test_a_placement_may_name_ranks_that_are_not_here() -> None:
    grid = placement("tpu", np.arange(4096).reshape(64, 64), axes=("data", "model"))
    assert grid.size == 4096
    with pytest.raises(SbpError, match="there are no tpu devices here"):
        _ = grid.mesh
