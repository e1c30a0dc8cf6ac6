"""Rules in index notation: which signatures an op has over ONE placement axis.

An nd-sbp is a product: each placement axis takes one of these signatures for itself. A rule is one line of text::

    rule    = formula (";" clause)*
    formula = term ("," term)* "->" term ("," term)*           one term for each input, one for each output
    term    = (name[mark] | [name][mark]"..." | "_")*          one item for each tensor axis
    clause  = sbp ("," sbp)* "->" sbp ("," sbp)*               sbp: B, P, P(max), P(min), P*

**Splits.** Every name in the formula may be split, one at a time, at every place where it stands: ``S(i)`` there, and
B for the inputs without it. What an output without it becomes, and what the local op has to know for it, is said by
a mark (at one place or at all of them):

========  ==========================  =================================================================
mark      output without the index    the local op
========  ==========================  =================================================================
(none)    not allowed                 the op itself, on the rank's parts
``+``     ``P``                       the op itself
``+/``    ``P``                       ``size``: divides by the *logical* size of the index
``^max``  ``P("max")``                the op itself; an empty part gives -inf
``^min``  ``P("min")``                the op itself; an empty part gives +inf
``@``     not allowed                 ``offset``: knows where its part of the index begins
``@+``    ``P``                       ``offset``
``*``     B                           ``collective``: runs collectives over the placement axis
``%``     not allowed                 the op itself; right only when all its splits are even
========  ==========================  =================================================================

A local op that runs collectives may also need the logical size and where its part begins. Where several placement
axes split an op, what each of them asks of the local op adds up.

``_`` is a tensor axis that is never split. ``...`` stands for any number of tensor axes, also none; it broadcasts as
in numpy: the axes of all terms with the same (or no) name before the dots are aligned at their ends, and an input of
size 1 where another has more is B when that axis is split. Other names must have one size wherever they stand.

**Partials.** Each clause is one signature of P and B. ``P*`` means three clauses: with P, with P("max"), with
P("min") for every ``P*`` in it. Clauses say by which law P passes: ``P, P -> P`` for an op linear in both inputs at
once (add), ``P, B -> P; B, P -> P`` for one linear in each alone (matmul), ``P(max) -> P(max)`` for an increasing one,
``P(max) -> P(min)`` for a decreasing one.

**Order.** :meth:`Rule.signatures` gives all-B first; then the splits, in the order in which the tensor axes stand in
the inputs; then the clauses as written (``P*``: sum, max, min).

Where an op's parameters hold the shape of its output (reshape, broadcast_to), the local op takes that of the part.

Examples::

    m k+, k+ n -> m n ; P, B -> P ; B, P -> P        matmul of matrices
    ..., ... -> ... ; P, P -> P                      add
    a k+/ -> a ; P -> P                              mean over tensor axis 1
    a c* -> a c*                                     softmax over tensor axis 1
    i..., v@+ d -> i... d ; B, P* -> P*              embedding

Index notation for sharding is the idea of nnScaler's and Shardy's rules; what the rows say began with OneFlow's
signatures. ``prove.py`` proves each of them.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from .errors import Fault, SbpError
from .signature import B, P, Partial, Sbp, Split, parse_sbp

LocalForm = Literal["plain", "size", "offset", "collective"]
"""What the op that a rank runs on its parts is, or has to know; see the table of marks."""

Shapes = Sequence[Sequence[int]]


def dual(sbp: Sbp) -> Sbp:
    """Gives the sbp of a gradient: S(i) for S(i), P for B, B for P.

    Raises:
        SbpError: For P("max") and P("min"): the gradient of a maximum goes to the rank that holds it.

    Example:
        >>> from oneflax.sbp import B, P, S, dual
        >>> dual(S(1)), dual(B), dual(P)
        (S(1), P, B)
    """
    if isinstance(sbp, Split):
        return sbp
    if sbp == B:
        return P
    if sbp == P:
        return B
    raise SbpError(Fault(f"dual({sbp})", f"{sbp} has no dual: only S, B and P of a sum have one.", mend="box it to B."))


@dataclass(frozen=True, slots=True)
class AxisSignature:
    """The sbp of an op's inputs and outputs over one placement axis, for which running it on the parts is right.

    Args:
        inputs: One sbp for each input; tensor axes are not negative.
        outputs: One sbp for each output.
        local: What the local op is: the op itself (``"plain"``), or one that knows the logical size (``"size"``) or
            the begin of its part (``"offset"``) of the split tensor axis, or that runs collectives over the placement
            axis (``"collective"``).
        even: Right only when every tensor axis that is split, of inputs and outputs, splits evenly over *all* the
            placement axes that split it; see :meth:`splits_evenly`.
    """

    inputs: tuple[Sbp, ...]
    outputs: tuple[Sbp, ...]
    local: LocalForm = "plain"
    even: bool = False

    @property
    def collective(self) -> bool:
        """Whether the local op itself communicates over the placement axis."""
        return self.local == "collective"

    def dual(self) -> "AxisSignature | None":
        """Gives the signature of the local vjp, from cotangents to gradients; None where a max or min is P.

        Integer and boolean inputs have no gradient: their sbp in it means nothing.
        """
        if any(isinstance(sbp, Partial) and sbp != P for sbp in (*self.inputs, *self.outputs)):
            return None
        return AxisSignature(
            tuple(map(dual, self.outputs)), tuple(map(dual, self.inputs)), local=self.local, even=self.even
        )

    def splits_evenly(self, input_shapes: Shapes, output_shapes: Shapes, parts: int) -> bool:
        """Whether every split tensor axis divides into `parts` equal parts (the product of *all* its splits)."""
        pairs = zip((*self.inputs, *self.outputs), (*input_shapes, *output_shapes))
        return all(shape[sbp.axis] % parts == 0 for sbp, shape in pairs if isinstance(sbp, Split))

    def __str__(self) -> str:
        notes = [note for note, on in ((self.local, self.local != "plain"), ("even", self.even)) if on]
        text = f"{_sbps_text(self.inputs)} -> {_sbps_text(self.outputs)}"
        return f"{text} [{', '.join(notes)}]" if notes else text


class _Axis(NamedTuple):
    """One item of a term: an index, a run of tensor axes (``group``), or with name None one that is never split."""

    name: str | None
    group: bool


class _Index(NamedTuple):
    """An index at one place of a run, counted from its end; 0 for an index outside a run."""

    name: str
    place: int


_Term = tuple[_Axis, ...]
_Layout = tuple[_Index | None, ...]


class _Mark(NamedTuple):
    absent: Sbp | None
    local: LocalForm
    even: bool = False


_MARKS: dict[str, _Mark] = {
    "": _Mark(None, "plain"),
    "+": _Mark(P, "plain"),
    "+/": _Mark(P, "size"),
    "^max": _Mark(Partial("max"), "plain"),
    "^min": _Mark(Partial("min"), "plain"),
    "@": _Mark(None, "offset"),
    "@+": _Mark(P, "offset"),
    "*": _Mark(B, "collective"),
    "%": _Mark(None, "plain", even=True),
}
_ITEM = re.compile(r"(?P<name>[a-z][a-z0-9]*)?(?P<mark>\+/?|\^max|\^min|@\+?|\*|%)?(?P<dots>\.\.\.)?")
_SIGN_OR_WORD = re.compile(r"->|[,;]|(?:(?!->)[^\s,;])+")


@dataclass(frozen=True, slots=True, repr=False)
class Rule:
    """A rule: text in the notation of this module, read and checked when made.

    Args:
        text: The rule.
        law: The algebraic law it rests on, for people; :class:`oneflax.sbp.rules.Law` names them.

    Raises:
        SbpError: The text is not a rule. The message gives the position, counted from 0.

    Example:
        >>> from oneflax.sbp import Rule
        >>> for signature in Rule("m k+, k+ n -> m n ; P, B -> P").signatures([(4, 6), (6, 8)]):
        ...     print(signature)
        B, B -> B
        S(0), B -> S(0)
        S(1), S(0) -> P
        B, S(1) -> S(1)
        P, B -> P
    """

    text: str
    law: str = ""
    _inputs: tuple[_Term, ...] = field(init=False, compare=False)
    _outputs: tuple[_Term, ...] = field(init=False, compare=False)
    _marks: dict[str, _Mark] = field(init=False, compare=False)
    _clauses: tuple[AxisSignature, ...] = field(init=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "text", " ".join(self.text.split()))
        reader = _Reader(self.text)
        formula, *clauses = reader.segments()
        inputs, outputs = reader.formula(formula)
        object.__setattr__(self, "_inputs", inputs)
        object.__setattr__(self, "_outputs", outputs)
        object.__setattr__(self, "_marks", {name: _MARKS[mark] for name, mark in reader.marks.items()})
        arity = (len(inputs), len(outputs))
        object.__setattr__(self, "_clauses", tuple(s for c in clauses for s in reader.clause(c, arity)))

    @property
    def arity(self) -> tuple[int, int]:
        """The number of inputs and of outputs."""
        return len(self._inputs), len(self._outputs)

    @property
    def collective(self) -> bool:
        """Whether some split makes the local op run a collective."""
        return any(mark.local == "collective" for mark in self._marks.values())

    def signatures(self, shapes: Shapes) -> tuple[AxisSignature, ...]:
        """Gives the signatures for inputs of these shapes, without repeats, in the order that the module states.

        Sizes are not compared with the number of ranks: a split may be uneven, or leave ranks without elements.

        Args:
            shapes: The logical shape of each input.

        Raises:
            SbpError: The shapes do not fit the rule; everything that does not fit at once.
        """
        layouts, sizes = self._place(shapes)
        lengths: dict[str, int] = {}
        for name, place in sizes:
            lengths[name] = max(lengths.get(name, 0), place)
        results = [_layout(term, lengths) for term in self._outputs]
        found = [AxisSignature((B,) * len(self._inputs), (B,) * len(self._outputs))]
        for index, size in sizes.items():
            mark = self._marks[index.name]
            inputs = [_split_at(index, layout, shape, size) for layout, shape in zip(layouts, shapes)]
            outputs = [Split(r.index(index)) if index in r else mark.absent or B for r in results]
            found.append(AxisSignature(tuple(inputs), tuple(outputs), mark.local, mark.even))
        return tuple(dict.fromkeys([*found, *self._clauses]))

    def _place(self, shapes: Shapes) -> tuple[list[_Layout], dict[_Index, int]]:
        """Gives which index each tensor axis of each input is, and the size of each index."""
        faults: list[Fault] = []
        if len(shapes) != len(self._inputs):
            raise SbpError(self._fault(f"{len(shapes)} shapes for {len(self._inputs)} inputs.", shapes))
        layouts: list[_Layout] = []
        found: dict[_Index, list[int]] = {}
        for i, (term, shape) in enumerate(zip(self._inputs, shapes)):
            group = next((axis.name or "" for axis in term if axis.group), None)
            extra = len(shape) - len(term) + (group is not None)
            if extra < 0 or (extra and group is None):
                least = "at least " * (group is not None)
                needed = len(term) - (group is not None)
                faults.append(self._fault(f"input {i} has {len(shape)} tensor axes; it needs {least}{needed}.", shapes))
                continue
            layouts.append(_layout(term, {} if group is None else {group: extra}))
            for index, size in zip(layouts[-1], shape):
                if index is not None:
                    found.setdefault(index, []).append(size)
        for index, sizes in found.items():
            distinct = set(sizes) - {1} if index.place else set(sizes)
            if len(distinct) > 1:
                named = index.name + "..." * bool(index.place)
                faults.append(self._fault(f"index {named} has the sizes {' and '.join(map(str, sizes))}.", shapes))
        if faults:
            raise SbpError(faults)
        return layouts, {index: next((n for n in sizes if n != 1), 1) for index, sizes in found.items()}

    def _fault(self, what: str, shapes: Shapes) -> Fault:
        given = tuple(f"input {i}: [{', '.join(map(str, shape))}]" for i, shape in enumerate(shapes))
        return Fault(f'rule "{self.text}"', what, given)

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        return f"Rule({self.text!r}, law={self.law!r})" if self.law else f"Rule({self.text!r})"


def _layout(term: _Term, lengths: dict[str, int]) -> _Layout:
    """Gives the index of each tensor axis; a run of n has the places n, ..., 1."""
    layout: list[_Index | None] = []
    for name, group in term:
        if group:
            layout.extend(_Index(name or "", place) for place in range(lengths.get(name or "", 0), 0, -1))
        else:
            layout.append(None if name is None else _Index(name, 0))
    return tuple(layout)


def _split_at(index: _Index, layout: _Layout, shape: Sequence[int], size: int) -> Sbp:
    if index not in layout:
        return B
    axis = layout.index(index)
    return B if index.place and shape[axis] == 1 != size else Split(axis)


def _sbps_text(items: Iterable[Sbp]) -> str:
    return ", ".join(map(str, items))


class _Word(NamedTuple):
    text: str
    position: int


_Side = list[list[_Word]]


class _Reader:
    """Reads one rule's text; `marks` fills with the mark of each name."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.marks: dict[str, str] = {}
        self._runs: dict[str, bool] = {}

    def segments(self) -> Iterator[tuple[_Side, _Side]]:
        """Gives the formula and the clauses, each as its left and right side, as words between commas."""
        sides: list[_Side] = [[[]]]
        for match in _SIGN_OR_WORD.finditer(self.text):
            word = _Word(match[0], match.start())
            if word.text == ",":
                sides[-1].append([])
            elif word.text == "->":
                sides.append([[]])
            elif word.text == ";":
                yield self._two_sides(sides, word.position)
                sides = [[[]]]
            else:
                sides[-1][-1].append(word)
        yield self._two_sides(sides, len(self.text))

    def _two_sides(self, sides: list[_Side], end: int) -> tuple[_Side, _Side]:
        if len(sides) != 2:
            raise self._error(end, f'one "->" is needed before here, and there are {len(sides) - 1}.')
        return sides[0], sides[1]

    def formula(self, sides: tuple[_Side, _Side]) -> tuple[tuple[_Term, ...], tuple[_Term, ...]]:
        """Gives the terms of the inputs and of the outputs."""
        inputs, outputs = (tuple(self._term(words) for words in side) for side in sides)
        named_in, named_out = _names(inputs), _names(outputs)
        for name in named_out:
            if name not in named_in:
                raise self._error(self._find(name), f"index {name or '...'} is in no input: write _ for it.")
        for name, mark in self.marks.items():
            missing = [i for i, term in enumerate(outputs) if name not in _names((term,))]
            shown = name or "..."
            if missing and _MARKS[mark].absent is None:
                what = f"index {shown} is not in output {missing[0]}: mark it +, +/, ^max, ^min, @+ or *, or write _."
                raise self._error(self._find(name), what)
            if not missing and mark not in ("*", "@+") and _MARKS[mark].absent is not None:
                raise self._error(self._find(name), f"index {shown} is in every output, so {mark} means nothing.")
        return inputs, outputs

    def _term(self, words: list[_Word]) -> _Term:
        axes: list[_Axis] = []
        for word in words:
            axis = self._axis(word)
            if axis.name is not None and axis.name in {a.name for a in axes}:
                raise self._error(word.position, f"index {axis.name or '...'} stands twice in one term.")
            if axis.group and any(a.group for a in axes):
                raise self._error(word.position, 'a second "..." in one term.')
            axes.append(axis)
        return tuple(axes)

    def _axis(self, word: _Word) -> _Axis:
        if word.text == "_":
            return _Axis(None, False)
        match = _ITEM.fullmatch(word.text)
        if match is None or not (match["name"] or match["dots"]):
            raise self._error(word.position, f'"{word.text}" is no index, no "..." and no "_".')
        name, mark = match["name"] or "", match["mark"] or ""
        if self._runs.setdefault(name, match["dots"] is not None) != (match["dots"] is not None):
            raise self._error(word.position, f"{name} is one index and {name}... a run: give them two names.")
        known = self.marks.setdefault(name, mark)
        if mark and known and mark != known:
            raise self._error(word.position, f"index {name or '...'} is marked {known} before and {mark} here.")
        self.marks[name] = known or mark
        return _Axis(name, match["dots"] is not None)

    def clause(self, sides: tuple[_Side, _Side], arity: tuple[int, int]) -> Iterator[AxisSignature]:
        """Gives the signatures of one clause: one, or three where it has ``P*``."""
        words = [[self._single(item) for item in side] for side in sides]
        for side, needed, what in zip(words, arity, ("inputs", "outputs")):
            if len(side) != needed:
                raise self._error(side[0].position, f"the formula has {needed} {what}, the clause {len(side)}.")
        kinds = ("sum", "max", "min") if any(w.text == "P*" for side in words for w in side) else ("sum",)
        for kind in kinds:
            inputs, outputs = (tuple(self._sbp(word, kind) for word in side) for side in words)
            if all(sbp == B for sbp in inputs):
                raise self._error(words[0][0].position, "a clause has a P among its inputs.")
            yield AxisSignature(inputs, outputs)

    def _single(self, words: list[_Word]) -> _Word:
        if len(words) != 1:
            position = words[1].position if words else len(self.text)
            raise self._error(position, "one sbp is needed between commas in a clause.")
        return words[0]

    def _sbp(self, word: _Word, kind: str) -> Sbp:
        if word.text == "P*":
            return Partial(kind)
        try:
            sbp = parse_sbp(word.text)
        except SbpError:
            sbp = Split(0)
        if isinstance(sbp, Split):
            raise self._error(word.position, f'"{word.text}" is none of B, P, P(max), P(min) and P*.')
        return sbp

    def _find(self, name: str) -> int:
        """Gives where a name (or, without one, the dots) first stands."""
        pattern = rf"\b{name}\b" if name else r"(?<![a-z0-9])(?:\+/?|\^max|\^min|@\+?|\*|%)?\.\.\."
        match = re.search(pattern, self.text)
        assert match is not None
        return match.start()

    def _error(self, position: int, what: str) -> SbpError:
        return SbpError(Fault(f'rule "{self.text}"', f"position {position}: {what}"))


def _names(terms: Iterable[_Term]) -> set[str]:
    return {axis.name for term in terms for axis in term if axis.name is not None}
