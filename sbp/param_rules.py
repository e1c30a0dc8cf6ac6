"""Rules that depend on an op's parameters: each function gives the text of a rule for given shapes.

The text is in the notation of ``notation.py``; every tensor axis has its own letter, so that a printed rule shows what
happens to each. Functions take the shapes of the inputs first and the op's static arguments by name; negative tensor
axes count from the end. They are pure: nothing here knows a placement.
"""

import math
from collections.abc import Sequence
from typing import NoReturn

from .errors import Fault, SbpError, describe
from .notation import Shapes

Axes = int | Sequence[int] | None
"""One tensor axis, several, or None for all."""

_LETTERS = "abcdefghijklmnopqrstuvwxyz"


def reduction(mark: str, op: str, shapes: Shapes, axes: Axes = None, keepdims: bool = False) -> str:
    """Gives the rule of a reduction: a reduced tensor axis carries `mark`, every other stays where it is."""
    names = _names(shapes[0])
    reduced = _as_axes(axes, len(names), op, shapes)
    before = [name + mark * (i in reduced) for i, name in enumerate(names)]
    after = ["_" if i in reduced else name for i, name in enumerate(names) if keepdims or i not in reduced]
    return f"{_term(before)} -> {_term(after)}"


def matmul(shapes: Shapes, transpose_a: bool = False, transpose_b: bool = False) -> str:
    """Gives the rule of a product of vectors, matrices, or batches of matrices that broadcast.

    A flag says that an input's last two tensor axes are exchanged before the product; on a vector it means nothing.
    """
    a, b = ["k+"], ["k+"]
    result: list[str] = []
    if len(shapes[0]) != 1:
        a = ["...", *(["k+", "m"] if transpose_a else ["m", "k+"])]
        result = ["...", "m"]
    if len(shapes[1]) != 1:
        b = ["...", *(["n", "k+"] if transpose_b else ["k+", "n"])]
        result = [*(result or ["..."]), "n"]
    return f"{_term(a)}, {_term(b)} -> {_term(result)}"


def transpose(shapes: Shapes, perm: Sequence[int] | None = None) -> str:
    """Gives the rule of a transpose: result axis i is input axis ``perm[i]``; without one the order is reversed."""
    names = _names(shapes[0])
    order = list(range(len(names)))[::-1] if perm is None else [_axis(i, len(names), "transpose", shapes) for i in perm]
    if sorted(order) != list(range(len(names))):
        _refuse("transpose", f"perm={tuple(perm or ())} is no order of {len(names)} tensor axes.", shapes)
    return f"{_term(names)} -> {_term([names[i] for i in order])}"


def reshape(shapes: Shapes, shape: Sequence[int]) -> str:
    """Gives the rule of a reshape: which splits survive merging and splitting tensor axes in row-major order.

    Tensor axes of size 1 aside, the input's and the result's fall into smallest groups of equal size, in order. A
    group of one and one is the same tensor axis. In any other only the leading tensor axis may be split, since only
    its parts are consecutive elements, and only where it and its counterpart both split evenly (mark ``%``): then the
    part of every rank is the same run of elements on both sides.
    """
    before, after = tuple(shapes[0]), _full_shape(shapes, tuple(shape))
    sides: tuple[list[str], list[str]] = (["_"] * len(before), ["_"] * len(after))
    if before == after:
        sides = (_names(before), _names(before))
    elif math.prod(before):
        for name, (ins, outs) in zip(_names(before), _groups(before, after)):
            mark = "" if len(ins) == len(outs) == 1 else "%"
            sides[0][ins[0]] = sides[1][outs[0]] = name + mark
    return f"{_term(sides[0])} -> {_term(sides[1])}"


def broadcast_to(shapes: Shapes, shape: Sequence[int]) -> str:
    """Gives the rule of numpy's broadcast_to: a tensor axis that keeps its size stays; new and stretched ones are B."""
    names = _names(shapes[0])
    before, after = ["_"] * len(names), ["_"] * len(shape)
    for i in range(1, len(names) + 1):
        if i <= len(shape) and shapes[0][-i] == shape[-i]:
            before[-i] = after[-i] = names[-i]
        elif i > len(shape) or shapes[0][-i] != 1:
            _refuse("broadcast_to", f"no way to shape {list(shape)}.", shapes)
    return f"{_term(before)} -> {_term(after)}"


def concat(shapes: Shapes, axis: int = 0) -> str:
    """Gives the rule of a concatenation of any number of inputs: split anywhere but on the tensor axis it joins."""
    names = _names(shapes[0])
    names[_axis(axis, len(names), "concat", shapes)] = "_"
    partials = ", ".join(["P*"] * len(shapes))
    return f"{', '.join([_term(names)] * len(shapes))} -> {_term(names)} ; {partials} -> P*"


def slice_(shapes: Shapes, slices: Sequence[Sequence[int | None] | None]) -> str:
    """Gives the rule of a basic slice: split where the whole tensor axis is kept.

    Args:
        shapes: The input's shape.
        slices: For each tensor axis ``(start, stop)`` or ``(start, stop, step)`` as in Python, or None for all of it;
            tensor axes beyond its length are kept.
    """
    if len(slices) > len(shapes[0]):
        _refuse("slice", f"{len(slices)} slices for {len(shapes[0])} tensor axes.", shapes)
    names = _names(shapes[0])
    for i, bounds in enumerate(slices):
        if bounds is not None and slice(*bounds).indices(shapes[0][i]) != (0, shapes[0][i], 1):
            names[i] = "_"
    return f"{_term(names)} -> {_term(names)}"


def gather(shapes: Shapes, axis: int = 0) -> str:
    """Gives the rule of numpy's take: ``gather(x, indices)`` with the indices' tensor axes in the place of `axis`.

    With `axis` split, each rank looks up the indices that fall into its part and gives 0 for the others.
    """
    names = [name + "x" for name in _names(shapes[0])]
    i = _axis(axis, len(names), "gather", shapes)
    result = _term([*names[:i], "i...", *names[i + 1 :]])
    names[i] += "@+"
    return f"{_term(names)}, i... -> {result}"


def normalise(op: str, shapes: Shapes, axis: int = -1) -> str:
    """Gives the rule of softmax and its like: the tensor axis it normalises over splits with collectives."""
    names = _names(shapes[0])
    names[_axis(axis, len(names), op, shapes)] += "*"
    return f"{_term(names)} -> {_term(names)}"


def layer_norm(shapes: Shapes, begin_axis: int = -1) -> str:
    """Gives the rule of layer_norm over the tensor axes from `begin_axis` on; inputs x, then weight, then bias.

    The normalised tensor axes split with collectives (sums of x and of its squared distance from the mean). The
    result is linear in weight and bias together.
    """
    names = _names(shapes[0])
    begin = _axis(begin_axis, len(names), "layer_norm", shapes)
    normed = [name + "*" for name in names[begin:]]
    x, more = _term([*names[:begin], *normed]), len(shapes) - 1
    rule = f"{', '.join([x, *[_term(normed)] * more])} -> {x}"
    return f"{rule} ; {', '.join(['B', *['P'] * more])} -> P" if more else rule


def cross_entropy(shapes: Shapes, reduction: str = "none") -> str:
    """Gives the rule of minus the log-probability of each label: logits (N..., C) first, labels (N...) second.

    Split classes need collectives (the largest logit, the sum of exponentials, the label's logit), each as large as
    the labels; logits are never gathered. ``"mean"`` divides by the logical number of labels.
    """
    marks = {"none": "", "sum": "+", "mean": "+/"}
    if reduction not in marks:
        _refuse("cross_entropy", f'reduction="{reduction}" is none of {", ".join(marks)}.', shapes)
    n = f"n{marks[reduction]}..."
    return f"{n} c*, {n} -> {n if reduction == 'none' else ''}"


def cast(shapes: Shapes, source: str, target: str) -> str:
    """Gives the rule of a cast between dtypes: linear, up to rounding, and increasing between floating-point ones."""
    linear = all(dtype.startswith(("float", "bfloat")) for dtype in (source, target))
    return "... -> ... ; P* -> P*" if linear else "... -> ..."


def scale(shapes: Shapes, scalar: float | None = None) -> str:
    """Gives the rule of a product with a scalar (divided by c: 1/c); None where the value is not known yet."""
    if scalar is not None and not math.isfinite(scalar):
        return "... -> ..."
    rule = "... -> ... ; P -> P"
    if scalar is None or scalar == 0:  # 0 * -inf is NaN, and -inf is what an empty part of a maximum holds
        return rule
    least, most = ("P(min)", "P(max)") if scalar > 0 else ("P(max)", "P(min)")
    return f"{rule} ; P(max) -> {most} ; P(min) -> {least}"


def add_scalar(shapes: Shapes, scalar: float | None = None) -> str:
    """Gives the rule of a sum with a scalar; None where the value is not known yet, since -inf + inf is NaN."""
    if scalar is None or not math.isfinite(scalar):
        return "... -> ..."
    return "... -> ... ; P(max) -> P(max) ; P(min) -> P(min)"


def pow_scalar(shapes: Shapes, exponent: float | None = None) -> str:
    """Gives the rule of a power with a scalar exponent: odd positive whole exponents increase, 1 is the identity."""
    if exponent == 1:
        return "... -> ... ; P* -> P*"
    if exponent is None or exponent < 0 or exponent % 2 != 1:
        return "... -> ..."
    return "... -> ... ; P(max) -> P(max) ; P(min) -> P(min)"


def _names(shape: Sequence[int]) -> list[str]:
    """Gives a name for each tensor axis: a, b, ..., z, a1, ..."""
    return [_LETTERS[i % 26] + (str(i // 26) if i >= 26 else "") for i in range(len(shape))]


def _term(items: Sequence[str]) -> str:
    return " ".join(items)


def _as_axes(axes: Axes, ndim: int, op: str, shapes: Shapes) -> set[int]:
    if axes is None:
        return set(range(ndim))
    return {_axis(i, ndim, op, shapes) for i in ((axes,) if isinstance(axes, int) else axes)}


def _axis(axis: int, ndim: int, op: str, shapes: Shapes) -> int:
    if not -ndim <= axis < ndim:
        _refuse(op, f"there is no tensor axis {axis}; the input has {ndim}.", shapes)
    return axis % ndim


def _full_shape(shapes: Shapes, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Gives the result's shape with the size for -1 filled in."""
    total, known = math.prod(shapes[0]), math.prod(n for n in shape if n != -1)
    full = tuple(total // known if n == -1 and known else n for n in shape)
    if shape.count(-1) > 1 or math.prod(full) != total or min(full, default=0) < 0:
        _refuse("reshape", f"{total} elements do not fill the shape {list(shape)}.", shapes)
    return full


def _groups(before: Sequence[int], after: Sequence[int]) -> list[tuple[list[int], list[int]]]:
    """Gives the smallest groups of tensor axes of equal size, in order; those of size 1 are in none."""
    ins = [i for i, n in enumerate(before) if n != 1]
    outs = [i for i, n in enumerate(after) if n != 1]
    groups: list[tuple[list[int], list[int]]] = []
    while ins:
        group_in, group_out = [ins.pop(0)], [outs.pop(0)]
        size_in, size_out = before[group_in[0]], after[group_out[0]]
        while size_in != size_out:
            if size_in < size_out:
                group_in.append(ins.pop(0))
                size_in *= before[group_in[-1]]
            else:
                group_out.append(outs.pop(0))
                size_out *= after[group_out[-1]]
        groups.append((group_in, group_out))
    return groups


def _refuse(op: str, what: str, shapes: Shapes) -> NoReturn:
    given = tuple(describe(f"input {i}", "", shape) for i, shape in enumerate(shapes))
    raise SbpError(Fault(op, what, given))
