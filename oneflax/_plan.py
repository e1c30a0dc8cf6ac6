"""``Plan``: where a model's arrays live, how its batch is split, where it is cut. The model is not edited."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import optax

from oneflax.pipeline.schedules.one_f_one_b import one_f_one_b
from oneflax.pipeline.schedules.schedule import Schedule
from oneflax.pipeline.table import ScheduleTable
from oneflax.sbp.errors import Fault, FlowError, PlanError
from oneflax.sbp.grid import Placement

from ._batch import BatchLayout
from ._patterns import Pattern
from ._placing import gathered
from ._problem import Problem, Program
from ._train_step import TrainStep
from .flax.rules import read_rules

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
        return structure.unflatten(gathered(leaves))

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
