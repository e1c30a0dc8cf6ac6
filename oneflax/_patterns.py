"""Patterns on module and parameter paths: one language for rules, stages and overrides.

A pattern with ``*`` and no other regex sign is a glob, anchored at the start: ``*`` is one path segment, ``**`` any
number (also none), and it covers everything below what it matches. Anything else is a regular expression for
``re.search``.
"""

import difflib
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property

from oneflax.sbp.errors import Fault, PlanError

_REGEX_SIGNS = re.compile(r"[.^$+?{}\[\]()|\\]")


@dataclass(frozen=True)
class Pattern:
    """One pattern.

    Args:
        text: The pattern as the user wrote it.

    Raises:
        PlanError: The text is no regular expression.

    >>> Pattern("model/layers/*").find("model/layers/3/attn/q_proj/kernel")
    'model/layers/3'
    >>> Pattern("(q|k|v)_proj/kernel").find("model/layers/3/attn/q_proj/kernel")
    'q_proj/kernel'
    >>> Pattern("layers/*").find("model/layers/3") is None
    True
    """

    text: str
    where: str = field(default="pattern", compare=False)

    def __post_init__(self) -> None:
        if not isinstance(self.text, str) or not self.text:
            raise PlanError(
                Fault(self.where, f"a pattern is a text, not {self.text!r}.", mend=r'"blocks/*" or r"kernel$"')
            )
        try:
            _ = self._regex
        except (re.error, OverflowError, RecursionError) as error:
            what = f"{self.text!r} is no regular expression: {error}."
            raise PlanError(Fault(self.where, what, mend=f"{re.escape(self.text)!r}, or a glob")) from None

    @property
    def is_glob(self) -> bool:
        """Whether the pattern reads as a glob."""
        return "*" in self.text and not _REGEX_SIGNS.search(self.text)

    @cached_property
    def _regex(self) -> re.Pattern[str]:
        if not self.is_glob:
            return re.compile(self.text)
        body = "".join(map(_segment, self.text.strip("/").split("/")))
        return re.compile(f"^{body}(?=/|$)")

    def find(self, path: str) -> str | None:
        """The part of `path` that the pattern matches, or None. For a glob: up to and with its last segment."""
        found = self._regex.search(path)
        return found.group(0) if found else None

    def matches(self, path: str) -> bool:
        """Whether the pattern covers `path`."""
        return self._regex.search(path) is not None


def _segment(text: str) -> str:
    """One segment of a glob with the ``/`` before it (none at the start), as a regular expression."""
    if text == "**":
        return r"(?:(?:\A|/)[^/]+)*"
    return r"(?:\A|/)" + ("[^/]+" if text == "*" else re.escape(text).replace(r"\*", "[^/]*"))


def nearest(text: str, names: Iterable[str], count: int = 3) -> list[str]:
    """The names most like `text`, for a message."""
    return difflib.get_close_matches(text, list(dict.fromkeys(names)), n=count, cutoff=0.3)
