"""Placement: an n-d grid of ranks of one device type, in the order given, with names for its axes if wanted.

A placement says *where*; it is a plain value and knows no devices. It may name ranks that this machine does not have,
since plans are made for other machines too: devices are looked up only for ``placement("auto")``, for sizes "over all
ranks", and for :attr:`Placement.mesh`. So this file imports no jax.
"""

import difflib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from .errors import Fault, SbpError
from .ranks import (
    as_code,
    both_fault,
    brackets,
    checked_axes,
    checked_ranks,
    count_ranks,
    device_type,
    nested_ranks,
    quote,
    ranks_by_size,
    take,
)

if TYPE_CHECKING:
    from jax.sharding import Mesh

# Beyond this many ranks str() shows only the first and the last: error messages stay readable on large machines.
_SHOWN_RANKS = 64


@dataclass(frozen=True, slots=True, init=False, repr=False, eq=False)
class Placement:
    """An n-d grid of ranks of one device type.

    OneFlow's ``oneflow.placement``, with two differences: the order of the ranks is kept (OneFlow sorts them), and
    its axes may have names. Two placements are equal when type, ranks in order, and axis names are equal.

    Args:
        type: ``"cpu"``, ``"cuda"`` (``"gpu"`` is the same), ``"tpu"``, or ``"auto"``: the platform that jax chose.
        ranks: The ranks, as nested lists or an integer array; n levels give n placement axes. Without it: all ranks.
        axes: A name for each placement axis.
        **sizes: Instead of `ranks` and `axes`: the name and size of each placement axis, over all ranks. One size
            may be -1 and takes what is left.

    Raises:
        SbpError: The type is unknown; the ranks are not distinct whole numbers in a rectangular grid; the names do
            not fit; the sizes do not multiply to the number of ranks.

    Example:
        >>> from oneflax.sbp import placement
        >>> grid = placement("cpu", [[0, 1], [2, 3]], axes=("data", "model"))
        >>> grid.shape, grid.size, grid.flat
        ((2, 2), 4, (0, 1, 2, 3))
        >>> grid.at(data=1)
        placement("cpu", [2, 3], axes=("model",))
        >>> print(grid)
        cpu[[0, 1], [2, 3]] (data=2, model=2)
    """

    type: str
    ranks: tuple[Any, ...]
    axes: tuple[str, ...] | None
    shape: tuple[int, ...]
    flat: tuple[int, ...]
    _hash: int = field(repr=False)
    _mesh: "Mesh | None" = field(repr=False)

    def __init__(self, type: str, ranks: Any = None, axes: Sequence[str] | str | None = None, **sizes: int) -> None:
        where = f"placement({quote(type)})"
        kind = device_type(type, where)
        if sizes:
            if ranks is not None or axes is not None:
                raise SbpError(both_fault(where, ranks, sizes))
            nested = ranks_by_size(kind, sizes, where)
            axes = tuple(sizes)
        elif ranks is None:
            nested = tuple(range(count_ranks(kind)))
        else:
            nested = nested_ranks(ranks)
        shape, flat = checked_ranks(nested, ranks, where)
        names = checked_axes(axes, shape, where)
        nested = flat if len(shape) == 1 else nested
        for name, value in (
            ("type", kind),
            ("ranks", nested),
            ("axes", names),
            ("shape", shape),
            ("flat", flat),
            ("_hash", hash((kind, nested, names))),
            ("_mesh", None),
        ):
            object.__setattr__(self, name, value)

    @classmethod
    def all(cls, type: str = "auto") -> "Placement":
        """Gives all ranks of a device type, over all processes, as one placement axis."""
        return cls(type)

    @property
    def size(self) -> int:
        """The number of ranks."""
        return len(self.flat)

    @property
    def ndim(self) -> int:
        """The number of placement axes."""
        return len(self.shape)

    @property
    def axis_names(self) -> tuple[str, ...]:
        """A name for each placement axis: those given, or ``"axis0"``, ``"axis1"``, ..."""
        return self.axes or tuple(f"axis{i}" for i in range(self.ndim))

    @property
    def mesh(self) -> "Mesh":
        """The ``jax.sharding.Mesh`` of this placement: Auto axes named :attr:`axis_names`, ranks in the order given.

        Raises:
            SbpError: There are no devices of the type here, or fewer than the ranks need.
        """
        if self._mesh is None:
            from .devices import mesh_of

            object.__setattr__(self, "_mesh", mesh_of(self))
        assert self._mesh is not None
        return self._mesh

    def axis_index(self, axis: str | int) -> int:
        """Gives the index of a placement axis, from its name or from an index that may be negative.

        Raises:
            SbpError: There is no such placement axis.
        """
        if isinstance(axis, str) and axis in self.axis_names:
            return self.axis_names.index(axis)
        if isinstance(axis, int) and not isinstance(axis, bool) and -self.ndim <= axis < self.ndim:
            return axis % self.ndim
        raise SbpError(self._no_axis_fault(axis))

    def describe_axis(self, axis: int) -> str:
        """Words one placement axis for a message: ``placement axis 'model' (size 2)``, or by index when unnamed."""
        name = repr(self.axes[axis]) if self.axes else axis
        return f"placement axis {name} (size {self.shape[axis]})"

    def at(self, /, **indices: int) -> "Placement":
        """Gives the sub-placement at an index on some placement axes; those axes are gone from it.

        When no placement axis is left, the one rank comes back as an unnamed placement of size 1.

        Args:
            **indices: The index on each named placement axis; negative ones count from the end.

        Raises:
            SbpError: There is no such placement axis, or no such index on it.

        Example:
            >>> from oneflax.sbp import placement
            >>> placement("cpu", [[0, 1], [2, 3]], axes=("stage", "data")).at(stage=0)
            placement("cpu", [0, 1], axes=("data",))
        """
        where = f"placement.at({', '.join(f'{name}={index!r}' for name, index in indices.items())})"
        faults: list[Fault] = []
        chosen: dict[int, int] = {}
        for name, index in indices.items():
            if name not in self.axis_names:
                faults.append(self._no_axis_fault(name, where))
                continue
            axis = self.axis_index(name)
            size = self.shape[axis]
            if not isinstance(index, int) or isinstance(index, bool) or not -size <= index < size:
                faults.append(self._no_index_fault(axis, index, where))
                continue
            chosen[axis] = index % size
        if faults:
            raise SbpError(faults)
        left = [i for i in range(self.ndim) if i not in chosen]
        ranks = take(self.ranks, [chosen.get(i) for i in range(self.ndim)])
        if not left:
            return Placement(self.type, (ranks,))
        return Placement(self.type, ranks, tuple(self.axes[i] for i in left) if self.axes else None)

    def _no_axis_fault(self, axis: object, where: str = "") -> Fault:
        near = difflib.get_close_matches(axis, self.axes or (), n=1) if isinstance(axis, str) else []
        if self.axes:
            known = f"the placement axes are {', '.join(self.axes)}"
        else:
            known = f"{self.ndim} placement {'axis has no name' if self.ndim == 1 else 'axes have no names'}"
        mend = "" if self.axes else "give names with axes=(...), or "
        mend += "use the index 0." if self.ndim == 1 else f"use an index from 0 to {self.ndim - 1}."
        return Fault(
            where or f"placement.axis_index({quote(axis)})",
            f"there is no placement axis {axis!r}; {known}.",
            (f"placement {self}",),
            f"use {near[0]!r}." if near else f"use a name, or {mend}" if self.axes else mend,
        )

    def _no_index_fault(self, axis: int, index: object, where: str) -> Fault:
        size = self.shape[axis]
        return Fault(
            where,
            f"{self.describe_axis(axis)} has no index {index!r}.",
            (f"placement {self}",),
            f"use a whole number from {-size} to {size - 1}.",
        )

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, Placement):
            return NotImplemented
        return (
            self._hash == other._hash
            and self.type == other.type
            and self.ranks == other.ranks
            and self.axes == other.axes
        )

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> tuple[Any, ...]:
        # The cached hash differs from process to process, and a mesh holds devices: neither travels.
        return Placement, (self.type, self.ranks, self.axes)

    def __repr__(self) -> str:
        return as_code(self.type, self.ranks, self.axes)

    def __str__(self) -> str:
        whole = self.size <= _SHOWN_RANKS
        ranks = brackets(self.ranks) if whole else f"[{self.flat[0]}, ..., {self.flat[-1]}]"
        if self.axes:
            return f"{self.type}{ranks} ({', '.join(f'{n}={s}' for n, s in zip(self.axes, self.shape))})"
        return f"{self.type}{ranks}" + ("" if whole else f" (shape {'x'.join(map(str, self.shape))})")


placement = Placement
