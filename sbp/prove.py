"""The prover: tries every signature of an op on numbers, and compares what holds with what the table declares.

One placement axis of 2 and of 3 ranks. For a signature, inputs are drawn and cut into parts, every rank runs the local
op (``prove_ops.py``) on its parts, the results are put together again and compared with the op on the whole.

**Valid** is a signature whose result equals the op's on every draw, for each number of ranks that fits it. Values are
of mixed sign and not rounded; every part of a P is drawn by itself (addends; operands of a maximum). One draw has some
NaN. Sixteen more, where an input is P of a maximum or minimum, have inputs that are half NaN, infinities and zeros of
both signs, for -inf is what an empty part holds. A law of sums is one about finite numbers and NaN: inf - inf is NaN.

Tried are: S(i) for each tensor axis that splits evenly, B, and for floats P, P("max"), P("min"), for all inputs and
outputs in every combination, with every form that the local op has. A result of booleans or integers is not tried as P.

**Wrong** is a declared signature that is not valid. The declared ones are tried on uneven sizes as well, also on sizes
below the number of ranks, unless they ask for even ones.
**Missing** is a valid signature (of any form) that is not among the proven ones, but for three kinds that add nothing:

1. All inputs are B: the result is B, and a slice or an addend of it is boxing.
2. An output is P("max") or P("min") where B is proven for the same inputs: equal operands.
3. An input is B where P("max") or P("min") is proven, the rest being the same: B *is* such a P at no cost.

Nothing is proven about gradients here, and need not be: with P = sum of all addends, S and B as they are, the sum over
the ranks of <dual cotangent, result> equals <cotangent, op(inputs)> for whatever parts the inputs are cut into, so the
parts' gradients are those of the whole, laid out by the dual rule. What has to be checked is that an automatic local
vjp computes them, collectives included; the tests do that with jax.

Run ``python -m oneflax.sbp.prove matmul``, or ``all``: it prints what is proven, wrong and missing, and exits 1 if
anything is wrong or missing. The idea is that of PyTorch's ``strategy_validation.py`` for DTensor.
"""

import argparse
import functools
import itertools
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import GeneratorType
from typing import Any

from .notation import AxisSignature, LocalForm, Rule
from .prove_ops import OPS, Case, Here, Op, Shape
from .rules import rule_for
from .signature import B, P, Partial, Sbp, Split

RANKS = (2, 3)
"""Lengths of the placement axis. With 2 alone, 'every rank but one' and 'one rank' look the same."""

# A cast to float32 rounds each addend by 6e-8 of it; a wrong signature is off by far more than this.
_TOLERANCE = 1e-5
_DRAWS, _SPECIAL_DRAWS = 3, 16
_SPECIAL = (math.nan, math.inf, math.inf, math.inf, -math.inf, -math.inf, -math.inf, 0.0, -0.0)
_ALL_PARTIALS = (P, Partial("max"), Partial("min"))


@dataclass(frozen=True, slots=True)
class Proof:
    """What was found for one case of an op.

    Args:
        op: The op.
        case: Its shapes and parameters.
        rule: The rule that was tried.
        proven: Declared, and valid.
        wrong: Declared, and not valid.
        missing: Valid, and not declared.
        untested: Declared, but no number of ranks splits the case's sizes evenly: the case is badly chosen.
    """

    op: str
    case: Case
    rule: Rule
    proven: tuple[AxisSignature, ...]
    wrong: tuple[AxisSignature, ...]
    missing: tuple[AxisSignature, ...]
    untested: tuple[AxisSignature, ...]

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong, missing or untested."""
        return not (self.wrong or self.missing or self.untested)

    def __str__(self) -> str:
        shapes = ", ".join(str(list(shape)) for shape in self.case.shapes)
        params = "".join(f", {name}={value}" for name, value in self.case.params.items())
        lines = [f"{self.op}({shapes}{params})  {self.rule}  ({self.rule.law.lower()})"]
        for word in ("proven", "wrong", "missing", "untested"):
            lines += [f"  {word:8}  {signature}" for signature in getattr(self, word)]
        return "\n".join(lines)


def prove(
    name: str, rule_of: Callable[..., Rule] = rule_for, ops: Mapping[str, Op] = OPS, search: bool = True
) -> tuple[Proof, ...]:
    """Tries an op's signatures on all its cases.

    Args:
        name: The op.
        rule_of: Gives the rule to try, called like :func:`rule_for`.
        ops: How each op is proven.
        search: Also look for missing signatures.

    Example:
        >>> from oneflax.sbp.prove import prove
        >>> all(proof.ok for proof in prove("matmul"))
        True
    """
    op = ops[name]
    return tuple(_prove_case(name, op, case, rule_of, search) for case in op.cases)


def holds(op: Op, case: Case, signature: AxisSignature, ranks: int) -> bool:
    """Whether one signature is valid for one number of ranks; the case's sizes may split unevenly."""
    return bool(_valid_outputs(op, case, signature.inputs, signature.local, ranks, [signature.outputs]))


def assemble(parts: Sequence[Any], sbp: Sbp) -> Any:
    """Gives the logical array of the parts that ranks hold, or None where they are no such parts.

    The parts of a split are the sizes that an even or uneven split gives (the first ``n % ranks`` one longer); those
    of B must agree.
    """
    import numpy as np

    if isinstance(sbp, Split):
        if any(part.ndim <= sbp.axis for part in parts):
            return None
        sizes = [part.shape[sbp.axis] for part in parts]
        if sizes != _part_sizes(sum(sizes), len(parts)):
            return None
        return np.concatenate(parts, axis=sbp.axis)
    if any(part.shape != parts[0].shape for part in parts):
        return None
    if isinstance(sbp, Partial):
        return {"sum": np.add, "max": np.maximum, "min": np.minimum}[sbp.kind].reduce(np.stack(parts))
    return parts[0] if all(_equal(part, parts[0]) for part in parts) else None


def split_parts(value: Any, sbp: Sbp, ranks: int) -> list[Any]:
    """Gives what each rank holds of an array that is S or B."""
    import numpy as np

    if not isinstance(sbp, Split):
        return [value] * ranks
    ends = itertools.accumulate(_part_sizes(value.shape[sbp.axis], ranks)[:-1])
    return np.split(value, list(ends), axis=sbp.axis)


def run_ranks(
    op: Op, case: Case, signature: AxisSignature, parts: Sequence[Sequence[Any]], output_shape: Shape = ()
) -> list[Any]:
    """Runs the local op on every rank.

    Args:
        op: The op.
        case: The logical shapes and the parameters.
        signature: What the parts are; its output is needed only by ops that take their part's shape.
        parts: For each input, the part of each rank.
        output_shape: The output's logical shape, for those ops.
    """
    ranks = len(parts[0])
    results = []
    for rank in range(ranks):
        here = Here(
            xp=_numpy(),
            form=signature.local,
            shapes=case.shapes,
            starts=tuple(_starts(shape, sbp, ranks)[rank] for shape, sbp in zip(case.shapes, signature.inputs)),
            target=_part_shape(output_shape, signature.outputs[0], ranks, rank) if op.shaped else (),
        )
        results.append(op.run(here, *(of_rank[rank] for of_rank in parts), **case.params))
    return _lockstep(results)


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the proofs of some ops; gives the exit status, 1 if anything is wrong, missing or untested."""
    parser = argparse.ArgumentParser(prog="python -m oneflax.sbp.prove", description="Proves rows of the rule table.")
    parser.add_argument("ops", nargs="+", metavar="OP", help=f"all, or any of: {' '.join(OPS)}")
    names = parser.parse_args(argv).ops
    unknown = [name for name in names if name not in OPS and name != "all"]
    if unknown:
        parser.error(f"no such op: {' '.join(unknown)}. Ops: {' '.join(OPS)}")
    proofs = [proof for name in (OPS if "all" in names else names) for proof in prove(name)]
    print("\n".join(map(str, proofs)))
    counts = {word: sum(len(getattr(p, word)) for p in proofs) for word in ("proven", "wrong", "missing", "untested")}
    print("  ".join(f"{word} {count}" for word, count in counts.items()))
    return int(not all(proof.ok for proof in proofs))


def _prove_case(name: str, op: Op, case: Case, rule_of: Callable[..., Rule], search: bool) -> Proof:
    rule = rule_of(name, case.shapes, **case.params)
    declared = rule.signatures(case.shapes)
    wrong, untested = [], []
    for signature in declared:
        verdicts = [holds(op, case, signature, ranks) for ranks in RANKS if _is_for(op, case, signature, ranks)]
        if not verdicts:
            untested.append(signature)
        elif not all(verdicts):
            wrong.append(signature)
    if op.resizes:
        # All sizes one longer: uneven. All sizes 2: the third rank has nothing.
        for other in (case.resized(lambda n: n + 1), case.resized(lambda n: 2)):
            found = rule_of(name, other.shapes, **other.params).signatures(other.shapes)
            tried = [s for s in found if not s.even and s not in wrong]
            wrong += [s for s in tried if not all(holds(op, other, s, ranks) for ranks in RANKS)]
    proven = [s for s in declared if s not in wrong and s not in untested]
    missing = [s for s in _search(op, case) if not any(_implies(d, s) for d in proven)] if search else []
    return Proof(name, case, rule, tuple(proven), tuple(wrong), tuple(missing), tuple(untested))


def _is_for(op: Op, case: Case, signature: AxisSignature, ranks: int) -> bool:
    return not signature.even or signature.splits_evenly(case.shapes, [_logical_shape(op, case)], ranks)


def _implies(proven: AxisSignature, valid: AxisSignature) -> bool:
    """Whether the valid signature is the proven one in any form, or weaker by the conventions 2 and 3."""
    inputs = all(v == p or (v == B and _is_extreme(p)) for v, p in zip(valid.inputs, proven.inputs))
    outputs = all(v == p or (p == B and _is_extreme(v)) for v, p in zip(valid.outputs, proven.outputs))
    return inputs and outputs


def _is_extreme(sbp: Sbp) -> bool:
    return isinstance(sbp, Partial) and sbp != P


def _search(op: Op, case: Case) -> list[AxisSignature]:
    """Gives every valid signature of a case whose inputs are not all B."""
    refuted: set[AxisSignature] = set()
    found: dict[AxisSignature, None] = {}
    result = _logical(op, case, _draw_inputs(case, [B] * len(case.shapes), 1, 0)[1])
    for ranks in RANKS:
        options = [
            _options(shape, isinstance(case.kind(i), str) and case.kind(i) != "bool", ranks)
            for i, shape in enumerate(case.shapes)
        ]
        outputs = [(sbp,) for sbp in _options(result.shape, result.dtype.kind == "f", ranks)]
        for inputs, form in itertools.product(itertools.product(*options), op.forms):
            if all(sbp == B for sbp in inputs):
                continue
            tried = [AxisSignature(inputs, output, form) for output in outputs]
            tried = [s for s in tried if s not in refuted]
            valid = _valid_outputs(op, case, inputs, form, ranks, [s.outputs for s in tried])
            found.update((s, None) for s in tried if s.outputs in valid)
            refuted.update(s for s in tried if s.outputs not in valid)
    pairs = {(s.inputs, s.outputs): s for s in found if s not in refuted}
    return list(pairs.values())


def _options(shape: Shape, partial: bool, ranks: int) -> list[Sbp]:
    splits = [Split(i) for i, n in enumerate(shape) if n > 1 and n % ranks == 0]
    return [*splits, B, *(_ALL_PARTIALS if partial else ())]


def _valid_outputs(
    op: Op,
    case: Case,
    inputs: tuple[Sbp, ...],
    form: LocalForm,
    ranks: int,
    outputs: Sequence[tuple[Sbp, ...]],
) -> list[tuple[Sbp, ...]]:
    """Gives which of the outputs are right on every draw. An op that refuses the parts is right for none."""
    import numpy as np

    alive = list(outputs)
    draws = _DRAWS + (_SPECIAL_DRAWS if any(map(_is_extreme, inputs)) else 0)
    with np.errstate(all="ignore"):
        for draw in range(draws):
            parts, values = _draw_inputs(case, inputs, ranks, draw)
            expected = _logical(op, case, values)
            results: dict[Any, list[Any] | None] = {}
            right = []
            for output in alive:
                key = output if op.shaped else None
                if key not in results:
                    results[key] = _try_ranks(op, case, AxisSignature(inputs, output, form), parts, expected.shape)
                got = results[key]
                if got is not None and _equal(assemble(got, output[0]), expected):
                    right.append(output)
            alive = right
            if not alive:
                break
    return alive


def _try_ranks(op: Op, case: Case, signature: AxisSignature, parts: Any, shape: Shape) -> list[Any] | None:
    try:
        return run_ranks(op, case, signature, parts, shape)
    except (ValueError, IndexError):  # the parts do not fit each other
        return None


def _logical(op: Op, case: Case, values: Sequence[Any]) -> Any:
    """Gives the op's result on whole inputs: one rank, whose parts they are."""
    import numpy as np

    whole = AxisSignature((B,) * len(values), (B,))
    with np.errstate(all="ignore"):
        return run_ranks(op, case, whole, [[value] for value in values], case.params.get("shape", ()))[0]


def _logical_shape(op: Op, case: Case) -> Shape:
    return _logical(op, case, _draw_inputs(case, [B] * len(case.shapes), 1, 0)[1]).shape


def _draw_inputs(case: Case, sbps: Sequence[Sbp], ranks: int, draw: int) -> tuple[list[list[Any]], list[Any]]:
    """Gives for each input its parts and its logical value; the same for the same arguments."""
    parts, values = [], []
    for i, (shape, sbp) in enumerate(zip(case.shapes, sbps)):
        kind = case.kind(i)
        if isinstance(kind, tuple):
            kind = case.shapes[kind[0]][kind[1]]
        if isinstance(sbp, Partial):
            parts.append([_draw(shape, kind, draw, (i, rank)) for rank in range(ranks)])
            values.append(assemble(parts[-1], sbp))
        else:
            values.append(_draw(shape, kind, draw, (i, ranks)))
            parts.append(split_parts(values[-1], sbp, ranks))
    return parts, values


@functools.lru_cache(maxsize=1024)
def _draw(shape: Shape, kind: str | int, draw: int, seed: tuple[int, int]) -> Any:
    """Gives one array, read-only: finite in draws 0 and 1, some NaN in draw 2, later half special for most inputs.

    Args:
        shape: Its shape.
        kind: A kind of floats, "bool", or a number that indices are below.
        draw: The draw.
        seed: The input, and which part of it: inputs and parts differ.
    """
    import numpy as np

    random = np.random.default_rng([draw, *seed])
    special = draw >= _DRAWS and np.random.default_rng([draw, seed[0]]).random() < 0.7
    if kind == "bool":
        return random.random(shape) < 0.5
    if isinstance(kind, int):
        return random.integers(kind, size=shape)
    value = random.normal(size=shape) * 2 if kind != "few" else random.choice([-1.7, -0.3, 0.9, 2.1], shape)
    if kind == "positive":
        value = np.abs(value) + 0.1
    if draw == _DRAWS - 1:
        value = np.where(random.random(shape) < 0.05, math.nan, value)
    elif special:
        value = np.where(random.random(shape) < 0.5, random.choice(_SPECIAL, shape), value)
    value.setflags(write=False)
    return value


def _lockstep(results: list[Any]) -> list[Any]:
    """Runs local ops with collectives side by side: each yields a value and is sent that of all ranks."""
    import numpy as np

    if not isinstance(results[0], GeneratorType):
        return results
    sent: Any = None
    while True:
        asked, done = [], []
        for local in results:
            try:
                asked.append(local.send(sent))
            except StopIteration as stop:
                done.append(stop.value)
        if not asked:
            return done
        values = [value for _, value in asked]
        # Arrays that differ in shape cannot be combined, whatever broadcasting would make of them.
        sent = {"sum": np.add, "max": np.maximum}[asked[0][0]].reduce(np.stack(values))


def _equal(a: Any, b: Any) -> bool:
    import numpy as np

    if a is None or a.shape != b.shape:
        return False
    return np.allclose(a, b, rtol=_TOLERANCE, atol=_TOLERANCE, equal_nan=True)


def _part_sizes(size: int, ranks: int) -> list[int]:
    return [size // ranks + (rank < size % ranks) for rank in range(ranks)]


def _part_shape(shape: Shape, sbp: Sbp, ranks: int, rank: int) -> Shape:
    if not isinstance(sbp, Split):
        return shape
    return (*shape[: sbp.axis], _part_sizes(shape[sbp.axis], ranks)[rank], *shape[sbp.axis + 1 :])


def _starts(shape: Shape, sbp: Sbp, ranks: int) -> list[tuple[int, ...]]:
    """Gives for each rank where its part begins on each tensor axis."""
    ends = [0] * ranks
    if isinstance(sbp, Split):
        ends = [0, *itertools.accumulate(_part_sizes(shape[sbp.axis], ranks))]
    axis = sbp.axis if isinstance(sbp, Split) else None
    return [tuple(ends[rank] if i == axis else 0 for i in range(len(shape))) for rank in range(ranks)]


class _Numpy:
    """Numpy, with the error function."""

    def __getattr__(self, name: str) -> Any:
        import numpy as np

        return np.vectorize(math.erf, otypes=[float]) if name == "erf" else getattr(np, name)


def _numpy() -> Any:
    return _Numpy()


if __name__ == "__main__":
    sys.exit(main())
