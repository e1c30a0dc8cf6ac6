"""The nnx side of a plan: a module as parameters and state, and its module paths in the traced program.

nnx leaves no path in the trace. While a plan traces a loss, :func:`scoped_calls` wraps the ``__call__`` of the
model's module classes so that every operation carries the full path of the module that made it.

Each module knows its path by a static attribute. nnx carries such attributes through ``split`` and ``merge``, hence
into ``nnx.remat``, ``nnx.jit`` and their kin, and traces anew for another path: two layers never share a trace in
which only the first one's path stands.
"""

import functools
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
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)
    return graphdef, params, rest


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

    A module without a path that is called outside of any other (closed over by the loss, or split before it) is taken
    as a model of its own. Classes and modules are put back as they were at the end. Calls in other threads are left
    alone, and other threads that trace wait.
    """
    with _lock:
        hooks = _Hooks()
        try:
            hooks.learn(model)
            yield
        finally:
            hooks.undo()


class _Hooks:
    def __init__(self) -> None:
        self._learned: list[Any] = []
        self._classes: dict[type, Any] = {}
        self._thread = threading.get_ident()
        self._depth = 0

    def learn(self, root: Any) -> None:
        """Gives every callable module of `root` its path, and hooks its class."""
        for path, module in nnx.iter_modules(root):
            cls = type(module)
            if any("__call__" in base.__dict__ for base in cls.__mro__) and _PATH not in vars(module):
                vars(module)[_PATH] = "/".join(map(str, path))
                self._learned.append(module)
                self._hook(cls)

    def undo(self) -> None:
        for cls, original in self._classes.items():
            if original is _MISSING:
                del cls.__call__
            else:
                cls.__call__ = original
        for module in self._learned:
            del vars(module)[_PATH]

    def _hook(self, cls: Any) -> None:
        if cls in self._classes:
            return
        original = cls.__call__
        self._classes[cls] = cls.__dict__.get("__call__", _MISSING)

        @functools.wraps(original)
        def call(module: Any, /, *args: Any, **kwargs: Any) -> Any:
            with self._scope(module):
                return original(module, *args, **kwargs)

        cls.__call__ = call

    @contextmanager
    def _scope(self, module: Any) -> Iterator[None]:
        if threading.get_ident() != self._thread:
            yield
            return
        if _PATH not in vars(module) and self._depth == 0:
            self.learn(module)
        path = vars(module).get(_PATH)
        if not path:  # the root's own operations belong to no layer
            yield
            return
        self._depth += 1
        try:
            with jax.named_scope(PATH_SCOPE + path):
                yield
        finally:
            self._depth -= 1


_PATH = "_oneflax_path"
_MISSING: Any = object()
