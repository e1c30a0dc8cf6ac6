"""Copies of arrays on other devices, made so that donating one takes nothing from whoever holds another."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def copies(leaves: Sequence[Any], places: Sequence[Any]) -> list[Any]:
    """Copies at other places (devices or shardings), leaf by leaf, so that none is there twice for long.

    ``device_put(may_alias=False)`` does not serve: from one device to several and back it shares memory all the same.
    """
    return [_copy(leaf, place) for leaf, place in zip(leaves, places)]


def _copy(leaf: Any, place: Any) -> Any:
    placed = jax.device_put(owned(leaf), place)
    if isinstance(leaf, jax.Array) and leaf.devices() & placed.devices():
        return jnp.copy(placed)
    return placed


def owned(leaf: Any) -> Any:
    """The leaf, a numpy array copied: ``device_put`` reads it later, when its owner may have changed it."""
    return leaf.copy() if isinstance(leaf, np.ndarray) else leaf


def gathered(leaves: Sequence[Any]) -> list[Any]:
    """Arrays copied whole to the device where jax makes new ones."""
    (here,) = jnp.zeros(()).devices()
    return copies(leaves, [here] * len(leaves))


def strongly_typed(leaf: Any, dtype: Any) -> Any:
    """The leaf in `dtype`. A weak type would make the first step compute in other dtypes than the later ones."""
    return jax.lax.convert_element_type(leaf, dtype) if getattr(leaf, "weak_type", False) else leaf
