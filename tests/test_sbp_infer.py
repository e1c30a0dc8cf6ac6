"""The choice of a signature: worked out by hand for inputs as they lie."""

import pytest

from oneflax.sbp import parse_nd_sbp, rule_for
from oneflax.sbp.infer import Tensors, infer

MATMUL = ("matmul", [(8, 16), (16, 32)], (8, 32))
ADD = ("add", [(8, 16), (8, 16)], (8, 16))
RELU = ("relu", [(8, 16)], (8, 16))
CASES = [
    # Column, then row parallel: nothing moves, and the contraction leaves P.
    (MATMUL, ["(S(0), B)", "(B, S(1))"], (4, 2), "(S(0), B), (B, S(1)) -> (S(0), S(1))", ()),
    (MATMUL, ["(S(0), S(1))", "(B, S(0))"], (4, 2), "(S(0), S(1)), (B, S(0)) -> (S(0), P)", ()),
    # B is P at no cost: rank 0 keeps the value.
    (ADD, ["(S(0), P)", "(S(0), B)"], (4, 2), "(S(0), P), (S(0), P) -> (S(0), P)", ()),
    # P does not pass a non-linear op; a reduce-scatter sends half of what an all-reduce does.
    (RELU, ["(S(0), P)"], (4, 2), "(S(0), S(0)) -> (S(0), S(0))", ("reduce-scatter",)),
    # A slice is free, a gather is not (OneFlow gathers here).
    (ADD, ["B", "S(0)"], (4,), "S(0), S(0) -> S(0)", ()),
    # 8 rows do not divide by 16: the other tensor axis does.
    (RELU, ["P"], (16,), "S(1) -> S(1)", ("reduce-scatter",)),
]


@pytest.mark.parametrize(("op", "held", "grid", "chosen", "collectives"), CASES)
def test_the_cheapest_signature(op: tuple, held: list[str], grid: tuple, chosen: str, collectives: tuple) -> None:
    name, shapes, out = op
    inputs, outputs = Tensors(tuple(shapes), (4,) * len(shapes)), Tensors((out,), (4,))
    choice = infer(rule_for(name, shapes), [parse_nd_sbp(text) for text in held], inputs, outputs, grid)
    assert str(choice) == chosen
    assert tuple(c for route in choice.routes for c in route.collectives) == collectives
    assert (choice.sent_bytes == 0) == (not collectives)


def test_max_and_min_stay_out_where_a_gradient_is_needed() -> None:
    inputs, outputs = Tensors(((8, 16),), (4,)), Tensors(((8,),), (4,))
    rule = rule_for("max", [(8, 16)], axes=1)
    (free,) = infer(rule, [parse_nd_sbp("S(1)")], inputs, outputs, (4,)).outputs
    (smooth,) = infer(rule, [parse_nd_sbp("S(1)")], inputs, outputs, (4,), differentiable=True).outputs
    assert str(free) == 'P("max")'
    assert str(smooth) == "S(0)"  # an all-to-all sends a quarter of what the all-gather for B would
