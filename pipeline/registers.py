"""Registers: the bounded slots that hold a microbatch's values, and the credits that bound them.

A pool has `capacity` slots. Whoever fills a slot takes a credit with :meth:`RegisterPool.acquire`; whoever is done with
the value takes it out with :meth:`RegisterPool.release`, which gives the credit back. The most slots ever filled at
once is measured, so that a memory bound is a number that was seen and not a hope. (OneFlow: ``register_num`` of an
actor, and the buffers that ``pipeline_buffer_pass.cpp`` puts on the edges between stages.)
"""

from collections.abc import Hashable, Iterable
from typing import Any, Generic, TypeVar

Edge = tuple[int, int]
Key = TypeVar("Key", bound=Hashable)


class RegisterPool(Generic[Key]):
    """A bounded set of slots, each filled under a key (usually a microbatch).

    Args:
        capacity: How many slots there are; None is no bound, and the pool only measures.
        name: What the pool belongs to, for messages: ``"stage 2"``, ``"edge 0 -> 3"``.

    Misuse is a fault of the runtime and not of its user, so it raises AssertionError with a message.

    >>> pool = RegisterPool(2, "stage 0")
    >>> pool.acquire(0), pool.acquire(1), pool.free
    (None, None, 0)
    >>> pool.release(0)
    >>> pool.in_use, pool.peak, pool.holders
    (1, 2, (1,))
    """

    __slots__ = ("_held", "capacity", "name", "peak")

    def __init__(self, capacity: int | None = None, name: str = "registers") -> None:
        assert capacity is None or capacity >= 1, f"{name}: a pool has at least 1 slot, not {capacity}"
        self.capacity = capacity
        self.name = name
        self.peak = 0
        self._held: dict[Key, Any] = {}  # in the order in which they were filled

    @property
    def in_use(self) -> int:
        """How many slots are filled now."""
        return len(self._held)

    @property
    def free(self) -> float:
        """How many credits are left; infinite without a bound."""
        return float("inf") if self.capacity is None else self.capacity - len(self._held)

    @property
    def holders(self) -> tuple[Key, ...]:
        """The keys of the filled slots, the one filled first in front."""
        return tuple(self._held)

    def __contains__(self, key: object) -> bool:
        """Whether a slot is filled under `key`."""
        return key in self._held

    def acquire(self, key: Key, value: Any = None) -> None:
        """Takes a credit and fills a slot under `key` with a value (None where the pool only counts)."""
        held = self._held
        if key in held:
            raise AssertionError(f"{self.name}: {key!r} already fills a slot; {self}")
        if self.capacity is not None and len(held) >= self.capacity:
            raise AssertionError(f"{self.name}: no credit is free for {key!r}; {self}")
        held[key] = value
        if len(held) > self.peak:
            self.peak = len(held)

    def release(self, key: Key) -> Any:
        """Empties the slot of `key`, gives its credit back, and gives the value."""
        if key not in self._held:
            raise AssertionError(f"{self.name}: {key!r} fills no slot (released twice, or never acquired); {self}")
        return self._held.pop(key)

    def __str__(self) -> str:
        bound = "no bound" if self.capacity is None else f"{self.capacity} slots"
        return f"{bound}, held by {', '.join(map(repr, self._held)) or 'nobody'}"

    def __repr__(self) -> str:
        return f"RegisterPool({self.name}: {self})"


def chain_edges(stages: int) -> frozenset[Edge]:
    """The forward edges of a chain: every stage feeds the next.

    >>> sorted(chain_edges(3))
    [(0, 1), (1, 2)]
    """
    return frozenset((stage, stage + 1) for stage in range(stages - 1))


def edge_slots(edges: Iterable[Edge]) -> dict[Edge, int]:
    """Slots of every edge: one, and one more for each stage that the edge spans.

    A value that skips stages waits while they work, so a longer edge needs more slots for the same flow.

    >>> edge_slots([(0, 1), (0, 3)])
    {(0, 1): 2, (0, 3): 4}
    """
    return {(src, dst): 1 + (dst - src) for src, dst in edges}
