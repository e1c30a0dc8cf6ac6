"""A problem with stages: its loss cut by paths or marks, run by the actors, updated where each stage lives."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from oneflax.pipeline.executor import Executor, StepInputs
from oneflax.pipeline.graph import Graph, inner_paths, trace
from oneflax.pipeline.schedules.schedule import Schedule
from oneflax.pipeline.stage_functions import accumulation_dtype, add_in_order
from oneflax.pipeline.stages import Cut, Roles, StageGraph, cut
from oneflax.pipeline.table import ScheduleTable
from oneflax.pipeline.transfer import send
from oneflax.pipeline.update import StagedFunction
from oneflax.sbp.grid import Placement
from oneflax.sbp.layout import named_sharding

from ._patterns import Pattern
from ._problem import OptimizerForm, Problem, Program, replicated, update_rule
from ._stage_paths import StagePaths, stages_by_path


def staged_program(
    problem: Problem,
    placements: Sequence[Placement],
    patterns: Sequence[Pattern],
    schedule: Schedule | ScheduleTable,
) -> Program:
    """Traces and cuts the loss; nothing compiles before the first call.

    Args:
        problem: What has to run.
        placements: The devices of each stage.
        patterns: Stage patterns; empty when the loss has ``flow.stage`` marks instead.
        schedule: The order of work.

    Raises:
        PlanError: The loss cannot be cut so.
        ScheduleError: The schedule does not fit the stages.
    """
    return _Staged(problem, placements, patterns, schedule).program()


class _Staged:
    def __init__(
        self,
        problem: Problem,
        placements: Sequence[Placement],
        patterns: Sequence[Pattern],
        schedule: Schedule | ScheduleTable,
    ) -> None:
        self._problem, self._placements = problem, list(placements)
        self._meshes = [placement.mesh for placement in placements]
        params, state = len(problem.param_shapes), len(problem.state_shapes)
        graph = _trace_loss(problem)
        self._params, self._state = graph.inputs[:params], graph.inputs[params : params + state]
        self._rest = graph.inputs[params + state :]
        roles = Roles(
            tuple(self._params), tuple(self._state), (*self._rest, *graph.constants), tuple(problem.form.state_paths)
        )
        paths = _stage_paths(graph, patterns, len(placements), rooted=not problem.form.is_module)
        self._cut = cut(graph, roles, len(placements), paths or (lambda path: None))
        self._homes = [self._home(value, path, paths) for value, path in zip(self._params, problem.form.param_paths)]
        self._state_homes = [min(self._cut.stages_reading(value), default=0) for value in self._state]
        self._executor = Executor(self._cut, schedule.table(len(placements)), placements, self._argument_layouts())
        self._feed = _Feed(problem, self._cut, self._rest, placements)
        self._opt = OptimizerForm.of(problem.optimizer, problem.form)
        self._opt_homes = [None if owner is None else self._homes[owner] for owner in self._opt.owners]
        self._loss_stage = next(s.index for s in self._cut.stages if 0 in s.results)
        self._finish = jax.jit(lambda losses: (problem.loss_of(stacked := jnp.stack(losses)), stacked))
        self._sum = jax.jit(add_in_order)
        self._update: StagedFunction | None = None
        self._one = jax.device_put(
            jnp.ones((), graph.avals[self._loss_value()].dtype), replicated(placements[self._loss_stage], ())
        )

    def _loss_value(self) -> int:
        atom = self._cut.graph.outputs[0]
        assert isinstance(atom, int)  # a loss that is a constant depends on no stage and is refused by the cut
        return atom

    def _home(self, value: int, path: str, paths: StagePaths | None) -> int:
        stages = self._cut.stages_reading(value)
        if stages:
            return min(stages)
        return (paths(path) if paths is not None else None) or 0

    def _argument_layouts(self) -> Mapping[int, Sequence[NamedSharding]]:
        layouts: dict[int, list[NamedSharding]] = {}
        for value, leaf in zip(self._params, self._problem.layouts):
            layouts[value] = [named_sharding(leaf.shape, leaf.nd_sbp, p, leaf.path) for p in self._placements]
        for value, shape in zip(self._state, self._problem.state_shapes):
            layouts[value] = [replicated(p, shape.shape) for p in self._placements]
        return layouts

    def program(self) -> Program:
        """The functions and layouts that a plan works with."""
        problem, placements = self._problem, self._placements
        params = [
            named_sharding(x.shape, x.nd_sbp, placements[home], x.path) for x, home in zip(problem.layouts, self._homes)
        ]
        state = [replicated(placements[home], x.shape) for x, home in zip(problem.state_shapes, self._state_homes)]
        self._shardings, self._state_shardings = params, state
        self._opt_shardings = [
            named_sharding(x.shape, self._opt.sbp_of(i, problem.layouts, placements[home or 0]), placements[home or 0])
            for i, (x, home) in enumerate(zip(self._opt.shapes, self._opt_homes))
        ]
        graph = self._cut.graph
        return Program(
            param_shardings=params,
            state_shardings=state,
            opt_shardings=self._opt_shardings,
            stages=self._homes,
            initialise=self._initialise,
            init_optimizer=self._init_optimizer,
            value_and_grad=self._with_means,
            step=self._step,
            lower_step=None,
            edges=[(e.source, e.target, graph.avals[e.value]) for e in self._cut.edges],
            executor=self._executor,
        )

    def _initialise(self, make: Callable[[Any], tuple[list[Any], list[Any]]], key: Any) -> tuple[list[Any], list[Any]]:
        """Each stage computes its own arrays: XLA drops the others, so none is ever whole in one place."""
        made: dict[tuple[str, int], Any] = {}
        for stage, placement in enumerate(self._placements):
            mine = [i for i, home in enumerate(self._homes) if home == stage]
            states = [i for i, home in enumerate(self._state_homes) if home == stage]
            if not mine and not states:
                continue
            layout = ([self._shardings[i] for i in mine], [self._state_shardings[i] for i in states])

            def pick(key: Any, mine: list[int] = mine, states: list[int] = states) -> tuple[list[Any], list[Any]]:
                params, state = make(key)
                return [params[i] for i in mine], [state[i] for i in states]

            here = jax.device_put(key, replicated(placement, ()))
            params, state = jax.jit(pick, out_shardings=layout)(here)
            made.update((("param", i), value) for i, value in zip(mine, params))
            made.update((("state", i), value) for i, value in zip(states, state))
        return [made["param", i] for i in range(len(self._homes))], [made["state", i] for i in range(len(self._state))]

    def _init_optimizer(self, params: list[Any]) -> list[Any]:
        optimizer, form = self._problem.optimizer, self._problem.form
        assert optimizer is not None
        function = StagedFunction(
            lambda *arrays: jax.tree.leaves(optimizer.init(form.param_tree.unflatten(arrays))),
            self._problem.param_shapes,
            homes=self._homes,
            shardings=self._shardings,
            out_homes=self._opt_homes,
            out_shardings=self._opt_shardings,
            meshes=self._meshes,
            donate=[False] * len(params),
            what="optimizer.init",
        )
        return function(*params)

    def _with_sums(
        self, params: list[Any], state: list[Any], batch: Sequence[Any], key: Any
    ) -> tuple[Any, Any, list[Any], list[Any]]:
        stages = self._cut.stages
        values = dict(zip(self._params, zip(params, self._homes)))
        states = dict(zip(self._state, zip(state, self._state_homes)))
        inputs = StepInputs(
            params=[self._at(stage.index, [values[v] for v in stage.params]) for stage in stages],
            state=[self._at(stage.index, [states[v] for v in stage.state]) for stage in stages],
            feed=self._feed.for_step(batch, key),
        )
        out = self._executor.run(inputs, self._one)
        loss, losses = self._finish(out.results[0])
        after = {(v, s.index): x for s, xs in zip(stages, out.state) for v, x in zip(s.state, xs)}
        new_state = [after.get((v, home), old) for v, home, old in zip(self._state, self._state_homes, state)]
        return loss, losses, self._collect(out.gradients, params), new_state

    def _with_means(self, params: list[Any], *arguments: Any) -> tuple[Any, Any, list[Any], list[Any]]:
        loss, losses, sums, state = self._with_sums(params, *arguments)
        return loss, losses, self._problem.gradient_of_sum(sums, params), state

    def _at(self, stage: int, items: Sequence[tuple[Any, int]]) -> list[Any]:
        """Arrays on a stage's devices; those that live on another stage (tied parameters) are copied there."""
        away = [i for i, (_, home) in enumerate(items) if home != stage]
        arrays = [array for array, _ in items]
        for i, copy in zip(away, send([arrays[i] for i in away], self._meshes[stage])):
            arrays[i] = copy
        return arrays

    def _collect(self, by_stage: Sequence[Sequence[Any]], params: Sequence[Any]) -> list[Any]:
        """One gradient a parameter, at its home: the parts of all stages that use it, added in stage order.

        It is the sum over microbatches, for 16-bit parameters in 32 bits.
        """
        parts: dict[int, list[tuple[int, Any]]] = {value: [] for value in self._params}
        for stage, gradients in zip(self._cut.stages, by_stage):
            for value, gradient in zip(stage.params, gradients):
                parts[value].append((stage.index, gradient))
        gradients = []
        for value, home, param in zip(self._params, self._homes, params):
            here = self._at(home, [(gradient, stage) for stage, gradient in parts[value]])
            if not here:  # no stage uses the parameter
                here = [jnp.zeros_like(param, accumulation_dtype(param.dtype))]
            gradients.append(here[0] if len(here) == 1 else self._sum(here))
        return gradients

    def _step(
        self, params: list[Any], state: list[Any], opt: list[Any], batch: Sequence[Any], key: Any
    ) -> tuple[list[Any], list[Any], list[Any], dict[str, Any]]:
        loss, losses, sums, state = self._with_sums(params, state, batch, key)
        if self._update is None:
            self._update = self._make_update()
        results = self._update(*sums, *params, *opt, loss)
        count = len(params)
        metrics = {"loss": loss, "grad_norm": results[-1], "microbatch_losses": losses}
        return results[:count], state, results[count:-1], metrics

    def _make_update(self) -> StagedFunction:
        params, opt = self._problem.param_shapes, self._opt.shapes
        gradients = [jax.ShapeDtypeStruct(x.shape, accumulation_dtype(x.dtype)) for x in params]
        homes = [*self._homes, *self._homes, *self._opt_homes]
        norm_home, norm_layout = self._loss_stage, replicated(self._placements[self._loss_stage], ())
        return StagedFunction(
            update_rule(self._problem, self._opt),
            [*gradients, *params, *opt, jax.ShapeDtypeStruct((), self._one.dtype)],
            homes=[*homes, norm_home],
            shardings=[*self._shardings, *self._shardings, *self._opt_shardings, norm_layout],
            out_homes=[*self._homes, *self._opt_homes, norm_home],
            out_shardings=[*self._shardings, *self._opt_shardings, norm_layout],
            meshes=self._meshes,
            donate=[False] * len(params) + [True] * (len(params) + len(opt)) + [False],
            what="optimizer.update",
        )


def _trace_loss(problem: Problem) -> Graph:
    def pure(params: list[Any], state: list[Any], batch: list[Any], key: Any, index: Any) -> tuple[Any, list[Any]]:
        return problem.loss(params, state, batch, key, index)

    index = jax.ShapeDtypeStruct((), jnp.int32)
    shapes = (problem.param_shapes, problem.state_shapes, list(problem.batch_shapes), problem.key_shape, index)
    return trace(pure, *shapes)[0]


def _stage_paths(graph: Graph, patterns: Sequence[Pattern], stages: int, rooted: bool) -> StagePaths | None:
    if not patterns:
        return None
    paths = [path for op in graph.ops for path in (op.path, *inner_paths(op.equation, (op.path,)))]
    return stages_by_path(patterns, paths, stages, rooted)


class _Feed:
    """Gives every stage the leaves of a microbatch that it reads, and nothing else."""

    def __init__(self, problem: Problem, cut: Cut, rest: Sequence[int], placements: Sequence[Placement]) -> None:
        """`rest`: value numbers of batch leaves, then the key if the loss takes one, then the microbatch number."""
        self._batch = problem.batch
        leaves = len(problem.batch_shapes)
        self._leaf = {value: i for i, value in enumerate(rest[:leaves])}
        self._key = rest[leaves] if problem.loss.takes_key else None
        self._placements = placements
        self._layouts = [
            {v: named_sharding(x.shape, problem.batch.nd_sbp, p) for v, x in zip(rest, problem.batch_shapes)}
            for p in placements
        ]
        everywhere = [replicated(p, ()) for p in placements]
        self._everywhere = everywhere
        self._fixed: list[dict[int, Any]] = []
        self._numbers: list[list[Any]] = []
        number = rest[-1]
        self._number = number
        for stage, layout in zip(cut.stages, everywhere):
            constants = {v: jax.device_put(x, layout) for v, x in cut.graph.constants.items() if v in stage.data}
            self._fixed.append(constants)
            wanted = range(problem.microbatches) if number in stage.data else ()
            self._numbers.append([jax.device_put(np.int32(i), layout) for i in wanted])
        self._key_readers = [self._key is not None and self._key in stage.data for stage in cut.stages]

    def for_step(self, batch: Sequence[Any], key: Any) -> Callable[[StageGraph, int], list[Any]]:
        """The feed of one step."""
        keys = [jax.device_put(key, x) if yes else None for yes, x in zip(self._key_readers, self._everywhere)]

        def feed(stage: StageGraph, microbatch: int) -> list[Any]:
            index = stage.index
            leaves = [v for v in stage.data if v in self._leaf]
            views = [self._batch.microbatch(batch[self._leaf[v]], microbatch) for v in leaves]
            placed = jax.device_put(views, [self._layouts[index][v] for v in leaves]) if leaves else []
            known = {**self._fixed[index], **dict(zip(leaves, placed))}
            if self._key is not None and self._key_readers[index]:
                known[self._key] = keys[index]
            if self._numbers[index]:
                known[self._number] = self._numbers[index][microbatch]
            return [known[v] for v in stage.data]

        return feed
