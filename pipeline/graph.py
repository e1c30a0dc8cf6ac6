"""A traced function as a flat list of operations whose values are numbered.

:func:`trace` runs JAX's tracer and :func:`flatten` opens the calls that hide several modules (``jit`` around a whole
model), so that the cutter sees one list. Control flow, remat and custom derivatives stay single operations.
:func:`evaluate` runs such a list again, under any JAX transformation.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax

from oneflax.sbp import _compat

from .markers import marked_stage

#: Operations whose body is only a call: opening them changes nothing but the list's length.
_CALLS = frozenset({"jit", "pjit", "closed_call", "core_call"})

#: Marks the name scopes that carry a module's full path (set by the nnx call hook), so that they cannot be mistaken
#: for a scope that the model's author named.
PATH_SCOPE = "oneflax::"


@dataclass(frozen=True, slots=True)
class Literal:
    """A constant written into an operation's argument list."""

    value: Any


#: An argument of an operation: the number of a value, or a constant.
Atom = int | Literal


@dataclass(frozen=True, slots=True)
class Op:
    """One operation: JAX's equation, its arguments and results by number, and the module path it ran under."""

    equation: Any
    inputs: tuple[Atom, ...]
    outputs: tuple[int, ...]
    path: str

    @property
    def value_inputs(self) -> Iterator[int]:
        """The numbered arguments, constants left out."""
        return (atom for atom in self.inputs if isinstance(atom, int))

    def __str__(self) -> str:
        return f"{self.equation.primitive.name} at {_compat.source_line(self.equation)}"


@dataclass(slots=True)
class Graph:
    """A function's operations in execution order.

    Attributes:
        inputs: Numbers of the arguments.
        outputs: The results; an argument may be handed through, and a result may be a constant.
        constants: Arrays that the function closed over, by number.
        ops: The operations.
        avals: Shape and dtype of every value, by number.
    """

    inputs: list[int] = field(default_factory=list)
    outputs: list[Atom] = field(default_factory=list)
    constants: dict[int, Any] = field(default_factory=dict)
    ops: list[Op] = field(default_factory=list)
    avals: list[Any] = field(default_factory=list)

    def new_value(self, aval: Any) -> int:
        """Numbers one more value."""
        self.avals.append(aval)
        return len(self.avals) - 1


def trace(fn: Callable[..., Any], *args: Any, open_all: bool = False) -> tuple[Graph, Any]:
    """Traces `fn` on arguments or their shapes; gives its graph and the shapes of its result as a pytree."""
    jaxpr, out_shape = jax.make_jaxpr(fn, return_shape=True)(*args)
    return flatten(jaxpr, open_all=open_all), out_shape


def flatten(closed_jaxpr: Any, *, open_all: bool = False) -> Graph:
    """The graph of a closed jaxpr, with calls opened where modules meet inside them, or all of them."""
    graph = Graph()
    jaxpr, constants = _compat.open_jaxpr(closed_jaxpr)
    env: dict[Any, Atom] = {}
    for var in jaxpr.invars:
        graph.inputs.append(graph.new_value(var.aval))
        env[var] = graph.inputs[-1]
    _bind_constants(graph, env, jaxpr, constants)
    _append(graph, env, jaxpr, (), open_all)
    graph.outputs.extend(_atom(env, var) for var in jaxpr.outvars)
    return graph


def _bind_constants(graph: Graph, env: dict[Any, Atom], jaxpr: Any, constants: Sequence[Any]) -> None:
    known = {id(value): number for number, value in graph.constants.items()}
    for var, value in zip(jaxpr.constvars, constants):
        if id(value) not in known:
            known[id(value)] = graph.new_value(var.aval)
            graph.constants[known[id(value)]] = value
        env[var] = known[id(value)]


def _atom(env: Mapping[Any, Atom], var: Any) -> Atom:
    return Literal(var.val) if _compat.is_literal(var) else env[var]


def _append(graph: Graph, env: dict[Any, Atom], jaxpr: Any, outer: tuple[str, ...], open_all: bool) -> None:
    for equation in jaxpr.eqns:
        scopes = outer + _compat.scopes(equation)
        inputs = tuple(_atom(env, var) for var in equation.invars)
        body = _body_to_open(equation, open_all)
        if body is not None:
            inner, constants = _compat.open_jaxpr(body)
            inner_env: dict[Any, Atom] = dict(zip(inner.invars, inputs))
            _bind_constants(graph, inner_env, inner, constants)
            _append(graph, inner_env, inner, scopes, open_all)
            env.update((var, _atom(inner_env, out)) for var, out in zip(equation.outvars, inner.outvars))
            continue
        outputs = tuple(graph.new_value(var.aval) for var in equation.outvars)
        env.update(zip(equation.outvars, outputs))
        graph.ops.append(Op(equation, inputs, outputs, path_of(scopes)))


def _body_to_open(equation: Any, open_all: bool) -> Any:
    """The body of a call that holds scopes or markers of its own, else None (a small jitted jnp function)."""
    if equation.primitive.name not in _CALLS:
        return None
    bodies = _compat.inner_jaxprs(equation)
    return bodies[0] if open_all or any(_has_scopes(body) or has_marks(body) for body in bodies) else None


def _has_scopes(jaxpr: Any) -> bool:
    inner, _ = _compat.open_jaxpr(jaxpr)
    return any(
        _compat.scopes(equation) or any(map(_has_scopes, _compat.inner_jaxprs(equation))) for equation in inner.eqns
    )


def has_marks(jaxpr: Any) -> bool:
    """Whether a jaxpr, open or closed, holds a mark of ``flow.stage`` at any depth."""
    inner, _ = _compat.open_jaxpr(jaxpr)
    return any(map(hands_over, inner.eqns))


def hands_over(equation: Any) -> bool:
    """Whether an operation is a mark of ``flow.stage`` or holds one, so that its arguments are a stage's inputs."""
    return marked_stage(equation) is not None or any(map(has_marks, _compat.inner_jaxprs(equation)))


def path_of(scopes: Sequence[str]) -> str:
    """A module path from name scopes: the innermost full path of the nnx hook, else the scopes joined (linen)."""
    for scope in reversed(scopes):
        if scope.startswith(PATH_SCOPE):
            return scope[len(PATH_SCOPE) :]
    return "/".join(scopes)


def inner_paths(equation: Any, outer: tuple[str, ...] = ()) -> Iterator[str]:
    """Module paths inside an operation's body (remat, scan, custom derivatives)."""
    for body in _compat.inner_jaxprs(equation):
        inner, _ = _compat.open_jaxpr(body)
        for sub in inner.eqns:
            scopes = outer + _compat.scopes(sub)
            yield path_of(scopes)
            yield from inner_paths(sub, scopes)


def evaluate(ops: Sequence[Op], env: dict[int, Any]) -> None:
    """Runs operations in order. `env` holds values by number and receives the results."""
    for op in ops:
        values = [env[atom] if isinstance(atom, int) else atom.value for atom in op.inputs]
        results = _compat.bind(op.equation, values)
        env.update(zip(op.outputs, results))
