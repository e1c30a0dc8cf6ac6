"""The schedules by name, as the command line spells them."""

import inspect
from collections.abc import Callable
from difflib import SequenceMatcher

from oneflax.sbp.errors import Fault, ScheduleError

from .forward_only import forward_only
from .gpipe import gpipe
from .one_f_one_b import one_f_one_b
from .schedule import Schedule

NAMES: dict[str, Callable[..., Schedule]] = {"gpipe": gpipe, "1f1b": one_f_one_b, "forward-only": forward_only}
"""Name → the function that makes the schedule."""


def by_name(name: str, **settings: int) -> Schedule:
    """Makes the schedule called `name`; capitals and underscores do not matter.

    Args:
        name: One of :data:`NAMES`.
        **settings: What the schedule's own function takes, as ``microbatches=8``.

    Raises:
        ScheduleError: An unknown name (the message lists the nearest first), or a setting that the schedule lacks.

    >>> str(by_name("1F1B", microbatches=8))
    '1f1b(microbatches=8)'
    """
    spelled = name.lower().replace("_", "-")
    if spelled not in NAMES:
        raise _unknown_name(name, sorted(NAMES, key=lambda known: -_likeness(spelled, known)))
    taken = list(inspect.signature(NAMES[spelled]).parameters)
    if unknown := [key for key in settings if key not in taken]:
        raise _unknown_settings(spelled, unknown, taken)
    return NAMES[spelled](**settings)


def _likeness(one: str, other: str) -> float:
    return SequenceMatcher(None, one, other).ratio()


def _unknown_name(name: str, nearest: list[str]) -> ScheduleError:
    what = f"there is no schedule {name!r}; the nearest first: {', '.join(nearest)}."
    return ScheduleError(Fault("by_name(name)", what, mend=f"by_name({nearest[0]!r}, microbatches=8)"))


def _unknown_settings(name: str, unknown: list[str], taken: list[str]) -> ScheduleError:
    what = f"the schedule takes no {', '.join(unknown)}; it takes {', '.join(taken)}."
    return ScheduleError(Fault(f"by_name({name!r})", what, mend=f"leave {', '.join(unknown)} out."))
