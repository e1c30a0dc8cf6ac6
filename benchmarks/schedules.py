"""How long it takes to put a schedule's actions in the order of dispatch: once for each compiled plan."""

import statistics

from benchmarks.timing import Row, alternate
from oneflax.pipeline.actors import dispatch_order
from oneflax.pipeline.schedules import one_f_one_b

WORKERS, MICROBATCHES, ROUNDS = 8, 64, 21


def main() -> list[Row]:
    """Measures one-forward-one-backward for 8 workers and 64 microbatches."""
    table = one_f_one_b(MICROBATCHES).table(workers=WORKERS)
    (times,) = alternate({"order": lambda: dispatch_order(table)}, ROUNDS).values()
    name = f"schedules: dispatch order of 1f1b, {WORKERS} workers x {MICROBATCHES} microbatches"
    detail = f"{2 * WORKERS * MICROBATCHES} actions, min {min(times) * 1e3:.1f} ms"
    return [Row(name, statistics.median(times) * 1e3, "ms", 50, detail)]
