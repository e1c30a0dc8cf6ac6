"""Every row of the rule table is proven: nothing wrong, nothing missing, gradients by the dual rule."""

import doctest
import importlib
import math
from collections.abc import Callable
from types import GeneratorType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from oneflax.sbp import AxisSignature, B, P, Partial, Rule, S, Sbp, SbpError, Split, dual, rule_for
from oneflax.sbp.prove import RANKS, assemble, holds, main, prove, run_ranks, split_parts
from oneflax.sbp.prove_ops import OPS, Case, Here, Op
from oneflax.sbp.rules import TABLE, Law, Row

MAX, MIN = Partial("max"), Partial("min")


def test_every_row_has_a_proof_and_every_proof_a_row() -> None:
    assert set(OPS) == set(TABLE)
    assert all(len(op.cases) >= 2 for op in OPS.values())


@pytest.mark.parametrize("name", TABLE)
def test_nothing_is_wrong_and_nothing_missing(name: str) -> None:
    for proof in prove(name):
        assert proof.ok, str(proof)
        assert len(proof.proven) > 1


def test_the_example_of_rule_for_runs() -> None:
    assert doctest.testmod(importlib.import_module("oneflax.sbp.rules.table")).failed == 0


# Laws


@pytest.mark.parametrize("name", TABLE)
def test_partials_pass_as_the_law_says(name: str) -> None:
    for case in OPS[name].cases:
        found = [s for s in rule_for(name, case.shapes, **case.params).signatures(case.shapes) if any_partial(s.inputs)]
        kinds = {sbp for s in found for sbp in s.inputs if isinstance(sbp, Partial)}
        sums = [sum(sbp == P for sbp in s.inputs) for s in found if P in s.inputs]
        match TABLE[name].law:
            case Law.POINTWISE:
                assert kinds == set()
            case Law.INCREASING:
                assert kinds <= {MAX, MIN} or case.params.get("exponent") == 1
            case Law.LINEAR:
                assert P in kinds or case.params.get("target") == "int32"
                assert sums in ([], [len(case.shapes)])
            case Law.MULTILINEAR:
                assert kinds == {P}
                assert set(sums) == {1}
            case Law.SELECTION:
                assert kinds == {P, MAX, MIN}
                assert len(found) == 3
            case Law.LATTICE:
                assert kinds in ({MAX}, {MIN}, {MAX, MIN})
            case Law.NORMALISING:
                assert kinds <= {P}


def any_partial(sbps: tuple[Sbp, ...]) -> bool:
    return any(isinstance(sbp, Partial) for sbp in sbps)


# Planted faults


def planted(text: str, law: str = "") -> Callable[..., Rule]:
    return lambda name, shapes, **params: Rule(text, law)


PAIR = AxisSignature((S(1), S(0)), (P,))


@pytest.mark.parametrize(
    ("name", "rule", "wrong", "missing"),
    [
        ("relu", "... -> ... ; P -> P ; P(max) -> P(max) ; P(min) -> P(min)", AxisSignature((P,), (P,)), None),
        ("sigmoid", "... -> ... ; P(max) -> P(min) ; P(min) -> P(max)", AxisSignature((MAX,), (MIN,)), None),
        ("log", "... -> ... ; P* -> P*", AxisSignature((MAX,), (MAX,)), None),
        ("add", "..., ... -> ... ; P, B -> P", AxisSignature((P, B), (P,)), AxisSignature((P, P), (P,))),
        ("mul", "..., ... -> ... ; P, P -> P", AxisSignature((P, P), (P,)), AxisSignature((P, B), (P,))),
        ("div", "..., ... -> ... ; P, B -> P ; B, P -> P", AxisSignature((B, P), (P,)), None),
        ("maximum", "..., ... -> ... ; P*, P* -> P*", AxisSignature((P, P), (P,)), AxisSignature((B, MIN), (MIN,))),
        ("matmul", "m _, _ n -> m n ; P, B -> P ; B, P -> P", None, PAIR),
        ("matmul", "m k^max, k^max n -> m n", AxisSignature((S(1), S(0)), (MAX,)), PAIR),
        ("matmul", "m k*, k* n -> m n", AxisSignature((S(1), S(0)), (B,), "collective"), PAIR),
        ("softmax", "a b -> a b", AxisSignature((S(1),), (S(1),)), None),
        ("softmax", "a _ -> a _", None, AxisSignature((S(1),), (S(1),), "collective")),
        ("transpose", "a b -> a b", AxisSignature((S(0),), (S(0),)), AxisSignature((S(0),), (S(1),))),
        ("concat", "a b, a _ -> a b", AxisSignature((S(1), B), (S(1),)), None),
        ("slice", "a b -> a b ; P* -> P*", AxisSignature((S(1),), (S(1),)), None),
        ("embedding", "i..., v+ d -> i... d", AxisSignature((B, S(0)), (P,)), AxisSignature((B, P), (P,))),
    ],
)
def test_planted_faults_are_seen(
    name: str, rule: str, wrong: AxisSignature | None, missing: AxisSignature | None
) -> None:
    op = OPS[name]
    # The texts are for the first case, and for its sizes.
    first = Op(op.run, op.cases[:1], op.forms, op.shaped, resizes=False)
    (proof,) = prove(name, planted(rule), {name: first})
    assert not proof.ok
    assert wrong is None or wrong in proof.wrong
    assert missing is None or (missing.inputs, missing.outputs) in {(s.inputs, s.outputs) for s in proof.missing}


def test_a_maximum_is_not_a_sum() -> None:
    case = OPS["max"].cases[0]
    assert not holds(OPS["max"], case, AxisSignature((S(1),), (P,)), 2)
    assert holds(OPS["max"], case, AxisSignature((S(1),), (MAX,)), 2)
    assert not holds(OPS["max"], case, AxisSignature((S(1),), (MIN,)), 2)
    assert not holds(OPS["max"], case, AxisSignature((P,), (P,)), 2)


def test_a_mean_of_parts_needs_the_logical_size() -> None:
    case = Case(((6, 7),), {"axes": 1})
    for ranks in RANKS:
        assert not holds(OPS["mean"], case, AxisSignature((S(1),), (P,)), ranks)
        assert holds(OPS["mean"], case, AxisSignature((S(1),), (P,), "size"), ranks)


def test_uneven_parts_of_a_reshape_are_refused() -> None:
    merge, uneven = Case(((6, 5),), {"shape": (30,)}), Case(((7, 4),), {"shape": (28,)})
    signature = AxisSignature((S(0),), (S(0),))
    assert all(holds(OPS["reshape"], merge, signature, ranks) for ranks in RANKS)
    assert not any(holds(OPS["reshape"], uneven, signature, ranks) for ranks in RANKS)
    assert not holds(OPS["reshape"], Case(((30,),), {"shape": (6, 5)}), signature, 5)  # 30 splits by 5, 6 does not


def test_the_norm_of_parts_is_no_addend() -> None:
    """OneFlow 0.9 gives 44.998 here: it declares S -> P for a root of a sum."""
    norm = Op(lambda here, x: here.xp.sqrt(here.xp.sum(x * x)), (Case(((4, 6),)), Case(((12, 6),))))
    x = np.arange(16.0).reshape(4, 4)
    signature = AxisSignature((S(0),), (P,))
    parts = run_ranks(norm, Case(((4, 4),)), signature, [split_parts(x, S(0), 2)])
    assert math.isclose(assemble(parts, P), 44.998, rel_tol=1e-4)
    assert math.isclose(np.linalg.norm(x), 35.214, rel_tol=1e-4)
    (first, second) = prove("norm", planted("a+ b+ -> "), {"norm": norm})
    for proof in (first, second):
        assert proof.wrong == (signature, AxisSignature((S(1),), (P,)))
        assert proof.missing == ()
    (proof, _) = prove("norm", planted("_ _ -> ; P -> P"), {"norm": norm})
    assert proof.wrong == (AxisSignature((P,), (P,)),)


def test_a_case_that_tests_nothing_is_told() -> None:
    case = {"reshape": Op(OPS["reshape"].run, (Case(((5, 4),), {"shape": (20,)}),), shaped=True, resizes=False)}
    (proof,) = prove("reshape", ops=case)
    assert proof.untested == (AxisSignature((S(0),), (S(0),), even=True),)
    assert not proof.ok


# The prover's parts


def test_parts_go_together_again() -> None:
    x = np.random.default_rng(0).normal(size=(7, 2))
    parts = split_parts(x, S(0), 3)
    assert [part.shape for part in parts] == [(3, 2), (2, 2), (2, 2)]
    np.testing.assert_array_equal(assemble(parts, S(0)), x)
    assert assemble(parts[::-1], S(0)) is None
    assert [part.shape for part in split_parts(x, S(1), 3)] == [(7, 1), (7, 1), (7, 0)]
    assert assemble([x, x + 1], B) is None
    np.testing.assert_array_equal(assemble([x, x + 1], P), x + (x + 1))
    np.testing.assert_array_equal(assemble([x, x + 1], MAX), x + 1)
    assert np.isnan(assemble([x, np.full_like(x, np.nan)], MAX)).all()


def softmax(x: np.ndarray, axis: int = -1) -> np.ndarray:
    return np.exp(x) / np.exp(x).sum(axis, keepdims=True)


def losses(x: np.ndarray, labels: np.ndarray) -> np.ndarray:
    return -np.log(softmax(x)[(*np.indices(labels.shape), labels)])


WIDE = np.random.default_rng(1).normal(size=(4, 3, 5))
LABELS = np.random.default_rng(2).integers(3, size=(4, 3))


@pytest.mark.parametrize(
    ("name", "inputs", "params", "expected"),
    [
        ("mean", [WIDE], {"axes": (0, 2)}, WIDE.mean((0, 2))),
        ("max", [WIDE], {"axes": -1, "keepdims": True}, WIDE.max(-1, keepdims=True)),
        ("relu", [WIDE], {}, np.where(WIDE > 0, WIDE, 0)),
        ("sigmoid", [WIDE], {}, (np.tanh(WIDE / 2) + 1) / 2),
        ("silu", [WIDE], {}, WIDE * (np.tanh(WIDE / 2) + 1) / 2),
        ("gelu", [np.array([-1.0, 0.5, 2.0])], {}, np.array([-0.158655254, 0.345731231, 1.954499736])),
        ("rsqrt", [WIDE**2], {}, 1 / np.abs(WIDE)),
        ("softmax", [WIDE], {"axis": 1}, softmax(WIDE, 1)),
        ("log_softmax", [WIDE], {}, np.log(softmax(WIDE))),
        ("cross_entropy", [WIDE, LABELS], {}, losses(WIDE, LABELS)),
        ("cross_entropy", [WIDE, LABELS], {"reduction": "mean"}, losses(WIDE, LABELS).mean()),
        ("layer_norm", [WIDE], {}, (WIDE - WIDE.mean(-1, keepdims=True)) / np.sqrt(WIDE.var(-1, keepdims=True) + 1e-5)),
        ("gather", [WIDE, LABELS], {"axis": 1}, WIDE[:, LABELS]),
        ("embedding", [LABELS, WIDE[0]], {}, WIDE[0][LABELS]),
        ("one_hot", [LABELS], {"classes": 4}, np.eye(4)[LABELS]),
        ("matmul", [WIDE, WIDE], {"transpose_b": True}, np.einsum("bik,bjk->bij", WIDE, WIDE)),
        ("matmul", [WIDE, WIDE], {"transpose_a": True}, np.einsum("bki,bkj->bij", WIDE, WIDE)),
        ("slice", [WIDE], {"slices": (None, (1, 3))}, WIDE[:, 1:3]),
    ],
)
def test_the_reference_ops_compute_what_their_name_says(
    name: str, inputs: list[np.ndarray], params: dict[str, Any], expected: np.ndarray
) -> None:
    case = Case(tuple(x.shape for x in inputs), params)
    whole = AxisSignature((B,) * len(inputs), (B,))
    np.testing.assert_allclose(
        run_ranks(OPS[name], case, whole, [[x] for x in inputs])[0], expected, rtol=1e-7, atol=1e-9
    )


def test_the_command_prints_and_exits(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert main(["neg"]) == 0
    printed = capsys.readouterr().out
    assert "neg([6, 12])  ... -> ... ; P -> P" in printed
    assert '  proven    P("max") -> P("min")\n' in printed
    assert printed.splitlines()[-1] == "proven 13  wrong 0  missing 0  untested 0"
    monkeypatch.setitem(TABLE, "neg", Row(Law.LINEAR, "... -> ...", "P* -> P*"))
    assert main(["neg", "abs"]) == 1
    printed = capsys.readouterr().out
    assert '  wrong     P("max") -> P("max")\n' in printed
    assert '  missing   P("max") -> P("min")\n' in printed
    with pytest.raises(SystemExit, match="2"):
        main(["no_such_op"])
    assert "no such op: no_such_op" in capsys.readouterr().err


# Rules with parameters


@pytest.mark.parametrize(
    ("name", "shapes", "params", "text"),
    [
        ("sum", [(2, 3, 4)], {"axes": (0, -1)}, "a+ b c+ -> b ; P -> P"),
        ("sum", [(2, 3)], {"axes": 1, "keepdims": True}, "a b+ -> a _ ; P -> P"),
        ("sum", [()], {}, " -> ; P -> P"),
        ("min", [(2, 3)], {}, "a^min b^min -> ; P(min) -> P(min)"),
        ("matmul", [(3,), (3,)], {}, "k+, k+ -> ; P, B -> P ; B, P -> P"),
        ("matmul", [(3,), (3, 4)], {}, "k+, ... k+ n -> ... n ; P, B -> P ; B, P -> P"),
        ("matmul", [(2, 3), (4, 3)], {"transpose_b": True}, "... m k+, ... n k+ -> ... m n ; P, B -> P ; B, P -> P"),
        ("transpose", [(2, 3, 4)], {"perm": (0, -1, 1)}, "a b c -> a c b ; P* -> P*"),
        ("reshape", [(6, 5, 4)], {"shape": (30, 2, 2)}, "a% _ b% -> a% b% _ ; P* -> P*"),
        ("reshape", [(6, 1, 4)], {"shape": (1, -1, 4)}, "a _ b -> _ a b ; P* -> P*"),
        ("reshape", [(2, 0)], {"shape": (0, 3)}, "_ _ -> _ _ ; P* -> P*"),
        ("reshape", [(2, 0)], {"shape": (2, 0)}, "a b -> a b ; P* -> P*"),
        ("broadcast_to", [(2, 1)], {"shape": (5, 2, 7)}, "a _ -> _ a _ ; P* -> P*"),
        ("concat", [(2, 3)] * 3, {"axis": -1}, "a _, a _, a _ -> a _ ; P*, P*, P* -> P*"),
        ("slice", [(2, 3)], {"slices": ((0, 2), (1, None))}, "a _ -> a _ ; P* -> P*"),
        ("scale", [(2,)], {}, "... -> ... ; P -> P"),
        ("scale", [(2,)], {"scalar": 0.0}, "... -> ... ; P -> P"),
        ("scale", [(2,)], {"scalar": math.inf}, "... -> ..."),
        ("add_scalar", [(2,)], {}, "... -> ..."),
        ("pow_scalar", [(2,)], {"exponent": 0.5}, "... -> ..."),
        ("cast", [(2,)], {"source": "int32", "target": "float32"}, "... -> ..."),
        ("layer_norm", [(2, 3), (3,)], {}, "a b*, b* -> a b* ; B, P -> P"),
        ("cross_entropy", [(2, 3), (2,)], {"reduction": "sum"}, "n+... c*, n+... ->"),
    ],
)
def test_texts_of_rules_with_parameters(name: str, shapes: list[Any], params: dict[str, Any], text: str) -> None:
    assert str(rule_for(name, shapes, **params)) == " ".join(text.split())


@pytest.mark.parametrize(
    ("name", "shapes", "params", "message"),
    [
        ("matmull", [], {}, 'rule_for("matmull"): the table has no such op.\n  Mend: matmul or mul'),
        ("sum", [(2, 3)], {"axes": 2}, "sum: there is no tensor axis 2; the input has 2."),
        ("reshape", [(2, 3)], {"shape": (4, -1)}, "reshape: 6 elements do not fill the shape [4, -1]."),
        ("reshape", [(2, 3)], {"shape": (-1, -1)}, "reshape: 6 elements do not fill the shape [-1, -1]."),
        ("transpose", [(2, 3)], {"perm": (0, 0)}, "transpose: perm=(0, 0) is no order of 2 tensor axes."),
        ("broadcast_to", [(2, 3)], {"shape": (2, 4)}, "broadcast_to: no way to shape [2, 4]."),
        ("broadcast_to", [(2, 3)], {"shape": (3,)}, "broadcast_to: no way to shape [3]."),
        ("slice", [(2,)], {"slices": (None, None)}, "slice: 2 slices for 1 tensor axes."),
        ("cross_entropy", [(2, 3), (2,)], {"reduction": "max"}, 'reduction="max" is none of none, sum, mean.'),
    ],
)
def test_what_does_not_fit_an_op_is_refused(name: str, shapes: list[Any], params: dict[str, Any], message: str) -> None:
    with pytest.raises(SbpError) as error:
        rule_for(name, shapes, **params)
    assert message in str(error.value)


# Gradients: the local vjp that jax makes, run on every rank, gives gradients laid out by the dual rule


class JaxNumpy:
    """jax.numpy, with the error function."""

    def __getattr__(self, name: str) -> Any:
        return jax.scipy.special.erf if name == "erf" else getattr(jnp, name)


def finish(result: Any) -> Any:
    """Runs a local op to its end; its collectives go over the axis that vmap names."""
    if not isinstance(result, GeneratorType):
        return result
    sent = None
    try:
        while True:
            kind, value = result.send(sent)
            # The largest value only shifts exponents; a maximum over ranks has no derivative of its own.
            sent = lax.psum(value, "ranks") if kind == "sum" else lax.pmax(lax.stop_gradient(value), "ranks")
    except StopIteration as stop:
        return stop.value


def vjp_on_ranks(
    op: Op, case: Case, signature: AxisSignature, output_shape: tuple[int, ...], ranks: int
) -> Callable[..., Any]:
    """One rank's result and local vjp, mapped over the ranks; parts and cotangents are stacked."""
    target = list(output_shape)
    if isinstance(signature.outputs[0], Split):
        target[signature.outputs[0].axis] //= ranks

    def on_rank(rank: Any, parts: list[Any], cotangent: Any) -> Any:
        starts = tuple(
            tuple(rank * (n // ranks) if sbp == S(i) else 0 for i, n in enumerate(shape))
            for shape, sbp in zip(case.shapes, signature.inputs)
        )
        here = Here(JaxNumpy(), signature.local, case.shapes, starts, tuple(target))
        floats = [i for i, part in enumerate(parts) if part.dtype == jnp.float32]

        def run(*values: Any) -> Any:
            given = [values[floats.index(i)] if i in floats else part for i, part in enumerate(parts)]
            return finish(op.run(here, *given, **case.params))

        result, vjp = jax.vjp(run, *[parts[i] for i in floats])
        return result, dict(zip(floats, vjp(cotangent)))

    return lambda parts, cotangent: jax.vmap(on_rank, axis_name="ranks")(jnp.arange(ranks), parts, cotangent)


def draw(random: np.random.Generator, case: Case, i: int, positive: bool) -> np.ndarray:
    kind, shape = case.kind(i), case.shapes[i]
    if isinstance(kind, tuple):
        return random.integers(case.shapes[kind[0]][kind[1]], size=shape).astype(np.int32)
    if kind == "bool":
        return random.random(shape) < 0.5
    value = random.normal(size=shape)
    return (np.abs(value) + 0.5 if positive else value).astype(np.float32)


def cut(random: np.random.Generator, value: np.ndarray, sbp: Sbp, ranks: int) -> np.ndarray:
    """Stacked parts of a value; the addends of a P are random."""
    if sbp != P:
        return np.stack(split_parts(value, sbp, ranks))
    addends = random.normal(size=(ranks - 1, *value.shape)).astype(value.dtype)
    return np.concatenate([addends, (value - addends.sum(0))[None]])


SMOOTH = [name for name, op in OPS.items() if op.smooth]
CASE = {"matmul": 1, "mean": 1, "sum": 1, "gather": 1, "cross_entropy": 2, "layer_norm": 2}
"""Which case, where it is not the first."""


@pytest.mark.parametrize("name", SMOOTH)
def test_gradients_follow_the_dual_rule(name: str) -> None:
    op, case, ranks = OPS[name], OPS[name].cases[CASE.get(name, 0)], 2
    random = np.random.default_rng(3)
    values = [draw(random, case, i, name in ("log", "sqrt", "rsqrt", "pow")) for i in range(len(case.shapes))]
    whole = AxisSignature((B,) * len(values), (B,))
    shape = run_ranks(op, case, whole, [[v] for v in values], case.params.get("shape", ()))[0].shape
    cotangent = random.normal(size=shape).astype(np.float32)
    found = rule_for(name, case.shapes, **case.params).signatures(case.shapes)
    fitting = [s for s in found if not s.even or s.splits_evenly(case.shapes, [shape], ranks)]
    signatures = [s for s in fitting[1:] if s.dual() is not None]
    runs = [vjp_on_ranks(op, case, whole, shape, 1), *(vjp_on_ranks(op, case, s, shape, ranks) for s in signatures)]
    arguments = [([v[None] for v in values], cotangent[None])]
    for s in signatures:
        parts = [cut(random, v, sbp, ranks) for v, sbp in zip(values, s.inputs)]
        arguments.append((parts, cut(random, cotangent, dual(s.outputs[0]), ranks)))

    logical, *results = jax.jit(lambda all: [run(*one) for run, one in zip(runs, all)])(arguments)
    for s, (result, gradients) in zip(signatures, results):
        check(result, s.outputs[0], logical[0], f"{name} {s}")
        for i, gradient in gradients.items():
            check(gradient, dual(s.inputs[i]), logical[1][i], f"{name} {s}, input {i}")


def check(parts: Any, sbp: Sbp, logical: Any, what: str) -> None:
    """That stacked parts are those of a value. The bound is for float32 sums of up to a thousand products."""
    value = assemble(list(np.asarray(parts)), sbp)
    assert value is not None, what
    np.testing.assert_allclose(value, logical[0], rtol=2e-4, atol=2e-4, err_msg=what)


@pytest.mark.parametrize(("sbp", "times"), [(P, 1), (B, 2)])
def test_a_cotangent_of_b_is_seen_where_p_is_right(sbp: Sbp, times: int) -> None:
    """A result of B has a cotangent of P; with B gradients are as many times too large as there are ranks."""
    case = Case(((6, 12), (6,)), {}, ("float", (0, 1)))
    random = np.random.default_rng(4)
    logits, labels = draw(random, case, 0, False), draw(random, case, 1, False)
    run = vjp_on_ranks(OPS["cross_entropy"], case, AxisSignature((S(1), B), (B,), "collective"), (6,), 2)
    parts = [cut(random, logits, S(1), 2), cut(random, labels, B, 2)]
    gradient = jax.jit(run)(parts, cut(random, np.ones(6, np.float32), sbp, 2))[1][0]
    expected = times * (softmax(logits) - np.eye(12)[labels])
    np.testing.assert_allclose(assemble(list(np.asarray(gradient)), S(1)), expected, rtol=1e-4, atol=1e-5)
