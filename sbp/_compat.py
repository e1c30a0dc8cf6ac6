"""The one place for jax names that differ between the supported versions, and for private ones.

The rule: every other file takes such a name from here, never from jax. Supported are jax >= 0.10.2 and < 0.13; an
import under another version stops with the reason.
"""

import os
import sys
from collections.abc import Sequence
from typing import Any

import jax
import jax.extend.core as jex_core
from jax._src import source_info_util
from jax.interpreters import ad, batching, mlir
from jax.sharding import AxisType as AxisType

_OLDEST, _BEYOND = (0, 10, 2), (0, 13)


def check_version(text: str, version: tuple[int, ...]) -> None:
    """Raises ImportError when a jax version is outside the supported range.

    Args:
        text: The version as jax prints it.
        version: The same as numbers, to compare.
    """
    if not _OLDEST <= version[:3] < _BEYOND:
        raise ImportError(
            f'oneflax needs jax >= 0.10.2 and < 0.13, but finds jax {text}. Mend: pip install "jax>=0.10.2,<0.13"'
        )


check_version(jax.__version__, jax.__version_info__)


def numeric_settings() -> tuple[Any, ...]:
    """Settings of jax that change what a traced function computes: x64, and the precision of products."""
    return tuple(getattr(jax.config, name) for name in ("jax_enable_x64", "jax_default_matmul_precision"))


# Jaxprs: jax 0.12 merged ClosedJaxpr into Jaxpr; name stacks and source lines have no public accessor.


def open_jaxpr(jaxpr: Any) -> tuple[Any, Sequence[Any]]:
    """The jaxpr inside a closed one, and its constants."""
    return getattr(jaxpr, "jaxpr", jaxpr), getattr(jaxpr, "consts", ())


def is_literal(atom: Any) -> bool:
    """Whether an equation's argument is a constant written in place."""
    return isinstance(atom, jex_core.Literal)


def is_array(value: Any) -> bool:
    """Whether jax would trace `value` as an array."""
    return jex_core.valid_jaxtype(value) and not isinstance(value, str)


def is_jaxpr(value: Any) -> bool:
    """Whether a parameter of an equation is a jaxpr, open or closed."""
    return isinstance(value, (jex_core.ClosedJaxpr, jex_core.Jaxpr))


def inner_jaxprs(equation: Any) -> list[Any]:
    """The bodies that an equation carries (calls, control flow, remat, custom derivatives)."""
    found = []
    for value in equation.params.values():
        for item in value if isinstance(value, (tuple, list)) else (value,):
            if is_jaxpr(item):
                found.append(item)
    return found


def scopes(equation: Any) -> tuple[str, ...]:
    """The name scopes that an equation was traced under, outermost first; transformations are left out."""
    return tuple(item.name for item in equation.source_info.name_stack.stack if type(item).__name__ == "Scope")


def source_line(equation: Any) -> str:
    """Where the user's code made this equation: ``file:line``. Frames of oneflax and flax count as nobody's code."""
    frames = list(source_info_util.user_frames(equation.source_info.traceback))
    if not frames:
        return "an unknown line"
    flax = getattr(sys.modules.get("flax"), "__file__", None)
    libraries = tuple(os.path.dirname(file) + os.sep for file in (os.path.dirname(__file__), flax) if file)
    frame = next((frame for frame in frames if not frame.file_name.startswith(libraries)), frames[0])
    return f"{frame.file_name}:{frame.start_line}"


def context(equation: Any) -> tuple[Any, ...]:
    """What an equation was traced under that may change its numbers: how keys are drawn, where and how it runs."""
    names = ("threefry_partitionable", "compute_type", "xla_metadata", "configs")
    return tuple(getattr(equation.ctx, name, None) for name in names)


def bind(equation: Any, values: Sequence[Any]) -> Sequence[Any]:
    """Runs one equation on other values, under the context that it was traced in."""
    params = equation.primitive.get_bind_params(equation.params)
    stack = source_info_util.current_name_stack() + equation.source_info.name_stack
    with (
        source_info_util.user_context(equation.source_info.traceback, name_stack=stack),
        equation.ctx.manager,
    ):
        result = equation.primitive.bind(*values, **params)
    return result if equation.primitive.multiple_results else (result,)


def identity_primitive(name: str) -> Any:
    """A primitive with one array in and the same out, differentiable, batchable, free at run time."""
    primitive = jex_core.Primitive(name)
    primitive.def_impl(lambda x, **_: x)
    primitive.def_abstract_eval(lambda x, **_: x)
    ad.deflinear2(primitive, lambda ct, x, **params: [primitive.bind(ct, **params)])
    batching.defvectorized(primitive)
    mlir.register_lowering(primitive, lambda ctx, x, **_: [x])
    return primitive
