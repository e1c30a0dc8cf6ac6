"""A schedule: a rule that lays out a table for any number of workers."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from oneflax.sbp.errors import Fault, ScheduleError

from ..actions import Action, Cell
from ..table import ScheduleTable

Rows = Iterable[Iterable[Action | Cell]]
Rule = Callable[[int, int, int], Rows]
"""(workers, microbatches, chunks) → one row a worker."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """A named rule with its settings; ``dataclasses.replace`` gives one with others.

    Args:
        name: As the command line spells it: ``"1f1b"``.
        microbatches: How many microbatches a step is cut into.
        rule: Lays out the rows, a pure function.
        chunks: How many stages each worker runs.
        forward_only: Whether there is no backward.

    Raises:
        ScheduleError: `microbatches` or `chunks` is not a whole number from 1 up.

    >>> from oneflax.pipeline.schedules import one_f_one_b
    >>> sch = one_f_one_b(microbatches=8)
    >>> str(sch), sch.table(workers=4).peak_activations
    ('1f1b(microbatches=8)', (4, 3, 2, 1))
    """

    name: str
    microbatches: int
    rule: Rule = field(repr=False)
    chunks: int = 1
    forward_only: bool = False

    def __post_init__(self) -> None:
        faults = [_bad_count(self.name, key, n) for key, n in self._counts.items() if not _is_count(n)]
        if faults:
            raise ScheduleError(faults)

    @property
    def _counts(self) -> dict[str, int]:
        return {"microbatches": self.microbatches, "chunks": self.chunks}

    def table(self, workers: int) -> ScheduleTable:
        """Lays the schedule out for `workers` workers, which run ``workers * chunks`` stages.

        Raises:
            ScheduleError: `workers` is not a whole number from 1 up.
        """
        if not _is_count(workers):
            raise ScheduleError(_bad_count(f"{self}.table", "workers", workers))
        rows = self.rule(workers, self.microbatches, self.chunks)
        stages = workers * self.chunks
        return ScheduleTable.of(rows, self.name, self.microbatches, stages, self.forward_only)

    def __str__(self) -> str:
        chunks = f", chunks={self.chunks}" if self.chunks != 1 else ""
        return f"{self.name}(microbatches={self.microbatches}{chunks})"


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _bad_count(where: str, argument: str, value: object) -> Fault:
    return Fault(
        f"{where}({argument}=)", f"{argument} is a whole number from 1 up, not {value!r}.", mend=f"{argument}=4"
    )
