"""Rules in index notation: what they read as, which signatures they give, and what is refused."""

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oneflax.sbp import AxisSignature, B, P, Partial, Rule, S, SbpError, dual

MATMUL = "m k+, k+ n -> m n ; P, B -> P ; B, P -> P"


def texts(rule: str, *shapes: tuple[int, ...]) -> list[str]:
    """The signatures of a rule, after the all-B one, which is always first."""
    first, *rest = Rule(rule).signatures(shapes)
    assert {*first.inputs, *first.outputs} == {B}
    return [str(signature) for signature in rest]


def test_a_shared_index_splits_everywhere_it_stands() -> None:
    assert texts(MATMUL, (4, 6), (6, 8)) == [
        "S(0), B -> S(0)",
        "S(1), S(0) -> P",
        "B, S(1) -> S(1)",
        "P, B -> P",
        "B, P -> P",
    ]


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        ("a k+ -> a", ["S(0) -> S(0)", "S(1) -> P"]),
        ("a k+/ -> a", ["S(0) -> S(0)", "S(1) -> P [size]"]),
        ("a k^max -> a", ["S(0) -> S(0)", 'S(1) -> P("max")']),
        ("a k^min -> a", ["S(0) -> S(0)", 'S(1) -> P("min")']),
        ("a k@+ -> a", ["S(0) -> S(0)", "S(1) -> P [offset]"]),
        ("a k@ -> a k", ["S(0) -> S(0)", "S(1) -> S(1) [offset]"]),
        ("a k* -> a", ["S(0) -> S(0)", "S(1) -> B [collective]"]),
        ("a k* -> a k", ["S(0) -> S(0)", "S(1) -> S(1) [collective]"]),
        ("a k% -> k a", ["S(0) -> S(1)", "S(1) -> S(0) [even]"]),
        ("a _ -> _ a", ["S(0) -> S(1)"]),
        ("a k+ -> a, a k", ["S(0) -> S(0), S(0)", "S(1) -> P, S(1)"]),
        ("a _ -> a _ ; P* -> P*", ["S(0) -> S(0)", "P -> P", 'P("max") -> P("max")', 'P("min") -> P("min")']),
        ("a _ -> a _ ; P(max) -> P(min)", ["S(0) -> S(0)", 'P("max") -> P("min")']),
        ("_ _ -> ", []),
    ],
)
def test_marks_and_clauses(rule: str, expected: list[str]) -> None:
    assert texts(rule, (4, 6)) == expected


def test_a_mark_may_stand_at_any_place_of_its_index() -> None:
    assert Rule("m k+, k n -> m n").signatures([(2, 3), (3, 4)]) == Rule("m k, k+ n -> m n").signatures(
        [(2, 3), (3, 4)]
    )


def test_dots_broadcast_as_in_numpy() -> None:
    assert texts("..., ... -> ...", (6, 12), (18, 1, 12)) == [
        "S(0), B -> S(1)",
        "S(1), S(2) -> S(2)",
        "B, S(0) -> S(0)",
    ]
    assert texts("..., ... -> ...", (6,), ()) == ["S(0), B -> S(0)"]
    assert texts("..., ... -> ...", (), ()) == []
    # Where all have size 1 nothing is stretched, so all are split.
    assert texts("..., ... -> ...", (1,), (1,)) == ["S(0), S(0) -> S(0)"]
    assert texts("..., ... -> ...", (0,), (1,)) == ["S(0), B -> S(0)"]


def test_runs_with_names_are_apart() -> None:
    assert texts("i..., v@+ d -> i... d", (2, 3), (5, 7)) == [
        "S(0), B -> S(0)",
        "S(1), B -> S(1)",
        "B, S(0) -> P [offset]",
        "B, S(1) -> S(2)",
    ]
    assert texts("n+... c*, n+... -> ", (2, 3, 5), (2, 3)) == [
        "S(0), S(0) -> P",
        "S(1), S(1) -> P",
        "S(2), B -> B [collective]",
    ]
    assert texts("... m k+, ... k+ n -> ... m n", (5, 1, 4, 6), (7, 6, 8)) == [
        "S(0), B -> S(0)",
        "B, S(0) -> S(1)",
        "S(2), B -> S(2)",
        "S(3), S(1) -> P",
        "B, S(2) -> S(3)",
    ]


def test_repeats_are_dropped() -> None:
    assert texts("a -> a ; P -> P ; P* -> P*", (4,)) == [
        "S(0) -> S(0)",
        "P -> P",
        'P("max") -> P("max")',
        'P("min") -> P("min")',
    ]


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ("m k, k n -> m n", "position 2: index k is not in output 0: mark it +, +/, ^max, ^min, @+ or *, or write _."),
        ("... k% -> ...", "position 4: index k is not in output 0: mark it +, +/, ^max, ^min, @+ or *, or write _."),
        ("..., a -> a", "position 0: index ... is not in output 0: mark it +, +/, ^max, ^min, @+ or *, or write _."),
        ("a -> a b", "position 7: index b is in no input: write _ for it."),
        ("a -> ... a", "position 5: index ... is in no input: write _ for it."),
        ("a+ -> a", "position 0: index a is in every output, so + means nothing."),
        ("a a -> a", "position 2: index a stands twice in one term."),
        ("a... b... -> a... b...", 'position 5: a second "..." in one term.'),
        ("a..., a -> a...", "position 6: a is one index and a... a run: give them two names."),
        ("a+, a* -> ", "position 4: index a is marked + before and * here."),
        ("a K -> a", 'position 2: "K" is no index, no "..." and no "_".'),
        ("a k^sum -> a", 'position 2: "k^sum" is no index, no "..." and no "_".'),
        ("", 'position 0: one "->" is needed before here, and there are 0.'),
        ("a -> a -> a", 'position 11: one "->" is needed before here, and there are 2.'),
        ("a -> a ;", 'position 8: one "->" is needed before here, and there are 0.'),
        ("a -> a ; B -> P", "position 9: a clause has a P among its inputs."),
        ("a -> a ; S(0) -> P", 'position 9: "S(0)" is none of B, P, P(max), P(min) and P*.'),
        ("a -> a ; P -> Q", 'position 14: "Q" is none of B, P, P(max), P(min) and P*.'),
        ("a -> a ; P, P -> P", "position 9: the formula has 1 inputs, the clause 2."),
        ("a -> a ; P P -> P", "position 11: one sbp is needed between commas in a clause."),
    ],
)
def test_faults_in_the_text_have_a_position(rule: str, message: str) -> None:
    with pytest.raises(SbpError) as error:
        Rule(rule)
    text = " ".join(rule.split())
    assert str(error.value) == f'rule "{text}": {message}'


def test_shapes_that_do_not_fit_are_all_told_at_once() -> None:
    with pytest.raises(SbpError) as error:
        Rule("m k+, k+ n -> m n").signatures([(2, 3, 4), (4,)])
    assert str(error.value).splitlines()[:4] == [
        'rule "m k+, k+ n -> m n": 2 faults',
        '1. rule "m k+, k+ n -> m n": input 0 has 3 tensor axes; it needs 2.',
        "     input 0: [2, 3, 4]    input 1: [4]",
        '2. rule "m k+, k+ n -> m n": input 1 has 1 tensor axes; it needs 2.',
    ]
    for rule, shapes, fault in [
        ("m k+, k+ n -> m n", [(2, 3), (4, 5)], "index k has the sizes 3 and 4."),
        ("..., ... -> ...", [(2, 3), (2, 4)], "index ... has the sizes 3 and 4."),
        ("i..., i... -> i...", [(0,), (4,)], "index i... has the sizes 0 and 4."),
        ("... a b -> ... a b", [(3,)], "input 0 has 1 tensor axes; it needs at least 2."),
        ("a -> a", [(2,), (2,)], "2 shapes for 1 inputs."),
    ]:
        with pytest.raises(SbpError) as error:
            Rule(rule).signatures(shapes)
        assert error.value.faults[0].what == fault


def test_a_rule_is_a_value_with_a_text() -> None:
    rule = Rule("  m   k+,k+ n->m n;P,B->P ", law="MULTILINEAR")
    assert rule.text == str(rule) == "m k+,k+ n->m n;P,B->P"
    assert repr(rule) == "Rule('m k+,k+ n->m n;P,B->P', law='MULTILINEAR')"
    assert Rule(str(rule), rule.law) == rule == pickle.loads(pickle.dumps(rule))
    assert hash(Rule(MATMUL)) == hash(Rule(MATMUL))
    assert Rule(MATMUL) != Rule(MATMUL, law="LINEAR")
    assert rule.arity == (2, 1)
    assert (rule.collective, Rule("a* -> a").collective) == (False, True)


def test_dual() -> None:
    assert [dual(sbp) for sbp in (S(1), B, P)] == [S(1), P, B]
    with pytest.raises(SbpError, match="has no dual"):
        dual(Partial("max"))
    split_k = AxisSignature((S(1), S(0)), (P,))
    assert split_k.dual() == AxisSignature((B,), (S(1), S(0)))
    columns = AxisSignature((B, S(1)), (S(1),), local="collective", even=True)
    assert columns.dual() == AxisSignature((S(1),), (P, S(1)), local="collective", even=True)
    assert AxisSignature((S(1),), (Partial("max"),)).dual() is None


def test_even_splits() -> None:
    signature = AxisSignature((S(0), B), (S(1),), even=True)
    assert signature.splits_evenly([(6, 5), (7,)], [(5, 4)], 2)
    assert not signature.splits_evenly([(6, 5), (7,)], [(5, 4)], 3)
    assert not signature.splits_evenly([(6, 5), (7,)], [(5, 4)], 4)
    assert (signature.collective, AxisSignature((B,), (B,), "collective").collective) == (False, True)


names = st.lists(st.sampled_from("abcdefg"), min_size=1, max_size=5, unique=True)


@given(names, st.data())
def test_every_axis_of_a_pure_permutation_moves_with_its_split(axes: list[str], data: st.DataObject) -> None:
    moved = data.draw(st.permutations(axes))
    found = Rule(f"{' '.join(axes)} -> {' '.join(moved)}").signatures([tuple(range(2, 2 + len(axes)))])
    expected = [((S(i),), (S(moved.index(name)),)) for i, name in enumerate(axes)]
    assert [(s.inputs, s.outputs) for s in found[1:]] == expected
