"""Placement and SBP: where a tensor lives and how it is laid out there. Imports nothing of the rest of oneflax."""

if __name__ != "oneflax.sbp":
    raise ImportError(f"import this package as 'oneflax.sbp', not as {__name__!r}")

from ._lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
