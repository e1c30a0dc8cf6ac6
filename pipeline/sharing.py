"""Which stages compute the same function, so that they share one trace.

Two stages are the same when their operations, parameters of operations and shapes agree. Scalars written into the
operations may differ (each layer of a linen model carries the hash of its own path): those become arguments.
"""

import hashlib
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from oneflax.sbp import _compat

from .graph import Atom, Graph, Literal
from .markers import marked_stage
from .stages import StageGraph


@dataclass(frozen=True, slots=True)
class Lifted:
    """One scalar that differs between stages of a group: argument `argument` of operation `op`."""

    op: int
    argument: int


@dataclass(frozen=True, slots=True)
class Group:
    """Stages that share a trace; the first one stands for all.

    Attributes:
        members: Stages of the group.
        lifted: Scalars that became arguments. values: Their values, one tuple a member.
    """

    members: tuple[StageGraph, ...]
    lifted: tuple[Lifted, ...]
    values: tuple[tuple[Any, ...], ...]


def group_stages(graph: Graph, stages: Sequence[StageGraph], consumers: Sequence[Hashable]) -> tuple[Group, ...]:
    """Groups stages by what they compute. `consumers` tells, for each stage, who reads its edges."""
    groups: dict[Hashable, list[StageGraph]] = {}
    for stage, readers in zip(stages, consumers):
        groups.setdefault((_signature(graph, stage), readers), []).append(stage)
    return tuple(_lift(members) for members in groups.values())


def _lift(members: list[StageGraph]) -> Group:
    lifted = []
    first = members[0]
    for i, op in enumerate(first.ops):
        for j, atom in enumerate(op.inputs):
            if isinstance(atom, Literal) and len({_scalar(m.ops[i].inputs[j]) for m in members}) > 1:
                lifted.append(Lifted(i, j))
    values = tuple(tuple(_literal(m.ops[x.op].inputs[x.argument]) for x in lifted) for m in members)
    return Group(tuple(members), tuple(lifted), values)


def _literal(atom: Atom) -> Any:
    assert isinstance(atom, Literal)
    return atom.value


def _scalar(atom: Atom) -> Hashable:
    """A constant as something comparable: bytes, so that NaN equals itself and 0.0 differs from -0.0."""
    return np.asarray(_literal(atom)).tobytes()


def _signature(graph: Graph, stage: StageGraph) -> Hashable:
    number: dict[int, int] = {}
    for value in (*stage.params, *stage.state, *stage.data, *stage.edges_in):
        number.setdefault(value, len(number))
    ops = []
    for op in stage.ops:
        inputs = tuple(_atom_signature(atom, number, blank=True) for atom in op.inputs)
        for value in op.outputs:
            number[value] = len(number)
        avals = tuple(_aval(graph.avals[v]) for v in op.outputs)
        ops.append((op.equation.primitive.name, _params_signature(op.equation), inputs, avals))
    return (
        tuple(
            tuple(_aval(graph.avals[v]) for v in values)
            for values in (stage.params, stage.state, stage.data, stage.edges_in)
        ),
        tuple(ops),
        tuple(number[v] for v in stage.edges_out),
        tuple((number[old], _atom_signature(new, number)) for old, new in stage.new_state.items()),
        tuple(sorted(stage.results)),
        tuple(_atom_signature(atom, number) for _, atom in sorted(stage.results.items())),
    )


def _aval(aval: Any) -> Hashable:
    return (getattr(aval, "shape", None), str(getattr(aval, "dtype", aval)), getattr(aval, "weak_type", False))


def _atom_signature(atom: Atom, number: dict[int, int], *, blank: bool = False) -> Hashable:
    if isinstance(atom, int):
        return number[atom]
    array = np.asarray(atom.value)
    kind = ("literal", array.shape, str(array.dtype), isinstance(atom.value, (bool, int, float, complex)))
    return kind if blank else (*kind, array.tobytes())


@dataclass(frozen=True, slots=True, eq=False)
class _Itself:
    """Equal to nothing but another one of the same object, which it keeps alive so that no address comes twice."""

    value: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Itself) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


def _params_signature(equation: Any, *, rules: bool = True) -> Hashable:
    """An operation's parameters as a comparable value; bodies by structure, rules of custom derivatives by trace.

    Without `rules`, custom derivatives count by their value alone: enough inside a derivative's own trace.
    """
    if marked_stage(equation) is not None:
        return ()
    if equation.primitive.name.startswith(("custom_jvp", "custom_vjp")):
        if rules:
            return _derivative_signature(equation)
        return tuple(_jaxpr_signature(body, rules=False) for body in _compat.inner_jaxprs(equation))
    context = tuple(_param(value, rules) for value in _compat.context(equation))
    return (context, *((name, _param(value, rules)) for name, value in sorted(equation.params.items())))


def _param(value: Any, rules: bool) -> Hashable:
    if _compat.is_jaxpr(value):
        return _jaxpr_signature(value, rules=rules)
    if isinstance(value, (tuple, list)):
        return (type(value).__name__, *(_param(item, rules) for item in value))
    if isinstance(value, (bool, int, float, complex)):
        return (type(value).__name__, repr(value))  # True == 1 == 1.0, and 0.0 == -0.0, but not here
    if isinstance(value, np.ndarray):
        return _content(value)
    try:
        hash(value)
    except TypeError:
        return _Itself(value)
    return value


def _content(value: Any) -> Hashable:
    """An array by what it holds; what is no array (a key, a part of an array on other machines) by identity."""
    try:
        array = np.asarray(value)
    except (TypeError, RuntimeError):
        return _Itself(value)
    return ("array", array.shape, str(array.dtype), hashlib.sha256(array.tobytes()).digest())


def _jaxpr_signature(closed: Any, *, rules: bool = True) -> Hashable:
    jaxpr, constants = _compat.open_jaxpr(closed)
    number = {var: i for i, var in enumerate((*jaxpr.constvars, *jaxpr.invars))}

    def atom(var: Any) -> Hashable:
        return _atom_signature(Literal(var.val), {}) if _compat.is_literal(var) else number[var]

    equations = []
    for equation in jaxpr.eqns:
        inputs = tuple(map(atom, equation.invars))
        for var in equation.outvars:
            number[var] = len(number)
        avals = tuple(_aval(var.aval) for var in equation.outvars)
        equations.append((equation.primitive.name, _params_signature(equation, rules=rules), inputs, avals))
    invars = tuple(_aval(var.aval) for var in (*jaxpr.constvars, *jaxpr.invars))
    return ("jaxpr", invars, tuple(equations), tuple(map(atom, jaxpr.outvars)), tuple(map(_content, constants)))


def _derivative_signature(equation: Any) -> Hashable:
    """The signature of a custom derivative: its value and its rule, traced.

    The rule is a Python function that is new at each trace, and may close over numbers that the value does not show
    (a gradient scale), so nothing short of the rule's own trace tells whether two are the same. A rule that asks which
    arguments are differentiated (``symbolic_zeros``) has several traces, and is equal to itself alone.
    """
    if equation.params.get("symbolic_zeros"):
        return _Itself(equation)
    shapes = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in equation.invars]

    def value_and_pullback(*args: Any) -> Any:
        outs, pullback = jax.vjp(lambda *xs: tuple(_compat.bind(equation, xs)), *args)
        return outs, pullback(tuple(jax.numpy.ones_like(out) for out in outs))

    try:
        return ("derivative", _jaxpr_signature(jax.make_jaxpr(value_and_pullback)(*shapes), rules=False))
    except Exception:  # integer results, or a rule that fails: the stage is traced alone and tells why, if it is used
        return _Itself(equation)
