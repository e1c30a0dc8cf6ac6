"""Traces: when every action of a step ran, measured by the runtime or computed by the simulator.

Both give the same type, so that what was planned and what happened print, draw and compare alike.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from .actions import KINDS, Action, Kind

Direction = Literal["F", "B"]


@dataclass(frozen=True, slots=True)
class TimedAction:
    """One action with its worker and its time, in seconds from any common start."""

    worker: int
    stage: int
    kind: Kind
    microbatch: int
    start_s: float
    end_s: float

    @property
    def action(self) -> Action:
        """The action without worker and time."""
        return Action(self.stage, self.kind, self.microbatch)

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"


@dataclass(frozen=True, slots=True)
class TimedTransfer:
    """One value on its way between stages: activations (direction ``"F"``) or cotangents (``"B"``)."""

    src_stage: int
    dst_stage: int
    microbatch: int
    direction: Direction
    start_s: float
    end_s: float
    bytes: int


@dataclass(frozen=True, slots=True)
class Trace:
    """The timeline of one step.

    Args:
        actions: What ran when.
        workers: How many workers there are, those that did nothing included.
        name: The schedule's name, for titles.
        transfers: Values on their way between stages, if they were recorded.
        peak_bytes: For each worker the most bytes it held at once, if measured.

    >>> trace = Trace((TimedAction(0, 0, "F", 0, 0.0, 1.0), TimedAction(1, 1, "F", 0, 1.0, 2.0)), workers=2)
    >>> trace.makespan_s, trace.busy, trace.bubble
    (2.0, (0.5, 0.5), 0.5)
    >>> print(trace)
    trace: 2 workers, 2.000 s, bubble 50.0 %
    worker  stages    busy   F mean
    0       0       50.0 %  1.000 s
    1       1       50.0 %  1.000 s
    """

    actions: tuple[TimedAction, ...]
    workers: int
    name: str = "trace"
    transfers: tuple[TimedTransfer, ...] = ()
    peak_bytes: tuple[int, ...] | None = None

    @property
    def start_s(self) -> float:
        """When the first action starts."""
        return min((a.start_s for a in self.actions), default=0.0)

    @property
    def makespan_s(self) -> float:
        """Seconds from the start of the first action to the end of the last."""
        return max((a.end_s for a in self.actions), default=0.0) - self.start_s

    @property
    def busy_s(self) -> tuple[float, ...]:
        """For each worker the seconds in which it ran something; actions that overlap count once."""
        rows: list[list[tuple[float, float]]] = [[] for _ in range(self.workers)]
        for a in self.actions:
            rows[a.worker].append((a.start_s, a.end_s))
        return tuple(map(_covered, rows))

    @property
    def busy(self) -> tuple[float, ...]:
        """For each worker the share of the makespan in which it ran something."""
        makespan = self.makespan_s
        return tuple(busy / makespan if makespan else 0.0 for busy in self.busy_s)

    @property
    def bubble(self) -> float:
        """The idle share of all workers' time: ``1 - busy / (workers * makespan)``; 0 for an empty trace."""
        whole = self.workers * self.makespan_s
        return 1 - sum(self.busy_s) / whole if whole else 0.0

    def to_svg(self, path: str | Path) -> None:
        """Draws the timeline, see :func:`.picture.draw`."""
        from .picture import draw

        Path(path).write_text(draw(self), encoding="utf-8")

    def to_chrome(self, path: str | Path) -> None:
        """Writes Chrome's Trace Event JSON, which chrome://tracing and https://ui.perfetto.dev open.

        Workers are the threads of one process, edges with transfers those of a second one. Times are microseconds from
        the first action on.
        """
        text = json.dumps({"traceEvents": list(_chrome_events(self)), "displayTimeUnit": "ms"}, indent=0)
        Path(path).write_text(text, encoding="utf-8")

    def __str__(self) -> str:
        workers = "1 worker" if self.workers == 1 else f"{self.workers} workers"
        head = f"{self.name}: {workers}, {seconds_text(self.makespan_s)}, bubble {100 * self.bubble:.1f} %"
        return "\n".join([head, *_aligned(_rows(self))])


def seconds_text(seconds: float) -> str:
    """Words a duration with a unit that fits: ``"1.500 ms"``."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3f} {unit}"
    return f"{seconds / 1e-6:.1f} us" if seconds else "0 s"


def bytes_text(count: float) -> str:
    """Words a number of bytes: ``"1.5 MiB"``."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"


def _covered(spans: Iterable[tuple[float, float]]) -> float:
    """The length of the union of spans."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def _rows(trace: Trace) -> list[list[str]]:
    kinds = [kind for kind in KINDS if any(a.kind == kind for a in trace.actions)]
    rows = [["worker", "stages", "busy", *(f"{kind} mean" for kind in kinds), *(["peak"] if trace.peak_bytes else [])]]
    for worker, share in enumerate(trace.busy):
        mine = [a for a in trace.actions if a.worker == worker]
        stages = ",".join(map(str, sorted({a.stage for a in mine}))) or "-"
        row = [str(worker), stages, f"{100 * share:.1f} %"]
        for kind in kinds:
            times = [a.end_s - a.start_s for a in mine if a.kind == kind]
            row.append(seconds_text(sum(times) / len(times)) if times else "-")
        if trace.peak_bytes:
            row.append(bytes_text(trace.peak_bytes[worker]))
        rows.append(row)
    return rows


def _aligned(rows: list[list[str]]) -> list[str]:
    """Columns side by side: names to the left, figures to the right."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    lines = [
        "  ".join(
            text.ljust(width) if at < 2 else text.rjust(width) for at, (text, width) in enumerate(zip(row, widths))
        )
        for row in rows
    ]
    return [line.rstrip() for line in lines]


def _chrome_events(trace: Trace) -> Iterable[dict[str, Any]]:
    yield _named("process_name", 0, 0, f"{trace.name}: workers")
    for worker in range(trace.workers):
        yield _named("thread_name", 0, worker, f"worker {worker}")
    for a in trace.actions:
        args = {"stage": a.stage, "kind": a.kind, "microbatch": a.microbatch}
        yield _complete(str(a), a.kind, (a.start_s, a.end_s), trace.start_s, (0, a.worker), args)
    if not trace.transfers:
        return
    yield _named("process_name", 1, 0, f"{trace.name}: transfers")
    edges = sorted({(t.direction != "F", t.src_stage, t.dst_stage) for t in trace.transfers})
    for thread, (_, src, dst) in enumerate(edges):
        yield _named("thread_name", 1, thread, f"stage {src} -> {dst}")
    for t in trace.transfers:
        thread = edges.index((t.direction != "F", t.src_stage, t.dst_stage))
        args = {
            "src_stage": t.src_stage,
            "dst_stage": t.dst_stage,
            "microbatch": t.microbatch,
            "direction": t.direction,
            "bytes": t.bytes,
        }
        yield _complete(
            f"microbatch {t.microbatch}", "transfer", (t.start_s, t.end_s), trace.start_s, (1, thread), args
        )


def _named(what: str, process: int, thread: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": process, "tid": thread, "args": {"name": name}}


def _complete(
    name: str, category: str, span_s: tuple[float, float], zero_s: float, at: tuple[int, int], args: dict[str, Any]
) -> dict[str, Any]:
    """A "complete" event: start and duration in microseconds; `at` is process and thread."""
    start, end = ((time - zero_s) * 1e6 for time in span_s)
    return {
        "ph": "X",
        "name": name,
        "cat": category,
        "ts": start,
        "dur": end - start,
        "pid": at[0],
        "tid": at[1],
        "args": args,
    }
