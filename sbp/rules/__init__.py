"""The rule table: for each op the line that says how it may be split, grouped by family and by law."""

from .laws import Law as Law
from .laws import Row as Row
from .table import TABLE as TABLE
from .table import rule_for as rule_for
