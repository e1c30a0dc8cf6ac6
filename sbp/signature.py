"""SBP: how one placement axis holds a tensor, and nd-sbp: one of them for each placement axis. Text that parses back.

``S(i)`` splits tensor axis i over the placement axis, ``B`` gives every rank the whole, and ``P`` gives every rank an
addend (``P("max")``, ``P("min")``: an operand of the maximum, minimum). Pure values: this file imports no jax.
OneFlow writes ``flow.sbp.split(i)``, ``flow.sbp.broadcast``, ``flow.sbp.partial_sum``; these are the same values.
"""

import operator
import re
import reprlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from .errors import Fault, SbpError
from .grid import Placement

_KINDS = ("sum", "max", "min")


@dataclass(frozen=True, slots=True)
class Sbp:
    """Base of :class:`Split`, :class:`Broadcast` and :class:`Partial`."""


@dataclass(frozen=True, slots=True, repr=False)
class Split(Sbp):
    """``S(axis)``: the ranks along the placement axis hold consecutive pieces of a tensor axis.

    Args:
        axis: The tensor axis; a negative one counts from the end.

    Raises:
        SbpError: The tensor axis is not a whole number.

    Example:
        >>> from oneflax.sbp import S
        >>> S(-1), S(0) == S(0), isinstance(S(0), S)
        (S(-1), True, True)
    """

    axis: int

    def __post_init__(self) -> None:
        try:
            # numpy's bool carries the same name, and an index it is not either.
            if self.axis.__class__.__name__ in ("bool", "bool_"):
                raise TypeError
            object.__setattr__(self, "axis", operator.index(self.axis))
        except TypeError:
            raise SbpError(_axis_fault(self.axis)) from None

    def __repr__(self) -> str:
        return f"S({self.axis})"


@dataclass(frozen=True, slots=True, repr=False)
class Broadcast(Sbp):
    """``B``: every rank along the placement axis holds the whole."""

    def __call__(self) -> "Broadcast":
        """Gives itself: OneFlow allows ``flow.sbp.broadcast()``."""
        return self

    def __repr__(self) -> str:
        return "B"


@dataclass(frozen=True, slots=True, repr=False)
class Partial(Sbp):
    """``P``: every rank along the placement axis holds an addend of the whole; with ``"max"``, ``"min"`` an operand.

    Args:
        kind: ``"sum"``, ``"max"`` or ``"min"``.

    Raises:
        SbpError: The kind is none of these.

    Example:
        >>> from oneflax.sbp import P
        >>> P, P("max"), P("sum") == P
        (P, P("max"), True)
    """

    kind: str = "sum"

    def __post_init__(self) -> None:
        if self.kind not in _KINDS:
            raise SbpError(_kind_fault(self.kind))

    def __call__(self, kind: str | None = None) -> "Partial":
        """Gives the partial of a kind; without one itself, as OneFlow's ``flow.sbp.partial_sum()``."""
        return self if kind is None else Partial(kind)

    def __repr__(self) -> str:
        return "P" if self.kind == "sum" else f'P("{self.kind}")'


S = Split
B = Broadcast()
P = Partial()
broadcast = B
partial_sum = P


def split(axis: int | None = None, *, dim: int | None = None) -> Split:
    """Gives ``S(axis)``, in OneFlow's spelling; `dim` is OneFlow's other name for `axis`."""
    if (axis is None) == (dim is None):
        raise TypeError("split() takes the tensor axis once, as axis or as dim")
    return Split(axis if axis is not None else dim)  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True, repr=False, eq=False)
class NdSbp:
    """One sbp for each placement axis: an immutable value that reads like a tuple and equals the tuple of its items.

    Args:
        items: The sbp of placement axis 0, 1, ...

    Raises:
        SbpError: There is none, or one of them is not an sbp.

    Example:
        >>> from oneflax.sbp import B, NdSbp, S
        >>> nd_sbp = NdSbp((S(-1), B))
        >>> nd_sbp, nd_sbp[0], nd_sbp == (S(-1), B), nd_sbp.resolve(ndim=2)
        ((S(-1), B), S(-1), True, (S(1), B))
    """

    items: tuple[Sbp, ...]
    _hash: int = field(init=False)

    def __post_init__(self) -> None:
        items = tuple(self.items)
        bad = [item for item in items if not isinstance(item, Sbp)]
        if bad or not items:
            raise SbpError(_items_fault(bad))
        object.__setattr__(self, "items", items)
        object.__setattr__(self, "_hash", hash(items))

    def resolve(self, ndim: int) -> "NdSbp":
        """Gives the same nd-sbp with non-negative tensor axes, for a tensor of `ndim` axes.

        Raises:
            SbpError: A split names a tensor axis that is not there; all such splits at once.
        """
        faults = axis_faults(self, ndim, f"resolve(ndim={ndim})", (f"nd-sbp {self}",))
        if faults:
            raise SbpError(faults)
        if not any(isinstance(item, Split) and item.axis < 0 for item in self.items):
            return self
        return NdSbp(tuple(Split(i.axis % ndim) if isinstance(i, Split) else i for i in self.items))

    def __iter__(self) -> Iterator[Sbp]:
        return iter(self.items)

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> Sbp:
        return self.items[index]

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if isinstance(other, NdSbp):
            return self._hash == other._hash and self.items == other.items
        return self.items == other if isinstance(other, tuple) else NotImplemented

    def __hash__(self) -> int:
        return self._hash  # that of the tuple, which it equals

    def __reduce__(self) -> tuple[Any, ...]:
        return NdSbp, (self.items,)  # the cached hash differs from process to process

    def __repr__(self) -> str:
        if len(self.items) == 1:
            return repr(self.items[0])
        return f"({', '.join(map(repr, self.items))})"


_TEXT = re.compile(
    r"""(?:(?:oneflow\.|flow\.)?sbp\.)?(?:
        (?:S|split) \s* \( \s* (?:(?:axis|dim)\s*=\s*)? (?P<axis>-?\d{1,9}) \s* \)
        | (?P<broadcast>B|broadcast)
        | P \s* \( \s* (?P<quote>["']?) (?P<kind>\w+) (?P=quote) \s* \)
        | P | partial_sum
    )""",
    re.VERBOSE,
)


def parse_sbp(text: str) -> Sbp:
    """Reads one sbp: ``S(0)``, ``B``, ``P``, ``P("max")``, or OneFlow's ``split(0)``, ``broadcast``, ``partial_sum``.

    Blanks do not matter. What ``str`` of an sbp gives reads back to an equal one.

    Raises:
        SbpError: The text is not an sbp.

    Example:
        >>> from oneflax.sbp import parse_sbp
        >>> parse_sbp(" S( -1 ) "), parse_sbp("split(0)"), parse_sbp("P(max)")
        (S(-1), S(0), P("max"))
    """
    match = _TEXT.fullmatch(text.strip())
    if match is None:
        raise SbpError(_text_fault(text))
    if match["axis"]:
        return Split(int(match["axis"]))
    if match["broadcast"]:
        return B
    return Partial(match["kind"] or "sum")


def parse_nd_sbp(text: str) -> NdSbp:
    """Reads an nd-sbp: ``(S(0), B)``, ``[S(0), B]``, ``S(0), B``, ``(S(0),)`` or ``S(0)``.

    Raises:
        SbpError: A part of the text is not an sbp.

    Example:
        >>> from oneflax.sbp import parse_nd_sbp
        >>> parse_nd_sbp("( S(0) , broadcast )")
        (S(0), B)
    """
    inner = text.strip()
    if inner[:1] + inner[-1:] in ("()", "[]"):
        inner = inner[1:-1]
    if not inner.strip():
        raise SbpError(replace(_items_fault([]), where="parse_nd_sbp"))
    parts = inner.split(",")
    if len(parts) > 1 and not parts[-1].strip():
        parts.pop()
    return NdSbp(tuple(sbp for _, sbp in _collect(enumerate(parts), "parse_nd_sbp")))


def as_nd_sbp(value: Any, placement: Placement, where: str = "sbp=") -> NdSbp:
    """Reads any form in which a user gives an nd-sbp, and checks that it has one sbp for each placement axis.

    Args:
        value: An :class:`NdSbp`; a tuple or list of sbp or text; text; one sbp (for one placement axis); or a dict
            from the name (or index) of a placement axis to an sbp, where a missing placement axis is B.
        placement: The placement whose axes it is for.
        where: The call and argument, for messages.

    Raises:
        SbpError: The form is none of these, its length is not the number of placement axes, or there is no such
            placement axis.

    Example:
        >>> from oneflax.sbp import S, as_nd_sbp, placement
        >>> grid = placement("cpu", [[0, 1], [2, 3]], axes=("data", "model"))
        >>> as_nd_sbp({"model": S(-1)}, grid), as_nd_sbp("(S(0), B)", grid)
        ((B, S(-1)), (S(0), B))
    """
    if isinstance(value, NdSbp):
        nd_sbp = value
    elif isinstance(value, Mapping):
        nd_sbp = _from_mapping(value, placement, where)
    else:
        nd_sbp = _from_sequence(value, where)
    if len(nd_sbp) != placement.ndim:
        raise SbpError(_length_fault(nd_sbp, placement, where))
    return nd_sbp


def axis_faults(
    nd_sbp: NdSbp, ndim: int, where: str, given: tuple[str, ...], placement: Placement | None = None
) -> list[Fault]:
    """Gives a fault for each split whose tensor axis a tensor of `ndim` axes does not have."""
    faults: list[Fault] = []
    for i, item in enumerate(nd_sbp):
        if isinstance(item, Split) and not -ndim <= item.axis < ndim:
            over = placement.describe_axis(i) if placement else f"placement axis {i}"
            if ndim == 0:
                what, mend = "a tensor without tensor axes cannot be split.", "B."
            elif ndim == 1:
                what, mend = f"there is no tensor axis {item.axis}; the only one is 0.", "S(0) or B."
            else:
                what = f"there is no tensor axis {item.axis}; they are 0 to {ndim - 1}."
                mend = f"S(0) to S({ndim - 1}), or B."
            faults.append(Fault(where, f"{item} over {over}: {what}", given, mend))
    return faults


def _as_sbp(value: object, where: str) -> Sbp:
    if isinstance(value, Sbp):
        return value
    if isinstance(value, str):
        try:
            return parse_sbp(value)
        except SbpError as error:
            raise SbpError([replace(fault, where=where) for fault in error.faults]) from None
    raise SbpError(_type_fault(value, where))


def _collect(pairs: Iterable[tuple[Any, object]], where: str) -> list[tuple[Any, Sbp]]:
    """Reads the sbp of each (key, value); raises all faults at once."""
    found: list[tuple[Any, Sbp]] = []
    faults: list[Fault] = []
    for key, value in pairs:
        try:
            found.append((key, _as_sbp(value, where)))
        except SbpError as error:
            faults.extend(error.faults)
    if faults:
        raise SbpError(faults)
    return found


def _from_sequence(value: Any, where: str) -> NdSbp:
    if isinstance(value, str):
        try:
            return parse_nd_sbp(value)
        except SbpError as error:
            raise SbpError([replace(fault, where=where) for fault in error.faults]) from None
    items = tuple(value) if isinstance(value, tuple | list) else (value,)
    if not items:
        raise SbpError(replace(_items_fault([]), where=where))
    return NdSbp(tuple(sbp for _, sbp in _collect(enumerate(items), where)))


def _from_mapping(value: Mapping[Any, Any], placement: Placement, where: str) -> NdSbp:
    items: list[Sbp] = [B] * placement.ndim
    faults: list[Fault] = []
    for axis, item in value.items():
        try:
            items[placement.axis_index(axis)] = _as_sbp(item, where)
        except SbpError as error:
            faults.extend(replace(fault, where=where) for fault in error.faults)
    if faults:
        raise SbpError(faults)
    return NdSbp(tuple(items))


_FORMS = 'S(0), S(-1), B, P, P("max") or P("min")'


def _axis_fault(axis: object) -> Fault:
    text = f'"{axis}"' if isinstance(axis, str) else repr(axis)
    return Fault(
        f"S({text})", f"a tensor axis is a whole number, not {axis.__class__.__name__}.", mend="S(0), or S(-1)."
    )


def _kind_fault(kind: object) -> Fault:
    text = f'"{kind}"' if isinstance(kind, str) else repr(kind)
    return Fault(f"P({text})", 'a partial is of kind "sum", "max" or "min".', mend='P, P("max") or P("min").')


def _text_fault(text: str) -> Fault:
    return Fault("parse_sbp", f'"{text.strip()}" is not an sbp.', mend=f"write {_FORMS}.")


def _type_fault(value: object, where: str) -> Fault:
    what = f"an sbp is {_FORMS}, not {value.__class__.__name__}."
    return Fault(
        where, what, (f"given {reprlib.repr(value)}",), 'sbp=(S(0), B), sbp="(S(0), B)" or sbp={"data": S(0)}.'
    )


def _items_fault(bad: list[Any]) -> Fault:
    if bad:
        return replace(_type_fault(bad[0], "NdSbp"), mend="NdSbp((S(0), B)).")
    return Fault(
        "NdSbp", "an nd-sbp has one sbp for each placement axis, and none is given.", mend="(B,), or (S(0), B)."
    )


def _length_fault(nd_sbp: NdSbp, placement: Placement, where: str) -> Fault:
    axes = "axis" if placement.ndim == 1 else "axes"
    fitted = (*nd_sbp, *(B,) * placement.ndim)[: placement.ndim]
    return Fault(
        where,
        f"{len(nd_sbp)} sbp for {placement.ndim} placement {axes}.",
        (f"nd-sbp {nd_sbp}", f"placement {placement}"),
        f"sbp={NdSbp(fitted)}.",
    )
