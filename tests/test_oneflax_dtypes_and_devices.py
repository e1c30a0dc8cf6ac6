"""Plans with other dtypes than float32, and with arrays that lie anywhere: the numbers of plain jax."""

import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import oneflax as flow
from oneflax import S
from oneflax.sbp import PlanError

pytestmark = pytest.mark.slow  # training runs; the quick tier is for what needs none


RNG = np.random.default_rng(0)
PARAMS = {"a": RNG.normal(0, 0.3, (8, 16)).astype(np.float32), "c": RNG.normal(0, 0.3, (16, 2)).astype(np.float32)}
BATCH = {"x": RNG.standard_normal((64, 8)).astype(np.float32), "y": RNG.standard_normal((64, 2)).astype(np.float32)}
ONE = flow.placement("cpu", [[[0]]], axes=("stage", "data", "model"))
SPLIT = flow.placement("cpu", [[[0, 1], [2, 3]]], axes=("stage", "data", "model"))
STAGES = flow.placement("cpu", stage=2, data=2, model=2)
GRIDS = pytest.mark.parametrize("grid", [ONE, SPLIT, STAGES], ids=["one", "split", "stages"])


def loss(params: Any, batch: Any) -> jax.Array:
    hidden = flow.stage(jnp.tanh(batch["x"] @ params["a"]), 1)
    return jnp.mean((hidden @ params["c"] - batch["y"]) ** 2)


def plan(grid: flow.placement, microbatches: int = 1) -> flow.Plan:
    return flow.Plan(grid, {"data": S(0)}, [("a", {"model": S(1)})], microbatches=microbatches)


def worst(ours: Any, theirs: Any) -> float:
    pairs = zip(jax.tree.leaves(ours), jax.tree.leaves(theirs))
    return max(float(np.abs(np.asarray(a, np.float64) - np.asarray(b)).max() / np.abs(b).max()) for a, b in pairs)


@GRIDS
@pytest.mark.newest
def test_many_microbatches_of_bfloat16_sum_in_32_bits(grid: flow.placement) -> None:
    params = jax.tree.map(lambda x: jnp.asarray(x, jnp.bfloat16), PARAMS)
    exact = jax.grad(loss)(jax.tree.map(lambda x: x.astype(jnp.float32), params), BATCH)
    value, gradients = plan(grid, 32).value_and_grad(loss)(params, BATCH)
    assert {leaf.dtype for leaf in jax.tree.leaves(gradients)} == {jnp.dtype(jnp.bfloat16)}
    assert worst(gradients, exact) < 2**-8  # half a bfloat16 step, and the rounding of the products: summed in
    assert value.dtype == jnp.float32  # 16 bits it is about 2**-5


@GRIDS
def test_the_weight_of_a_microbatch_is_not_rounded_to_a_16_bit_loss(grid: flow.placement) -> None:
    batch = jax.tree.map(lambda x: x[:12], BATCH)
    _, gradients = plan(grid, 3).value_and_grad(lambda p, b: loss(p, b).astype(jnp.bfloat16))(PARAMS, batch)
    parts = [jax.tree.map(lambda x, i=i: x[4 * i : 4 * i + 4], batch) for i in range(3)]
    exact = [jax.grad(loss)(PARAMS, part) for part in parts]  # a cast of the loss itself changes no gradient
    mean = jax.tree.map(lambda *xs: sum(xs) / 3, *exact)
    np.testing.assert_allclose(worst(gradients, mean), 0, atol=1e-6)


@GRIDS
def test_weak_types_do_not_make_the_first_step_another(grid: flow.placement) -> None:
    params = {"a": jnp.full((8, 16), 0.1), "c": jnp.full((16, 2), 0.3)}
    assert params["a"].weak_type

    def half(params: Any, batch: Any) -> jax.Array:
        return loss(params, {"x": batch["x"].astype(jnp.bfloat16), "y": batch["y"]})

    step = plan(grid).train_step(half, optax.sgd(0.0))
    state, first = step(step.init(lambda key: params, BATCH, jax.random.key(0)), BATCH)
    _, second = step(state, BATCH)
    strong = jax.tree.map(lambda x: np.asarray(x, np.float32), params)
    assert float(first["loss"]) == float(second["loss"])
    np.testing.assert_allclose(float(first["loss"]), float(half(strong, BATCH)), rtol=1e-6)


@GRIDS
def test_gradients_lie_where_the_user_put_the_parameters(grid: flow.placement) -> None:
    third = jax.devices()[3]
    _, gradients = plan(grid).value_and_grad(loss)(jax.device_put(PARAMS, third), BATCH)
    assert {leaf.device for leaf in jax.tree.leaves(gradients)} == {third}
    np.testing.assert_allclose(worst(gradients, jax.grad(loss)(PARAMS, BATCH)), 0, atol=1e-6)


class Net(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.layers = nnx.List([nnx.Linear(8, 8, rngs=rngs) for _ in range(2)])
        self.head = nnx.Linear(8, 2, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        for layer in self.layers:
            x = nnx.tanh(layer(x))
        return self.head(x)


def net_loss(model: Net, batch: Any) -> jax.Array:
    return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)


@pytest.mark.slow
@GRIDS
def test_an_nnx_optimizer_takes_the_gradients(grid: flow.placement) -> None:
    ours, theirs = Net(nnx.Rngs(0)), Net(nnx.Rngs(0))
    value_and_grad = flow.Plan(grid, {"data": S(0)}, stages="layers/*").value_and_grad(net_loss)
    for model, compute in ((ours, value_and_grad), (theirs, nnx.value_and_grad(net_loss))):
        optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
        for _ in range(3):
            _, gradients = compute(model, BATCH)
            optimizer.update(model, gradients)
    for mine, other in zip(jax.tree.leaves(nnx.state(ours)), jax.tree.leaves(nnx.state(theirs))):
        np.testing.assert_allclose(mine, other, atol=2e-6)


@GRIDS
@pytest.mark.parametrize("microbatches", [1, 4])
def test_batches_on_a_device_are_cut_there(grid: flow.placement, microbatches: int) -> None:
    step = plan(grid, microbatches).train_step(loss, optax.sgd(0.1))
    expected = step(step.place(PARAMS, BATCH), BATCH)[1]["loss"]
    on_device = jax.device_put(BATCH, jax.devices()[5])
    with jax.transfer_guard_device_to_host("disallow"):
        state = step.place(PARAMS)
        got = step(state, on_device)[1]["loss"]
    assert float(got) == float(expected)


@GRIDS
def test_keys_in_a_batch(grid: flow.placement) -> None:
    keys = jax.random.split(jax.random.key(1), 64)

    def noisy(params: Any, batch: Any) -> jax.Array:
        noise = jax.vmap(lambda key: jax.random.normal(key, (8,)))(batch["key"])
        return loss(params, {"x": batch["x"] + noise, "y": batch["y"]})

    value, _ = plan(grid, 2).value_and_grad(noisy)(PARAMS, {**BATCH, "key": keys})
    np.testing.assert_allclose(float(value), float(noisy(PARAMS, {**BATCH, "key": keys})), rtol=1e-5)


@GRIDS
def test_float64_where_x64_is_on(grid: flow.placement) -> None:
    with jax.enable_x64(True):
        params = jax.tree.map(np.float64, PARAMS)
        batch = jax.tree.map(np.float64, BATCH)
        value, gradients = plan(grid, 4).value_and_grad(loss)(params, batch)
        exact = jax.grad(loss)(params, batch)
        assert value.dtype == np.float64
        assert worst(gradients, exact) < 1e-13


@GRIDS
def test_optimizers_that_ask_for_the_loss(grid: flow.placement) -> None:
    optimizer = optax.chain(optax.sgd(0.0), optax.contrib.reduce_on_plateau(factor=0.5, patience=1, cooldown=0))
    step = plan(grid).train_step(loss, optimizer)
    state = step.place(PARAMS, BATCH)
    for _ in range(4):
        state, _ = step(state, BATCH)
    assert float(optax.tree_utils.tree_get(state.opt_state, "scale")) == 0.5**3  # of four equal losses, three too many


def test_other_collections_are_not_trained() -> None:
    step = plan(ONE).train_step(loss, optax.sgd(0.1))
    message = (
        "model: holds the collections 'params' and 'batch_stats': an optimizer would train all of them.\n"
        "  Mend: model.init(key, x)['params'], and the other collections closed over in the loss"
    )
    with pytest.raises(PlanError) as caught:
        step.place({"params": PARAMS, "batch_stats": {"mean": np.zeros(3, np.float32)}})
    assert str(caught.value) == message


@GRIDS
def test_a_committed_key_for_init(grid: flow.placement) -> None:
    key = jax.device_put(jax.random.key(0), jax.devices()[7])
    step = plan(grid).train_step(loss, optax.sgd(0.1))
    state = step.init(lambda key: {"a": jax.random.normal(key, (8, 16)), "c": PARAMS["c"]}, BATCH, key)
    np.testing.assert_allclose(state.params["a"], jax.random.normal(jax.random.key(0), (8, 16)), rtol=1e-6)


def test_many_forms_of_batches_are_a_warning() -> None:
    compute = plan(ONE).value_and_grad(loss)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for rows in range(1, 11):
            compute(PARAMS, jax.tree.map(lambda x, rows=rows: x[:rows], BATCH))
    texts = [str(w.message) for w in caught if "forms of batches" in str(w.message)]
    assert len(texts) == 1
    assert "((1, 8), (1, 2))" in texts[0]
