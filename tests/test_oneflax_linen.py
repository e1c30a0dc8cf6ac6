"""A linen model as a pytree of parameters: rules and stages by path, the numbers of one device."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn

import oneflax as flow
from oneflax import S


class Layer(nn.Module):
    width: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        up = nn.Dense(2 * self.width, name="up")(nn.LayerNorm(name="norm")(x))
        return x + nn.Dense(self.width, name="down")(nn.gelu(up))


class Net(nn.Module):
    layers: int = 4

    def setup(self) -> None:
        self.embed = nn.Embed(20, 8)
        self.stack = [Layer(8) for _ in range(self.layers)]
        self.head = nn.Dense(20)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.embed(tokens)
        for layer in self.stack:
            x = layer(x)
        return self.head(x)


NET = Net()
TOKENS = np.random.default_rng(0).integers(0, 20, (8, 7)).astype(np.int32)


def init(key: jax.Array) -> Any:
    return NET.init(key, TOKENS[:1, :-1])["params"]


def loss(params: Any, tokens: jax.Array) -> jax.Array:
    logits = NET.apply({"params": params}, tokens[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(jnp.asarray(logits), tokens[:, 1:]).mean()


@pytest.mark.slow
@pytest.mark.newest
@pytest.mark.parametrize("stages", [r"stack_\d+", "stack_*", ["stack_[01]", "stack_[23]"]], ids=str)
def test_two_stages_of_a_linen_model_train_as_one_device(stages: Any) -> None:
    params, losses = init(jax.random.key(0)), []
    optimizer = optax.adamw(1e-2)
    opt = optimizer.init(params)
    for _ in range(3):
        value, gradients = jax.jit(jax.value_and_grad(loss))(params, TOKENS)
        updates, opt = optimizer.update(gradients, opt, params)
        params = optax.apply_updates(params, updates)
        losses.append(float(value))

    plan = flow.Plan(
        flow.placement("cpu", stage=2, data=2, model=2),
        batch={"data": S(0)},
        params=[("up/kernel", {"model": S(-1)}), ("up/bias", {"model": S(0)}), ("down/kernel", {"model": S(-2)})],
        stages=stages,
        microbatches=2,
    )
    step = plan.train_step(loss, optimizer)
    state = step.init(init, TOKENS, jax.random.key(0))
    ours = []
    for _ in range(3):
        state, metrics = step(state, TOKENS)
        ours.append(float(metrics["loss"]))
    np.testing.assert_allclose(ours, losses, rtol=1e-5)
    by_stage = {row.path.split("/")[0]: row.stage for row in plan.explain().params}
    assert by_stage == {"embed": 0, "stack_0": 0, "stack_1": 0, "stack_2": 1, "stack_3": 1, "head": 1}
