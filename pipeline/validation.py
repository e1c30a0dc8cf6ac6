"""The validator: everything that is wrong with a schedule table, found at once.

First each pass of each stage and microbatch is counted and its place in the row is compared with what it needs in the
same stage. Then the actors run until they finish or stand still, which finds the waits across workers. Then registers
are counted, if bounds were given.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from oneflax.sbp.errors import Fault

from .actors import ActorSystem, run_clock
from .blocked import SLOT, stall_fault
from .registers import Edge, chain_edges
from .table import ScheduleTable, held
from .text_grid import step_grid

Place = tuple[int, int]  # worker, step
_MOST_SLOTS = 4096  # where the search for the least slots gives up; more than any table of ours has microbatches


@dataclass(slots=True)
class _Findings:
    """The faults so far, and the cells to mark in the grid."""

    table: ScheduleTable
    faults: list[Fault] = field(default_factory=list)
    marks: set[Place] = field(default_factory=set)

    def add(self, what: str, mend: str, *places: Place, stage: int | None = None) -> None:
        """Adds a fault at the first of `places`, or at a stage where nothing is in place."""
        at = (
            f", worker {places[0][0]}, step {places[0][1]}"
            if places
            else f", stage {stage}"
            if stage is not None
            else ""
        )
        self.faults.append(Fault(f"table {self.table.name!r}{at}", what, mend=mend))
        self.marks.update(places)


def find_faults(
    table: ScheduleTable,
    edges: Iterable[Edge] | None,
    credits: int | Sequence[int] | None,
    slots: Mapping[Edge, int] | None,
) -> list[Fault]:
    """Everything that is wrong, see :meth:`.table.ScheduleTable.validate`. The last fault carries the grid."""
    found = _Findings(table)
    places = _places(table)
    if _check_size(found, places):
        return found.faults  # without this, a file that says 1000000000F0 would cost as many messages
    edges = chain_edges(table.stages) if edges is None else frozenset(edges)
    _check_numbers(found, places)
    _check_workers(found, places)
    _check_edges(found, edges)
    good_edges = {edge for edge in edges if 0 <= edge[0] < edge[1] < table.stages}
    for stage in range(table.stages):
        _check_passes(found, places, stage)
    if found.faults:
        last = found.faults[-1]
        grid = "\n  ".join(step_grid(table.cells, found.marks))
        found.faults[-1] = Fault(last.where, last.what, (grid,), last.mend)
    faults = found.faults + _stall(ActorSystem(table, good_edges, lenient=True))
    return faults or [*_credit_faults(table, credits), *_slot_faults(table, good_edges, slots)]


def _places(table: ScheduleTable) -> dict[tuple[int, str, int], list[Place]]:
    """Stage, kind, microbatch → every place where the table has it."""
    places: dict[tuple[int, str, int], list[Place]] = {}
    for worker, row in enumerate(table.cells):
        for step, cell in enumerate(row):
            for action in cell:
                places.setdefault((action.stage, action.kind, action.microbatch), []).append((worker, step))
    return places


def _check_size(found: _Findings, places: Mapping[tuple[int, str, int], list[Place]]) -> bool:
    """Whether there are fewer kinds of actions than stages or microbatches, so that most of them are missing."""
    table = found.table
    for name, count in (("stages", table.stages), ("microbatches", table.microbatches)):
        if count > len(places):
            mend = f"number the {name} without gaps from 0." if places else 'ScheduleTable.of([["0F0", "0B0"]])'
            found.add(f"{count} {name} need more than the table's {len(places)} different actions.", mend)
    if not places and not found.faults:
        found.add("the table has no actions.", 'ScheduleTable.of([["0F0", "0B0"]])')
    return bool(found.faults)


def _check_numbers(found: _Findings, places: Mapping[tuple[int, str, int], list[Place]]) -> None:
    """Stages and microbatches that the table does not have."""
    table = found.table
    for (stage, kind, microbatch), where in places.items():
        if stage >= table.stages:
            what = f"{stage}{kind}{microbatch} names stage {stage}; the table has stages {_span(table.stages)}."
            found.add(what, "remove it, or lay the table out for more stages.", *where)
        if microbatch >= table.microbatches:
            what = f"{stage}{kind}{microbatch} names microbatch {microbatch}; a step has {_span(table.microbatches)}."
            found.add(what, "remove it, or give the table more microbatches.", *where)


def _check_workers(found: _Findings, places: Mapping[tuple[int, str, int], list[Place]]) -> None:
    """Stages without a worker or with several."""
    first: dict[int, dict[int, Place]] = {}
    for (stage, _, _), where in places.items():
        for place in where:
            seen = first.setdefault(stage, {})
            seen[place[0]] = min(place, seen.get(place[0], place))
    for stage in range(found.table.stages):
        workers = [first[stage][worker] for worker in sorted(first[stage])] if stage in first else []
        if not workers:
            found.add(f"no worker runs stage {stage}.", "number the stages without gaps from 0.", stage=stage)
        elif len(workers) > 1:
            others = " and ".join(f"worker {worker} (step {step})" for worker, step in workers[1:])
            what = f"stage {stage} is also on {others}; a stage has one worker, which holds its weights."
            found.add(what, f"keep all passes of stage {stage} on one worker.", *workers)


def _check_edges(found: _Findings, edges: Iterable[Edge]) -> None:
    stages = found.table.stages
    for src, dst in sorted(edges):
        if not 0 <= src < dst < stages:
            what = f"edge {src} -> {dst} does not lead from one of the stages {_span(stages)} to a later one."
            found.add(what, "number the stages in the order in which data flows.")


def _check_passes(found: _Findings, places: Mapping[tuple[int, str, int], list[Place]], stage: int) -> None:
    """Counts one stage's passes over every microbatch, and their order on a worker."""
    lacking: dict[str, list[int]] = {}
    seen = False
    for microbatch in range(found.table.microbatches):
        by_kind = {kind: places.get((stage, kind, microbatch), []) for kind in "FBIW"}
        seen = seen or any(by_kind.values())
        for kind, where in by_kind.items():
            _check_doubled(found, f"{stage}{kind}{microbatch}", where)
        for kind in _lacking(found.table.forward_only, by_kind):
            lacking.setdefault(kind, []).append(microbatch)
        _check_kinds(found, stage, microbatch, by_kind)
        for earlier, later in (("F", "B"), ("F", "I"), ("I", "W")):
            _check_order(
                found,
                (f"{stage}{earlier}{microbatch}", by_kind[earlier]),
                (f"{stage}{later}{microbatch}", by_kind[later]),
            )
    if not seen:
        return  # a stage without a worker is reported as such
    for kind, missing in lacking.items():
        name = {"F": "forward", "B": "backward"}.get(kind, f"{kind}, the other half of a split backward,")
        what = f"{name} of stage {stage} is missing for microbatch {_numbers(missing)}."
        found.add(what, f"add {stage}{kind}{missing[0]}{' and so on' if missing[1:] else ''}.", stage=stage)


def _lacking(forward_only: bool, by_kind: Mapping[str, list[Place]]) -> Iterable[str]:
    if not by_kind["F"]:
        yield "F"
    if forward_only or by_kind["B"]:
        return
    if not by_kind["I"] and not by_kind["W"]:
        yield "B"
    elif not by_kind["I"]:
        yield "I"
    elif not by_kind["W"]:
        yield "W"


def _check_doubled(found: _Findings, name: str, where: Sequence[Place]) -> None:
    by_worker: dict[int, list[Place]] = {}
    for place in where:
        by_worker.setdefault(place[0], []).append(place)
    for same in by_worker.values():  # on several workers: reported as a stage on several workers
        if len(same) > 1:
            steps = ", ".join(str(step) for _, step in same[1:])
            found.add(f"{name} runs again at step {steps}; every pass runs once.", f"keep one {name}.", *same)


def _check_kinds(found: _Findings, stage: int, microbatch: int, by_kind: Mapping[str, list[Place]]) -> None:
    backward = [place for kind in "BIW" for place in by_kind[kind]]
    if found.table.forward_only and backward:
        what = f"a forward-only table has a backward of stage {stage}, microbatch {microbatch}."
        found.add(what, "remove it, or make the table with forward_only=False.", *backward)
    elif by_kind["B"] and (by_kind["I"] or by_kind["W"]):
        what = f"microbatch {microbatch} of stage {stage} has a full backward B and a split one (I, W)."
        found.add(what, "keep B, or I and W.", *backward)


def _check_order(found: _Findings, earlier: tuple[str, list[Place]], later: tuple[str, list[Place]]) -> None:
    """What needs another pass of its own stage must stand behind it."""
    for before in earlier[1][:1]:
        for after in later[1][:1]:
            if before[0] == after[0] and after[1] <= before[1]:
                what = f"{later[0]} needs {earlier[0]}, which the same worker runs only at step {before[1]}."
                found.add(what, f"move {earlier[0]} before {later[0]}.", after, before)


def _stall(system: ActorSystem) -> list[Fault]:
    run_clock(system)
    return [] if system.finished else [stall_fault(system.table, system.blocked())]


def _credit_faults(table: ScheduleTable, credits: int | Sequence[int] | None) -> list[Fault]:
    """Stages that hold more microbatches than they have credits. A row fixes what is held, so the least is exact."""
    if credits is None:
        return []
    given = [credits] * table.stages if isinstance(credits, int) else list(credits)
    where = f"table {table.name!r}"
    if len(given) != table.stages:
        what = f"credits has {len(given)} numbers for {table.stages} stages."
        return [Fault(where, what, (f"credits: {given}",), "give one number a stage, or one for all.")]
    least = least_credits(table)
    return [
        Fault(
            f"{where}, stage {stage}",
            f"the stage holds {needed} microbatches at once and has {count} credits.",
            mend=f"credits={least}, the least that works.",
        )
        for stage, (needed, count) in enumerate(zip(least, given))
        if needed > count
    ]


def least_credits(table: ScheduleTable) -> list[int]:
    """The most microbatches that each stage holds at once, which is the least number of credits it can run with."""
    rows = [table.cells[worker] for worker in table.worker_of_stage]
    return [max(held(row, table.forward_only, stage)) for stage, row in enumerate(rows)]


def _slot_faults(table: ScheduleTable, edges: Iterable[Edge], slots: Mapping[Edge, int] | None) -> list[Fault]:
    """Edges whose slots are so few that the actors stand still."""
    if not slots:
        return []
    least = {edge: max(1, count) for edge, count in slots.items()}
    while True:
        system = ActorSystem(table, edges, slots=least)
        run_clock(system)
        if system.finished:
            break
        blocked = system.blocked()
        short = next(w for w in (*blocked.cycle, *blocked.waits) if w.needs.startswith(SLOT) and w.edge)
        assert short.edge is not None
        assert least[short.edge] < _MOST_SLOTS, f"no number of slots helps: {blocked}"
        least[short.edge] += 1
    return [
        Fault(
            f"table {table.name!r}, edge {src} -> {dst}",
            f"{slots[src, dst]} slots are too few: the workers wait for one another.",
            mend=f"slots={{({src}, {dst}): {count}}}, the least that works.",
        )
        for (src, dst), count in sorted(least.items())
        if count > slots[src, dst]
    ]


def _span(count: int) -> str:
    return "0" if count == 1 else f"0 to {count - 1}"


def _numbers(values: Sequence[int]) -> str:
    """Numbers with runs drawn together: ``0, 2-5``."""
    runs: list[list[int]] = []
    for value in values:
        if runs and value == runs[-1][-1] + 1:
            runs[-1].append(value)
        else:
            runs.append([value])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
