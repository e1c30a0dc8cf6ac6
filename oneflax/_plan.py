"""``Plan``: where a model's arrays live, how its batch is split, where it is cut into stages. The model is not edited."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import optax

from oneflax.pipeline.schedules.one_f_one_b import one_f_one_b
from oneflax.pipeline.schedules.schedule import Schedule
from oneflax.pipeline.table import ScheduleTable
from oneflax.sbp.errors import Fault, PlanError
from oneflax.sbp.grid import Placement

from ._batch import BatchLayout
from ._loss import Loss, ModelForm
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
        PlanError, SbpError: Something does not fit; all faults at once, as far as they can be seen without the model.

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
        self.grid = grid
        self.rules = read_rules(params, "params")
        self.stages = _read_stages(stages)
        self.microbatches = _count_microbatches(schedule, microbatches)
        self.schedule = schedule
        self._placements = _stage_placements(grid)
        if self.schedule is None and len(self._placements) > 1:
            self.schedule = one_f_one_b(self.microbatches)
        self._batch = BatchLayout.of(batch, self._placements[0], self.microbatches)
        self._last: tuple[Problem, Program] | None = None
        self._check_stages()

    def _check_stages(self) -> None:
        if self.stages and (self.grid.axes is None or STAGE_AXIS not in self.grid.axes):
            what = f"{self.grid} has no placement axis named 'stage' to hold them."
            raise PlanError(Fault("Plan(stages=)", what, mend='flow.placement("auto", stage=2, data=-1)'))
        if self.schedule is not None:
            table = self.schedule.table(len(self._placements))
            if table.forward_only:
                mend = f"flow.pipeline.one_f_one_b({self.microbatches})"
                raise PlanError(
                    Fault("Plan(schedule=)", f"{table.name} has no backward, so it trains nothing.", mend=mend)
                )

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
        leaves, structure = jax.tree.flatten(tree)
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
        self._form: ModelForm | None = None
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

        abstract = nnx.abstract(make, key)
        self._form = form = ModelForm(abstract)
        _, program = self._program_for(form, *self._plan._batch.flatten(sample_batch))

        def leaves(key: Any) -> tuple[list[Any], list[Any]]:
            return form.leaves_of(make(key))

        params, state = program.initialise(leaves, key)
        return self._state(program, params, state)

    def place(self, params_or_model: Any) -> TrainState:
        """A state from existing values, which stay untouched. They are placed at the first call, if not now."""
        self._form = form = ModelForm(params_or_model)
        params, state = form.leaves_of(params_or_model)
        self._plan_layouts(form)
        if self._current is not None:
            return self._state(self._current, *_placed(self._current, params, state))
        return TrainState(list(params), list(state), [], 0, form, OptimizerForm.of(self._optimizer, form))

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
        problem, program = self._program_for(state._form, *(flat := self._plan._batch.flatten(batch)))
        state = self._adopt(program, state)
        if program.executor is not None:
            program.executor.record = self.record
        base = _base_key(problem, key, state.step)
        params, rest, opt, metrics = program.step(state._params, state._state, state._opt, flat[0], base)
        new = TrainState(params, rest, opt, state.step + 1, state._form, state._opt_form, program)
        return new, metrics

    def value_and_grad(self, params_or_model: Any, batch: Any, key: Any = None) -> tuple[Any, Any]:
        """Loss and gradients of one batch; see :meth:`Plan.value_and_grad`."""
        self._form = form = ModelForm(params_or_model)
        problem, program = self._program_for(form, *(flat := self._plan._batch.flatten(batch)))
        params, state = _placed(program, *form.leaves_of(params_or_model))
        base = _base_key(problem, key, 0)
        loss, _, gradients, state = program.value_and_grad(params, state, flat[0], base)
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

    def _program_for(self, form: ModelForm, arrays: Sequence[Any], tree: Any) -> tuple[Problem, Program]:
        layout = self._plan._batch
        signature = (form, tree, tuple((a.shape, a.dtype) for a in arrays))
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
            )
            self._programs[signature] = problem, self._plan._program(problem)
        problem, self._current = self._programs[signature]
        return problem, self._current

    def _state(self, program: Program, params: list[Any], state: list[Any]) -> TrainState:
        assert self._form is not None
        opt = program.init_optimizer(params)
        return TrainState(params, state, opt, 0, self._form, OptimizerForm.of(self._optimizer, self._form), program)

    def _adopt(self, program: Program, state: TrainState) -> TrainState:
        """The state on this program's devices; one that another program placed is moved."""
        if state._owner is program:
            return state
        params, rest = _placed(program, state._params, state._state)
        opt = jax.device_put(state._opt, program.opt_shardings) if state._opt else program.init_optimizer(params)
        return TrainState(params, rest, opt, state.step, state._form, state._opt_form, program)


def gather_leaves(leaves: Sequence[Any]) -> list[Any]:
    """Arrays copied whole to the default device."""
    return jax.device_put(list(leaves), jax.devices()[0])


def _placed(program: Program, params: Sequence[Any], state: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """Copies, so that donating them takes nothing from the user."""
    shardings = [*program.param_shardings, *program.state_shardings]
    leaves = jax.device_put([*params, *state], shardings, may_alias=False)
    return leaves[: len(params)], leaves[len(params) :]


def _base_key(problem: Problem, key: Any, step: int) -> Any:
    if not problem.loss.takes_key:
        return None
    if key is None:
        what = "the loss takes a key, and the step got none."
        raise PlanError(Fault("step(state, batch, key)", what, mend="step(state, batch, jax.random.key(0))"))
    return jax.random.fold_in(key, step)


def _read_stages(stages: str | Sequence[str] | None) -> tuple[Pattern, ...]:
    if stages is None:
        return ()
    texts = [stages] if isinstance(stages, str) else list(stages)
    if not texts:
        raise PlanError(Fault("Plan(stages=)", "an empty list names no stage.", mend='stages="blocks/*"'))
    return tuple(Pattern(text, "Plan(stages=)") for text in texts)


def _count_microbatches(schedule: Schedule | ScheduleTable | None, microbatches: int | None) -> int:
    if schedule is not None and not isinstance(schedule, (Schedule, ScheduleTable)):
        mend = "flow.pipeline.one_f_one_b(microbatches=8)"
        raise PlanError(Fault("Plan(schedule=)", f"a schedule is needed, not {schedule!r}.", mend=mend))
    if microbatches is not None and (
        isinstance(microbatches, bool) or not isinstance(microbatches, int) or microbatches < 1
    ):
        what = f"a whole number of at least 1 is needed, not {microbatches!r}."
        raise PlanError(Fault("Plan(microbatches=)", what, mend="microbatches=4"))
    if schedule is None:
        return microbatches or 1
    if microbatches not in (None, schedule.microbatches):
        what = f"is {microbatches}, but the schedule has {schedule.microbatches}."
        raise PlanError(Fault("Plan(microbatches=)", what, mend="leave it out: the schedule tells"))
    return schedule.microbatches


def _stage_placements(grid: Placement) -> list[Placement]:
    if grid.axes is None or STAGE_AXIS not in grid.axes:
        return [grid]
    count = grid.shape[grid.axes.index(STAGE_AXIS)]
    return [grid.at(**{STAGE_AXIS: i}) for i in range(count)]
