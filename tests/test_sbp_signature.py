"""Sbp and nd-sbp as values and as text."""

import copy
import os
import pickle
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import oneflax as flow
from oneflax.sbp import (
    B,
    Broadcast,
    NdSbp,
    P,
    Partial,
    S,
    SbpError,
    Split,
    as_nd_sbp,
    parse_nd_sbp,
    parse_sbp,
    placement,
)

GRID = placement("cpu", [[0, 1], [2, 3]], axes=("data", "model"))
LINE = placement("cpu", [0, 1])

sbps = st.one_of(
    st.integers(-(10**9) + 1, 10**9 - 1).map(S), st.just(B), st.sampled_from([P, P("sum"), P("max"), P("min")])
)
nd_sbps = st.lists(sbps, min_size=1, max_size=4).map(lambda items: NdSbp(tuple(items)))
blanks = st.text(" \t\n", max_size=3)


def spread(text: str, blank: str) -> str:
    """Puts blanks around every sign that is not part of a word."""
    return "".join(f"{blank}{c}{blank}" if c in "()," else c for c in text)


def test_values_have_the_text_users_type() -> None:
    assert [str(x) for x in (S(0), S(-1), B, P, P("max"), P("min"), P("sum"))] == [
        "S(0)",
        "S(-1)",
        "B",
        "P",
        'P("max")',
        'P("min")',
        "P",
    ]
    assert repr(NdSbp((S(0), B))) == str(NdSbp((S(0), B))) == "(S(0), B)"
    assert str(NdSbp((S(0),))) == "S(0)"


def test_equal_values_are_equal_and_different_ones_are_not() -> None:
    values = [S(0), S(1), S(-1), B, P, P("max"), P("min")]
    for i, a in enumerate(values):
        for j, b in enumerate(values):
            assert (a == b) == (i == j)
    assert len({*values, *copy.deepcopy(values)}) == len(values)
    assert P("sum") == P == Partial()
    assert Broadcast() == B


def test_s_is_the_class_split() -> None:
    assert S is Split
    assert isinstance(S(0), S)
    assert not isinstance(B, S)
    assert S(np.int32(1)) == S(1)  # type: ignore[arg-type]
    assert type(S(np.int64(2)).axis) is int  # type: ignore[arg-type]


def test_oneflow_spellings_are_the_same_values() -> None:
    assert flow.S is S
    assert flow.B is B
    assert flow.P is P
    assert flow.sbp.split(0) == flow.sbp.split(axis=0) == flow.sbp.split(dim=0) == S(0)
    assert flow.sbp.broadcast is flow.sbp.broadcast() is B
    assert flow.sbp.partial_sum is flow.sbp.partial_sum() is P
    for wrong in ({}, {"axis": 0, "dim": 0}):
        with pytest.raises(TypeError, match="takes the tensor axis once"):
            flow.sbp.split(**wrong)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("S(0)", S(0)),
        ("  S ( -1 )\n", S(-1)),
        ("B", B),
        ("P", P),
        ('P("max")', P("max")),
        ("P('min')", P("min")),
        ("P(max)", P("max")),
        ("P(sum)", P),
        ("split(0)", S(0)),
        ("split(dim=1)", S(1)),
        ("split( axis = 1 )", S(1)),
        ("oneflow.sbp.split(dim=0)", S(0)),
        ("flow.sbp.broadcast", B),
        ("broadcast", B),
        ("sbp.partial_sum", P),
    ],
)
def test_text_forms_of_one_sbp(text: str, value: object) -> None:
    assert parse_sbp(text) == value


@pytest.mark.parametrize(
    "text", ["", "S", "S()", "S(x)", "S[0]", "S(1 2)", "S(0.5)", "s(0)", "P(max", 'P("max)', "S(0)B", "S(0, 1)", "BB"]
)
def test_other_text_is_refused(text: str) -> None:
    with pytest.raises(SbpError, match="is not an sbp"):
        parse_sbp(text)


@pytest.mark.parametrize(
    ("text", "items"),
    [
        ("(S(0), B)", (S(0), B)),
        ("[S(0), B]", (S(0), B)),
        ("S(0), B", (S(0), B)),
        ("(S(0),)", (S(0),)),
        ("(S(0))", (S(0),)),
        ("S(0)", (S(0),)),
        ("(B, S(-1), P)", (B, S(-1), P)),
        ("(oneflow.sbp.split(dim=0), oneflow.sbp.broadcast)", (S(0), B)),
        ("(oneflow.sbp.split(dim=0),)", (S(0),)),
        (' ( P("max") ,B ) ', (P("max"), B)),
    ],
)
def test_text_forms_of_an_nd_sbp(text: str, items: tuple[object, ...]) -> None:
    assert parse_nd_sbp(text).items == items


@given(sbps, blanks)
def test_text_of_an_sbp_parses_back(value: object, blank: str) -> None:
    assert parse_sbp(str(value)) == value
    assert parse_sbp(spread(repr(value), blank)) == value
    assert eval(repr(value), {"S": S, "B": B, "P": P}) == value


@given(nd_sbps, blanks)
def test_text_of_an_nd_sbp_parses_back(value: NdSbp, blank: str) -> None:
    assert parse_nd_sbp(str(value)) == value
    assert parse_nd_sbp(spread(str(value), blank)) == value
    assert parse_nd_sbp(str(value.items)) == value


@given(st.text(max_size=12) | st.text("SBP(0), -maxsumplit", max_size=16))
def test_any_text_is_read_or_refused_with_our_error(text: str) -> None:
    try:
        value = parse_nd_sbp(text)
    except SbpError:
        return
    assert parse_nd_sbp(str(value)) == value


def test_nd_sbp_reads_like_a_tuple() -> None:
    value = NdSbp((S(0), B))
    assert list(value) == [S(0), B]
    assert (value[0], value[-1], len(value)) == (S(0), B, 2)
    first, second = value
    assert (first, second) == (S(0), B)
    assert B in value
    assert value == (S(0), B)
    assert value != (S(0), P)
    assert value != NdSbp((B, S(0)))
    assert value != [S(0), B]
    assert {value: 1}[(S(0), B)] == 1  # type: ignore[index]
    with pytest.raises(AttributeError):
        value.items = (B,)  # type: ignore[misc]


@given(nd_sbps)
def test_copies_are_equal(value: NdSbp) -> None:
    for other in (copy.copy(value), copy.deepcopy(value), pickle.loads(pickle.dumps(value))):
        assert other == value
        assert hash(other) == hash(value)


def test_pickled_values_keep_their_place_in_a_dict_of_another_process() -> None:
    # Text hashes differ from process to process; a hash that travelled would lose the key.
    things = {NdSbp((P("max"), S(0))): 1, GRID: 2}
    code = (
        "import pickle, sys; from oneflax.sbp import NdSbp, P, S, placement; d = pickle.loads(sys.stdin.buffer.read());"
        "print(d[NdSbp((P('max'), S(0)))], d[placement('cpu', [[0, 1], [2, 3]], axes=('data', 'model'))])"
    )
    for seed in ("1", "2"):
        env = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        done = subprocess.run([sys.executable, "-c", code], input=pickle.dumps(things), env=env, capture_output=True)
        assert done.stdout.split() == [b"1", b"2"], done.stderr.decode()


def test_resolve_makes_tensor_axes_non_negative() -> None:
    assert NdSbp((S(-1), B, S(-3), P)).resolve(3) == (S(2), B, S(0), P)
    value = NdSbp((S(0), B))
    assert value.resolve(1) is value


@pytest.mark.parametrize(
    "value",
    [
        NdSbp((B, S(-1))),
        (B, S(-1)),
        [B, S(-1)],
        ("B", "S(-1)"),
        ["broadcast", S(-1)],
        "(B, S(-1))",
        "B, S(-1)",
        {"model": S(-1)},
        {"model": "S(-1)"},
        {"data": B, "model": S(-1)},
        {1: S(-1)},
        {-1: S(-1)},
    ],
)
def test_every_form_of_an_nd_sbp_is_read(value: object) -> None:
    read = as_nd_sbp(value, GRID)
    assert type(read) is NdSbp
    assert read == (B, S(-1))


def test_one_sbp_is_enough_for_one_placement_axis() -> None:
    assert as_nd_sbp(S(0), LINE) == as_nd_sbp("S(0)", LINE) == as_nd_sbp((S(0),), LINE) == (S(0),)
    assert as_nd_sbp({}, GRID) == (B, B)
    assert as_nd_sbp({"axis0": P}, LINE) == (P,)


def test_an_nd_sbp_is_not_copied() -> None:
    value = NdSbp((B, P))
    assert as_nd_sbp(value, GRID) is value


def test_signatures_and_placements_load_no_jax_and_no_numpy() -> None:
    code = (
        "import sys; from oneflax.sbp import S, placement, as_nd_sbp, part_shape, check_layout;"
        "assert part_shape((8,), S(0), placement('tpu', [4, 5])) == (4,); print({'jax', 'numpy'} & set(sys.modules))"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert done.stdout.strip() == "set()", done.stderr
