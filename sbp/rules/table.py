"""The table of all rows, and the one way to ask it for a rule."""

import difflib
from typing import Any

from ..errors import Fault, SbpError
from ..notation import Rule, Shapes
from .laws import Row
from .moving import LOOKUPS, SHAPES
from .normalising import NORMALISING
from .pointwise import BINARY, UNARY
from .reducing import PRODUCTS, REDUCTIONS

TABLE: dict[str, Row] = {**UNARY, **BINARY, **PRODUCTS, **REDUCTIONS, **SHAPES, **LOOKUPS, **NORMALISING}
"""Op → row. To read, not to change."""


def rule_for(op: str, shapes: Shapes, **params: Any) -> Rule:
    """Gives the rule of an op for inputs of these shapes.

    Args:
        op: The op's name in :data:`TABLE`.
        shapes: The logical shape of each input.
        **params: The op's static arguments, under the names that its function in ``param_rules.py`` has; an op whose
            row is plain text takes none into account.

    Raises:
        SbpError: There is no such row, or shapes or parameters do not fit the op.

    Example:
        >>> from oneflax.sbp import rule_for
        >>> rule_for("sum", [(4, 6)], axes=1)
        Rule('a b+ -> a ; P -> P', law='LINEAR')
    """
    row = TABLE.get(op)
    if row is None:
        close = difflib.get_close_matches(op, TABLE, 3)
        raise SbpError(Fault(f'rule_for("{op}")', "the table has no such op.", mend=" or ".join(close)))
    formula = row.formula if isinstance(row.formula, str) else row.formula(shapes, **params)
    return Rule(f"{formula} ; {row.partials}" if row.partials else formula, row.law.name)
