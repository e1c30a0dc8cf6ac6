"""One training run of the demo: the loop, its times, the progress bar, and Ctrl-C.

The loop knows nothing of devices: it drives any step function ``(state, batch) -> (state, loss)``.
"""

import contextlib
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

if TYPE_CHECKING:
    import jax

IN_FLIGHT = 2
"""Steps dispatched ahead of the loss that is read: enough to keep devices busy, while deep queues can lock them up."""

LINE_EVERY = 50
"""Steps between the lines that stand for the progress bar where there is no terminal."""

Step = Callable[[Any, np.ndarray], "tuple[Any, jax.Array]"]
"""(state, batch) -> (state, loss)"""


@dataclass(slots=True)
class Run:
    """What is known of a training: its losses in nats per token, and when each was read.

    Args:
        start_s: When it began, by ``time.perf_counter``.
        losses: The loss of each step, before its update.
        known_s: When each loss was read.
    """

    start_s: float
    losses: list[float] = field(default_factory=list)
    known_s: list[float] = field(default_factory=list)

    @property
    def first_step_s(self) -> float:
        """The first step, compilation included."""
        return self.known_s[0] - self.start_s

    @property
    def step_s(self) -> float:
        """The mean time of a step after the first one."""
        return self.step_s_since(1)

    def step_s_since(self, step: int) -> float:
        """The mean time of the steps after number ``step``; of the first step where there are no others."""
        first = max(step, 1) - 1
        later = len(self.known_s) - 1 - first
        return (self.known_s[-1] - self.known_s[first]) / later if later > 0 else self.first_step_s


class Stop:
    """Whether the user pressed Ctrl-C. The first one ends training after the step; the second one ends the process."""

    def __init__(self) -> None:
        self.asked = False

    @contextlib.contextmanager
    def listening(self) -> Iterator["Stop"]:
        """Takes Ctrl-C over; only the main thread can."""
        if threading.current_thread() is not threading.main_thread():
            yield self
            return
        before = signal.signal(signal.SIGINT, self._interrupted)
        try:
            yield self
        finally:
            signal.signal(signal.SIGINT, before)

    def _interrupted(self, signum: int, frame: object) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True
        # Not print: the signal may come in the middle of one.
        os.write(2, b"\nstopping after this step; Ctrl-C once more quits at once\n")


def train(step: Step, state: Any, batches: Iterable[np.ndarray], show: Callable[[Run], None], stop: Stop) -> Any:
    """Takes a step for each batch, at least one, until ``stop`` is asked for.

    Each loss is read two steps late, so that the host does not wait for the devices.

    Returns:
        The last state and the `Run`.
    """
    run = Run(time.perf_counter())
    pending: deque[Any] = deque()

    def read() -> None:
        run.losses.append(float(pending.popleft()))
        run.known_s.append(time.perf_counter())
        show(run)

    for batch in batches:
        state, loss = step(state, batch)
        pending.append(loss)
        if len(pending) > IN_FLIGHT:
            read()
        if stop.asked:
            break
    while pending:
        read()
    return state, run


class Show:
    """A run as it goes: a progress bar on a terminal, elsewhere a line every 50 steps. Call it after each loss.

    Args:
        console: Where to.
        name: What the run is called.
        steps: How many steps it shall make.
        tokens: Tokens a step.
    """

    def __init__(self, console: Console, name: str, steps: int, tokens: int) -> None:
        self.console, self.name, self.steps, self.tokens = console, name, steps, tokens
        self.bar: Progress | None = None

    def __enter__(self) -> "Show":
        if not self.console.is_terminal:
            self.console.print(f"{self.name}: compiling", highlight=False, soft_wrap=True)
            return self
        name, figures = TextColumn("{task.description}"), TextColumn("{task.fields[figures]}")
        columns = (name, BarColumn(None), MofNCompleteColumn(), figures, TimeElapsedColumn())
        self.bar = Progress(*columns, console=self.console, expand=True)
        self.bar.add_task(self.name, total=self.steps, figures="compiling")
        self.bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self.bar is not None:
            self.bar.stop()

    def __call__(self, run: Run) -> None:
        """Shows the newest loss; the speed is that of the last 20 steps."""
        done = len(run.losses)
        step_s = run.step_s_since(done - 20)
        figures = f"loss {run.losses[-1]:.4f}  {self.tokens / step_s:6,.0f} tokens/s  {1e3 * step_s:4.0f} ms/step"
        if self.bar is not None:
            self.bar.update(self.bar.task_ids[0], completed=done, figures=figures)
        elif done in (1, self.steps) or done % LINE_EVERY == 0:
            elapsed = f"{run.known_s[-1] - run.start_s:.0f} s"
            self.console.print(
                f"{self.name}: step {done}/{self.steps}  {figures}  {elapsed}", highlight=False, soft_wrap=True
            )
