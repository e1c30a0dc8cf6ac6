"""Schedule tables: a schedule laid out for p workers and m microbatches.

The table is the one thing that the validator, the simulator, the runtime and the pictures read. It says what each
worker does in which order; *when* follows from the order (:mod:`.actors`).
"""

import csv
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from oneflax.sbp.errors import Fault, FlowError, ScheduleError

from .actions import Action, Cell, as_cell, cell_text, parse_cell
from .registers import Edge

if TYPE_CHECKING:
    from .actors import Costs
    from .simulate import Simulation


@dataclass(frozen=True, slots=True)
class ScheduleTable:
    """What every worker does, in order. Made by ``schedule.table(workers)``, :meth:`of` or :func:`from_csv`.

    Args:
        name: The schedule's name, for messages and titles.
        cells: One row a worker; each cell holds the actions that run together, usually one.
        microbatches: How many microbatches a step has.
        stages: How many stages there are.
        forward_only: Whether the table has no backward on purpose.

    >>> table = ScheduleTable.of([["0F0", "0B0"], ["1F0", "1B0"]], name="hand")
    >>> table.workers, table.stages, table.worker_of_stage
    (2, 2, (0, 1))
    >>> print(table)
    hand: 2 workers, 2 stages, 1 microbatch
    time      0   1   2   3   4   5
    worker 0  0F0  .   .   .  0B0----
    worker 1   .  1F0 1B0----  .   .
    """

    name: str
    cells: tuple[tuple[Cell, ...], ...]
    microbatches: int
    stages: int
    forward_only: bool = False

    @classmethod
    def of(
        cls,
        rows: Iterable[Iterable[Action | str | Iterable[Action]]],
        name: str = "table",
        microbatches: int | None = None,
        stages: int | None = None,
        forward_only: bool | None = None,
    ) -> "ScheduleTable":
        """Makes a table from rows of actions or their texts; what is not told is read off the actions.

        Blank cells are no action and are left out. `microbatches` and `stages` are one more than the highest number
        seen, `forward_only` is whether no backward occurs.
        """
        cells = tuple(tuple(cell for value in row if (cell := as_cell(value))) for row in rows)
        actions = [action for row in cells for cell in row for action in cell]
        return cls(
            name,
            cells,
            1 + max((a.microbatch for a in actions), default=-1) if microbatches is None else microbatches,
            1 + max((a.stage for a in actions), default=-1) if stages is None else stages,
            all(a.kind == "F" for a in actions) if forward_only is None else forward_only,
        )

    @property
    def workers(self) -> int:
        """How many workers there are."""
        return len(self.cells)

    @property
    def actions(self) -> tuple[tuple[Action, ...], ...]:
        """The actions of each worker in order; those that run together follow one another."""
        return tuple(tuple(action for cell in row for action in cell) for row in self.cells)

    @property
    def worker_of_stage(self) -> tuple[int, ...]:
        """The worker that runs each stage; -1 where none does, which :meth:`validate` refuses."""
        workers = [-1] * self.stages
        for worker, row in reversed(list(enumerate(self.actions))):
            for action in row:
                if action.stage < self.stages:
                    workers[action.stage] = worker
        return tuple(workers)

    @property
    def chunks(self) -> int:
        """The most stages that one worker runs."""
        return max((len({action.stage for action in row}) for row in self.actions), default=0)

    @property
    def peak_activations(self) -> tuple[int, ...]:
        """For each worker the most (stage, microbatch) pairs that it holds at once.

        A pair is held from its ``F`` until its ``B``; where the backward is split, until its ``W``, because the weight
        gradient reads the activations too. In a forward-only table a pair is held only while its ``F`` runs.
        """
        return tuple(max(held(row, self.forward_only), default=0) for row in self.cells)

    def table(self, workers: int) -> "ScheduleTable":
        """Gives the table itself, so that a table serves wherever a schedule does.

        Raises:
            ScheduleError: The table is laid out for another number of workers.
        """
        if workers != self.workers:
            raise _other_workers(self, workers)
        return self

    def validate(
        self,
        edges: Iterable[Edge] | None = None,
        credits: int | Sequence[int] | None = None,
        slots: Mapping[Edge, int] | None = None,
    ) -> None:
        """Checks that the table can run, and reports everything that is wrong at once.

        Args:
            edges: Forward edges ``(source stage, destination stage)``; the chain unless told.
            credits: Microbatches that each stage may hold, one number or one a stage; no bound unless told.
            slots: Values that wait on an edge at most, for the edges named; no bound unless told.

        Raises:
            ScheduleError: A pass is missing, doubled or out of order, a stage is unknown, without a worker or on two
                workers, an edge runs backward, the workers wait for one another in a cycle, or there are too few
                registers (the message has the least number that works).
        """
        from .validation import find_faults

        faults = find_faults(self, edges, credits, slots)
        if faults:
            raise ScheduleError(faults, f"table {self.name!r}")

    def simulate(self, costs: "Costs | None" = None, edges: Iterable[Edge] | None = None) -> "Simulation":
        """Runs the table on a clock, every action as soon as it can: see :func:`.simulate.simulate`."""
        from .simulate import simulate

        return simulate(self, costs, edges)

    def to_csv(self, path: str | Path) -> None:
        """Writes one row a worker, one cell an action (or a pair of them); :func:`from_csv` reads it back."""
        with Path(path).open("w", newline="", encoding="utf-8") as file:
            # A worker without actions gets one blank cell: a line without any cell would not count as a worker.
            csv.writer(file, lineterminator="\n").writerows(
                [cell_text(cell) for cell in row] or [""] for row in self.cells
            )

    @staticmethod
    def from_csv(path: str | Path, microbatches: int | None = None) -> "ScheduleTable":
        """The same as the function :func:`from_csv`."""
        return from_csv(path, microbatches)

    def to_svg(self, path: str | Path, costs: "Costs | None" = None) -> None:
        """Draws the table as it runs with `costs`, see :func:`.picture.draw`.

        Raises:
            ScheduleError: The table cannot run.
        """
        self.simulate(costs).to_svg(path)

    def __str__(self) -> str:
        from .text_grid import timed_grid

        return timed_grid(self)


def from_csv(path: str | Path, microbatches: int | None = None) -> ScheduleTable:
    """Reads a table: one row a worker, one cell an action; blank cells are no-ops and fall away.

    torch's files read as they are, overlapped pairs included. The file's name becomes the table's.

    Args:
        path: The file.
        microbatches: How many microbatches a step has; unless told, one more than the highest in the file.

    Raises:
        ScheduleError: A cell is not an action. All such cells are listed.
    """
    path = Path(path)
    rows: list[list[Cell]] = []
    faults: list[Fault] = []
    with path.open(newline="", encoding="utf-8-sig") as file:
        reader = csv.reader(file)
        for texts in filter(None, reader):
            rows.append([])
            for column, text in enumerate(texts, 1):
                try:
                    rows[-1].append(parse_cell(text))
                except FlowError:
                    faults.append(_bad_cell(path, reader.line_num, column, text))
    if faults:
        raise ScheduleError(faults, f"from_csv({path.name!r})")
    return ScheduleTable.of(rows, path.stem, microbatches)


def held(row: Sequence[Cell], forward_only: bool, stage: int | None = None) -> Iterable[int]:
    """How many (stage, microbatch) pairs a worker holds during each cell, of one stage if told."""
    now: set[tuple[int, int]] = set()
    for cell in row:
        mine = [a for a in cell if stage in (None, a.stage)]
        now.update((a.stage, a.microbatch) for a in mine if a.kind == "F")
        yield len(now)  # a backward in the same cell has not finished while the forward runs
        now.difference_update((a.stage, a.microbatch) for a in mine if forward_only or a.kind in "BW")


def _other_workers(table: ScheduleTable, workers: int) -> ScheduleError:
    return ScheduleError(
        Fault(
            f"table {table.name!r}.table(workers={workers})",
            f"the table is laid out for {table.workers} workers and cannot be laid out anew.",
            mend=f"use {table.workers} workers, or a schedule that is laid out for any number, as "
            f"one_f_one_b(microbatches={table.microbatches}).",
        )
    )


def _bad_cell(path: Path, line: int, column: int, text: str) -> Fault:
    return Fault(
        f"from_csv({path.name!r}), line {line}, cell {column}",
        f"{text!r} is not an action.",
        mend="write stage, F, B, I or W, and microbatch, as 2F0; a pair as 4F2;5B1; nothing for a no-op.",
    )
