"""Named schedules against the lists that independent systems agree on, and against the theory of their bubbles."""

import dataclasses
import json
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from oneflax.pipeline.schedules import NAMES, Schedule, by_name, forward_only, gpipe, one_f_one_b
from oneflax.sbp.errors import ScheduleError

CONSENSUS = json.loads((Path(__file__).parent / "oracles/schedules/consensus.json").read_text(encoding="utf-8"))
MAKERS = {"GPipe": gpipe, "1F1B": one_f_one_b, "ForwardOnly": forward_only}
ENTRIES = [entry for entry in CONSENSUS["entries"] if entry["schedule"] in MAKERS]


def test_the_oracle_has_every_schedule_at_every_size() -> None:
    assert len(ENTRIES) == 3 * 3 * 5


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda e: f"{e['schedule']}-p{e['p']}-m{e['m']}")
def test_consensus(entry: dict[str, Any]) -> None:
    table = MAKERS[entry["schedule"]](entry["m"]).table(workers=entry["p"])
    assert [[str(action) for action in row] for row in table.actions] == entry["actions"]
    assert table.stages == entry["num_stages"]
    assert list(table.worker_of_stage) == entry["stage_to_rank"]
    assert table.chunks == entry["stages_per_rank"]
    table.validate()
    simulation = table.simulate()
    metrics = entry["metrics"]
    assert simulation.makespan_s == metrics["makespan"]
    assert list(simulation.busy_s) == metrics["busy"]
    assert simulation.bubble == pytest.approx(float(Fraction(entry["theory"]["bubble"])), abs=1e-12)
    # The oracle's measure never frees a forward that has no backward; we free it when the forward ends.
    peak = [1] * entry["p"] if table.forward_only else entry["theory"]["peak"]
    assert list(table.peak_activations) == list(simulation.peak_activations) == peak


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("workers", [1, 2, 3, 5, 7])
@pytest.mark.parametrize("microbatches", [1, 2, 3, 6, 11])
def test_every_size_is_valid(name: str, workers: int, microbatches: int) -> None:
    table = by_name(name, microbatches=microbatches).table(workers)
    table.validate()
    bubble = (workers - 1) / (microbatches + workers - 1)
    assert table.simulate().bubble == pytest.approx(bubble, abs=1e-12)


def test_a_schedule_prints_and_is_replaced() -> None:
    schedule = one_f_one_b(microbatches=8)
    assert str(schedule) == "1f1b(microbatches=8)"
    assert dataclasses.replace(schedule, microbatches=4) == one_f_one_b(microbatches=4)
    with pytest.raises(ScheduleError):
        dataclasses.replace(schedule, microbatches=0)


@pytest.mark.parametrize("make", MAKERS.values())
@pytest.mark.parametrize("count", [0, -1, 2.0, "4", None, True])
def test_counts_that_make_no_sense_are_refused(make: Any, count: Any) -> None:
    with pytest.raises(ScheduleError, match=r"microbatches is a whole number from 1 up"):
        make(count)
    with pytest.raises(ScheduleError, match=r"workers is a whole number from 1 up"):
        make(4).table(count)


def test_message_of_a_bad_count() -> None:
    with pytest.raises(ScheduleError) as caught:
        gpipe(microbatches=0)
    assert str(caught.value) == (
        "gpipe(microbatches=): microbatches is a whole number from 1 up, not 0.\n  Mend: microbatches=4"
    )


@pytest.mark.parametrize("name", ["1f1b", "1F1B", "gpipe", "forward_only"])
def test_by_name(name: str) -> None:
    schedule = by_name(name, microbatches=3)
    assert isinstance(schedule, Schedule)
    assert schedule.name == name.lower().replace("_", "-")


def test_unknown_name_lists_the_nearest_first() -> None:
    with pytest.raises(ScheduleError) as caught:
        by_name("gpip", microbatches=4)
    assert str(caught.value).startswith("by_name(name): there is no schedule 'gpip'; the nearest first: gpipe, ")
    with pytest.raises(ScheduleError, match=r"nearest first: forward-only"):
        by_name("forwards")


def test_message_of_an_unknown_setting() -> None:
    with pytest.raises(ScheduleError) as caught:
        by_name("gpipe", microbatches=4, chunks=2)
    assert str(caught.value) == (
        "by_name('gpipe'): the schedule takes no chunks; it takes microbatches.\n  Mend: leave chunks out."
    )
