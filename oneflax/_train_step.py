"""``TrainStep``: the calls that a user makes with a plan and a loss."""

import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import optax

from oneflax.sbp import _compat
from oneflax.sbp.errors import Fault, PlanError

from ._loss import Loss, ModelForm, key_passing
from ._placing import copies, gathered, owned
from ._problem import REDUCTIONS, OptimizerForm, Problem, Program
from ._state import TrainState
from .flax.rules import lay_out

if TYPE_CHECKING:
    from ._plan import Plan

#: So many forms of batches compile without a word. More are usually a mistake: each one traces and compiles anew.
FORMS_BEFORE_WARNING = 8


class TrainStep:
    """A training step: ``state, metrics = step(state, batch, key=None)``.

    ``metrics`` holds ``loss``, ``grad_norm`` (of the summed gradient, before the optimizer) and
    ``microbatch_losses``, as arrays that may still be computed. The state is donated.

    Attributes:
        record: Set it to True to measure when each action of the pipeline's next steps runs; see :attr:`trace`.
    """

    def __init__(
        self, plan: "Plan", loss_fn: Callable[..., Any], optimizer: optax.GradientTransformation | None, reduce: str
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

        Raises:
            PlanError: The plan does not fit the model or the batch. All faults of one kind at once.
        """
        from .flax import nnx

        form = ModelForm(nnx.abstract(make, key))
        arrays, tree = self._plan._batch.flatten(sample_batch)
        program = self._program_for(form, arrays, tree, key if self._takes_key else None)

        def leaves(key: Any) -> tuple[list[Any], list[Any]]:
            return form.leaves_of(make(key))

        params, state = program.initialise(leaves, key)
        return self._state(form, program, params, state)

    def place(self, params_or_model: Any, sample_batch: Any = None) -> TrainState:
        """A state from existing values: pretrained parameters, numpy arrays, a module on one device.

        Args:
            params_or_model: An nnx module or a pytree of arrays. It stays untouched.
            sample_batch: A batch like those to come. With stages, the model is cut for a batch, so without one the
                values are placed at the step's first call, and must be left alone (not donated) until then.

        Raises:
            PlanError: The plan does not fit the model or the batch.
        """
        form = ModelForm(params_or_model)
        params, state = form.leaves_of(params_or_model)
        self._plan_layouts(form)
        program = next((program for problem, program in self._programs.values() if problem.form == form), None)
        if program is None and sample_batch is not None:
            key = jax.eval_shape(lambda: jax.random.key(0)) if self._takes_key else None
            arrays, tree = self._plan._batch.flatten(sample_batch)
            program = self._program_for(form, arrays, tree, key)
        if program is not None:
            return self._state(form, program, *_placed(program, params, state))
        params, state = [owned(leaf) for leaf in params], [owned(leaf) for leaf in state]
        return TrainState(params, state, [], 0, form, OptimizerForm.of(self._optimizer, form))

    def __call__(self, state: TrainState, batch: Any, key: Any = None) -> tuple[TrainState, dict[str, Any]]:
        """Takes one step.

        Args:
            state: The state so far; donated.
            batch: A pytree of arrays, numpy or jax, whose axis of examples divides into microbatches and parts.
            key: Needed if the loss takes a key. The same key serves every step: the step count is folded in.

        Raises:
            PlanError: The batch does not divide, the key is missing, or the state is another optimizer's.
        """
        if not isinstance(state, TrainState):
            what = f"the state is a {type(state).__name__}, not what step.init or step.place gave."
            raise PlanError(Fault("step(state, batch)", what, mend="state = step.place(params_or_model)"))
        _check_not_donated(state)
        taken = int(state.step)
        base = self._base_key(key, taken)
        arrays, tree = self._plan._batch.flatten(batch)
        program = self._program_for(state._form, arrays, tree, base)
        state = self._adopt(program, state)
        if program.executor is not None:
            program.executor.record = self.record
        params, rest, opt, metrics = program.step(state._params, state._state, state._opt, arrays, base)
        new = TrainState(params, rest, opt, taken + 1, state._form, state._opt_form, program)
        return new, metrics

    def value_and_grad(self, params_or_model: Any, batch: Any, key: Any = None) -> tuple[Any, Any]:
        """Loss and gradients of one batch; see :meth:`Plan.value_and_grad`."""
        form = ModelForm(params_or_model)
        base = self._base_key(key, 0)
        arrays, tree = self._plan._batch.flatten(batch)
        program = self._program_for(form, arrays, tree, base)
        given = form.leaves_of(params_or_model)
        # No copies: nothing here is donated, and what already lies where the plan wants it stays.
        placed = [jax.device_put([owned(x) for x in xs], where) for xs, where in zip(given, program.shardings)]
        loss, _, gradients, state = program.value_and_grad(*placed, arrays, base)
        spread = program.executor is not None
        form.update_state(params_or_model, _like(state, given[1], spread))
        return loss, form.param_tree.unflatten(_like(gradients, given[0], spread))

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
        signature = (form, tree, tuple((a.shape, a.dtype) for a in arrays), shape, _compat.numeric_settings())
        if signature not in self._programs:
            self._warn_of_many()
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

    def _warn_of_many(self) -> None:
        if len(self._programs) == FORMS_BEFORE_WARNING:
            shapes = [tuple(shape for shape, _ in signature[2]) for signature in self._programs]
            text = f"a step has compiled for {len(shapes)} forms of batches, and compiles anew for each: {shapes}"
            warnings.warn(f"{text}. Mend: pad batches to one shape", stacklevel=4)

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
        opt = copies(state._opt, program.opt_shardings) if state._opt else program.init_optimizer(params)
        return TrainState(params, rest, opt, state.step, state._form, state._opt_form, program)


def _check_not_donated(state: TrainState) -> None:
    first = state._params[0]
    if isinstance(first, jax.Array) and first.is_deleted():
        what = "the state was given to an earlier step, which took over its memory."
        raise PlanError(Fault("step(state, batch)", what, mend="state, metrics = step(state, batch)"))


def _placed(program: Program, params: Sequence[Any], state: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    leaves = copies([*params, *state], [*program.param_shardings, *program.state_shardings])
    return leaves[: len(params)], leaves[len(params) :]


def _like(results: Sequence[Any], given: Sequence[Any], spread: bool) -> list[Any]:
    """Results where the arrays lie that they belong to, so that both can enter one computation.

    Arrays that the user put nowhere in particular bind nothing: results stay as the plan laid them out, unless they
    are `spread` over stages, where no computation could take them all.
    """
    moved = []
    for result, leaf in zip(results, given):
        if isinstance(leaf, jax.Array) and leaf.committed:
            moved.append(jax.device_put(result, leaf.sharding))
        else:
            moved.append(gathered([result])[0] if spread else result)
    return moved
