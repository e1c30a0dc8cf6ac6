"""A plain loss cut into stages and as a running pipeline, with nothing of a plan. For tests."""

import itertools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from oneflax.pipeline.executor import Executor, StepInputs
from oneflax.pipeline.graph import evaluate, trace
from oneflax.pipeline.stages import Cut, Roles, StageGraph, cut
from oneflax.pipeline.table import ScheduleTable
from oneflax.sbp import B, named_sharding, placement

WIDTH = 4


def by_scope(path: str) -> int | None:
    """Stage s for what runs under a scope ``s<number>``, and nothing else."""
    found = re.search(r"(?:^|/)s(\d)(?:/|$)", path)
    return int(found[1]) if found else None


def cut_loss(
    loss: Callable[..., Any], stages: int, params: Any, batch: Any, state: Sequence[Any] = (), paths: bool = False
) -> Cut:
    """Cuts ``loss(params, batch)``, or ``loss(params, batch, state) -> (loss, *new_state, *aux)``."""
    arguments = (params, batch, list(state)) if state else (params, batch)
    graph, _ = trace(loss, *arguments)
    counts = [len(jax.tree.leaves(tree)) for tree in (params, batch)]
    ends = np.cumsum([0, *counts, len(state)])
    p, b, s = (tuple(graph.inputs[start:end]) for start, end in itertools.pairwise(ends))
    return cut(graph, Roles(p, s, (*b, *graph.constants)), stages, by_scope if paths else lambda path: None)


def run_in_order(
    made: Cut, params: Any, batch: Any, state: Sequence[Any] = ()
) -> tuple[dict[int, Any], dict[int, Any]]:
    """The cut as its definition says: stage after stage, each on what it declares and no more."""
    known = dict(zip(made.graph.inputs, (*jax.tree.leaves((params, batch)), *state)))
    known.update(made.graph.constants)
    results: dict[int, Any] = {}
    replaced: dict[int, Any] = {}
    for part in made.stages:
        env = {value: known[value] for value in (*part.params, *part.state, *part.data, *part.edges_in)}
        read_only = set(env)
        evaluate(part.ops, env)
        assert not read_only.intersection(v for op in part.ops for v in op.outputs)
        known.update((value, env[value]) for value in part.edges_out)
        look = {old: env[new] if isinstance(new, int) else new.value for old, new in part.new_state.items()}
        for old, new in look.items():
            np.testing.assert_array_equal(new, replaced.setdefault(old, new))
        results.update((i, env[x] if isinstance(x, int) else x.value) for i, x in part.results.items())
    return results, replaced


def assert_same_loss(made: Cut, loss: Callable[..., Any], params: Any, batch: Any) -> None:
    """Loss and gradient of the stages against one plain function. Op by op the bits would be the same; jit may not."""
    want, want_grad = jax.value_and_grad(lambda p: jax.tree.leaves(loss(p, batch))[0])(params)
    got, got_grad = jax.value_and_grad(lambda p: run_in_order(made, p, batch)[0][0])(params)
    np.testing.assert_allclose(got, want, rtol=1e-6)
    largest = max(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(want_grad))
    for a, b in zip(jax.tree.leaves(got_grad), jax.tree.leaves(want_grad)):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-6 * largest)


def values(count: int, seed: int = 0) -> list[Any]:
    draw = np.random.default_rng(seed)
    return [jnp.asarray(draw.normal(size=(WIDTH, WIDTH)), jnp.float32) for _ in range(count)]


BATCH = {"x": values(1, 1)[0], "y": values(1, 2)[0]}


def names(part: StageGraph) -> list[str]:
    return [op.equation.primitive.name for op in part.ops]


def edge_pairs(made: Cut) -> list[tuple[int, int]]:
    return sorted((edge.source, edge.target) for edge in made.edges)


@dataclass(slots=True)
class Step:
    """What one step gave. Gradients are by parameter, summed over the stages that read it in their order."""

    losses: list[Any]
    gradients: list[np.ndarray]
    state: list[np.ndarray]
    results: dict[int, list[Any]]


class Pipeline:
    """``loss(params, batch)``, or ``loss(params, batch, state) -> (loss, *new_state, *others)``, on CPU devices."""

    def __init__(
        self,
        loss: Callable[..., Any],
        params: Sequence[Any],
        batch: Any,
        table: ScheduleTable,
        state: Sequence[Any] = (),
        stages: int | None = None,
        each: int = 1,
    ) -> None:
        """`batch`: one microbatch, for its shapes. `each`: devices a worker has."""
        graph, _ = trace(loss, *((list(params), batch, list(state)) if state else (list(params), batch)))
        counts = [len(params), len(jax.tree.leaves(batch)), len(state)]
        ends = np.cumsum([0, *counts])
        p, b, s = (tuple(graph.inputs[start:end]) for start, end in itertools.pairwise(ends))
        self.cut = cut(graph, Roles(p, s, (*b, *graph.constants)), table.stages if stages is None else stages)
        places = [placement("cpu", list(range(w * each, (w + 1) * each))) for w in range(table.workers)]
        self.placements = [places[worker] for worker in table.worker_of_stage]
        self.layouts = {
            v: [named_sharding(graph.avals[v].shape, (B,), at) for at in self.placements] for v in (*p, *s, *b)
        }
        self.everywhere = [named_sharding((), (B,), at) for at in self.placements]
        self._places = places
        self.executor = Executor(self.cut, table, places, self.layouts)

    def use(self, table: ScheduleTable) -> None:
        """Goes on with another table for the same workers; what is compiled stays."""
        kinds, runners = self.executor.kinds, self.executor.runners
        assert table.worker_of_stage == self.executor.table.worker_of_stage
        self.executor = Executor(self.cut, table, self._places, self.layouts)
        self.executor.kinds, self.executor.runners = kinds, runners

    def inputs(
        self, params: Sequence[Any], batches: Sequence[Any], state: Sequence[Any] = (), before: Any = None
    ) -> StepInputs:
        """Arguments on their devices. `before` is called with stage and microbatch ahead of each feed."""
        roles, graph = self.cut.roles, self.cut.graph
        by_value = {**dict(zip(roles.params, params)), **dict(zip(roles.state, state))}

        def feed(part: StageGraph, microbatch: int) -> list[Any]:
            if before is not None:
                before(part.index, microbatch)
            leaves = dict(zip(roles.data, jax.tree.leaves(batches[microbatch]))) | graph.constants
            return [jax.device_put(leaves[v], self.everywhere[part.index]) for v in part.data]

        def at_home(part: StageGraph, values: Sequence[int]) -> list[Any]:
            return [jax.device_put(by_value[v], self.layouts[v][part.index]) for v in values]

        return StepInputs(
            [at_home(s, s.params) for s in self.cut.stages], [at_home(s, s.state) for s in self.cut.stages], feed
        )

    def run(self, params: Sequence[Any], batches: Sequence[Any], state: Sequence[Any] = (), before: Any = None) -> Step:
        """One step in which every microbatch's loss counts 1."""
        return self.step(self.inputs(params, batches, state, before), params, state)

    def step(self, inputs: StepInputs, params: Sequence[Any], state: Sequence[Any] = ()) -> Step:
        """One step from arguments that are in place."""
        loss_stage = next(s.index for s in self.cut.stages if 0 in s.results)
        loss_value = self.cut.graph.outputs[0]
        assert isinstance(loss_value, int)
        weight = jax.device_put(jnp.ones((), self.cut.graph.avals[loss_value].dtype), self.everywhere[loss_stage])
        out = self.executor.run(inputs, weight)
        roles = self.cut.roles
        gradients = {v: np.zeros(np.shape(x), x.dtype) for v, x in zip(roles.params, params)}
        for part, grads in zip(self.cut.stages, out.gradients):
            for v, gradient in zip(part.params, grads):
                gradients[v] = gradients[v] + np.asarray(gradient)
        after = {v: np.asarray(x) for v, x in zip(roles.state, state)}
        for part, news in zip(self.cut.stages, out.state):
            after.update((v, np.asarray(new)) for v, new in zip(part.state, news) if v in part.new_state)
        results = {i: [np.asarray(x) for x in values] for i, values in out.results.items()}
        return Step(results[0], list(gradients.values()), list(after.values()), results)


def plain(loss: Callable[..., Any], params: Sequence[Any], batches: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """Losses and summed gradients of the same microbatches by ``jax.grad`` on one device."""
    both = jax.jit(jax.value_and_grad(lambda p, b: jax.tree.leaves(loss(p, b))[0]))
    found = [both(list(params), batch) for batch in batches]
    total = [sum(np.asarray(g[i], np.float64) for _, g in found) for i in range(len(params))]
    return [value for value, _ in found], total


def assert_gradients(got: Sequence[Any], want: Sequence[Any], relative: float = 1e-6) -> None:
    """Gradients agree to `relative` of the largest one."""
    largest = max(float(np.abs(leaf).max()) for leaf in want)
    assert largest > 0, "a gradient that is zero everywhere compares with anything"
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=relative * largest)
