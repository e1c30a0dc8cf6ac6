"""What a placement is made from: reads the type, ranks, axis names and sizes that a user gives, and checks them."""

import difflib
import itertools
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from .errors import Fault, SbpError

TYPES = ("cpu", "cuda", "tpu")
_ALIASES = {"gpu": "cuda"}
# A mend writes out the ranks of a placement up to this many; a longer line would hide the rest of the message.
_WRITTEN_RANKS = 16


def quote(value: object) -> str:
    """Words a value for a message, text in double quotes."""
    return f'"{value}"' if isinstance(value, str) else repr(value)


def _counted(count: int, thing: str) -> str:
    plural = thing.replace("axis", "axes") if thing.endswith("axis") else thing + "s"
    return f"{count} {thing if count == 1 else plural}"


def brackets(ranks: object) -> str:
    """Writes nested tuples as nested lists."""
    return f"[{', '.join(map(brackets, ranks))}]" if isinstance(ranks, tuple) else str(ranks)


def as_code(kind: str, ranks: tuple[Any, ...], axes: tuple[str, ...] | None) -> str:
    """Writes a placement as the code that makes it."""
    names = "" if axes is None else f", axes=({', '.join(map(quote, axes))}{',' * (len(axes) == 1)})"
    return f'placement("{kind}", {brackets(ranks)}{names})'


def count_ranks(kind: str) -> int:
    """The number of ranks of a device type here."""
    from .devices import devices_of

    return len(devices_of(kind))


def device_type(given: object, where: str) -> str:
    """Gives the one name of a device type."""
    if isinstance(given, str):
        if given == "auto":
            from .devices import default_type

            return default_type()
        kind = _ALIASES.get(given, given)
        if kind in TYPES:
            return kind
    choices = (*TYPES, *_ALIASES, "auto")
    near = difflib.get_close_matches(given.lower(), choices, n=1) if isinstance(given, str) else []
    listed = '"cpu", "cuda", "tpu" or "auto"'
    mend = f'placement("{near[0]}", ...); the device types are {listed}.' if near else f"use {listed}."
    raise SbpError(Fault(where, f"{quote(given)} is not a device type.", mend=mend))


def nested_ranks(ranks: Any) -> Any:
    """Turns nested sequences and arrays into nested tuples; anything else stays, for the check to name."""
    if hasattr(ranks, "tolist"):
        ranks = ranks.tolist()
    if isinstance(ranks, list | tuple | range):
        return tuple(nested_ranks(rank) for rank in ranks)
    return ranks


def _flatten(nested: Any) -> list[Any]:
    if not isinstance(nested, tuple):
        return [nested]
    return list(itertools.chain.from_iterable(map(_flatten, nested)))


def _shape_of(nested: Any) -> tuple[int, ...] | None:
    """The shape of nested tuples, or None when they are not rectangular."""
    if not isinstance(nested, tuple):
        return ()
    shapes = {_shape_of(item) for item in nested}
    inner = shapes.pop() if len(shapes) == 1 else None
    return None if inner is None else (len(nested), *inner)


def take(nested: Any, indices: Sequence[int | None]) -> Any:
    """Indexes nested tuples level by level; None keeps a level."""
    if not indices:
        return nested
    index, *rest = indices
    return tuple(take(item, rest) for item in nested) if index is None else take(nested[index], rest)


def _fold(flat: Iterable[int], shape: Sequence[int]) -> tuple[Any, ...]:
    """Folds flat ranks into nested tuples of a shape, the last placement axis fastest."""
    items: list[Any] = list(flat)
    for size in reversed(shape[1:]):
        items = [tuple(items[i : i + size]) for i in range(0, len(items), size)]
    return tuple(items)


def checked_ranks(nested: Any, given: object, where: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Gives shape and flat ranks, or raises all that is wrong with them."""
    if isinstance(nested, int) and not isinstance(nested, bool):
        nested = (nested,)
    flat, shape = _flatten(nested), _shape_of(nested)
    bad = [r for r in flat if not isinstance(r, int) or isinstance(r, bool) or r < 0]
    twice = [] if bad else [rank for rank, times in Counter(flat).items() if times > 1]
    shown = (f"ranks {brackets(nested) if isinstance(nested, tuple) else repr(given)}",)
    faults: list[Fault] = []
    if bad:
        what = f"a rank is a whole number from 0 on, not {', '.join(map(repr, bad))}."
        faults.append(Fault(where, what, shown, "give nested lists of ranks, as in [0, 1] or [[0, 1], [2, 3]]."))
    if twice:
        what = f"a rank is one device, but {', '.join(f'rank {rank}' for rank in twice)} is given more than once."
        faults.append(Fault(where, what, shown, "name each rank once."))
    if not flat:
        faults.append(Fault(where, "a placement has at least one rank.", shown, "placement(..., [0])."))
    elif shape is None:
        what = "the ranks do not form a rectangular grid."
        faults.append(Fault(where, what, shown, "make all rows equally long, as in [[0, 1], [2, 3]]."))
    if faults:
        raise SbpError(faults)
    assert shape is not None
    return shape, tuple(flat)


def checked_axes(axes: Sequence[str] | str | None, shape: tuple[int, ...], where: str) -> tuple[str, ...] | None:
    """Gives the axis names as a tuple, or raises all that is wrong with them."""
    if axes is None:
        return None
    names = (axes,) if isinstance(axes, str) else tuple(axes)
    shown = (f"axes ({', '.join(map(quote, names))})", f"shape {shape}")
    faults: list[Fault] = []
    bad = [name for name in names if not isinstance(name, str) or not name.isidentifier()]
    if bad:
        what = f"an axis name is a word of letters, digits and _, not {', '.join(map(quote, bad))}."
        faults.append(Fault(where, what, shown, 'axes=("data", "model"), for example.'))
    if len(names) != len(shape):
        what = f"{_counted(len(names), 'axis name')} for ranks of {_counted(len(shape), 'placement axis')}."
        faults.append(Fault(where, what, shown, "one name for each level of nesting of the ranks."))
    if not bad and len(set(names)) < len(names):
        faults.append(Fault(where, "two placement axes have one name.", shown, "give each placement axis its own."))
    if faults:
        raise SbpError(faults)
    return names


def both_fault(where: str, ranks: object, sizes: dict[str, int]) -> Fault:
    """Words that sizes came together with ranks or axis names."""
    near = [w for key in sizes for w in difflib.get_close_matches(key, ("ranks", "axes", "type"), n=1)]
    other = "ranks" if ranks is not None else "axes"
    return Fault(
        where,
        f"{other} and sizes ({', '.join(f'{n}={s!r}' for n, s in sizes.items())}) cannot be given together.",
        mend=f"did you mean {near[0]}=?" if near else 'sizes alone, or ranks with axes=("data", "model").',
    )


def ranks_by_size(kind: str, sizes: dict[str, int], where: str) -> tuple[Any, ...]:
    """All ranks of a type, folded to the sizes given."""
    faults = [_size_fault(where, n, s) for n, s in sizes.items() if not _is_size(s)]
    free = [name for name, size in sizes.items() if size == -1 and _is_size(size)]
    if len(free) > 1:
        what = f"one placement axis can take what is left, not {len(free)} ({', '.join(free)})."
        faults.append(Fault(where, what, mend="give all sizes but one."))
    if faults:
        raise SbpError(faults)
    count = count_ranks(kind)
    fixed = math.prod(size for size in sizes.values() if size != -1)
    if count % fixed or (not free and fixed != count):
        raise SbpError(_product_fault(where, kind, sizes, count, fixed))
    return _fold(range(count), [count // fixed if size == -1 else size for size in sizes.values()])


def _is_size(size: object) -> bool:
    return isinstance(size, int) and not isinstance(size, bool) and (size > 0 or size == -1)


def _size_fault(where: str, name: str, size: object) -> Fault:
    near = difflib.get_close_matches(name, ("ranks", "axes"), n=1)
    mend = f"did you mean {near[0]}=?" if near else f"{name}=2, or {name}=-1 for what is left."
    return Fault(
        where, f"the size of placement axis {name!r} is a whole number from 1 on, or -1, not {size!r}.", mend=mend
    )


def _product_fault(where: str, kind: str, sizes: dict[str, int], count: int, fixed: int) -> Fault:
    given = ", ".join(f"{name}={size}" for name, size in sizes.items())
    if -1 in sizes.values():
        what = f"{given}: the {count} {kind} ranks do not divide by {fixed}."
        return Fault(where, what, mend=f"choose sizes whose product divides {count}.")
    mends: list[str] = []
    free = next((name for name, size in sizes.items() if count % (fixed // size) == 0), None)
    if free is not None:
        mends.append(f'placement("{kind}", {", ".join(f"{n}={-1 if n == free else s}" for n, s in sizes.items())})')
    if fixed < count and fixed <= _WRITTEN_RANKS:
        some = as_code(kind, _fold(range(fixed), list(sizes.values())), tuple(sizes))
        mends.append(f"{some} for some of the ranks")
    if kind == "cpu" and fixed > count:  # CPU devices are virtual: there can be as many as one likes
        flag = f"XLA_FLAGS=--xla_force_host_platform_device_count={fixed}"
        mends.insert(0, f"set {flag} and NPROC=32 before jax starts, for {fixed} virtual devices")
    are = f"is 1 {kind} rank" if count == 1 else f"are {count} {kind} ranks"
    make = f"makes {fixed} rank{'s' if fixed > 1 else ''}" if len(sizes) == 1 else f"make {fixed} ranks"
    what = f"{given} {make}, but there {are}."
    return Fault(where, what, mend=", or ".join(mends or [f"choose sizes whose product is {count}"]) + ".")
