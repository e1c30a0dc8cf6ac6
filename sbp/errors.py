"""The errors a user sees, and the one builder that words them.

A message has five parts: the call and argument; the tensor axis and placement axis with their sizes; the rule that
was broken; every input as ``name: dtype[shape] sbp``; and the mend, as code. A check decides *that* something is
wrong and hands the parts to :class:`Fault`; the wording of the frame lives here alone.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

#: An nd-sbp as a mend writes it: ``sbp=(S(0), B)``, ``sbp=B``, ``sbp="(S(0), B)"`` or ``sbp={"data": S(0)}``.
_SBP_ARGUMENT = re.compile(r'sbp=(\((?:[^()]|\([^()]*\))*\)|"[^"]*"|\{[^}]*\}|\w+(?:\([^()]*\))?)')


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that is wrong.

    Args:
        where: The call and argument, ``"Plan(params=)"``.
        what: The broken rule in one sentence, with tensor axis and placement axis and their sizes.
        given: What was given, each already worded (see :func:`describe`).
        mend: What to write instead, as code where possible.
    """

    where: str
    what: str
    given: tuple[str, ...] = ()
    mend: str = ""

    def __str__(self) -> str:
        lines = [f"{self.where}: {self.what}"]
        if self.given:
            lines.append("  " + "    ".join(self.given))
        if self.mend:
            lines.append("  Mend: " + self.mend)
        return "\n".join(lines)

    def as_argument(self, form: str) -> "Fault":
        """The fault with each nd-sbp of its mend written as the user's call takes it.

        Args:
            form: That call with ``{}`` for the nd-sbp: ``"batch={}"``.

        >>> fault = Fault("Plan(batch=)", "1 sbp for 2 placement axes.", mend="sbp=(S(0), B).")
        >>> fault.as_argument("batch={}").mend
        'batch=(S(0), B).'
        """
        mend = _SBP_ARGUMENT.sub(lambda found: form.replace("{}", found[1]), self.mend)
        return replace(self, mend=mend)


class FlowError(ValueError):
    """Base of oneflax's errors. It carries all faults found at once, not only the first.

    Args:
        faults: What is wrong, one or many.
        where: Headline of a list of several faults.
    """

    def __init__(self, faults: Fault | Iterable[Fault], where: str = "") -> None:
        self.faults: tuple[Fault, ...] = (faults,) if isinstance(faults, Fault) else tuple(faults)
        self.where = where
        super().__init__(_message(self.faults, where))

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles faults and headline, of which the message is made: it has to leave worker processes whole."""
        return type(self), (self.faults, self.where), vars(self)


class SbpError(FlowError):
    """A placement, sbp or tensor that does not fit."""


class PlanError(FlowError):
    """A plan that does not fit its model, batch or placement."""


class ScheduleError(FlowError):
    """A pipeline schedule that cannot run."""


def _message(faults: Sequence[Fault], where: str) -> str:
    if len(faults) == 1:
        return str(faults[0])
    items = [f"{i}. {fault}".replace("\n", "\n   ") for i, fault in enumerate(faults, 1)]
    return "\n".join([f"{where or faults[0].where}: {len(faults)} faults", *items])


def describe(name: str, dtype: object, shape: Sequence[int], sbp: object = None, placement: object = None) -> str:
    """Words one input: ``"a: float32[4, 8] (S(0), B) placement cpu[0, 1]"``."""
    text = f"{name}: {dtype}[{', '.join(map(str, shape))}]"
    if sbp is not None:
        text += f" {sbp}"
    if placement is not None:
        text += f" placement {placement}"
    return text
