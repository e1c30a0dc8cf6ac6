"""The simulator: a schedule table on a clock, every action as soon as its worker is free and its inputs are there."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from oneflax.sbp.errors import ScheduleError

from .blocked import stall_fault
from .registers import Edge
from .trace import TimedAction, Trace

if TYPE_CHECKING:
    from .actors import Costs
    from .table import ScheduleTable


@dataclass(frozen=True, slots=True)
class Simulation(Trace):
    """A computed :class:`.trace.Trace`, with what the table holds.

    Args:
        peak_activations: For each worker the most (stage, microbatch) pairs held at once, as
            :attr:`.table.ScheduleTable.peak_activations` counts them.
    """

    peak_activations: tuple[int, ...] = ()


def simulate(table: "ScheduleTable", costs: "Costs | None" = None, edges: Iterable[Edge] | None = None) -> Simulation:
    """Computes when each action of a table runs. Transfers between stages take no time.

    Args:
        table: The schedule table.
        costs: Seconds for each kind, ``{"F": 1, "B": 2, "I": 1, "W": 1}`` unless told, or a function of the action.
            Actions that share a cell run together, for the sum of their seconds.
        edges: Forward edges between stages; the chain unless told.

    Raises:
        ScheduleError: The table cannot run to its end, or a cost is missing, negative or not finite.

    >>> from oneflax.pipeline.schedules import one_f_one_b
    >>> simulation = one_f_one_b(microbatches=8).table(workers=4).simulate()
    >>> simulation.makespan_s, round(simulation.bubble, 3), simulation.peak_activations
    (33.0, 0.273, (4, 3, 2, 1))
    """
    from .actors import ActorSystem, run_clock

    system = ActorSystem(table, edges)
    firings = run_clock(system, costs)
    if not system.finished:
        raise ScheduleError(stall_fault(table, system.blocked()))
    actions = tuple(
        TimedAction(firing.worker, action.stage, action.kind, action.microbatch, firing.start_s, firing.end_s)
        for firing in firings
        for action in firing.cell
    )
    return Simulation(actions, table.workers, table.name, peak_activations=table.peak_activations)
