"""What the executor's Python costs an action, beyond the bare launches and copies of the same things.

Stages that compute next to nothing, one-forward-one-backward. The bare loop calls the same compiled functions and
`jax.device_put` on the same shapes in the same order, with nothing around them.
"""

import statistics
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import oneflax as flow
from benchmarks.timing import Row, alternate
from oneflax.pipeline.executor import Executor, StepInputs
from oneflax.pipeline.graph import trace
from oneflax.pipeline.stage_functions import StageArguments
from oneflax.pipeline.stages import Roles, cut
from oneflax.sbp import B, S, named_sharding

WIDTH, ROWS, MICROBATCHES, ROUNDS = 8, 4, 8, 41


def executor(stages: int, data: int) -> tuple[Executor, StepInputs, Any, list[Any]]:
    """A chain of nearly empty stages on `stages` × `data` devices, its inputs, loss weight, and grids."""

    def loss(params: list[Any], x: Any) -> Any:
        for i, w in enumerate(params):
            x = flow.stage(x, i) + w
        return x.sum()

    shapes = [jax.ShapeDtypeStruct((WIDTH,), jnp.float32)] * stages, jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32)
    graph, _ = trace(loss, *shapes)
    roles = Roles(tuple(graph.inputs[:stages]), (), (graph.inputs[stages],))
    grid = flow.placement("auto", np.arange(stages * data).reshape(stages, data).tolist(), axes=("stage", "data"))
    grids = [grid.at(stage=i) for i in range(stages)]
    whole = [named_sharding((WIDTH,), B, g) for g in grids]
    rows = named_sharding((ROWS, WIDTH), S(0), grids[0])
    table = flow.pipeline.one_f_one_b(MICROBATCHES).table(stages)
    built = Executor(cut(graph, roles, stages), table, grids, dict.fromkeys(roles.params, whole))
    params = [[jax.device_put(np.ones(WIDTH, np.float32), layout)] for layout in whole]
    batch = np.ones((MICROBATCHES, ROWS, WIDTH), np.float32)

    def feed(stage: Any, microbatch: int) -> list[Any]:
        return jax.device_put([batch[microbatch]], [rows]) if stage.data else []

    weight = jax.device_put(np.float32(1), named_sharding((), B, grids[-1]))
    return built, StepInputs(params, [[] for _ in range(stages)], feed), weight, grids


def bare(built: Executor, inputs: StepInputs, weight: Any, grids: list[Any]) -> Callable[[], None]:
    """The same launches and copies, written out for a chain of stages."""
    order = [action for _, action in built._order]
    runners, stages, last = built.runners, built.cut.stages, len(grids) - 1
    rows = [named_sharding((ROWS, WIDTH), S(0), g) for g in grids]

    def step() -> None:
        totals = [runner.zeros() for runner in runners]
        edges: dict[Any, Any] = {}
        saved: dict[Any, Any] = {}
        for action in order:
            i, m = action.stage, action.microbatch
            runner = runners[i]
            if action.kind == "F":
                data = inputs.feed(stages[i], m)
                arrived = edges.pop((i, m)) if i else []
                args = StageArguments(runner.scalars, inputs.params[i], [], data, arrived)
                out = runner.forward(args)
                saved[i, m] = args, out.residuals
                if i < last:
                    edges[i + 1, m] = jax.device_put(list(out.edges_out), [rows[i + 1]])
            else:
                args, residuals = saved.pop((i, m))
                cotangents = edges.pop(("b", i, m)) if i < last else []
                back = runner.backward(
                    args, residuals, cotangents, weight if i == last else None, totals[i], runner.zero
                )
                totals[i] = back.gradients
                if i:
                    edges["b", i - 1, m] = jax.device_put(list(back.cotangents), [rows[i - 1]])
        jax.block_until_ready(totals)

    return step


def main() -> list[Row]:
    """Measures two and four stages of one device each, and two stages of two devices."""
    out = []
    for stages, data in ((2, 1), (4, 1), (2, 2)):
        built, inputs, weight, grids = executor(stages, data)

        def ours(built: Any = built, inputs: Any = inputs, weight: Any = weight) -> None:
            jax.block_until_ready(built.run(inputs, weight).gradients)

        theirs = bare(built, inputs, weight, grids)
        ours()
        theirs()
        seconds = alternate({"executor": ours, "bare": theirs}, ROUNDS)
        actions = 2 * stages * MICROBATCHES
        each = {name: statistics.median(values) / actions * 1e6 for name, values in seconds.items()}
        detail = f"executor {each['executor']:.0f} us, bare {each['bare']:.0f} us an action"
        name = f"executor: Python an action, {stages} stages of {data} device{'s' * (data > 1)}"
        out.append(Row(name, each["executor"] - each["bare"], "us", 100, detail))
    return out
