"""Pipelines of stages: schedules as data, actors with bounded registers, and the executor that runs them."""

if __name__ != "oneflax.pipeline":
    raise ImportError(f"import this package as 'oneflax.pipeline', not as {__name__!r}")

from oneflax.sbp._lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
