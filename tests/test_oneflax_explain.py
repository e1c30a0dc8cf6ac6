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
from oneflax._explain import EdgeRow, Explanation, ParamRow, StageRow, TiedRow

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


 edge     whole microbatch   dtype     there   back
 ──────────────────────────────────────────────────
 0 -> 1   [2, 4]             float32    32 B   32 B
"""

TIED_TEXT = """\
 stage   placement   parameters a device   tied copies a device   optimizer a device
 ───────────────────────────────────────────────────────────────────────────────────
 0       cpu[0]                     48 B                    0 B                  0 B
 1       cpu[1]                      0 B                   48 B                  0 B


 tied parameter   copied   copy a device   whole, there a step   back a step
 ───────────────────────────────────────────────────────────────────────────
 table            0 -> 1            48 B                  48 B          96 B


 edge     whole microbatch   dtype      there   back
 ───────────────────────────────────────────────────
 0 -> 1   [2, 4]             bfloat16    16 B   16 B
 0 -> 1   [2, 2]             int32       16 B    0 B
"""


def test_rows_with_stages() -> None:
    found = explain(grid=STAGES, schedule=flow.pipeline.gpipe(4))
    rule = "'^w' -> {model: S(0)}"
    assert found.params == (
        ParamRow("scale", (), "float32", "(B, B)", 4, 1, "default"),
        ParamRow("w0", (8, 4), "float32", "(B, S(0))", 8 * 4 * 4 // 2, 0, rule),
        ParamRow("w1", (4, 2), "float16", "(B, S(0))", 4 * 2 * 2 // 2, 1, rule),
    )
    assert found.edges == (EdgeRow(0, 1, (2, 4), "float32", 2 * 4 * 4, 2 * 4 * 4),)
    assert found.tied == ()
    first, second = "cpu[[0, 1], [2, 3]] (data=2, model=2)", "cpu[[4, 5], [6, 7]] (data=2, model=2)"
    # Adam keeps two arrays of a parameter's shape, and one count of 4 bytes, which lives on stage 0.
    assert found.stages == (StageRow(0, first, 64, 0, 2 * 64 + 4), StageRow(1, second, 4 + 8, 0, 2 * (4 + 8)))
    assert (found.schedule, found.microbatches) == ("gpipe", 4)
    assert found.bubble == pytest.approx(1 / 5)  # (p - 1) / (m + p - 1)
    assert found.placement == str(STAGES)


def test_rows_without_stages() -> None:
    found = explain(grid=STAGES.at(stage=0))
    assert {row.stage for row in found.params} == {0}
    assert (found.edges, found.schedule, found.bubble, found.microbatches) == ((), None, None, 1)
    assert found.tied == ()
    row = StageRow(0, "cpu[[0, 1], [2, 3]] (data=2, model=2)", 4 + 64 + 8, 0, 2 * (4 + 64 + 8) + 4)
    assert found.stages == (row,)


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
    assert read["edges"] == [
        {"source": 0, "target": 1, "shape": [4, 4], "dtype": "float32", "there_bytes": 64, "back_bytes": 64}
    ]
    assert read["tied"] == []
    assert read["schedule"] == "1f1b"
    assert set(read) == {
        "placement",
        "rules",
        "idle_axes",
        "params",
        "edges",
        "tied",
        "stages",
        "schedule",
        "bubble",
        "microbatches",
    }


def explain_tied(grid: flow.sbp.Placement, params: Any = ()) -> Explanation:
    """A table that embeds on the first stage and unembeds on the last, a value and an integer that move."""

    def loss(params: Any, tokens: jax.Array) -> jax.Array:
        h = flow.stage(params["table"][tokens], 0)
        best = jnp.argmax(h, axis=1)
        h = flow.stage(h, 1)
        return jnp.mean((h @ params["table"].T).astype(jnp.float32)[jnp.arange(len(tokens)), best])

    plan = flow.Plan(grid, params=params, microbatches=2)
    plan.value_and_grad(loss)({"table": jnp.ones((6, 4), jnp.bfloat16)}, np.zeros(4, np.int32))
    return plan.explain()


def test_copies_of_tied_parameters_and_values_without_gradient() -> None:
    found = explain_tied(flow.placement("cpu", [0, 1], axes=("stage",)))
    whole = 6 * 4 * 2
    assert found.tied == (TiedRow("table", 0, 1, whole, whole, 2 * whole),)  # gradients are summed in float32
    assert [(row.dtype, row.there_bytes, row.back_bytes) for row in found.edges] == [
        ("bfloat16", 16, 16),
        ("int32", 16, 0),  # row and column of each picked number
    ]
    assert [(row.param_bytes, row.tied_bytes) for row in found.stages] == [(whole, 0), (0, whole)]
    assert json.loads(found.to_json())["tied"] == [
        {"path": "table", "home": 0, "stage": 1, "device_bytes": 48, "there_bytes": 48, "back_bytes": 96}
    ]


@pytest.mark.newest
def test_the_text_of_tied_parameters() -> None:
    lines = [line.rstrip() for line in str(explain_tied(flow.placement("cpu", [0, 1], axes=("stage",)))).splitlines()]
    assert lines[lines.index(TIED_TEXT.splitlines()[0]) :] == TIED_TEXT.splitlines()


def test_a_device_holds_its_part_of_a_tied_copy() -> None:
    grid = flow.placement("cpu", [[0, 1], [2, 3]], axes=("stage", "model"))
    (row,) = explain_tied(grid, [("table", {"model": S(1)})]).tied
    assert (row.device_bytes, row.there_bytes, row.back_bytes) == (24, 48, 96)


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


def test_an_axis_that_splits_nothing_is_named() -> None:
    plan = flow.Plan(STAGES, params=[("^w", {"model": S(0)})])
    step = plan.train_step(loss, optax.sgd(0.1))
    step.place(PARAMS, BATCH)
    assert plan.explain().idle_axes == ("placement axis 'data' (size 2)",)
    assert "  placement axis 'data' (size 2) splits nothing: its ranks repeat the same work\n" in str(plan.explain())
