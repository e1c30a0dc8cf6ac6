"""oneflax: OneFlow's placement and SBP semantics over JAX and Flax.

Names load when they are first used (see ``__init__.pyi`` for the list), so the import is cheap.
"""

from ._version import VERSION as __version__  # noqa: F401
from .sbp._lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
