"""GPipe: all forwards, then all backwards (Huang et al. 2019, https://arxiv.org/abs/1811.06965)."""

from ..actions import Action
from .schedule import Rows, Schedule


def gpipe(microbatches: int) -> Schedule:
    """GPipe's schedule: each worker runs all forwards and then all backwards, in microbatch order.

    With p workers and m microbatches of equal cost the bubble is ``(p - 1) / (m + p - 1)`` of the step. Every worker
    holds m activations. Any p and m from 1 up.

    >>> print(gpipe(microbatches=2).table(workers=2))
    gpipe: 2 workers, 2 stages, 2 microbatches
    time      0   1   2   3   4   5   6   7   8
    worker 0  0F0 0F1  .   .   .  0B0---- 0B1----
    worker 1   .  1F0 1F1 1B0---- 1B1----  .   .
    """
    return Schedule("gpipe", microbatches, _rows)


def _rows(workers: int, microbatches: int, chunks: int) -> Rows:
    return [[Action(w, kind, i) for kind in ("F", "B") for i in range(microbatches)] for w in range(workers * chunks)]
