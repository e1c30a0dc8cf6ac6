"""The two jitted functions of a stage: forward, and backward from the forward's residuals.

One :class:`StageKind` is traced for a whole group of equal stages; each stage compiles it for its own devices.
Weights are never residuals: ``jax.vjp`` inside ``jit`` would return a copy of every weight for each microbatch in
flight, and another one cast or transposed. So what the closure of ``jax.vjp`` holds is sorted: arguments are dropped in
the forward and put back in the backward, and what follows from parameters alone is made again there.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .graph import Atom, Graph, Op, evaluate, trace
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
    """Cotangents for the floating edges that came in, the parameter gradients so far, and the token.

    Gradients are in :func:`accumulation_dtype`.
    """

    cotangents: Arrays
    gradients: Arrays
    token: Any


@dataclass(frozen=True, slots=True)
class _Closure:
    """What a traced forward leaves for its backward.

    Attributes:
        structure: The closure of ``jax.vjp`` as a pytree. leaves: Its leaves, as values of the forward's graph.
        inputs, constants: The forward's arguments and what it closed over, by value number.
        remade: Operations on parameters alone that make leaves again.
        kept: The leaves that are left, which the forward gives as residuals.
    """

    structure: Any
    leaves: Sequence[Atom]
    inputs: Sequence[int]
    constants: dict[int, Any]
    remade: Sequence[Op]
    kept: Sequence[int]

    @classmethod
    def of(cls, graph: Graph, structure: Any, leaves: Sequence[Atom], fixed: Sequence[int]) -> "_Closure":
        """Sorts the leaves; `fixed` are the arguments that are the same for every microbatch."""
        again = {*fixed, *graph.constants}
        for op in graph.ops:
            if again.issuperset(op.value_inputs) and not op.equation.effects:
                again.update(op.outputs)
        known = again.union(graph.inputs)
        kept = dict.fromkeys(leaf for leaf in leaves if isinstance(leaf, int) and leaf not in known)
        wanted = {leaf for leaf in leaves if isinstance(leaf, int)} & again
        remade: list[Op] = []
        for op in reversed(graph.ops):
            if again.issuperset(op.outputs) and not wanted.isdisjoint(op.outputs):
                remade.append(op)
                wanted.update(op.value_inputs)
        return cls(structure, leaves, graph.inputs, graph.constants, remade[::-1], tuple(kept))

    def pullback(self, arguments: Sequence[Any], residuals: Sequence[Any]) -> Any:
        """The function that ``jax.vjp`` gave, on another day."""
        env: dict[int, Any] = {**self.constants, **dict(zip(self.inputs, arguments)), **dict(zip(self.kept, residuals))}
        evaluate(self.remade, env)
        leaves = [env[leaf] if isinstance(leaf, int) else leaf.value for leaf in self.leaves]
        return jax.tree.unflatten(self.structure, leaves)


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
        self._closure: Any = None  # a _Closure, once the forward has been traced
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
        structure: Any = None

        def with_closure(args: StageArguments) -> tuple[Any, list[Any]]:
            nonlocal structure
            pullback, outputs = self._differentiate(args)
            leaves, structure = jax.tree.flatten(pullback)
            return outputs, leaves

        graph, (shapes, closure) = trace(with_closure, args, open_all=True)
        env: dict[int, Any] = {**graph.constants, **dict(zip(graph.inputs, jax.tree.leaves(args)))}
        evaluate(graph.ops, env)
        count = len(graph.outputs) - len(closure)
        values = [env[atom] if isinstance(atom, int) else jnp.asarray(atom.value) for atom in graph.outputs[:count]]
        edges_out, new_state, results = jax.tree.unflatten(jax.tree.structure(shapes), values)
        fixed = graph.inputs[: len(args.scalars) + len(args.params)]
        self._closure = _Closure.of(graph, structure, graph.outputs[count:], fixed)
        residuals = [env[value] for value in self._closure.kept]
        return ForwardOutput(edges_out, new_state, results, residuals, jnp.zeros((), jnp.int32))

    def _differentiate(self, args: StageArguments) -> tuple[Any, Any]:
        """The stage's pullback from loss and floating edges out to parameters and floating edges in; all it gives."""
        scalars, params, state, data, edges_in = args

        def differentiable(params: Arrays, floating: Arrays) -> tuple[Any, Any]:
            merged = _merge(edges_in, floating, self._differentiable_in)
            edges_out, new_state, results = self._run(scalars, params, state, data, merged)
            targets = _select(edges_out, self._differentiable_out) + results[: self._has_loss]
            return targets, (edges_out, new_state, results)

        floating_in = _select(edges_in, self._differentiable_in)
        _, pullback, outputs = jax.vjp(differentiable, list(params), floating_in, has_aux=True)
        return pullback, outputs

    def _backward(
        self,
        args: StageArguments,
        residuals: Arrays,
        cotangents: Arrays,
        loss_cotangent: Any,
        accumulated: Arrays,
        zero: Any,
    ) -> BackwardOutput:
        """`cotangents`: for each floating edge out, one from each stage that reads it, in the order of stages.

        `accumulated`: the gradients so far, to add to, in :func:`accumulation_dtype`. `zero`: an unsigned integer 0
        that the compiler does not know.
        """
        self.traces["B"] += 1
        pullback = self._closure.pullback(jax.tree.leaves(args), residuals)
        given = iter(cotangents)
        targets = [add_in_order([next(given) for _ in range(n)]) for n in self._consumers]
        if self._has_loss:
            targets.append(loss_cotangent)
        gradients, floating_in = pullback(targets)
        total = [a + _apart(g, zero).astype(a.dtype) for a, g in zip(accumulated, gradients)]
        return BackwardOutput(floating_in, total, jnp.zeros((), jnp.int32))


def _apart(value: Any, zero: Any) -> Any:
    """The value, rounded before it is added to anything.

    XLA fuses a product with the sum that it goes into and rounds once, so the bits would depend on whether a schedule
    adds here or later; ``optimization_barrier`` is gone by then. It cannot look through an exclusive or with a zero
    that it does not know.
    """
    if jnp.iscomplexobj(value):
        return jax.lax.complex(_apart(value.real, zero), _apart(value.imag, zero))
    bits = jax.lax.bitcast_convert_type(value, f"uint{8 * value.dtype.itemsize}")
    return jax.lax.bitcast_convert_type(bits ^ zero.astype(bits.dtype), value.dtype)


def _with_arguments(ops: Sequence[Op], group: Group) -> list[Op]:
    """The operations with each lifted scalar replaced by argument number ``-1 - i``."""
    lifted = {(x.op, x.argument): -1 - i for i, x in enumerate(group.lifted)}
    changed = []
    for i, op in enumerate(ops):
        inputs = tuple(lifted.get((i, j), atom) for j, atom in enumerate(op.inputs))
        changed.append(Op(op.equation, inputs, op.outputs, op.path))
    return changed


def accumulation_dtype(dtype: Any) -> Any:
    """The dtype in which gradients of a parameter of `dtype` are summed over microbatches.

    It is float32 for floating dtypes of fewer than 32 bits: a sum in bfloat16 stands still once it is 256 times as
    large as what is added. Whoever uses the sum rounds it once, at the end.

    >>> [str(accumulation_dtype(name)) for name in ("bfloat16", "float16", "float32", "complex64")]
    ['float32', 'float32', 'float32', 'complex64']
    """
    narrow = jnp.issubdtype(dtype, jnp.floating) and jnp.dtype(dtype).itemsize < 4
    return jnp.dtype(jnp.float32 if narrow else dtype)


def is_float(aval: Any) -> bool:
    """Whether a value is differentiated."""
    return jnp.issubdtype(aval.dtype, jnp.inexact)


def _select(values: Arrays, chosen: Sequence[bool]) -> list[Any]:
    return [value for value, yes in zip(values, chosen) if yes]


def _merge(values: Arrays, replaced: Arrays, chosen: Sequence[bool]) -> list[Any]:
    rest = iter(replaced)
    return [next(rest) if yes else value for value, yes in zip(values, chosen)]


def add_in_order(values: Arrays) -> Any:
    """The sum from the first to the last."""
    total = values[0]
    for value in values[1:]:
        total = total + value
    return total
