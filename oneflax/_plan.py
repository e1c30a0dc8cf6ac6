"""``Plan``: where a model's arrays live, how its batch is split, where it is cut. The model is not edited."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from oneflax.pipeline.schedules.one_f_one_b import one_f_one_b
from oneflax.pipeline.schedules.schedule import Schedule
from oneflax.pipeline.table import ScheduleTable
from oneflax.sbp.errors import Fault, FlowError, PlanError
from oneflax.sbp.grid import Placement

from ._batch import BatchLayout
from ._loss import Loss, ModelForm, key_passing
from ._patterns import Pattern
from ._problem import REDUCTIONS, OptimizerForm, Problem, Program
from ._state import TrainState
from .flax.rules import lay_out, read_rules

if TYPE_CHECKING:
    from ._explain import Explanation

STAGE_AXIS = "stage"


class Plan:
    """Everything decided about one model on one placement.

    Args:
        grid: The placement. An axis named ``stage`` holds the pipeline's stages, one sub-placement each.
        batch: The sbp of every batch leaf over the other axes, such as ``{"data": S(0)}``; everywhere whole if None.
        params: Rules ``(pattern, sbp)`` on parameter paths; the first that matches wins, B where none does. A pattern
            is a glob (``"blocks/*"``) or a regular expression.
        stages: Where the model is cut: one pattern whose matches are the layers, or a list with one pattern a stage.
            None: the loss marks its stages with :func:`oneflax.stage`, or there is one stage.
        schedule: The order of work over stages, ``flow.pipeline.one_f_one_b(microbatches=8)`` or a schedule table.
            One-forward-one-backward if None.
        microbatches: Into how many consecutive parts a batch is cut; told by the schedule if there is one.

    Raises:
        PlanError: Something does not fit; all faults at once, as far as they can be seen without the model.

    Example:
        >>> import oneflax as flow
        >>> from oneflax import S
        >>> grid = flow.placement("cpu", [[0, 1], [2, 3]], axes=("data", "model"))
        >>> plan = flow.Plan(grid, batch={"data": S(0)}, params=[(r"up/kernel", {"model": S(-1)})])
        >>> plan
        Plan(cpu[[0, 1], [2, 3]] (data=2, model=2), 1 stage, 1 microbatch, 1 rule)
    """

    def __init__(
        self,
        grid: Placement,
        batch: Any = None,
        params: Any = (),
        stages: str | Sequence[str] | None = None,
        schedule: Schedule | ScheduleTable | None = None,
        microbatches: int | None = None,
    ) -> None:
        if not isinstance(grid, Placement):
            mend = 'flow.Plan(flow.placement("auto", data=-1))'
            raise PlanError(Fault("Plan(grid)", f"a placement is needed, not {grid!r}.", mend=mend))
        faults: list[Fault] = []
        self.grid = grid
        self._placements = _stage_placements(grid)
        self.rules = _try(faults, read_rules, params, "params") or ()
        self.stages = _try(faults, _read_stages, stages, grid) or ()
        self.microbatches = _try(faults, _count_microbatches, schedule, microbatches) or 1
        layout = _try(faults, BatchLayout.of, batch, self._placements[0], self.microbatches)
        if schedule is None and len(self._placements) > 1:
            schedule = one_f_one_b(self.microbatches)
        _try(faults, _check_schedule, schedule, len(self._placements))
        if faults or layout is None:
            raise PlanError(faults, "Plan")
        self.schedule = schedule
        self._batch = layout
        self._last: tuple[Problem, Program] | None = None

    def __repr__(self) -> str:
        counts = [(len(self._placements), "stage"), (self.microbatches, "microbatch"), (len(self.rules), "rule")]
        words = [f"{n} {word}{'' if n == 1 else 'es' if word.endswith('ch') else 's'}" for n, word in counts]
        return f"Plan({self.grid}, {', '.join(words)})"

    def train_step(
        self, loss_fn: Callable[..., Any], optimizer: optax.GradientTransformation, reduce: str = "mean"
    ) -> "TrainStep":
        """One call that computes gradients and updates the parameters.

        Args:
            loss_fn: ``loss_fn(model, batch)`` for an nnx module, ``loss_fn(params, batch)`` for a pytree; a further
                parameter named ``key`` gets a key of its own for each step and microbatch. Gives one floating number.
            optimizer: Any optax transformation.
            reduce: How the losses of microbatches make the loss of the step: ``"mean"`` or ``"sum"``.
        """
        if not (callable(getattr(optimizer, "init", None)) and callable(getattr(optimizer, "update", None))):
            what = f"an optax transformation is needed, not {optimizer!r}."
            raise PlanError(Fault("train_step(optimizer)", what, mend="plan.train_step(loss_fn, optax.adamw(3e-4))"))
        return TrainStep(self, loss_fn, optimizer, reduce)

    def value_and_grad(self, loss_fn: Callable[..., Any], reduce: str = "mean") -> Callable[..., tuple[Any, Any]]:
        """``(params_or_model, batch, key=None) -> (loss, gradients)``, a drop-in for ``nnx.value_and_grad``.

        Gradients have the structure and the layout of the parameters. An nnx module's statistics and rng streams are
        advanced in place, as nnx does.
        """
        step = TrainStep(self, loss_fn, None, reduce)
        return step.value_and_grad

    def gather(self, tree: Any) -> Any:
        """Ordinary arrays on one device, from a pytree whose leaves lie anywhere."""
        leaves, structure = jax.tree.flatten(tree)  # copies: the state's own arrays are gone after the next step
        return structure.unflatten(gather_leaves(leaves))

    def explain(self) -> "Explanation":
        """What the plan does to the model that a step made with it saw last.

        Returns:
            An explanation: ``print`` it, or take ``.to_json()``.

        Raises:
            PlanError: No step has seen a model yet.
        """
        from ._explain import Explanation

        if self._last is None:
            mend = "step = plan.train_step(loss_fn, optimizer); state = step.init(make, sample_batch, key)"
            raise PlanError(Fault("plan.explain()", "the plan has not seen a model yet.", mend=mend))
        return Explanation.of(self, *self._last)

    def _program(self, problem: Problem) -> Program:
        """Compiles a problem, as one program or in stages."""
        if len(self._placements) > 1:
            from ._staged import staged_program

            assert self.schedule is not None
            program = staged_program(problem, self._placements, self.stages, self.schedule)
        else:
            from ._spmd import spmd_program
            from ._stage_paths import check_patterns

            check_patterns(self.stages, problem.form.param_paths)
            program = spmd_program(problem, self._placements[0])
        self._last = (problem, program)
        return program


class TrainStep:
    """A training step: ``state, metrics = step(state, batch, key=None)``.

    ``metrics`` holds ``loss``, ``grad_norm`` (of the summed gradient, before the optimizer) and
    ``microbatch_losses``, as arrays that may still be computed. The state is donated.
    """

    def __init__(
        self, plan: Plan, loss_fn: Callable[..., Any], optimizer: optax.GradientTransformation | None, reduce: str
    ) -> None:
        """Made by :meth:`Plan.train_step`."""
        if reduce not in REDUCTIONS:
            what = f"{reduce!r} is none of {', '.join(map(repr, REDUCTIONS))}."
            raise PlanError(Fault("train_step(reduce=)", what, mend='reduce="mean"'))
        self._plan, self._loss_fn, self._optimizer, self._reduce = plan, loss_fn, optimizer, reduce
        self._takes_key = key_passing(loss_fn) is not None
        self._programs: dict[Any, tuple[Problem, Program]] = {}
        self._current: Program | None = None
        self.record = False

    def init(self, make: Callable[[Any], Any], sample_batch: Any, key: Any) -> TrainState:
        """A fresh state. Every array is computed where it will live; none is ever whole on one device.

        Args:
            make: ``make(key)`` gives the model: an nnx module, or a pytree of parameters.
            sample_batch: A batch like those to come; only shapes matter.
            key: The key for ``make``.
        """
        from .flax import nnx

        form = ModelForm(nnx.abstract(make, key))
        arrays, tree = self._plan._batch.flatten(sample_batch)
        program = self._program_for(form, arrays, tree, key if self._takes_key else None)

        def leaves(key: Any) -> tuple[list[Any], list[Any]]:
            return form.leaves_of(make(key))

        params, state = program.initialise(leaves, key)
        return self._state(form, program, params, state)

    def place(self, params_or_model: Any) -> TrainState:
        """A state from existing values, which stay untouched. They are placed at the first call, if not now."""
        form = ModelForm(params_or_model)
        params, state = form.leaves_of(params_or_model)
        self._plan_layouts(form)
        for problem, program in self._programs.values():
            if problem.form == form:
                return self._state(form, program, *_placed(program, params, state))
        return TrainState(_owned(params), _owned(state), [], 0, form, OptimizerForm.of(self._optimizer, form))

    def __call__(self, state: TrainState, batch: Any, key: Any = None) -> tuple[TrainState, dict[str, Any]]:
        """Takes one step.

        Args:
            state: The state so far; donated.
            batch: A pytree of arrays, numpy or jax, whose axis of examples divides into microbatches and parts.
            key: Needed if the loss takes a key. The same key serves every step: the step count is folded in.

        Raises:
            PlanError: The batch does not divide, the key is missing, or the state is another model's.
        """
        if not isinstance(state, TrainState):
            what = f"the state is a {type(state).__name__}, not what step.init or step.place gave."
            raise PlanError(Fault("step(state, batch)", what, mend="state = step.place(params_or_model)"))
        base = self._base_key(key, state.step)
        arrays, tree = self._plan._batch.flatten(batch)
        program = self._program_for(state._form, arrays, tree, base)
        state = self._adopt(program, state)
        if program.executor is not None:
            program.executor.record = self.record
        params, rest, opt, metrics = program.step(state._params, state._state, state._opt, arrays, base)
        new = TrainState(params, rest, opt, state.step + 1, state._form, state._opt_form, program)
        return new, metrics

    def value_and_grad(self, params_or_model: Any, batch: Any, key: Any = None) -> tuple[Any, Any]:
        """Loss and gradients of one batch; see :meth:`Plan.value_and_grad`."""
        form = ModelForm(params_or_model)
        base = self._base_key(key, 0)
        arrays, tree = self._plan._batch.flatten(batch)
        program = self._program_for(form, arrays, tree, base)
        params, state = map(jax.device_put, map(_owned, form.leaves_of(params_or_model)), program.shardings)
        loss, _, gradients, state = program.value_and_grad(params, state, arrays, base)
        form.update_state(params_or_model, state)
        return loss, form.param_tree.unflatten(gradients)

    @property
    def program(self) -> Program | None:
        """What the last call ran, compiled; None before the first one."""
        return self._current

    @property
    def trace(self) -> Any:
        """The measured timeline of the last step taken with ``step.record = True``; None without stages."""
        executor = self._current.executor if self._current is not None else None
        return executor.trace if executor is not None else None

    def _plan_layouts(self, form: ModelForm) -> list[Any]:
        leaves = list(zip(form.param_paths, jax.tree.leaves(form.params)))
        return lay_out(self._plan.rules, leaves, self._plan._placements[0])

    def _base_key(self, key: Any, step: int) -> Any:
        if not self._takes_key:
            return None
        if key is None:
            what = "the loss takes a key, and the step got none."
            raise PlanError(Fault("step(state, batch, key)", what, mend="step(state, batch, jax.random.key(0))"))
        return jax.random.fold_in(key, step)

    def _program_for(self, form: ModelForm, arrays: Sequence[Any], tree: Any, key: Any) -> Program:
        layout = self._plan._batch
        shape = None if key is None else jax.ShapeDtypeStruct(key.shape, key.dtype)
        signature = (form, tree, tuple((a.shape, a.dtype) for a in arrays), shape)
        if signature not in self._programs:
            problem = Problem(
                grid=self._plan.grid,
                form=form,
                loss=Loss(self._loss_fn, form, tree),
                layouts=self._plan_layouts(form),
                batch=layout,
                batch_shapes=[layout.microbatch_shape(a) for a in arrays],
                reduce=self._reduce,
                optimizer=self._optimizer,
                key_shape=shape,
            )
            self._programs[signature] = problem, self._plan._program(problem)
        self._current = self._programs[signature][1]
        return self._current

    def _state(self, form: ModelForm, program: Program, params: list[Any], state: list[Any]) -> TrainState:
        opt = program.init_optimizer(params)
        return TrainState(params, state, opt, 0, form, OptimizerForm.of(self._optimizer, form), program)

    def _adopt(self, program: Program, state: TrainState) -> TrainState:
        """The state on this program's devices; one that another program placed is moved."""
        if state._owner is program or (state._owner is not None and state._owner.same_layout(program)):
            return state
        form = OptimizerForm.of(self._optimizer, state._form)
        if (form.tree, form.shapes) != (state._opt_form.tree, state._opt_form.shapes):
            what = "the state holds another optimizer's state than this step's."
            given = (f"state: {state._opt_form}", f"step: {form}")
            raise PlanError(Fault("step(state, batch)", what, given, "state = step.place(state.model())"))
        params, rest = _placed(program, state._params, state._state)
        opt = _copies(state._opt, program.opt_shardings) if state._opt else program.init_optimizer(params)
        return TrainState(params, rest, opt, state.step, state._form, state._opt_form, program)


def gather_leaves(leaves: Sequence[Any]) -> list[Any]:
    """Arrays copied whole to the default device."""
    return _copies(leaves, [jax.devices()[0]] * len(leaves))


def _copies(leaves: Sequence[Any], places: Sequence[Any]) -> list[Any]:
    """Copies on other devices, so that donating them, or the originals, takes nothing from whoever holds the others.

    ``device_put(may_alias=False)`` does not serve: from one device to several and back it shares memory all the same.
    """
    placed = jax.device_put(_owned(leaves), list(places))
    return [jnp.copy(new) if isinstance(leaf, jax.Array) else new for leaf, new in zip(leaves, placed)]


def _owned(leaves: Sequence[Any]) -> list[Any]:
    """The leaves, numpy arrays copied: ``device_put`` reads them later, when their owner may have changed them."""
    return [leaf.copy() if isinstance(leaf, np.ndarray) else leaf for leaf in leaves]


def _placed(program: Program, params: Sequence[Any], state: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    leaves = _copies([*params, *state], [*program.param_shardings, *program.state_shardings])
    return leaves[: len(params)], leaves[len(params) :]


def _try(faults: list[Fault], read: Callable[..., Any], *args: Any) -> Any:
    """The result of `read`, or None and its faults added to the list."""
    try:
        return read(*args)
    except FlowError as error:
        faults.extend(error.faults)
        return None


def _read_stages(stages: str | Sequence[str] | None, grid: Placement) -> tuple[Pattern, ...]:
    if stages is None:
        return ()
    texts = [stages] if isinstance(stages, str) else list(stages)
    faults: list[Fault] = []
    patterns = [_try(faults, Pattern, text, "Plan(stages=)") for text in texts]
    if not texts:
        faults.append(Fault("Plan(stages=)", "an empty list names no stage.", mend='stages="blocks/*"'))
    if grid.axes is None or STAGE_AXIS not in grid.axes:
        what = f"{grid} has no placement axis named 'stage' to hold them."
        faults.append(Fault("Plan(stages=)", what, mend='flow.placement("auto", stage=2, data=-1)'))
    if faults:
        raise PlanError(faults, "Plan(stages=)")
    return tuple(patterns)


def _check_schedule(schedule: Any, stages: int) -> None:
    if not isinstance(schedule, (Schedule, ScheduleTable)):
        return  # none, or refused when its microbatches were counted
    if schedule.forward_only:
        what = f"{schedule.name} has no backward, so it trains nothing."
        mend = f"schedule=flow.pipeline.one_f_one_b(microbatches={schedule.microbatches})"
        raise PlanError(Fault("Plan(schedule=)", what, mend=mend))
    schedule.table(stages)


def _count_microbatches(schedule: Schedule | ScheduleTable | None, microbatches: int | None) -> int:
    if schedule is not None and not isinstance(schedule, (Schedule, ScheduleTable)):
        mend = "flow.pipeline.one_f_one_b(microbatches=8)"
        raise PlanError(Fault("Plan(schedule=)", f"a schedule is needed, not {schedule!r}.", mend=f"schedule={mend}"))
    if microbatches is not None and (
        isinstance(microbatches, bool) or not isinstance(microbatches, int) or microbatches < 1
    ):
        what = f"a whole number of at least 1 is needed, not {microbatches!r}."
        raise PlanError(Fault("Plan(microbatches=)", what, mend="microbatches=4"))
    if schedule is None:
        return microbatches or 1
    if microbatches not in (None, schedule.microbatches):
        what = f"the schedule {schedule.name} has {schedule.microbatches} microbatches, not {microbatches}."
        raise PlanError(Fault("Plan(microbatches=)", what, mend="leave microbatches= out: the schedule tells"))
    return schedule.microbatches


def _stage_placements(grid: Placement) -> list[Placement]:
    if grid.axes is None or STAGE_AXIS not in grid.axes:
        return [grid]
    count = grid.shape[grid.axes.index(STAGE_AXIS)]
    return [grid.at(**{STAGE_AXIS: i}) for i in range(count)]
