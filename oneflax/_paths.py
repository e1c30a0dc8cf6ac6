"""Paths of the leaves of a pytree, spelled one way for every kind of container.

``blocks/0/attn/q/kernel`` is the path of that parameter in an nnx state, a linen dictionary or a plain pytree: list
indices are names, and the boxes that Flax puts around a value (``.value``) do not show.
"""

from typing import Any

import jax
from jax.tree_util import DictKey, FlattenedIndexKey, GetAttrKey, SequenceKey


def leaf_paths(tree: Any) -> list[str]:
    """The path of every leaf, in the order of ``jax.tree.leaves``."""
    return [path_text(keys) for keys, _ in jax.tree_util.tree_flatten_with_path(tree)[0]]


def path_text(keys: tuple[Any, ...]) -> str:
    """One key path as text."""
    if keys and isinstance(keys[-1], GetAttrKey) and keys[-1].name == "value":
        keys = keys[:-1]
    return "/".join(map(_key_text, keys))


def _key_text(key: Any) -> str:
    match key:
        case DictKey():
            return str(key.key)
        case SequenceKey():
            return str(key.idx)
        case GetAttrKey():
            return key.name
        case FlattenedIndexKey():
            return str(key.key)
        case _:
            return str(key)
