"""Measures when each action of a step starts and ends, without stopping the dispatching thread.

One thread a worker waits for the worker's tokens in order. An action ends when its token is ready; it started when
its worker was free, its inputs had arrived and it had been dispatched, whichever came last.

A thread sees each event a little after it happened, and how late depends on who gets a core. What an action waited
for was done when its inputs arrived, so the earlier of the two observations is kept: the timeline never shows an
action before its inputs.
"""

import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

import jax

from .actions import Action
from .registers import Edge
from .table import ScheduleTable
from .trace import TimedAction, Trace


@dataclass(slots=True)
class _Seen:
    """One action: when it was dispatched, when its inputs had come (None: it has none), when it was done."""

    worker: int
    action: Action
    dispatched_s: float
    arrived_s: float | None = None
    done_s: float | None = None


class Recorder:
    """Collects one step's timeline."""

    def __init__(self, table: ScheduleTable, edges: Iterable[Edge], returning: Iterable[Edge]) -> None:
        """Args: what the workers do, the edges between stages, and those over which a cotangent comes back."""
        self._table, self._edges, self._returning = table, tuple(edges), tuple(returning)
        self._seen: list[_Seen] = []  # in the order of dispatch, in which nothing comes before its inputs
        self._queues: list[SimpleQueue[tuple[_Seen, Sequence[Any], Any] | None]] = [
            SimpleQueue() for _ in range(table.workers)
        ]
        self._threads = [
            threading.Thread(target=self._watch, args=(worker,), name=f"oneflax-trace-{worker}", daemon=True)
            for worker in range(table.workers)
        ]
        for thread in self._threads:
            thread.start()

    def dispatched(self, worker: int, action: Action, arrivals: Sequence[Any], token: Any) -> None:
        """Notes an action. `arrivals`: values that came from other stages for it. `token`: ready when it is done."""
        seen = _Seen(worker, action, time.perf_counter())
        self._seen.append(seen)
        self._queues[worker].put((seen, arrivals, token))

    def close(self) -> None:
        """Tells the threads that nothing more comes; they end when what was dispatched is done."""
        for queue in self._queues:
            queue.put(None)

    def trace(self) -> Trace:
        """Waits until everything is done and gives the timeline, in seconds from its first start."""
        for thread in self._threads:
            thread.join()
        timed = self._timeline([seen for seen in self._seen if seen.done_s is not None])
        zero_s = min((a.start_s for a in timed), default=0.0)
        shifted = tuple(
            TimedAction(a.worker, a.stage, a.kind, a.microbatch, a.start_s - zero_s, a.end_s - zero_s)
            for a in sorted(timed, key=lambda a: (a.start_s, a.worker))
        )
        return Trace(shifted, self._table.workers, self._table.name)

    def _watch(self, worker: int) -> None:
        while (item := self._queues[worker].get()) is not None:
            seen, arrivals, token = item
            try:
                jax.block_until_ready(arrivals)
                seen.arrived_s = time.perf_counter() if arrivals else None
                jax.block_until_ready(token)
            except Exception:  # the dispatching thread meets the same error and reports it
                continue
            seen.done_s = time.perf_counter()

    def _timeline(self, seen: Sequence[_Seen]) -> list[TimedAction]:
        """Times of the actions, each observation made no later than what can only have followed."""
        done: dict[Action, float] = {}
        latest: dict[Action, float] = {}  # when the readers of an action's values had them
        next_done: dict[int, float] = {}
        for s in reversed(seen):
            assert s.done_s is not None
            end = min(s.done_s, latest.get(s.action, s.done_s), next_done.get(s.worker, s.done_s))
            done[s.action] = next_done[s.worker] = end
            if s.arrived_s is not None:
                for source in self._sources(s.action):
                    latest[source] = min(latest.get(source, end), s.arrived_s, end)
        timed: list[TimedAction] = []
        free: dict[int, float] = {}
        for s in seen:
            a, end = s.action, done[s.action]
            begins = max(s.dispatched_s, free.get(s.worker, 0.0), s.arrived_s or 0.0)
            timed.append(TimedAction(s.worker, a.stage, a.kind, a.microbatch, min(begins, end), end))
            free[s.worker] = end
        return timed

    def _sources(self, action: Action) -> list[Action]:
        """The actions whose values an action receives from other stages."""
        stage, i = action.stage, action.microbatch
        if action.kind == "F":
            return [Action(src, "F", i) for src, dst in self._edges if dst == stage]
        return [Action(dst, action.kind, i) for src, dst in self._returning if src == stage]
