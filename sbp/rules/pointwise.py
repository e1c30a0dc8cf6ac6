"""Rows of ops on one element at a time, with one input or with several that broadcast as in numpy."""

from .. import param_rules
from .laws import Law, Row

UNARY = {
    "identity": Row(Law.SELECTION, "... -> ...", "P* -> P*"),
    "neg": Row(Law.LINEAR, "... -> ...", "P -> P ; P(max) -> P(min) ; P(min) -> P(max)"),
    "cast": Row(Law.LINEAR, param_rules.cast),
    "scale": Row(Law.LINEAR, param_rules.scale),
    "add_scalar": Row(Law.INCREASING, param_rules.add_scalar),
    "pow_scalar": Row(Law.INCREASING, param_rules.pow_scalar),
    "relu": Row(Law.INCREASING, "... -> ...", "P(max) -> P(max) ; P(min) -> P(min)"),
    "exp": Row(Law.INCREASING, "... -> ...", "P(max) -> P(max) ; P(min) -> P(min)"),
    "tanh": Row(Law.INCREASING, "... -> ...", "P(max) -> P(max) ; P(min) -> P(min)"),
    "sigmoid": Row(Law.INCREASING, "... -> ...", "P(max) -> P(max) ; P(min) -> P(min)"),
    "erf": Row(Law.INCREASING, "... -> ...", "P(max) -> P(max) ; P(min) -> P(min)"),
    # Increasing on their domain, and NaN below it: one operand below it makes the minimum NaN, but not the maximum.
    "log": Row(Law.INCREASING, "... -> ...", "P(min) -> P(min)"),
    "sqrt": Row(Law.INCREASING, "... -> ...", "P(min) -> P(min)"),
    "rsqrt": Row(Law.POINTWISE, "... -> ..."),
    "gelu": Row(Law.POINTWISE, "... -> ..."),
    "silu": Row(Law.POINTWISE, "... -> ..."),
    "abs": Row(Law.POINTWISE, "... -> ..."),
    "square": Row(Law.POINTWISE, "... -> ..."),
    "reciprocal": Row(Law.POINTWISE, "... -> ..."),
    "sin": Row(Law.POINTWISE, "... -> ..."),
    "cos": Row(Law.POINTWISE, "... -> ..."),
    "one_hot": Row(Law.POINTWISE, "... -> ... _"),
}

BINARY = {
    "add": Row(Law.LINEAR, "..., ... -> ...", "P, P -> P"),
    "sub": Row(Law.LINEAR, "..., ... -> ...", "P, P -> P"),
    "mul": Row(Law.MULTILINEAR, "..., ... -> ...", "P, B -> P ; B, P -> P"),
    "div": Row(Law.MULTILINEAR, "..., ... -> ...", "P, B -> P"),
    "maximum": Row(
        Law.LATTICE, "..., ... -> ...", "P(max), P(max) -> P(max) ; P(min), B -> P(min) ; B, P(min) -> P(min)"
    ),
    "minimum": Row(
        Law.LATTICE, "..., ... -> ...", "P(min), P(min) -> P(min) ; P(max), B -> P(max) ; B, P(max) -> P(max)"
    ),
    "pow": Row(Law.POINTWISE, "..., ... -> ..."),
    "equal": Row(Law.POINTWISE, "..., ... -> ..."),
    "not_equal": Row(Law.POINTWISE, "..., ... -> ..."),
    "less": Row(Law.POINTWISE, "..., ... -> ..."),
    "less_equal": Row(Law.POINTWISE, "..., ... -> ..."),
    "greater": Row(Law.POINTWISE, "..., ... -> ..."),
    "greater_equal": Row(Law.POINTWISE, "..., ... -> ..."),
    "where": Row(Law.SELECTION, "..., ..., ... -> ...", "B, P*, P* -> P*"),
}
