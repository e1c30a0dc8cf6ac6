"""A plain JAX loss in two pipeline stages: no Flax, one mark where the second stage begins.

``--stages 1`` trains the same function on one device; the losses agree.
"""

import argparse
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import oneflax as flow

WIDTH = 32


def init(key: jax.Array) -> dict[str, jax.Array]:
    """Two layers and a way out."""
    a, b, c = jax.random.split(key, 3)
    return {
        "first": jax.random.normal(a, (8, WIDTH)) * 0.3,
        "second": jax.random.normal(b, (WIDTH, WIDTH)) * 0.2,
        "out": jax.random.normal(c, (WIDTH, 1)) * 0.2,
    }


def loss(params: dict[str, jax.Array], batch: dict[str, jax.Array]) -> jax.Array:
    """Squared error of a small network. The mark is all that tells of stages; outside a pipeline it does nothing."""
    hidden = jnp.tanh(batch["x"] @ params["first"])
    hidden = flow.stage(hidden, 1)
    hidden = jnp.tanh(hidden @ params["second"])
    return jnp.mean((hidden @ params["out"] - batch["y"]) ** 2)


def main(argv: list[str]) -> dict[str, Any]:
    """Trains; gives the loss of every step."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--stages", type=int, default=2, choices=(1, 2))
    parser.add_argument("--steps", type=int, default=50)
    args = parser.parse_args(argv)

    grid = flow.placement("auto", list(range(args.stages)), axes=("stage",))
    plan = flow.Plan(grid, microbatches=4)
    step = plan.train_step(loss, optax.adam(1e-2))

    rng = np.random.default_rng(0)
    x = rng.standard_normal((64, 8)).astype(np.float32)
    batch = {"x": x, "y": np.sin(x.sum(axis=1, keepdims=True))}
    state = step.init(init, batch, jax.random.key(0))
    losses = []
    for _ in range(args.steps):
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    print(plan.explain())
    print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f}")
    return {"losses": losses}


if __name__ == "__main__":
    main(sys.argv[1:])
