"""``flow.stage``: marks in any JAX function where a stage begins.

The mark is an identity operation in the traced function. Everything that depends on a marked value belongs to that
stage or a later one; skips over stages come free, because only dataflow counts.
"""

from typing import Any, TypeVar

import jax

from oneflax.sbp import _compat
from oneflax.sbp.errors import Fault, PlanError

Tree = TypeVar("Tree")

_stage_p = _compat.identity_primitive("oneflax_stage")


def stage(x: Tree, index: int) -> Tree:
    """Marks `x` as the input of stage `index`, counted from 0.

    Args:
        x: A pytree of arrays of any shape and dtype. Leaves that are no arrays pass unchanged.
        index: The stage that works on `x`.

    Returns:
        `x` itself: outside a pipeline the mark does nothing, and no data moves.

    Raises:
        PlanError: `index` is not a whole number ≥ 0.

    Example:
        >>> import jax.numpy as jnp
        >>> def loss(params, batch):
        ...     hidden = jnp.tanh(batch["x"] @ params["w0"])
        ...     hidden = stage(hidden, 1)
        ...     return jnp.mean((hidden @ params["w1"] - batch["y"]) ** 2)
    """
    if isinstance(index, bool) or not isinstance(index, int) or index < 0:
        what = f"a stage is a whole number ≥ 0, not {index!r}."
        raise PlanError(Fault("flow.stage(x, index)", what, mend="flow.stage(x, 1)"))
    return jax.tree.map(lambda leaf: _mark(leaf, index), x)


def _mark(leaf: Any, index: int) -> Any:
    if not _compat.is_array(leaf):
        return leaf
    return _stage_p.bind(leaf, index=index)


def marked_stage(equation: Any) -> int | None:
    """The stage that an operation marks, or None if it is no mark."""
    return equation.params["index"] if equation.primitive is _stage_p else None
