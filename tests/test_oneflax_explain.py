"""What a plan says about itself: rows against numbers worked out by hand, and the text word for word."""

import io
import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from rich.console import Console

import oneflax as flow
from oneflax import S
from oneflax._explain import EdgeRow, Explanation, ParamRow, StageRow

STAGES = flow.placement("cpu", [[[0, 1], [2, 3]], [[4, 5], [6, 7]]], axes=("stage", "data", "model"))
PARAMS = {"w0": np.ones((8, 4), np.float32), "w1": np.ones((4, 2), np.float16), "scale": np.ones((), np.float32)}
BATCH = {"x": np.ones((8, 8), np.float32), "y": np.ones((8, 2), np.float16)}


def loss(params: Any, batch: Any) -> jax.Array:
    hidden = flow.stage(jnp.tanh(batch["x"] @ params["w0"]), 1)
    error = hidden.astype(jnp.float16) @ params["w1"] - batch["y"]
    return params["scale"] * jnp.mean(error.astype(jnp.float32) ** 2)


def explain(**settings: Any) -> Explanation:
    plan = flow.Plan(batch={"data": S(0)}, params=[("^w", {"model": S(0)})], **settings)
    step = plan.train_step(loss, optax.adam(0.1))
    step(step.place(PARAMS), BATCH)
    return plan.explain()


TEXT = """\
Plan on cpu[[[0, 1], [2, 3]], [[4, 5], [6, 7]]] (stage=2, data=2, model=2): 4 microbatches, gpipe, bubble 20.0% at equal
stages
  rule 1: '^w' -> {model: S(0)}

 parameter   shape    dtype     sbp         a device   stage   by
 ─────────────────────────────────────────────────────────────────────
 scale       []       float32   (B, B)           4 B       1   default
 w0          [8, 4]   float32   (B, S(0))       64 B       0   rule 1
 w1          [4, 2]   float16   (B, S(0))        8 B       1   rule 1


 stage   placement                               parameters a device   optimizer a device
 ────────────────────────────────────────────────────────────────────────────────────────
 0       cpu[[0, 1], [2, 3]] (data=2, model=2)                  64 B                132 B
 1       cpu[[4, 5], [6, 7]] (data=2, model=2)                  12 B                 24 B


 edge     a microbatch   dtype     bytes, each way
 ─────────────────────────────────────────────────
 0 -> 1   [2, 4]         float32              32 B
"""


def test_rows_with_stages() -> None:
    found = explain(grid=STAGES, schedule=flow.pipeline.gpipe(4))
    rule = "'^w' -> {model: S(0)}"
    assert found.params == (
        ParamRow("scale", (), "float32", "(B, B)", 4, 1, "default"),
        ParamRow("w0", (8, 4), "float32", "(B, S(0))", 8 * 4 * 4 // 2, 0, rule),
        ParamRow("w1", (4, 2), "float16", "(B, S(0))", 4 * 2 * 2 // 2, 1, rule),
    )
    assert found.edges == (EdgeRow(0, 1, (2, 4), "float32", 2 * 4 * 4),)
    first, second = "cpu[[0, 1], [2, 3]] (data=2, model=2)", "cpu[[4, 5], [6, 7]] (data=2, model=2)"
    # Adam keeps two arrays of a parameter's shape, and one count of 4 bytes, which lives on stage 0.
    assert found.stages == (StageRow(0, first, 64, 2 * 64 + 4), StageRow(1, second, 4 + 8, 2 * (4 + 8)))
    assert (found.schedule, found.microbatches) == ("gpipe", 4)
    assert found.bubble == pytest.approx(1 / 5)  # (p - 1) / (m + p - 1)
    assert found.placement == str(STAGES)


def test_rows_without_stages() -> None:
    found = explain(grid=STAGES.at(stage=0))
    assert {row.stage for row in found.params} == {0}
    assert (found.edges, found.schedule, found.bubble, found.microbatches) == ((), None, None, 1)
    assert found.stages == (StageRow(0, "cpu[[0, 1], [2, 3]] (data=2, model=2)", 4 + 64 + 8, 2 * (4 + 64 + 8) + 4),)


def test_what_is_said_is_what_lies_there() -> None:
    plan = flow.Plan(STAGES, {"data": S(0)}, [("^w", {"model": S(0)})])
    step = plan.train_step(loss, optax.adam(0.1))
    state, _ = step(step.place(PARAMS), BATCH)
    for row in plan.explain().params:
        array = state.params[row.path]
        devices = set(STAGES.at(stage=row.stage).mesh.devices.flat)
        assert array.sharding.device_set == devices
        assert {shard.data.nbytes for shard in array.addressable_shards} == {row.device_bytes}
    for row in plan.explain().stages:
        device = STAGES.at(stage=row.stage).mesh.devices.flat[0]
        held = [
            s.data.nbytes for x in jax.tree.leaves(state.opt_state) for s in x.addressable_shards if s.device == device
        ]
        assert sum(held) == row.optimizer_bytes


@pytest.mark.newest
def test_the_text() -> None:
    found = explain(grid=STAGES, schedule=flow.pipeline.gpipe(4))
    assert [line.rstrip() for line in str(found).splitlines()] == TEXT.splitlines()


def test_it_prints_to_a_rich_console() -> None:
    found = explain(grid=STAGES.at(stage=0))
    console = Console(width=120, file=io.StringIO())
    console.print(found)
    assert isinstance(console.file, io.StringIO)
    assert "w0" in console.file.getvalue()
    assert "edge" not in console.file.getvalue()


def test_json_reads_back() -> None:
    found = explain(grid=STAGES, microbatches=2)
    read = json.loads(found.to_json())
    assert read["params"][1] == {
        "path": "w0",
        "shape": [8, 4],
        "dtype": "float32",
        "sbp": "(B, S(0))",
        "device_bytes": 64,
        "stage": 0,
        "rule": "'^w' -> {model: S(0)}",
    }
    assert read["edges"] == [{"source": 0, "target": 1, "shape": [4, 4], "dtype": "float32", "bytes": 64}]
    assert read["schedule"] == "1f1b"
    assert set(read) == {"placement", "rules", "params", "edges", "stages", "schedule", "bubble", "microbatches"}


class Deep(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.blocks = nnx.List([nnx.Linear(4, 4, rngs=rngs) for _ in range(5)])

    def __call__(self, x: jax.Array) -> jax.Array:
        for block in self.blocks:
            x = jnp.tanh(block(x))
        return x


def test_layers_stand_on_stages_in_runs() -> None:
    plan = flow.Plan(flow.placement("cpu", [0, 1], axes=("stage",)), stages="blocks/*")
    step = plan.train_step(lambda model, x: jnp.mean(model(x)), optax.sgd(0.1))
    step.init(lambda key: Deep(nnx.Rngs(key)), np.ones((2, 4), np.float32), jax.random.key(0))
    kernels = {row.path: row.stage for row in plan.explain().params if row.path.endswith("kernel")}
    assert kernels == {f"blocks/{i}/kernel": int(i > 2) for i in range(5)}


def test_gradients_alone_have_no_optimizer() -> None:
    plan = flow.Plan(flow.placement("cpu", [0]))
    plan.value_and_grad(loss)(PARAMS, BATCH)
    (row,) = plan.explain().stages
    assert (row.param_bytes, row.optimizer_bytes) == (4 + 128 + 16, 0)
