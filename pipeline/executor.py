"""Runs a cut loss over its stages' devices, in a schedule's order, from one dispatching thread.

JAX dispatches asynchronously, so the thread walks one fixed order over all workers (:func:`.actors.dispatch_order`)
and the devices overlap by themselves. Every value that waits for somebody lies in a register: microbatches in their
stages, values on edges, cotangents, gradients that came too early. The pools (:mod:`.step_registers`) measure and bound
them; an action that is dispatched and not yet done holds its arguments as well, and :data:`MAX_IN_FLIGHT` bounds those.
Numbers do not depend on the order: gradients are added in the order of microbatches, and randomness is keyed by step
and microbatch. Threads that share an executor take turns, a whole step each.
"""

import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from oneflax.sbp.errors import Fault, ScheduleError
from oneflax.sbp.grid import Placement

from .actions import Action
from .actors import dispatch_order
from .recorder import Recorder
from .routes import Route, routes_of
from .sharing import Group, group_stages
from .stage_functions import BackwardOutput, ForwardOutput, StageArguments, StageKind, accumulation_dtype
from .stages import Cut, StageGraph
from .step_registers import Bounds, StepRegisters
from .table import ScheduleTable
from .trace import Trace
from .transfer import send

#: Actions that may be queued on one worker. More hides no latency, holds more memory, and jax 0.10 on few CPU cores
#: deadlocks when dozens of multi-device programs are queued.
MAX_IN_FLIGHT = 6

#: ``feed(stage, microbatch)`` gives the stage's data arguments, on its devices, in the stage graph's order.
Feed = Callable[[StageGraph, int], Sequence[Any]]


@dataclass(frozen=True, slots=True)
class StepInputs:
    """What one step starts from. Lists are by stage, each in the stage graph's order and on the stage's devices."""

    params: Sequence[Sequence[Any]]
    state: Sequence[Sequence[Any]]
    feed: Feed


@dataclass(frozen=True, slots=True)
class StepOutputs:
    """What one step gives.

    Attributes:
        results: For each result of the loss, its values by microbatch (0 is the loss).
        gradients: By stage, the sum over microbatches for each of the stage's parameters, in
            :func:`.stage_functions.accumulation_dtype`. Empty if forward-only.
        state: By stage, the state after the last microbatch.
    """

    results: Mapping[int, Sequence[Any]]
    gradients: Sequence[Sequence[Any]]
    state: Sequence[Sequence[Any]]


@dataclass(slots=True)
class _Step:
    """One running step."""

    inputs: StepInputs
    registers: StepRegisters
    state: list[list[Any]]
    gradients: list[Sequence[Any]]
    added: list[int]  # by stage, how many microbatches the gradient holds
    results: dict[int, dict[int, Any]] = field(default_factory=dict)


class StageRunner:
    """One stage on its devices: the compiled functions and what never changes from step to step."""

    def __init__(
        self,
        stage: StageGraph,
        kind: StageKind,
        scalars: Sequence[Any],
        placement: Placement,
        param_shardings: Sequence[NamedSharding],
        state_shardings: Sequence[NamedSharding],
        avals: Sequence[Any],
    ) -> None:
        """Args: the stage, its shared functions, its own scalars, its devices, how its arguments lie there, shapes."""
        self.stage = stage
        self.kind = kind
        self.placement = placement
        self.mesh = placement.mesh
        everywhere = NamedSharding(self.mesh, PartitionSpec())
        self.scalars = jax.device_put(list(scalars), everywhere)
        self.zero = jax.device_put(np.uint32(0), everywhere)
        self.param_shardings = list(param_shardings)
        self.replaced = [stage.state.index(old) for old in stage.new_state]
        new_state = [state_shardings[i] for i in self.replaced]
        # Outer jits pin the layouts for these devices; the inner ones are shared, so equal stages trace once.
        free: Any = None  # XLA chooses
        small: Any = everywhere  # one layout for a whole list
        layout = ForwardOutput(free, new_state, small, free, everywhere)
        self.forward = jax.jit(lambda args: kind.forward(args), out_shardings=layout)
        self.evaluate = jax.jit(lambda args: kind.evaluate(args), out_shardings=layout)
        self.backward = jax.jit(
            lambda *args: kind.backward(*args),
            out_shardings=BackwardOutput(free, self.param_shardings, everywhere),
            donate_argnums=4,
        )
        shapes = [(avals[v].shape, accumulation_dtype(avals[v].dtype)) for v in stage.params]
        self.zeros = jax.jit(lambda: [jnp.zeros(*shape) for shape in shapes], out_shardings=self.param_shardings)
        self.add = jax.jit(
            lambda total, part: [a + b for a, b in zip(total, part)],
            out_shardings=self.param_shardings,
            donate_argnums=0,
        )


class Executor:
    """Runs steps of one cut loss under one schedule table.

    Attributes:
        record: Measure when each action of the next steps starts and ends.
        registers: The pools of the last whole step, each with the most that it may hold and the most that it held.
    """

    def __init__(
        self,
        cut: Cut,
        table: ScheduleTable,
        placements: Sequence[Placement],
        shardings: Mapping[int, Sequence[NamedSharding]],
    ) -> None:
        """Builds the runners; nothing compiles before the first step.

        Args:
            cut: The loss in stages.
            table: What each worker does; validated here against the cut's edges. Forwards of a stage with state run in
                the order of microbatches.
            placements: The devices of each worker.
            shardings: For each parameter and state argument (by value number), its layout on every stage.

        Raises:
            ScheduleError: The table does not fit the stages.
        """
        _check_table(cut, table)
        self.cut, self.table = cut, table
        self._order = dispatch_order(table, cut.stage_edges)
        self._routes = routes_of(cut)
        self._returning = {(source, s) for s, routes in enumerate(self._routes) for source, _ in routes.returns}
        groups = group_stages(cut.graph, cut.stages, [routes.consumers for routes in self._routes])
        self.kinds = [StageKind(cut.graph, g, self._routes[g.members[0].index].consumers) for g in groups]
        self.runners = self._make_runners(groups, placements, shardings)
        actions, returning = [action for _, action in self._order], () if table.forward_only else self._returning
        self._bounds = Bounds.of(actions, table.stages, cut.stage_edges, returning, table.forward_only)
        self.registers = StepRegisters(self._bounds)
        self._in_flight: list[deque[Any]] = [deque() for _ in range(table.workers)]
        self._turn = threading.RLock()
        self._recorder: Recorder | None = None
        self.record = False

    def _make_runners(
        self,
        groups: Sequence[Group],
        placements: Sequence[Placement],
        shardings: Mapping[int, Sequence[NamedSharding]],
    ) -> list[StageRunner]:
        runners: dict[int, StageRunner] = {}
        for group, kind in zip(groups, self.kinds):
            for stage, scalars in zip(group.members, group.values):
                placement = placements[self.table.worker_of_stage[stage.index]]
                params, state = ([shardings[v][stage.index] for v in values] for values in (stage.params, stage.state))
                runners[stage.index] = StageRunner(stage, kind, scalars, placement, params, state, self.cut.graph.avals)
        return [runners[stage.index] for stage in self.cut.stages]

    @property
    def trace(self) -> Trace | None:
        """The measured timeline of the last recorded step, or None. Waits until that step is done."""
        return None if self._recorder is None else self._recorder.trace()

    def run(self, inputs: StepInputs, loss_cotangent: Any) -> StepOutputs:
        """Dispatches one step; gives arrays that may still be computed. Threads wait for each other's dispatch.

        Args:
            inputs: Parameters, state and data.
            loss_cotangent: What the gradient of each microbatch's loss is weighted with, on the loss's stage.
        """
        with self._turn:
            return self._run(inputs, loss_cotangent)

    def _run(self, inputs: StepInputs, loss_cotangent: Any) -> StepOutputs:
        gradients = [] if self.table.forward_only else [runner.zeros() for runner in self.runners]
        state = [list(values) for values in inputs.state]
        step = _Step(inputs, StepRegisters(self._bounds), state, gradients, [0] * len(self.runners))
        recorder = Recorder(self.table, self.cut.stage_edges, self._returning) if self.record else None
        try:
            for worker, action in self._order:
                self._wait_for_room(worker)
                arrivals, token = self._fire(step, action, loss_cotangent)
                self._in_flight[worker].append(token)
                if recorder is not None:
                    recorder.dispatched(worker, action, arrivals, token)
        finally:
            if recorder is not None:
                recorder.close()
                self._recorder = recorder
        self.registers = step.registers
        microbatches = range(self.table.microbatches)
        results = {position: [by[i] for i in microbatches] for position, by in step.results.items()}
        return StepOutputs(results, step.gradients, step.state)

    def _wait_for_room(self, worker: int) -> None:
        queue = self._in_flight[worker]
        if len(queue) >= MAX_IN_FLIGHT:
            jax.block_until_ready(queue.popleft())

    def _fire(self, step: _Step, action: Action, loss_cotangent: Any) -> tuple[Sequence[Any], Any]:
        if action.kind == "F":
            return self._forward(step, action.stage, action.microbatch)
        assert action.kind == "B", f"{action} has no function"  # _check_table refuses I and W
        return self._backward(step, action.stage, action.microbatch, loss_cotangent)

    def _forward(self, step: _Step, index: int, microbatch: int) -> tuple[Sequence[Any], Any]:
        runner, stage, routes = self.runners[index], self.cut.stages[index], self._routes[index]
        edges_in = step.registers.arrived(routes.arrivals, index, microbatch)
        data = step.inputs.feed(stage, microbatch)
        args = StageArguments(runner.scalars, step.inputs.params[index], list(step.state[index]), data, edges_in)
        run = runner.evaluate if self.table.forward_only else runner.forward
        out = run(args)
        register = step.registers.stages[index]
        register.acquire(microbatch, (args, out.residuals))
        for position, value in zip(runner.replaced, out.new_state):
            step.state[index][position] = value
        for position, value in zip(sorted(stage.results), out.results):
            step.results.setdefault(position, {})[microbatch] = value
        self._send(step, index, microbatch, routes.sends, out.edges_out)
        if self.table.forward_only:
            register.release(microbatch)
        return edges_in, out.token

    def _backward(self, step: _Step, index: int, microbatch: int, loss_cotangent: Any) -> tuple[Sequence[Any], Any]:
        runner, stage, routes = self.runners[index], self.cut.stages[index], self._routes[index]
        args, residuals = step.registers.stages[index].release(microbatch)
        cotangents = step.registers.arrived(routes.cotangents, index, microbatch)
        weight = loss_cotangent if 0 in stage.results else None
        in_order = microbatch == step.added[index]
        total = step.gradients[index] if in_order else runner.zeros()
        out = runner.backward(args, residuals, cotangents, weight, total, runner.zero)
        self._add(step, index, microbatch, out.gradients, in_order)
        self._send(step, index, microbatch, routes.returns, out.cotangents)
        return cotangents, out.token

    def _send(self, step: _Step, index: int, microbatch: int, routes: Sequence[Route], values: Sequence[Any]) -> None:
        """Copies to each other stage what it reads, into the register of the edge."""
        for reader, positions in routes:
            copies = send([values[i] for i in positions], self.runners[reader].mesh)
            step.registers.edges[index, reader].acquire(microbatch, copies)

    def _add(self, step: _Step, index: int, microbatch: int, gradients: Sequence[Any], in_order: bool) -> None:
        """Gradients add in the order of microbatches, whatever the order in which they come."""
        if not in_order:
            step.registers.parked[index].acquire(microbatch, gradients)
            return
        step.gradients[index], step.added[index] = gradients, microbatch + 1
        parked = step.registers.parked.get(index)
        while parked is not None and step.added[index] in parked:
            part = parked.release(step.added[index])
            step.gradients[index] = self.runners[index].add(step.gradients[index], part)
            step.added[index] += 1


def _check_table(cut: Cut, table: ScheduleTable) -> None:
    """Refuses a table that does not fit the stages; see :class:`Executor`."""
    where = f"table {table.name!r}"
    if table.stages != len(cut.stages):
        what = f"the table is for {table.stages} stages and the loss has {len(cut.stages)}."
        raise ScheduleError(Fault(where, what, mend="as many stages in the table as flow.stage marks or patterns make"))
    table.validate(cut.stage_edges)
    actions = [action for row in table.actions for action in row]
    if split := [action for action in actions if action.kind in "IW"]:
        what = f"{split[0]} is half of a backward, which does not run yet."
        raise ScheduleError(Fault(where, what, mend="a table with B, such as one_f_one_b(microbatches=8)"))
    faults = []
    for stage in cut.stages:
        forwards = [a.microbatch for a in actions if a.stage == stage.index and a.kind == "F"]
        if stage.new_state and forwards != sorted(forwards):
            faults.append(_state_out_of_order(where, stage.index, forwards))
    if faults:
        raise ScheduleError(faults, where)


def _state_out_of_order(where: str, stage: int, forwards: Sequence[int]) -> Fault:
    order = ", ".join(map(str, forwards))
    what = f"its state goes from microbatch to microbatch, but its forwards run in the order {order}."
    mend = f"forwards of stage {stage} in the order of microbatches, or a model without state there"
    return Fault(f"{where}, stage {stage}", what, mend=mend)
