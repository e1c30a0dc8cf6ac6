"""The nnx side of a plan: a module as parameters and state, and its module paths in the traced program.

nnx leaves no path in the trace. While a plan traces a loss, :func:`scoped_calls` wraps the ``__call__`` of the
model's module classes so that every operation carries the full path of the module that made it.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import jax
from flax import nnx

from oneflax.pipeline.graph import PATH_SCOPE

_lock = threading.RLock()


def is_module(value: Any) -> bool:
    """Whether `value` is an nnx module."""
    return isinstance(value, nnx.Module)


def split(model: Any) -> tuple[Any, Any, Any]:
    """A module as (graph definition, parameters, everything else: statistics, rng streams)."""
    return nnx.split(model, nnx.Param, ...)


def merge(graphdef: Any, params: Any, rest: Any) -> Any:
    """The module again. It is a copy, so that its rng streams can advance under a transformation."""
    return nnx.merge(graphdef, params, rest, copy=True)


def rest_of(model: Any) -> Any:
    """What is not a parameter, after a call that may have changed it."""
    return nnx.split(model, nnx.Param, ...)[2]


def update(model: Any, rest: Any) -> None:
    """Writes variables into a module."""
    nnx.update(model, rest)


def abstract(make: Callable[[Any], Any], key: Any) -> Any:
    """The shapes of what `make(key)` returns, a module or a pytree; nothing is computed."""
    return nnx.eval_shape(make, key)


@contextmanager
def scoped_calls(model: Any) -> Iterator[None]:
    """Within it, operations traced in a call of one of the model's modules carry that module's path.

    A module that is met under an unknown identity outside of any known one (merged again inside the loss) is taken
    as a model of its own. The classes are put back as they were at the end.
    """
    paths: dict[int, str] = {}
    keep_alive: list[Any] = []
    classes: dict[type, Callable[..., Any]] = {}
    depth = 0

    def learn(root: Any) -> None:
        keep_alive.append(root)  # an id is only good while its object lives
        for path, module in nnx.iter_modules(root):
            paths.setdefault(id(module), "/".join(map(str, path)))
            hook(type(module))

    def hook(cls: type) -> None:
        if cls in classes or not callable(getattr(cls, "__call__", None)):
            return
        original = cls.__call__
        classes[cls] = cls.__dict__.get("__call__", _MISSING)

        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            nonlocal depth
            if id(self) not in paths and depth == 0:
                learn(self)
            path = paths.get(id(self))
            if not path:  # the root's own operations belong to no layer
                return original(self, *args, **kwargs)
            depth += 1
            try:
                with jax.named_scope(PATH_SCOPE + path):
                    return original(self, *args, **kwargs)
            finally:
                depth -= 1

        cls.__call__ = call

    with _lock:
        learn(model)
        try:
            yield
        finally:
            for cls, original in classes.items():
                if original is _MISSING:
                    del cls.__call__
                else:
                    cls.__call__ = original


_MISSING: Any = object()
