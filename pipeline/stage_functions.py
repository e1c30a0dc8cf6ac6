"""The two jitted functions of a stage: forward, and backward from the forward's residuals.

One :class:`StageKind` is traced for a whole group of equal stages; each stage compiles it for its own devices.
Weights are never residuals: ``jax.vjp`` inside ``jit`` would return a copy of every weight for each microbatch in
flight, so the leaves of its closure that are arguments are dropped in the forward and put back in the backward.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .graph import Atom, Graph, Op, evaluate
from .sharing import Group

Arrays = Sequence[Any]


class StageArguments(NamedTuple):
    """What a stage reads for one microbatch. Every field is a list of arrays, in the stage graph's order."""

    scalars: Arrays
    params: Arrays
    state: Arrays
    data: Arrays
    edges_in: Arrays


class ForwardOutput(NamedTuple):
    """What a stage gives for one microbatch.

    Attributes:
        edges_out: Values for later stages. new_state: The state that it replaces. results: Loss, auxiliary values.
        residuals: What the backward needs beyond the arguments.
        token: A scalar that is ready when the whole action is done.
    """

    edges_out: Arrays
    new_state: Arrays
    results: Arrays
    residuals: Arrays
    token: Any


class BackwardOutput(NamedTuple):
    """Cotangents for the floating edges that came in, the accumulated parameter gradients, and the token."""

    cotangents: Arrays
    gradients: Arrays
    token: Any


class StageKind:
    """The functions that a group of equal stages shares.

    Attributes:
        traces: How often each function was traced; more than once a kind means that the stages were not equal.
    """

    def __init__(self, graph: Graph, group: Group, consumers: Sequence[int]) -> None:
        """Args: the loss's graph, the group, and for each edge that leaves, how many stages read it."""
        stage = group.members[0]
        self._stage = stage
        self._ops = _with_arguments(stage.ops, group)
        self._differentiable_in = [is_float(graph.avals[v]) for v in stage.edges_in]
        self._differentiable_out = [is_float(graph.avals[v]) for v in stage.edges_out]
        self._consumers = [n for n, floating in zip(consumers, self._differentiable_out) if floating]
        self._has_loss = 0 in stage.results
        self._closure: Any = None
        self.traces = {"F": 0, "B": 0, "E": 0}
        self.forward = jax.jit(self._forward)
        self.backward = jax.jit(self._backward)
        self.evaluate = jax.jit(self._evaluate)

    def _run(self, scalars: Arrays, params: Arrays, state: Arrays, data: Arrays, edges_in: Arrays) -> tuple[Any, ...]:
        stage = self._stage
        env: dict[int, Any] = dict(zip(stage.params, params))
        env.update(zip(stage.state, state))
        env.update(zip(stage.data, data))
        env.update(zip(stage.edges_in, edges_in))
        env.update((-1 - i, value) for i, value in enumerate(scalars))
        evaluate(self._ops, env)

        def read(atom: Atom) -> Any:
            return env[atom] if isinstance(atom, int) else jnp.asarray(atom.value)

        edges_out = [env[v] for v in stage.edges_out]
        new_state = [read(atom) for atom in stage.new_state.values()]
        results = [read(atom) for _, atom in sorted(stage.results.items())]
        return edges_out, new_state, results

    def _evaluate(self, args: StageArguments) -> ForwardOutput:
        self.traces["E"] += 1
        edges_out, new_state, results = self._run(*args)
        return ForwardOutput(edges_out, new_state, results, [], jnp.zeros((), jnp.int32))

    def _forward(self, args: StageArguments) -> ForwardOutput:
        self.traces["F"] += 1
        scalars, params, state, data, edges_in = args

        def differentiable(params: Arrays, floating: Arrays) -> tuple[Any, Any]:
            merged = _merge(edges_in, floating, self._differentiable_in)
            edges_out, new_state, results = self._run(scalars, params, state, data, merged)
            targets = _select(edges_out, self._differentiable_out) + results[: self._has_loss]
            return targets, (edges_out, new_state, results)

        floating_in = _select(edges_in, self._differentiable_in)
        _, pullback, (edges_out, new_state, results) = jax.vjp(differentiable, list(params), floating_in, has_aux=True)
        leaves, treedef = jax.tree.flatten(pullback)
        arguments = jax.tree.leaves(args)
        position = {id(leaf): i for i, leaf in enumerate(arguments)}
        sources = [position.get(id(leaf)) for leaf in leaves]
        self._closure = (treedef, sources)
        residuals = [leaf for leaf, source in zip(leaves, sources) if source is None]
        return ForwardOutput(edges_out, new_state, results, residuals, jnp.zeros((), jnp.int32))

    def _backward(
        self, args: StageArguments, residuals: Arrays, cotangents: Arrays, loss_cotangent: Any, accumulated: Arrays
    ) -> BackwardOutput:
        """`cotangents`: for each floating edge out, one from each stage that reads it, in the order of stages."""
        self.traces["B"] += 1
        treedef, sources = self._closure
        arguments, rest = jax.tree.leaves(args), iter(residuals)
        leaves = [next(rest) if source is None else arguments[source] for source in sources]
        pullback = jax.tree.unflatten(treedef, leaves)
        given = iter(cotangents)
        targets = [_sum([next(given) for _ in range(n)]) for n in self._consumers]
        if self._has_loss:
            targets.append(loss_cotangent)
        gradients, floating_in = pullback(targets)
        # The barrier keeps the sum apart from the product that makes the gradient: fused, the bits would depend on
        # whether a schedule adds here or later.
        gradients = jax.lax.optimization_barrier(gradients)
        total = [a + g for a, g in zip(accumulated, gradients)]
        return BackwardOutput(floating_in, total, jnp.zeros((), jnp.int32))


def _with_arguments(ops: Sequence[Op], group: Group) -> list[Op]:
    """The operations with each lifted scalar replaced by argument number ``-1 - i``."""
    lifted = {(x.op, x.argument): -1 - i for i, x in enumerate(group.lifted)}
    changed = []
    for i, op in enumerate(ops):
        inputs = tuple(lifted.get((i, j), atom) for j, atom in enumerate(op.inputs))
        changed.append(Op(op.equation, inputs, op.outputs, op.path))
    return changed


def is_float(aval: Any) -> bool:
    """Whether a value is differentiated."""
    return jnp.issubdtype(aval.dtype, jnp.inexact)


def _select(values: Arrays, chosen: Sequence[bool]) -> list[Any]:
    return [value for value, yes in zip(values, chosen) if yes]


def _merge(values: Arrays, replaced: Arrays, chosen: Sequence[bool]) -> list[Any]:
    rest = iter(replaced)
    return [next(rest) if yes else value for value, yes in zip(values, chosen)]


def _sum(values: list[Any]) -> Any:
    total = values[0]
    for value in values[1:]:
        total = total + value
    return total
