"""1F1B: one forward, one backward in turn (PipeDream-Flush, Narayanan et al. 2021, https://arxiv.org/abs/2006.09503)."""

from ..actions import Action
from .schedule import Rows, Schedule


def one_f_one_b(microbatches: int) -> Schedule:
    """The 1F1B schedule: as many forwards as fill the pipeline, then forward and backward in turn.

    With p workers and m microbatches of equal cost the bubble is GPipe's, ``(p - 1) / (m + p - 1)`` of the step, but
    worker s holds only ``min(m, p - s)`` activations. Any p and m from 1 up.

    >>> print(one_f_one_b(microbatches=3).table(workers=2))
    1f1b: 2 workers, 2 stages, 3 microbatches
    time      0   1   2   3   4   5   6   7   8   9   10  11
    worker 0  0F0 0F1  .   .  0B0---- 0F2 0B1----  .  0B2----
    worker 1   .  1F0 1B0---- 1F1 1B1---- 1F2 1B2----  .   .
    """
    return Schedule("1f1b", microbatches, _rows)


def _rows(workers: int, microbatches: int, chunks: int) -> Rows:
    return [_row(stage, workers * chunks, microbatches) for stage in range(workers * chunks)]


def _row(stage: int, stages: int, microbatches: int) -> list[Action]:
    # The last stage turns around at once; each stage before it runs one forward more ahead.
    ahead = min(microbatches, stages - stage - 1)
    row = [Action(stage, "F", i) for i in range(ahead)]
    for i in range(microbatches):
        if ahead + i < microbatches:
            row.append(Action(stage, "F", ahead + i))
        row.append(Action(stage, "B", i))
    return row
