# ruff: noqa: E501 (messages stand here whole, as the user reads them)
"""Parameter rules: the first that matches wins, whatever its form; dead, shadowed and unfit rules are named."""

from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from oneflax import B, P, PlanError, S
from oneflax._patterns import Pattern
from oneflax.flax.rules import LeafLayout, Rule, lay_out, read_rules
from oneflax.sbp.grid import placement

GRID = placement("cpu", [[0, 1], [2, 3]], axes=("data", "model"))
SHAPES = {
    "blocks/0/up/kernel": (4, 8),
    "blocks/0/up/bias": (8,),
    "blocks/0/down/kernel": (8, 4),
    "blocks/1/up/kernel": (4, 8),
    "head/kernel": (4, 6),
}
LEAVES = [(path, jax.ShapeDtypeStruct(shape, np.float32)) for path, shape in SHAPES.items()]


def sbp_by_path(rules: Any) -> dict[str, tuple[Any, ...]]:
    return {leaf.path: tuple(leaf.nd_sbp) for leaf in lay_out(read_rules(rules, "params"), LEAVES, GRID)}


def test_the_first_rule_that_matches_wins() -> None:
    rules = [("blocks/0/**/kernel", {"model": S(0)}), ("up/kernel", {"model": S(-1)}), ("blocks/*", {"data": S(0)})]
    assert sbp_by_path(rules) == {
        "blocks/0/up/kernel": (B, S(0)),
        "blocks/0/up/bias": (S(0), B),
        "blocks/0/down/kernel": (B, S(0)),
        "blocks/1/up/kernel": (B, S(-1)),
        "head/kernel": (B, B),
    }


@pytest.mark.parametrize("sbp", [{"model": S(1)}, {"model": "S(1)"}, {1: S(1)}, (B, S(1)), [B, "S(1)"], "(B, S(1))"])
def test_every_form_of_an_sbp(sbp: Any) -> None:
    assert sbp_by_path({"up/kernel": sbp})["blocks/1/up/kernel"] == (B, S(1))


def test_what_a_layout_says() -> None:
    rules = read_rules([("head", {"model": S(-1), "data": B})], "params")
    *_, last = lay_out(rules, LEAVES, GRID)
    assert last == LeafLayout("head/kernel", (4, 6), np.float32, last.nd_sbp, "'head' -> {model: S(-1), data: B}")
    assert lay_out(rules, LEAVES, GRID)[0].rule == "default"
    assert str(Rule(Pattern("head"), (B, B))) == "'head' -> (B, B)"


@pytest.mark.parametrize("nothing", [None, (), [], {}])
def test_no_rules(nothing: Any) -> None:
    assert read_rules(nothing, "params") == ()


NAMES = st.sampled_from(["a", "b", "c"])
TREES = st.lists(st.lists(NAMES, min_size=1, max_size=3).map("/".join), min_size=1, max_size=6, unique=True)
RULES = st.lists(
    st.tuples(st.sampled_from(["a", "^b", "c$", "a/*", "**/c", "b/a"]), st.sampled_from([0, 1])), max_size=4
)


@given(TREES, RULES)
def test_every_rule_decides_something_or_is_an_error(paths: list[str], rules: list[tuple[str, int]]) -> None:
    leaves = [(path, jax.ShapeDtypeStruct((2, 2), np.float32)) for path in paths]
    winners = [next((i for i, (p, _) in enumerate(rules) if Pattern(p).matches(path)), None) for path in paths]
    read = read_rules([(pattern, {"model": S(axis)}) for pattern, axis in rules], "params")
    idle = set(range(len(rules))) - set(winners)
    if idle:
        with pytest.raises(PlanError) as caught:
            lay_out(read, leaves, GRID)
        assert len(caught.value.faults) == len(idle)
        return
    expected = [(B, B) if winner is None else (B, S(rules[winner][1])) for winner in winners]
    assert [tuple(leaf.nd_sbp) for leaf in lay_out(read, leaves, GRID)] == expected


UNREADABLE: list[tuple[Any, str]] = [
    ("kernel", """\
Plan(params=): rules are a list of pairs (pattern, sbp), not 'kernel'.
  Mend: params=[(r"q_proj/kernel", {"model": S(-1)})]"""),
    (7, """\
Plan(params=): rules are a list of pairs (pattern, sbp), not 7.
  Mend: params=[(r"q_proj/kernel", {"model": S(-1)})]"""),
    (["kernel", ("(a", B), ("b", B)], """\
Plan(params=): 2 faults
1. Plan(params=): rule 1 is not a pair (pattern, sbp) but 'kernel'.
     Mend: params=[(r"q_proj/kernel", {"model": S(-1)})]
2. Plan(params=) rule 2: '(a' is no regular expression: missing ), unterminated subpattern at position 0.
     Mend: '\\\\(a', or a glob"""),
]  # fmt: skip


@pytest.mark.parametrize(("rules", "message"), UNREADABLE)
def test_rules_that_cannot_be_read(rules: Any, message: str) -> None:
    with pytest.raises(PlanError) as caught:
        read_rules(rules, "params")
    assert str(caught.value) == message


UNFIT: list[tuple[Any, str]] = [
    ([("atn/kernel", B)], """\
Plan(params=): 2 faults
1. Plan(params=) rule 1 'atn/kernel': 1 sbp for 2 placement axes.
     nd-sbp B    placement cpu[[0, 1], [2, 3]] (data=2, model=2)
     Mend: ("atn/kernel", (B, B)).
2. Plan(params=) rule 1 'atn/kernel': matches none of the 5 paths.
     paths: head/kernel, blocks/0/down/kernel, blocks/1/up/kernel
     Mend: ("head/kernel", B), or drop the rule"""),
    ([("head", (B, B)), ("head/kernel", (B, B))], """\
Plan(params=) rule 2 'head/kernel': is shadowed: earlier rules take the one path that it matches.
  earlier rules: 1 'head'    first path: head/kernel
  Mend: move it before rule 1, or drop it"""),
    ([("up", (B, S(0))), ("kernel", (B, B)), ("blocks/*", (B, B))], """\
Plan(params=) rule 3 'blocks/*': is shadowed: earlier rules take all 4 paths that it matches.
  earlier rules: 1 'up', 2 'kernel'    first path: blocks/0/up/kernel
  Mend: move it before rule 1, or drop it"""),
    ([("head", {"modle": S(0)})], """\
Plan(params=) rule 1 'head': there is no placement axis 'modle'; the placement axes are data, model.
  placement cpu[[0, 1], [2, 3]] (data=2, model=2)
  Mend: use 'model'."""),
    ([("head", (B, S(0), B))], """\
Plan(params=) rule 1 'head': 3 sbp for 2 placement axes.
  nd-sbp (B, S(0), B)    placement cpu[[0, 1], [2, 3]] (data=2, model=2)
  Mend: ("head", (B, S(0)))."""),
    ([("head", {"model": 1})], """\
Plan(params=) rule 1 'head': an sbp is S(0), S(-1), B, P, P("max") or P("min"), not int.
  given 1
  Mend: ("head", (S(0), B)), ("head", "(S(0), B)") or ("head", {"data": S(0)})."""),
    ([("head", {"model": S(2)})], """\
Plan(params=) rule 1 'head': S(2) over placement axis 'model' (size 2): there is no tensor axis 2; they are 0 to 1.
  head/kernel: float32[4, 6] (B, S(2)) placement cpu[[0, 1], [2, 3]] (data=2, model=2)
  Mend: S(0) to S(1), or B."""),
    ([("bias", {"model": S(-2)})], """\
Plan(params=) rule 1 'bias': S(-2) over placement axis 'model' (size 2): there is no tensor axis -2; the only one is 0.
  blocks/0/up/bias: float32[8] (B, S(-2)) placement cpu[[0, 1], [2, 3]] (data=2, model=2)
  Mend: S(0) or B."""),
    ([("head", {"data": S(1), "model": S(1)})], """\
Plan(params=) rule 1 'head': tensor axis 1 of head/kernel (size 6) does not split evenly over placement axis 'data' (size 2) and placement axis 'model' (size 2), 4 parts together.
  head/kernel: float32[4, 6] (S(1), S(1)) placement cpu[[0, 1], [2, 3]] (data=2, model=2)
  Mend: ("head", (S(1), B)), or pad tensor axis 1 to 8."""),
    ([("head", {"model": P})], """\
Plan(params=) rule 1 'head': P over placement axis 'model' (size 2) is not a sharding: every rank holds an addend as large as the whole, and this call gives no such storage.
  head/kernel: float32[4, 6] (B, P) placement cpu[[0, 1], [2, 3]] (data=2, model=2)
  Mend: ("head", (B, B)) for the value itself."""),
    ([("hed", B), ("head", {"modle": S(0)}), ("up", (B, S(1)))], """\
Plan(params=): 4 faults
1. Plan(params=) rule 1 'hed': 1 sbp for 2 placement axes.
     nd-sbp B    placement cpu[[0, 1], [2, 3]] (data=2, model=2)
     Mend: ("hed", (B, B)).
2. Plan(params=) rule 2 'head': there is no placement axis 'modle'; the placement axes are data, model.
     placement cpu[[0, 1], [2, 3]] (data=2, model=2)
     Mend: use 'model'.
3. Plan(params=) rule 1 'hed': matches none of the 5 paths.
     paths: head/kernel
     Mend: ("head/kernel", B), or drop the rule
4. Plan(params=) rule 3 'up': S(1) over placement axis 'model' (size 2): there is no tensor axis 1; the only one is 0.
     blocks/0/up/bias: float32[8] (B, S(1)) placement cpu[[0, 1], [2, 3]] (data=2, model=2)
     Mend: S(0) or B."""),
]  # fmt: skip


@pytest.mark.parametrize(("rules", "message"), UNFIT)
def test_rules_that_do_not_fit(rules: Any, message: str) -> None:
    with pytest.raises(PlanError) as caught:
        lay_out(read_rules(rules, "params"), LEAVES, GRID)
    assert str(caught.value) == message
