"""A problem without stages as one jitted program: sharded arguments in, XLA's partitioner does the rest."""

from collections import deque
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from oneflax.pipeline.stage_functions import accumulation_dtype
from oneflax.sbp.grid import Placement
from oneflax.sbp.layout import named_sharding

from ._problem import OptimizerForm, Problem, Program, replicated, update_rule

#: Steps that may be queued: the host prepares one batch while another is trained on.
STEPS_IN_FLIGHT = 2


def spmd_program(problem: Problem, placement: Placement) -> Program:
    """Builds the program on `placement`, the grid without its stage axis. It compiles at its first call."""
    opt = OptimizerForm.of(problem.optimizer, problem.form)
    params = [named_sharding(x.shape, x.nd_sbp, placement, x.path) for x in problem.layouts]
    state = [replicated(placement, x.shape) for x in problem.state_shapes]
    opt_state = [
        named_sharding(x.shape, opt.sbp_of(i, problem.layouts, placement), placement) for i, x in enumerate(opt.shapes)
    ]
    everywhere = replicated(placement, ())
    compiled = _Compiled(problem, opt)
    value_and_grad = jax.jit(compiled.value_and_grad, out_shardings=(everywhere, everywhere, params, state))
    step = jax.jit(compiled.step, out_shardings=(params, state, opt_state, everywhere), donate_argnums=(0, 1, 2))
    pace = _Pace()

    def run_step(p: Any, s: Any, o: Any, batch: Any, key: Any) -> Any:
        pace.wait()
        results = step(p, s, o, _place(problem, placement, batch), _everywhere(key, placement))
        pace.started(results[3]["loss"])
        return results

    return Program(
        param_shardings=params,
        state_shardings=state,
        opt_shardings=opt_state,
        stages=[0] * len(params),
        initialise=lambda make, key: jax.jit(make, out_shardings=(params, state))(_everywhere(key, placement)),
        init_optimizer=jax.jit(compiled.init_optimizer, out_shardings=opt_state),
        value_and_grad=lambda p, s, batch, key: value_and_grad(
            p, s, _place(problem, placement, batch), _everywhere(key, placement)
        ),
        step=run_step,
        lower_step=lambda: step.lower(*_step_shapes(problem, placement, opt, params, state, opt_state)),
        edges=[],
        executor=None,
    )


class _Pace:
    """Lets few steps be queued: a loop that reads no result would fill memory with batches, and deadlock jax 0.10."""

    def __init__(self) -> None:
        self._losses: deque[Any] = deque()

    def wait(self) -> None:
        """Returns when another step may be dispatched."""
        while len(self._losses) >= STEPS_IN_FLIGHT:
            jax.block_until_ready(self._losses.popleft())

    def started(self, loss: Any) -> None:
        """Notes a step by its loss, which is ready when the step is done and is donated to nobody."""
        self._losses.append(loss)


def _step_shapes(
    problem: Problem,
    placement: Placement,
    opt: OptimizerForm,
    params: Sequence[NamedSharding],
    state: Sequence[NamedSharding],
    opt_state: Sequence[NamedSharding],
) -> tuple[Any, ...]:
    """Shapes and layouts of a step's arguments, to compile it without values."""

    def laid_out(shapes: Sequence[Any], shardings: Sequence[NamedSharding]) -> list[Any]:
        return [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s) for x, s in zip(shapes, shardings)]

    batch = [problem.batch.whole_shape(x) for x in problem.batch_shapes]
    nd_sbp = problem.batch.nd_sbp if problem.microbatches == 1 else problem.batch.stacked_sbp
    layouts = [named_sharding(x.shape, nd_sbp, placement) for x in batch]
    key = problem.key_shape
    return (
        laid_out(problem.param_shapes, params),
        laid_out(problem.state_shapes, state),
        laid_out(opt.shapes, opt_state),
        laid_out(batch, layouts),
        key if key is None else laid_out([key], [replicated(placement, ())])[0],
    )


def _place(problem: Problem, placement: Placement, batch: Sequence[Any]) -> list[Any]:
    layout = problem.batch
    if layout.microbatches == 1:
        arrays, nd_sbp = list(batch), layout.nd_sbp
    else:
        arrays, nd_sbp = [layout.stacked(array) for array in batch], layout.stacked_sbp
    return jax.device_put(arrays, [named_sharding(a.shape, nd_sbp, placement) for a in arrays])


def _everywhere(key: Any, placement: Placement) -> Any:
    return None if key is None else jax.device_put(key, replicated(placement, ()))


class _Compiled:
    """The functions that are jitted."""

    def __init__(self, problem: Problem, opt: OptimizerForm) -> None:
        self._problem, self._opt = problem, opt
        self._update = update_rule(problem, opt) if problem.optimizer is not None else None

    def init_optimizer(self, params: list[Any]) -> list[Any]:
        assert self._problem.optimizer is not None
        return jax.tree.leaves(self._problem.optimizer.init(self._problem.form.param_tree.unflatten(params)))

    def value_and_grad(
        self, params: list[Any], state: list[Any], batch: list[Any], key: Any
    ) -> tuple[Any, Any, list[Any], list[Any]]:
        loss, losses, sums, state = self._sums(params, state, batch, key)
        return loss, losses, self._problem.gradient_of_sum(sums, params), state

    def _sums(
        self, params: list[Any], state: list[Any], batch: list[Any], key: Any
    ) -> tuple[Any, Any, list[Any], list[Any]]:
        """The loss, the losses of microbatches, the sum of their gradients in microbatch order, and the state."""
        if self._problem.microbatches == 1:
            (loss, state), gradients = self._one(params, state, batch, key, 0)
            return loss, loss[None], gradients, state

        def body(carry: tuple[list[Any], list[Any]], item: tuple[Any, list[Any]]) -> tuple[Any, Any]:
            total, state = carry
            index, microbatch = item
            (loss, state), gradients = self._one(params, state, microbatch, key, index)
            return ([a + g for a, g in zip(total, gradients)], state), loss

        zeros = [jnp.zeros(p.shape, accumulation_dtype(p.dtype)) for p in params]
        numbers = jnp.arange(self._problem.microbatches)
        (sums, state), losses = jax.lax.scan(body, (zeros, state), (numbers, batch))
        return self._problem.loss_of(losses), losses, sums, state

    def _one(
        self, params: list[Any], state: list[Any], batch: list[Any], key: Any, index: Any
    ) -> tuple[tuple[Any, list[Any]], list[Any]]:
        """Loss, state and gradients of one microbatch."""
        return jax.value_and_grad(lambda p: self._problem.loss(p, state, batch, key, index), has_aux=True)(params)

    def step(
        self, params: list[Any], state: list[Any], opt: list[Any], batch: list[Any], key: Any
    ) -> tuple[list[Any], list[Any], list[Any], dict[str, Any]]:
        assert self._update is not None
        loss, losses, sums, state = self._sums(params, state, batch, key)
        results = self._update(*sums, *params, *opt, loss)
        count = len(params)
        metrics = {"loss": loss, "grad_norm": results[-1], "microbatch_losses": losses}
        return results[:count], state, results[count:-1], metrics
