"""Named schedules, one family a file; each gives a :class:`.schedule.Schedule`."""

from .forward_only import forward_only as forward_only
from .gpipe import gpipe as gpipe
from .names import NAMES as NAMES
from .names import by_name as by_name
from .one_f_one_b import one_f_one_b as one_f_one_b
from .schedule import Schedule as Schedule
