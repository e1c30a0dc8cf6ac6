"""Forward only: microbatches stream through the stages, for evaluation and inference."""

from ..actions import Action
from .schedule import Rows, Schedule


def forward_only(microbatches: int) -> Schedule:
    """The schedule without backwards: every worker runs its forwards in microbatch order.

    With p workers and m microbatches of equal cost the bubble is ``(p - 1) / (m + p - 1)``. A worker keeps nothing
    once a forward has ended. Any p and m from 1 up.

    >>> print(forward_only(microbatches=2).table(workers=2))
    forward-only: 2 workers, 2 stages, 2 microbatches
    time      0   1   2
    worker 0  0F0 0F1  .
    worker 1   .  1F0 1F1
    """
    return Schedule("forward-only", microbatches, _rows, forward_only=True)


def _rows(workers: int, microbatches: int, chunks: int) -> Rows:
    return [[Action(stage, "F", i) for i in range(microbatches)] for stage in range(workers * chunks)]
