"""The actor model as a pure state machine: who may work now, and in which order all the work can be dispatched.

Every worker is an actor that runs its row of the table. Its next cell may start when its inputs have arrived and the
registers that it fills have a free credit:

- ``F`` of a stage needs the activations of every stage that feeds it, one message an edge;
- ``B`` or ``I`` needs the stage's own ``F``, and the cotangent of every stage that it feeds;
- ``W`` needs the stage's own ``I``;
- ``F`` takes one credit of its stage, given back by ``B`` or ``W`` (in a forward-only table when ``F`` ends), and one
  slot on each edge out of the stage, given back when the ``F`` at the edge's end has read it.

The machine knows no time. :func:`run_clock` drives it with a cost for each action, as soon as possible, and
:func:`dispatch_order` is the order in which the actions start on that clock.
"""

import heapq
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from oneflax.sbp.errors import Fault, ScheduleError

from .actions import Action, Cell
from .blocked import SLOT, Blocked, Wait, find_cycle, stall_fault
from .registers import Edge, RegisterPool
from .table import ScheduleTable

Costs = Mapping[str, float] | Callable[[Action], float]
DEFAULT_COSTS: Mapping[str, float] = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}

_Key = tuple[int, str, int]  # (stage, kind, microbatch); kind "B" also stands for I, which sends the same message
_START_RANK = {"B": 0, "I": 0, "F": 1, "W": 2}


class ActorSystem:
    """The actors of one table with their messages and registers.

    Args:
        table: What each worker does in which order. Of an action that the table has twice, the first to run counts.
        edges: Forward edges between stages, the chain unless told. Cotangents take them in reverse.
        credits: Microbatches that each stage may hold at once, one number or one a stage; no bound unless told.
        slots: Values that may wait on an edge, for the edges named; no bound on the others.
        lenient: Do not wait for what can never come, an input that no worker makes or that the same stage makes later.
            The validator reports those by itself and looks for further cycles so.

    >>> from .table import ScheduleTable
    >>> system = ActorSystem(ScheduleTable.of([["0F0", "0B0"], ["1F0", "1B0"]]))
    >>> system.ready(1) is None                     # 1F0 waits for 0F0
    True
    >>> [str(action) for action in system.fire(0)]
    ['0F0']
    >>> [str(action) for action in system.ready(1) or ()]
    ['1F0']
    """

    def __init__(
        self,
        table: ScheduleTable,
        edges: Iterable[Edge] | None = None,
        credits: int | Sequence[int] | None = None,
        slots: Mapping[Edge, int] | None = None,
        lenient: bool = False,
    ) -> None:
        self.table = table
        self.edges = _chain(table) if edges is None else frozenset(edges)
        self._into: dict[int, list[int]] = {}
        self._out_of: dict[int, list[int]] = {}
        for src, dst in sorted(self.edges):
            self._into.setdefault(dst, []).append(src)
            self._out_of.setdefault(src, []).append(dst)
        self._place = _places(table)
        self._sent: set[_Key] = set()
        self._step = [0] * table.workers
        self._busy = [False] * table.workers
        self._missing: list[list[int]] = []
        self._readers: dict[_Key, list[tuple[int, int]]] = {}
        self._wire(lenient)
        self.credit_pools = _credit_pools(table.stages, credits)
        self.slot_pools = {
            edge: RegisterPool[int](n, f"edge {edge[0]} -> {edge[1]}") for edge, n in (slots or {}).items()
        }
        self._bounded = bool(self.credit_pools or self.slot_pools)

    def _wire(self, lenient: bool) -> None:
        """Counts for each cell the messages it waits for, and lists for each message the cells that read it."""
        for worker, row in enumerate(self.table.cells):
            self._missing.append(counts := [])
            for step, cell in enumerate(row):
                keys = {key for action in cell for key in self.inputs(action)}
                if lenient:
                    stages = {action.stage for action in cell}
                    keys = {key for key in keys if self._comes(key, worker, step, stages)}
                for key in keys:
                    self._readers.setdefault(key, []).append((worker, step))
                counts.append(len(keys))

    def _comes(self, key: _Key, worker: int, step: int, stages: set[int]) -> bool:
        place = self._place.get(key)
        return place is not None and not (place[0] == worker and place[1] >= step and key[0] in stages)

    def inputs(self, action: Action) -> list[_Key]:
        """The messages that an action waits for, each as (stage, kind, microbatch) of the action that sends it."""
        stage, kind, microbatch = action.stage, action.kind, action.microbatch
        if kind == "F":
            return [(src, "F", microbatch) for src in self._into.get(stage, ())]
        if kind == "W":
            return [(stage, "I", microbatch)]
        return [(stage, "F", microbatch), *((dst, "B", microbatch) for dst in self._out_of.get(stage, ()))]

    def step(self, worker: int) -> int:
        """How many cells of its row a worker has started."""
        return self._step[worker]

    @property
    def finished(self) -> bool:
        """Whether every worker has done its whole row."""
        return not any(self._busy) and all(map(lambda step, row: step == len(row), self._step, self.table.cells))

    def ready(self, worker: int) -> Cell | None:
        """The cell that a worker can start now, or None while it works, waits or is done."""
        step = self._step[worker]
        row = self.table.cells[worker]
        if self._busy[worker] or step == len(row) or self._missing[worker][step]:
            return None
        cell = row[step]
        return None if self._bounded and self._short_pools(cell) else cell

    def start(self, worker: int) -> Cell:
        """Starts a worker's next cell: its registers are taken."""
        cell = self.ready(worker)
        assert cell is not None, f"worker {worker} cannot start a cell now; ask ready({worker}) first"
        if self._bounded:
            for pool, microbatch in self._takes(cell):
                pool.acquire(microbatch)
        self._step[worker] += 1
        self._busy[worker] = True
        return cell

    def finish(self, worker: int) -> list[int]:
        """Ends the cell that a worker has started: messages leave, credits return. Gives the workers to look at."""
        assert self._busy[worker], f"worker {worker} has started no cell that could end"
        self._busy[worker] = False
        cell = self.table.cells[worker][self._step[worker] - 1]
        woken = [worker]
        for action in cell:
            for key in _messages(action):
                if key not in self._sent:
                    self._sent.add(key)
                    for reader, at in self._readers.get(key, ()):
                        self._missing[reader][at] -= 1
                        woken.append(reader)
        if self._bounded:
            for pool, microbatch in self._gives_back(cell):
                pool.release(microbatch)
            return list(range(self.table.workers))
        return woken

    def fire(self, worker: int) -> Cell:
        """Runs a worker's next cell from start to end and gives the cell."""
        cell = self.start(worker)
        self.finish(worker)
        return cell

    def blocked(self) -> Blocked:
        """Why each unfinished worker cannot go on, and the cycle in which they wait for one another, if any."""
        waits = tuple(
            wait
            for worker, row in enumerate(self.table.cells)
            if not self._busy[worker] and self._step[worker] < len(row)
            for wait in self._waits(worker, self._step[worker])
        )
        return Blocked(waits, find_cycle(waits))

    def _waits(self, worker: int, step: int) -> Iterable[Wait]:
        cell = self.table.cells[worker][step]
        for action in cell:
            for key in self.inputs(action):
                if key in self._sent or (worker, step) not in self._readers.get(key, ()):
                    continue
                place = self._place.get(key)
                needs = _action(self.table, place, key) if place else f"{key[0]}{key[1]}{key[2]}"
                edge = None if key[0] == action.stage else (key[0], action.stage)
                yield Wait(worker, step, action, f"for {needs}", edge, place)
        for pool in self._short_pools(cell):
            held = ", ".join(map(str, pool.holders))
            yield Wait(
                worker,
                step,
                next(action for action in cell if action.kind == "F"),
                f"{SLOT} {pool.name} ({pool.capacity} in all, held by microbatch {held})",
                next((edge for edge, other in self.slot_pools.items() if other is pool), None),
                min((place for key in self._releasers(pool) if (place := self._place.get(key))), default=None),
            )

    def _releasers(self, pool: RegisterPool[int]) -> Iterable[_Key]:
        """The actions that would free a pool's slots."""
        for edge, other in self.slot_pools.items():
            if other is pool:
                yield from ((edge[1], "F", key) for key in pool.holders)
        for stage, other in enumerate(self.credit_pools):
            if other is pool:
                for key in pool.holders:
                    weight = (stage, "W", key)
                    yield weight if weight in self._place else (stage, "B", key)

    def _takes(self, cell: Cell) -> Iterable[tuple[RegisterPool[int], int]]:
        for action in cell:
            if action.kind == "F":
                if self.credit_pools:
                    yield self.credit_pools[action.stage], action.microbatch
                for dst in self._out_of.get(action.stage, ()):
                    if pool := self.slot_pools.get((action.stage, dst)):
                        yield pool, action.microbatch

    def _gives_back(self, cell: Cell) -> Iterable[tuple[RegisterPool[int], int]]:
        for action in cell:
            if self.credit_pools and (action.kind in "BW" or self.table.forward_only):
                yield self.credit_pools[action.stage], action.microbatch
            if action.kind == "F":
                for src in self._into.get(action.stage, ()):
                    if pool := self.slot_pools.get((src, action.stage)):
                        yield pool, action.microbatch

    def _short_pools(self, cell: Cell) -> list[RegisterPool[int]]:
        """The pools that have too few free credits for a cell."""
        asked: dict[RegisterPool[int], int] = {}
        for pool, _ in self._takes(cell):
            asked[pool] = asked.get(pool, 0) + 1
        return [pool for pool, count in asked.items() if pool.free < count]


class Firing(NamedTuple):
    """One cell on the clock."""

    worker: int
    step: int
    cell: Cell
    start_s: float
    end_s: float


def run_clock(system: ActorSystem, costs: Costs | None = None) -> list[Firing]:
    """Runs a system to its end, or until nothing can move, every cell as soon as it can; in order of the starts.

    A cell takes the sum of its actions' costs. Cells that start at the same time are ordered by kind (``B`` and ``I``,
    then ``F``, then ``W``), then the later stage first, then the lower microbatch.

    Args:
        system: A new system; afterwards it is finished or blocked.
        costs: Seconds for each kind, or a function of the action; F=1, B=2, I=1, W=1 unless told.

    Raises:
        ScheduleError: A cost is missing or not a number from 0 up.
    """
    cost = as_cost(costs)
    firings: list[Firing] = []
    ending: list[tuple[float, int]] = []  # a heap of (end, worker)
    now = 0.0
    woken: Iterable[int] = range(system.table.workers)
    while True:
        ready = [(_start_rank(cell), worker) for worker in set(woken) if (cell := system.ready(worker))]
        for _, worker in sorted(ready):
            if system.ready(worker) is None:  # one that started just now took the last credit
                continue
            cell = system.start(worker)
            end = now + sum(map(cost, cell))
            firings.append(Firing(worker, system.step(worker) - 1, cell, now, end))
            heapq.heappush(ending, (end, worker))
        if not ending:
            return firings
        now = ending[0][0]
        woken = []
        while ending and ending[0][0] == now:
            woken += system.finish(heapq.heappop(ending)[1])


def dispatch_order(
    table: ScheduleTable, edges: Iterable[Edge] | None = None, costs: Costs | None = None
) -> tuple[tuple[int, Action], ...]:
    """One order over all workers in which a single thread can dispatch every action.

    Each action comes after everything it needs, and each worker's own order is the table's. It is the order of the
    starts on :func:`run_clock`'s clock, so a queue that runs a few actions ahead fills all workers evenly.

    Args:
        table: The schedule table.
        edges: Forward edges between stages; the chain unless told.
        costs: As :func:`run_clock` takes them.

    Returns:
        Pairs of worker and action. Actions that share a cell follow one another.

    Raises:
        ScheduleError: The table cannot run to its end; the message has the grid and the cycle.

    >>> from .table import ScheduleTable
    >>> [f"{worker}:{action}" for worker, action in dispatch_order(ScheduleTable.of([["0F0", "0B0"], ["1F0", "1B0"]]))]
    ['0:0F0', '1:1F0', '1:1B0', '0:0B0']
    """
    system = ActorSystem(table, edges)
    firings = run_clock(system, costs)
    if not system.finished:
        raise ScheduleError(stall_fault(table, system.blocked()))
    return tuple((firing.worker, action) for firing in firings for action in firing.cell)


def as_cost(costs: Costs | None) -> Callable[[Action], float]:
    """Takes costs as a table by kind or as a function of the action; a cost that makes no sense is a ScheduleError."""
    seconds_of = DEFAULT_COSTS if costs is None else costs

    def cost(action: Action) -> float:
        seconds = seconds_of(action) if callable(seconds_of) else seconds_of.get(action.kind)
        if seconds is None or not 0 <= seconds < float("inf"):
            raise _bad_cost(action, seconds)
        return seconds

    return cost


def _bad_cost(action: Action, seconds: float | None) -> ScheduleError:
    has = "no cost" if seconds is None else f"the cost {seconds}"
    what = f"{action} has {has}; a cost is a number of seconds from 0 up."
    return ScheduleError(Fault("costs", what, mend='costs={"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}'))


def _chain(table: ScheduleTable) -> frozenset[Edge]:
    """The chain's edges at the stages that occur; a table that names stage 10^9 must not cost as many edges."""
    stages = {action.stage for row in table.cells for cell in row for action in cell}
    return frozenset(
        (src, src + 1)
        for stage in stages
        for src in (stage - 1, stage)
        if src >= 0 and src + 1 < max(table.stages, stage + 1)
    )


def _places(table: ScheduleTable) -> dict[_Key, tuple[int, int]]:
    """Where (worker, step) each message is sent first."""
    places: dict[_Key, tuple[int, int]] = {}
    for worker, row in enumerate(table.cells):
        for step, cell in enumerate(row):
            for action in cell:
                for key in _messages(action):
                    places.setdefault(key, (worker, step))
    return places


def _messages(action: Action) -> tuple[_Key, ...]:
    """What an action sends. ``I`` sends the cotangent, as ``B`` does, and wakes its ``W``."""
    key = (action.stage, action.kind, action.microbatch)
    return (key, (action.stage, "B", action.microbatch)) if action.kind == "I" else (key,)


def _action(table: ScheduleTable, place: tuple[int, int], key: _Key) -> Action:
    """The action at a place that sends a message."""
    return next(action for action in table.cells[place[0]][place[1]] if key in _messages(action))


def _credit_pools(stages: int, credits: int | Sequence[int] | None) -> list[RegisterPool[int]]:
    if credits is None:
        return []
    counts = [credits] * stages if isinstance(credits, int) else credits
    return [RegisterPool[int](count, f"stage {stage}") for stage, count in enumerate(counts)]


def _start_rank(cell: Cell) -> tuple[int, int, int]:
    return min((_START_RANK[action.kind], -action.stage, action.microbatch) for action in cell)
