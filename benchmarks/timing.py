"""Timing of alternatives in alternating rounds, and the table that all benchmarks print."""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Row:
    """One measured claim.

    Attributes:
        name: What was measured. figure: The measured ratio or number, with its unit in `unit`.
        bound: What it should not exceed. detail: The two sides, in words.
    """

    name: str
    figure: float
    unit: str
    bound: float
    detail: str

    @property
    def holds(self) -> bool:
        """Whether the figure is within its bound."""
        return self.figure <= self.bound


def alternate(calls: Mapping[str, Callable[[], object]], rounds: int, repeat: int = 1) -> dict[str, list[float]]:
    """Seconds of each call, in rounds that take the calls in turn; every second round in reverse order."""
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for i in range(rounds):
        names = list(calls)[:: 1 if i % 2 == 0 else -1]
        for name in names:
            start = time.perf_counter()
            for _ in range(repeat):
                calls[name]()
            seconds[name].append((time.perf_counter() - start) / repeat)
    return seconds


def ratio(seconds: Mapping[str, Sequence[float]], ours: str, theirs: str) -> float:
    """Median of ours over median of theirs."""
    return statistics.median(seconds[ours]) / statistics.median(seconds[theirs])


def both(seconds: Mapping[str, Sequence[float]]) -> str:
    """Medians and minima in words, in milliseconds."""
    return ", ".join(f"{k} {statistics.median(v) * 1e3:.2f} ms (min {min(v) * 1e3:.2f})" for k, v in seconds.items())


def table(rows: Sequence[Row]) -> str:
    """The rows as text."""
    lines = [f"{'':2} {'measured':>9} {'bound':>8}  what"]
    for row in rows:
        mark = "ok" if row.holds else "!!"
        lines.append(f"{mark} {row.figure:9.3f} {row.bound:8.2f}  {row.name} [{row.unit}]: {row.detail}")
    return "\n".join(lines)
