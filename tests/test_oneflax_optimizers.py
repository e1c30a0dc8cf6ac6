"""Any optax transformation, split and staged: three steps equal to a plain loop on one device."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import oneflax as flow
from oneflax import S

MASK = {"a": {"w": True, "b": False}, "c": {"w": True}}
OPTIMIZERS = {
    "adamw": optax.adamw(1e-2),
    "momentum": optax.sgd(1e-2, 0.9),
    "clip": optax.chain(optax.clip_by_global_norm(0.1), optax.adam(1e-2)),
    "masked": optax.masked(optax.adam(1e-2), MASK),
    "mask by function": optax.chain(
        optax.masked(optax.add_decayed_weights(0.1), lambda p: jax.tree.map(lambda x: x.ndim > 1, p)), optax.adam(1e-2)
    ),
    "multi_transform": optax.multi_transform(
        {"x": optax.adam(1e-2), "y": optax.sgd(1e-2, 0.9)}, lambda p: {"a": {"w": "x", "b": "y"}, "c": {"w": "y"}}
    ),
    "inject_hyperparams": optax.inject_hyperparams(optax.adamw)(1e-2),
    "adafactor": optax.adafactor(1e-2),
    "MultiSteps": optax.MultiSteps(optax.adam(1e-2), 2).gradient_transformation(),
}
RNG = np.random.default_rng(0)
PARAMS: dict[str, Any] = {
    "a": {"w": RNG.standard_normal((8, 16)).astype(np.float32), "b": np.zeros(16, np.float32)},
    "c": {"w": RNG.standard_normal((16, 2)).astype(np.float32)},
}
BATCH = {"x": RNG.standard_normal((8, 8)).astype(np.float32), "y": RNG.standard_normal((8, 2)).astype(np.float32)}


def loss(params: Any, batch: Any) -> jax.Array:
    hidden = flow.stage(jnp.tanh(batch["x"] @ params["a"]["w"] + params["a"]["b"]), 1)
    return jnp.mean((hidden @ params["c"]["w"] - batch["y"]) ** 2)


def plain(optimizer: Any, steps: int) -> list[Any]:
    params = jax.tree.map(jnp.asarray, PARAMS)
    state = optimizer.init(params)

    @jax.jit
    def step(params: Any, state: Any) -> Any:
        updates, state = optimizer.update(jax.grad(loss)(params, BATCH), state, params)
        return optax.apply_updates(params, updates), state

    for _ in range(steps):
        params, state = step(params, state)
    return jax.tree.leaves(params)


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [{"data": 4, "model": 2}, {"stage": 2, "data": 2, "model": 2}], ids=str)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_three_steps_equal_a_plain_loop(name: str, sizes: dict[str, Any]) -> None:
    plan = flow.Plan(
        flow.placement("cpu", **sizes), batch={"data": S(0)}, params=[("a/w", {"model": S(-1)})], microbatches=2
    )
    step = plan.train_step(loss, OPTIMIZERS[name])
    state = step.place(PARAMS)
    for _ in range(3):
        state, _ = step(state, BATCH)
    for ours, theirs in zip(jax.tree.leaves(plan.gather(state.params)), plain(OPTIMIZERS[name], 3)):
        np.testing.assert_allclose(ours, theirs, atol=5e-6)  # adam divides rounding of gradients near zero


def test_moments_lie_where_their_parameter_lies_also_behind_a_mask() -> None:
    plan = flow.Plan(
        flow.placement("cpu", stage=2, data=2, model=2), batch={"data": S(0)}, params=[("a/w", {"model": S(-1)})]
    )
    step = plan.train_step(loss, OPTIMIZERS["masked"])
    state = step.init(lambda key: jax.tree.map(jnp.asarray, PARAMS), BATCH, jax.random.key(0))
    moments = [leaf for leaf in jax.tree.leaves(state.opt_state) if leaf.ndim]
    devices = [sorted(device.id for device in leaf.sharding.device_set) for leaf in moments]
    assert [(leaf.shape, leaf.sharding.shard_shape(leaf.shape), where) for leaf, where in zip(moments, devices)] == [
        ((8, 16), (8, 8), [0, 1, 2, 3]),
        ((16, 2), (16, 2), [4, 5, 6, 7]),
        ((8, 16), (8, 8), [0, 1, 2, 3]),
        ((16, 2), (16, 2), [4, 5, 6, 7]),
    ]
