"""Measures when each action of a step starts and ends, without stopping the dispatching thread.

One thread a worker waits for the worker's tokens in order. An action ends when its token is ready; it started when
its worker was free, its inputs had arrived and it had been dispatched, whichever came last.
"""

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

import jax

from .actions import Action
from .table import ScheduleTable
from .trace import TimedAction, Trace


@dataclass(frozen=True, slots=True)
class _Dispatched:
    action: Action
    arrivals: Sequence[Any]
    token: Any
    at_s: float


class Recorder:
    """Collects one step's timeline."""

    def __init__(self, table: ScheduleTable) -> None:
        self._table = table
        self._queues: list[SimpleQueue[_Dispatched | None]] = [SimpleQueue() for _ in range(table.workers)]
        self._timed: list[list[TimedAction]] = [[] for _ in range(table.workers)]
        self._threads = [
            threading.Thread(target=self._watch, args=(worker,), name=f"oneflax-trace-{worker}", daemon=True)
            for worker in range(table.workers)
        ]
        for thread in self._threads:
            thread.start()

    def dispatched(self, worker: int, action: Action, arrivals: Sequence[Any], token: Any) -> None:
        """Notes an action. `arrivals`: values that came from other stages for it. `token`: ready when it is done."""
        self._queues[worker].put(_Dispatched(action, arrivals, token, time.perf_counter()))

    def close(self) -> None:
        """Tells the threads that nothing more comes; they end when what was dispatched is done."""
        for queue in self._queues:
            queue.put(None)

    def trace(self) -> Trace:
        """Waits until everything is done and gives the timeline, in seconds from its first start."""
        for thread in self._threads:
            thread.join()
        actions = [timed for row in self._timed for timed in row]
        start_s = min((a.start_s for a in actions), default=0.0)
        shifted = tuple(
            TimedAction(a.worker, a.stage, a.kind, a.microbatch, a.start_s - start_s, a.end_s - start_s)
            for a in sorted(actions, key=lambda a: (a.start_s, a.worker))
        )
        return Trace(shifted, self._table.workers, self._table.name)

    def _watch(self, worker: int) -> None:
        free_s = 0.0
        while (item := self._queues[worker].get()) is not None:
            try:
                jax.block_until_ready(item.arrivals)
                ready_s = time.perf_counter() if item.arrivals else 0.0
                start_s = max(free_s, ready_s, item.at_s)
                jax.block_until_ready(item.token)
            except Exception:  # the dispatching thread meets the same error and reports it
                continue
            free_s = time.perf_counter()
            a = item.action
            self._timed[worker].append(
                TimedAction(worker, a.stage, a.kind, a.microbatch, start_s, max(start_s, free_s))
            )
