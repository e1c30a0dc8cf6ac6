"""Rows of ops that sum, multiply or compare along tensor axes: products of matrices and reductions."""

from functools import partial

from .. import param_rules
from .laws import Law, Row

PRODUCTS = {
    "matmul": Row(Law.MULTILINEAR, param_rules.matmul, "P, B -> P ; B, P -> P"),
}

REDUCTIONS = {
    "sum": Row(Law.LINEAR, partial(param_rules.reduction, "+", "sum"), "P -> P"),
    "mean": Row(Law.LINEAR, partial(param_rules.reduction, "+/", "mean"), "P -> P"),
    "max": Row(Law.LATTICE, partial(param_rules.reduction, "^max", "max"), "P(max) -> P(max)"),
    "min": Row(Law.LATTICE, partial(param_rules.reduction, "^min", "min"), "P(min) -> P(min)"),
}
