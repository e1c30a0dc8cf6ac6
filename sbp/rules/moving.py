"""Rows of ops that move, repeat or choose elements: reshapes, slices, joins, look-ups."""

from .. import param_rules
from .laws import Law, Row

SHAPES = {
    "reshape": Row(Law.SELECTION, param_rules.reshape, "P* -> P*"),
    "transpose": Row(Law.SELECTION, param_rules.transpose, "P* -> P*"),
    "broadcast_to": Row(Law.SELECTION, param_rules.broadcast_to, "P* -> P*"),
    "slice": Row(Law.SELECTION, param_rules.slice_, "P* -> P*"),
    "concat": Row(Law.SELECTION, param_rules.concat),
}

LOOKUPS = {
    "embedding": Row(Law.SELECTION, "i..., v@+ d -> i... d", "B, P* -> P*"),
    "gather": Row(Law.SELECTION, param_rules.gather, "P*, B -> P*"),
}
