"""Text grids of a schedule table: one line a worker, by time if the table runs, by step with marks if it does not."""

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from .actions import Cell, cell_text

if TYPE_CHECKING:
    from .table import ScheduleTable

_MARGIN = 2  # steps shown left and right of a marked one
_WHOLE = 16  # up to so many steps a grid is shown whole


def step_grid(rows: Sequence[Sequence[Cell]], marks: Collection[tuple[int, int]] = ()) -> list[str]:
    r"""The lines of a grid with one column a step, without regard to time; marked cells stand in ``[ ]``.

    Of a long table only the first step and the steps near a mark are shown, ``..`` stands for the rest.

    >>> from .actions import parse_cell
    >>> rows = [[parse_cell("0F0"), parse_cell("0B0")], [parse_cell("1F0"), parse_cell("1B0")]]
    >>> print("\n".join(step_grid(rows, {(1, 1)})))
    step       0    1
    worker 0  0F0  0B0
    worker 1  1F0 [1B0]
    """
    steps = max(map(len, rows), default=0)
    shown = _shown(steps, {step for _, step in marks})
    texts = [[cell_text(row[step]) if step < len(row) else "" for step in shown] for row in rows]
    widths = [max(len(line[at]) for line in texts) for at in range(len(shown))]
    head = f"worker {len(rows) - 1}"
    lines = [
        _line("step".ljust(len(head)), shown, [f" {str(step).center(width)} " for step, width in zip(shown, widths)])
    ]
    for worker, line in enumerate(texts):
        cells = [
            f"[{text}]".center(width + 2) if (worker, step) in marks else f" {text.center(width)} "
            for step, text, width in zip(shown, line, widths)
        ]
        lines.append(_line(f"worker {worker}".ljust(len(head)), shown, cells))
    return lines


def _shown(steps: int, marked: Collection[int]) -> list[int]:
    if steps <= _WHOLE:
        return list(range(steps))
    near = {step for mark in marked for step in range(mark - _MARGIN, mark + _MARGIN + 1)}
    return [step for step in range(steps) if step in near or step == 0]


def _line(head: str, shown: Sequence[int], cells: Sequence[str]) -> str:
    text = head + " "
    for at, cell in enumerate(cells):
        gap = at and shown[at] != shown[at - 1] + 1
        text += (" .. " if gap else "") + cell
    return text.rstrip()


def timed_grid(table: "ScheduleTable") -> str:
    """The table on the clock F=1, B=2, I=1, W=1: one column a unit of time, ``.`` is idle, ``-`` goes on.

    A table that cannot run is shown by steps instead, with the stuck cells marked.
    """
    from .actors import ActorSystem, run_clock

    title = f"{table.name}: {table.workers} workers, {table.stages} stages, {table.microbatches} microbatches"
    title = title.replace("1 workers", "1 worker") if table.workers == 1 else title
    title = title.replace(" 1 stages", " 1 stage") if table.stages == 1 else title
    title = title.replace(" 1 microbatches", " 1 microbatch") if table.microbatches == 1 else title
    system = ActorSystem(table)
    firings = run_clock(system)
    if not system.finished:
        stuck = {(wait.worker, wait.step) for wait in system.blocked().waits}
        return "\n".join([f"{title}, cannot run", *step_grid(table.cells, stuck)])
    end = int(max((firing.end_s for firing in firings), default=0))
    width = 1 + max((len(cell_text(firing.cell)) for firing in firings), default=3)
    head = len(f"worker {table.workers - 1}")
    lines = [[".".center(width - 1).ljust(width)] * end for _ in table.cells]
    for firing in firings:
        start, stop = int(firing.start_s), int(firing.end_s)
        text = cell_text(firing.cell)
        lines[firing.worker][start] = text.ljust((stop - start) * width - 1, "-" if stop - start > 1 else " ") + " "
        lines[firing.worker][start + 1 : stop] = [""] * (stop - start - 1)
    times = "".join(str(time).ljust(width) for time in range(end))
    body = [f"worker {worker}".ljust(head) + "  " + "".join(line) for worker, line in enumerate(lines)]
    return "\n".join(line.rstrip() for line in [title, "time".ljust(head) + "  " + times, *body])
