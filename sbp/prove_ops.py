"""What the prover runs: for each op the code of one rank, and the cases it is proven on.

The code is written for an array module that it is handed (numpy, or jax.numpy), so that one text serves the forward
proof and a check of its derivative. :class:`Here` tells it what a local op may know besides its parts. A local op
that runs collectives is a generator: it yields ``("sum" | "max", value)`` and is sent the value of all ranks.

Sizes are chosen so that a wrong signature cannot look right by accident: all tensor axes of a case differ, divide
by 2 and 3, and no part of one is as long as another. Two cases at least for each op.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from .notation import LocalForm

Shape = tuple[int, ...]
Kind = str | tuple[int, int]
"""What an input holds: "float", "positive", "few" (floats with ties), "bool", or indices into (input, tensor axis)."""


@dataclass(frozen=True, slots=True)
class Here:
    """What one rank's local op knows besides its parts.

    Args:
        xp: The array module, with ``erf`` added.
        form: Which local op it is.
        shapes: The logical shape of each input.
        starts: Where this rank's part of each input begins on each of its tensor axes.
        target: The shape of this rank's part of the output, for ops whose parameters hold one.
    """

    xp: Any
    form: LocalForm = "plain"
    shapes: tuple[Shape, ...] = ()
    starts: tuple[tuple[Any, ...], ...] = ()
    target: Shape = ()


@dataclass(frozen=True, slots=True)
class Case:
    """Shapes and parameters to prove an op on.

    Args:
        shapes: The logical shape of each input.
        params: The op's static arguments.
        kinds: What each input holds; empty means floats.
    """

    shapes: tuple[Shape, ...]
    params: dict[str, Any] = field(default_factory=dict)
    kinds: tuple[Kind, ...] = ()

    def kind(self, i: int) -> Kind:
        """What input i holds."""
        return self.kinds[i] if self.kinds else "float"

    def resized(self, size: Callable[[int], int]) -> "Case":
        """Gives the case with other sizes, those of 1 left alone."""

        def change(shape: Shape) -> Shape:
            return tuple(n if n == 1 else size(n) for n in shape)

        params = {name: change(v) if name == "shape" else v for name, v in self.params.items()}
        return Case(tuple(map(change, self.shapes)), params, self.kinds)


@dataclass(frozen=True, slots=True)
class Op:
    """An op as the prover sees it.

    Args:
        run: The local op: ``run(here, *parts, **params)``.
        cases: What to prove it on.
        forms: The forms that the local op has.
        shaped: The parameters hold the output's shape, so that the local op takes ``here.target``.
        resizes: The cases stay meaningful with other sizes.
        smooth: It has a derivative.
    """

    run: Callable[..., Any]
    cases: tuple[Case, ...]
    forms: tuple[LocalForm, ...] = ("plain",)
    shaped: bool = False
    resizes: bool = True
    smooth: bool = True


def _call(name: str) -> Callable[..., Any]:
    return lambda here, *parts: getattr(here.xp, name)(*parts)


def _sigmoid(here: Here, x: Any) -> Any:
    return 1 / (1 + here.xp.exp(-x))


def _gelu(here: Here, x: Any) -> Any:
    return x * (1 + here.xp.erf(x / math.sqrt(2))) / 2


def _sum(here: Here, x: Any, axes: Any = None, keepdims: bool = False) -> Any:
    return here.xp.sum(x, axis=axes, keepdims=keepdims)


def _mean(here: Here, x: Any, axes: Any = None, keepdims: bool = False) -> Any:
    total, shape = _sum(here, x, axes, keepdims), here.shapes[0] if here.form == "size" else x.shape
    reduced = range(len(shape)) if axes is None else (axes,) if isinstance(axes, int) else axes
    return total / math.prod(shape[i] for i in reduced)


def _extreme(name: str, identity: float) -> Callable[..., Any]:
    def run(here: Here, x: Any, axes: Any = None, keepdims: bool = False) -> Any:
        return getattr(here.xp, name)(x, axis=axes, keepdims=keepdims, initial=identity)

    return run


def _matmul(here: Here, a: Any, b: Any, transpose_a: bool = False, transpose_b: bool = False) -> Any:
    a = here.xp.swapaxes(a, -1, -2) if transpose_a and a.ndim > 1 else a
    b = here.xp.swapaxes(b, -1, -2) if transpose_b and b.ndim > 1 else b
    return here.xp.matmul(a, b)


def _slice(here: Here, x: Any, slices: Any) -> Any:
    return x[tuple(slice(None) if bounds is None else slice(*bounds) for bounds in slices)]


def _gather(here: Here, x: Any, indices: Any, axis: int = 0) -> Any:
    xp, size = here.xp, x.shape[axis]
    if here.form != "offset":
        return xp.take(x, indices, axis=axis)
    local = indices - here.starts[0][axis]
    inside = (local >= 0) & (local < size)
    shape = (1,) * axis + indices.shape + (1,) * (x.ndim - axis - 1)
    if size == 0:
        return xp.zeros(x.shape[:axis] + indices.shape + x.shape[axis + 1 :])
    return xp.where(inside.reshape(shape), xp.take(x, xp.where(inside, local, 0), axis=axis), 0)


def _log_softmax(here: Here, x: Any, axis: int = -1) -> Any:
    xp = here.xp
    top = xp.max(x, axis=axis, keepdims=True, initial=-math.inf)
    if here.form == "collective":
        top = yield "max", top
    total = xp.sum(xp.exp(x - top), axis=axis, keepdims=True)
    if here.form == "collective":
        total = yield "sum", total
    return x - top - xp.log(total)


def _softmax(here: Here, x: Any, axis: int = -1) -> Any:
    return here.xp.exp((yield from _log_softmax(here, x, axis)))


def _cross_entropy(here: Here, logits: Any, labels: Any, reduction: str = "none") -> Any:
    xp = here.xp
    log_probabilities = yield from _log_softmax(here, logits)
    start = here.starts[0][-1] if here.form == "collective" else 0
    chosen = xp.arange(logits.shape[-1]) + start == labels[..., None]
    losses = -xp.sum(xp.where(chosen, log_probabilities, 0), axis=-1)
    if here.form == "collective":
        losses = yield "sum", losses
    if reduction == "none":
        return losses
    count = math.prod(here.shapes[1]) if here.form == "size" else max(math.prod(labels.shape), 1)
    return xp.sum(losses) / (count if reduction == "mean" else 1)


def _layer_norm(here: Here, x: Any, *affine: Any, begin_axis: int = -1) -> Any:
    xp, begin = here.xp, begin_axis % x.ndim
    axes, whole = tuple(range(begin, x.ndim)), here.form == "collective"
    count = math.prod((here.shapes[0] if whole else x.shape)[begin:])
    total = xp.sum(x, axis=axes, keepdims=True)
    distance = x - (((yield "sum", total) if whole else total) / count)
    squares = xp.sum(distance**2, axis=axes, keepdims=True)
    result = distance / xp.sqrt(((yield "sum", squares) if whole else squares) / count + 1e-5)
    result = result * affine[0] if affine else result
    return result + affine[1] if len(affine) > 1 else result


def _cases(*shapes: tuple[Shape, ...], **params: Any) -> tuple[Case, ...]:
    return tuple(Case(one, params) for one in shapes)


_ONE = (((6, 12),), ((12, 6, 18),))
_TWO = (((6, 12), (6, 12)), ((6, 12), (18, 1, 12)), ((30,), ()))


def _unary(name: str, kind: Kind = "float") -> Op:
    return _pointwise(_call(name), kind)


def _pointwise(run: Callable[..., Any], kind: Kind = "float") -> Op:
    return Op(run, tuple(Case(shapes, {}, (kind,)) for shapes in _ONE))


def _with(run: Callable[..., Any], *values: dict[str, Any]) -> Op:
    return Op(run, tuple(Case(shapes, params) for shapes in _ONE for params in values))


def _binary(name: str, smooth: bool = True, kinds: tuple[Kind, ...] = ()) -> Op:
    return Op(_call(name), tuple(Case(shapes, {}, kinds) for shapes in _TWO), smooth=smooth)


def _comparison(name: str) -> Op:
    return _binary(name, smooth=False, kinds=("few", "few"))


def _cast(here: Here, x: Any, source: str, target: str) -> Any:
    return x.astype(target)


_REDUCTIONS = (
    *_cases(((6, 12),), axes=1),
    *_cases(((12, 6, 18),), axes=(0, 2)),
    *_cases(((12, 6, 18),), axes=(-2,), keepdims=True),
    *_cases(((6, 12),)),
)
_MATMUL = (
    *_cases(((6, 12), (12, 30)), ((18, 6, 12), (12, 30)), ((6, 1, 12, 24), (18, 24, 30)), ((12,), (12,))),
    *_cases(((12,), (6, 12, 30)), ((6, 12), (12,))),
    *_cases(((12, 6), (30, 12)), ((18, 12, 6), (18, 24, 12)), transpose_a=True, transpose_b=True),
)
_SHAPES = (
    ((6, 12), (72,)),
    ((72,), (6, 12)),
    ((6, 12, 30), (72, 6, 5)),
    ((12, 1, 30), (2, 6, 30, 1)),
    ((12, 18), (18, 12)),
    ((4, 6), (2, 2, 6)),
    ((7, 12), (7, 3, 4)),
    ((12, 30), (12, 30)),
)
_LABELS: tuple[Kind, ...] = ("float", (0, 2))
_LOSS = tuple(Case(((12, 18, 6), (12, 18)), {"reduction": r}, _LABELS) for r in ("none", "sum", "mean"))

OPS: dict[str, Op] = {
    "identity": _pointwise(lambda here, x: x),
    "neg": _unary("negative"),
    "cast": _with(_cast, {"source": "float64", "target": "float32"}, {"source": "float64", "target": "int32"}),
    "scale": _with(lambda here, x, scalar: x * scalar, {"scalar": 2.5}, {"scalar": -0.75}),
    "add_scalar": _with(lambda here, x, scalar: x + scalar, {"scalar": 1.5}),
    "pow_scalar": _with(
        lambda here, x, exponent: x**exponent,
        {"exponent": 2.0},
        {"exponent": 3.0},
        {"exponent": 1.0},
        {"exponent": -1.0},
    ),
    "relu": _pointwise(lambda here, x: here.xp.maximum(x, 0)),
    "exp": _unary("exp"),
    "tanh": _unary("tanh"),
    "sigmoid": _pointwise(_sigmoid),
    "erf": _unary("erf"),
    "log": _unary("log"),
    "sqrt": _unary("sqrt"),
    "rsqrt": _pointwise(lambda here, x: 1 / here.xp.sqrt(x)),
    "gelu": _pointwise(_gelu),
    "silu": _pointwise(lambda here, x: x * _sigmoid(here, x)),
    "abs": _unary("abs"),
    "square": _unary("square"),
    "reciprocal": _pointwise(lambda here, x: 1 / x),
    "sin": _unary("sin"),
    "cos": _unary("cos"),
    "one_hot": Op(
        lambda here, indices, classes: (indices[..., None] == here.xp.arange(classes)) * 1.0,
        tuple(Case(shapes, {"classes": 18}, ((0, 0),)) for shapes in _ONE),
        smooth=False,
    ),
    "add": _binary("add"),
    "sub": _binary("subtract"),
    "mul": _binary("multiply"),
    "div": _binary("divide"),
    "maximum": _binary("maximum"),
    "minimum": _binary("minimum"),
    "pow": _binary("power", kinds=("positive", "float")),
    "equal": _comparison("equal"),
    "not_equal": _comparison("not_equal"),
    "less": _comparison("less"),
    "less_equal": _comparison("less_equal"),
    "greater": _comparison("greater"),
    "greater_equal": _comparison("greater_equal"),
    "where": Op(
        _call("where"),
        tuple(
            Case(shapes, {}, ("bool", "float", "float"))
            for shapes in (((6, 12), (6, 12), (6, 12)), ((6, 1), (12,), (18, 6, 12)))
        ),
    ),
    "matmul": Op(_matmul, _MATMUL),
    "sum": Op(_sum, _REDUCTIONS),
    "mean": Op(_mean, _REDUCTIONS, forms=("plain", "size")),
    "max": Op(_extreme("max", -math.inf), _REDUCTIONS),
    "min": Op(_extreme("min", math.inf), _REDUCTIONS),
    "reshape": Op(
        lambda here, x, shape: x.reshape(here.target),
        tuple(Case((before,), {"shape": after}) for before, after in _SHAPES),
        shaped=True,
        resizes=False,
    ),
    "transpose": Op(
        lambda here, x, perm: here.xp.transpose(x, perm),
        (
            *_cases(((6, 12),), perm=(1, 0)),
            *_cases(((12, 6, 18),), perm=(2, 0, 1)),
            *_cases(((12, 6, 18),), perm=None),
        ),
    ),
    "broadcast_to": Op(
        lambda here, x, shape: here.xp.broadcast_to(x, here.target),
        (*_cases(((6, 1),), shape=(6, 12)), *_cases(((12, 6),), shape=(18, 12, 6))),
        shaped=True,
    ),
    "slice": Op(
        _slice,
        (*_cases(((6, 12),), slices=(None, (2, 8))), *_cases(((12, 6, 18),), slices=((None, None, -1), (0, None, 4)))),
    ),
    "concat": Op(
        lambda here, *parts, axis: here.xp.concatenate(parts, axis=axis),
        (
            *_cases(((6, 12), (6, 18)), axis=1),
            *_cases(((12, 6, 18), (6, 6, 18), (24, 6, 18)), axis=-3),
        ),
    ),
    "embedding": Op(
        lambda here, indices, table: _gather(Here(here.xp, here.form, (), here.starts[1:]), table, indices),
        tuple(Case(shapes, {}, ((1, 0), "float")) for shapes in (((30,), (12, 18)), ((6, 12), (18, 24)))),
        forms=("plain", "offset"),
    ),
    "gather": Op(
        _gather,
        tuple(
            Case(shapes, {"axis": axis}, ("float", (0, axis)))
            for axis, *shapes in ((0, (12, 18), (30,)), (1, (12, 6, 18), (6, 12)))
            for shapes in [tuple(shapes)]
        ),
        forms=("plain", "offset"),
    ),
    "softmax": Op(_softmax, (*_cases(((6, 12),)), *_cases(((12, 6, 18),), axis=1)), ("plain", "collective")),
    "log_softmax": Op(_log_softmax, (*_cases(((6, 12),)), *_cases(((12, 6, 18),), axis=1)), ("plain", "collective")),
    "cross_entropy": Op(
        _cross_entropy,
        (*_LOSS, Case(((12, 30), (12,)), {}, ("float", (0, 1)))),
        forms=("plain", "size", "collective"),
    ),
    "layer_norm": Op(
        _layer_norm,
        (
            *_cases(((6, 12),), ((6, 12), (12,)), ((12, 18, 6), (6,), (6,))),
            *_cases(((12, 18, 6), (18, 6), (18, 6)), begin_axis=1),
        ),
        ("plain", "collective"),
    ),
}
"""Op → how it is proven, for every row of the table."""
