"""Rows of ops that need all of some tensor axes at once; where those are split, the local op runs collectives."""

from functools import partial

from .. import param_rules
from .laws import Law, Row

NORMALISING = {
    "softmax": Row(Law.NORMALISING, partial(param_rules.normalise, "softmax")),
    "log_softmax": Row(Law.NORMALISING, partial(param_rules.normalise, "log_softmax")),
    "cross_entropy": Row(Law.NORMALISING, param_rules.cross_entropy),
    "layer_norm": Row(Law.NORMALISING, param_rules.layer_norm),
}
