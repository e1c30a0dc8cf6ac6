"""Actors, registers and the dispatch order, against dependencies that are spelled out here by brute force."""

from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oneflax.pipeline.actions import Action
from oneflax.pipeline.actors import ActorSystem, dispatch_order, run_clock
from oneflax.pipeline.registers import RegisterPool, chain_edges, edge_slots
from oneflax.pipeline.schedules import by_name, forward_only, gpipe, one_f_one_b
from oneflax.pipeline.table import ScheduleTable
from oneflax.sbp.errors import ScheduleError

ZERO_BUBBLE = [["0F0", "0F1", "0I0", "0W0", "0I1", "0W1"], ["1F0", "1I0", "1F1", "1I1", "1W0", "1W1"]]


def needed(action: Action, edges: Iterable[tuple[int, int]], split: bool) -> set[str]:
    """What must run before an action, from the definition of a pipeline."""
    back = "I" if split else "B"
    s, m = action.stage, action.microbatch
    if action.kind == "F":
        return {f"{src}F{m}" for src, dst in edges if dst == s}
    if action.kind == "W":
        return {f"{s}I{m}"}
    return {f"{s}F{m}"} | {f"{dst}{back}{m}" for src, dst in edges if src == s}


def assert_in_order(table: ScheduleTable, edges: set[tuple[int, int]], order: Iterable[tuple[int, Action]]) -> None:
    order = list(order)
    assert [[a for w, a in order if w == worker] for worker in range(table.workers)] == [
        list(row) for row in table.actions
    ]
    split = any(action.kind == "I" for _, action in order)
    seen: set[str] = set()
    for _, action in order:
        assert needed(action, edges, split) <= seen, f"{action} is dispatched before its inputs"
        seen.add(str(action))


def chain(stages: int) -> set[tuple[int, int]]:
    return {(s, s + 1) for s in range(stages - 1)}


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "forward-only"])
@pytest.mark.parametrize("workers", [1, 2, 4, 8])
@pytest.mark.parametrize("microbatches", [1, 2, 5, 16])
def test_dispatch_order_of_named_schedules(name: str, workers: int, microbatches: int) -> None:
    table = by_name(name, microbatches=microbatches).table(workers)
    assert_in_order(table, chain(workers), dispatch_order(table))


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_dispatch_order_of_any_dag_and_costs(data: st.DataObject) -> None:
    stages = data.draw(st.integers(1, 5))
    every = [(src, dst) for dst in range(stages) for src in range(dst)]
    edges = set(data.draw(st.lists(st.sampled_from(every), unique=True))) if every else set()
    make = data.draw(st.sampled_from([gpipe, one_f_one_b, forward_only]))
    table = make(data.draw(st.integers(1, 6))).table(stages)
    costs = {kind: data.draw(st.sampled_from([0.0, 0.25, 1.0, 3.0])) for kind in "FB"}
    assert_in_order(table, edges, dispatch_order(table, edges, costs))


def test_dispatch_order_of_a_split_backward() -> None:
    table = ScheduleTable.of(ZERO_BUBBLE)
    assert_in_order(table, chain(2), dispatch_order(table))


def test_dispatch_order_of_several_stages_a_worker_and_pairs() -> None:
    rows = [
        ["0F0", "0F1", "3F0", "3F1;3B0", "3B1", "0B0", "0B1"],
        ["1F0", "2F0", "1F1", "2F1", "2B0", "1B0;2B1", "1B1"],
    ]
    table = ScheduleTable.of(rows)
    table.validate()
    assert_in_order(table, chain(4), dispatch_order(table))


def test_ties_are_fixed() -> None:
    order = [f"{action}" for _, action in dispatch_order(one_f_one_b(3).table(workers=2))]
    assert order == ["0F0", "1F0", "0F1", "1B0", "0B0", "1F1", "1B1", "0F2", "0B1", "1F2", "1B2", "0B2"]


def test_dispatch_order_of_a_large_table() -> None:
    table = one_f_one_b(64).table(workers=8)
    order = dispatch_order(table)
    assert len(order) == 8 * 64 * 2
    assert_in_order(table, chain(8), order)


def test_a_stall_is_an_error_with_grid_and_cycle() -> None:
    table = ScheduleTable.of([["0F0", "0B0", "0F1", "0B1"], ["1F0", "1F1", "1B0", "1B1"]], "hand")
    with pytest.raises(ScheduleError) as caught:
        dispatch_order(table)
    assert "  worker 0  0F0 [0B0] 0F1  0B1\n  worker 1  1F0 [1F1] 1B0  1B1\n" in str(caught.value)
    assert "1F1 waits for 0F1 over edge 0 -> 1, which worker 0 does at step 2" in str(caught.value)


def test_message_of_an_input_that_never_comes() -> None:
    with pytest.raises(ScheduleError) as caught:
        dispatch_order(ScheduleTable.of([["0F0"], ["1F0", "1F1"]], "hand"))
    assert str(caught.value) == (
        "table 'hand': the workers wait for what never comes.\n"
        "  worker 1, step 1: 1F1 waits for 0F1 over edge 0 -> 1, which no worker does\n"
        "  step       0    1\n"
        "  worker 0  0F0\n"
        "  worker 1  1F0 [1F1]\n"
        "  Mend: table.validate() lists what is missing."
    )


@pytest.mark.parametrize(
    "costs", [{"F": 1.0}, {"F": -1.0, "B": 1.0}, {"F": float("nan"), "B": 1.0}, lambda a: float("inf")]
)
def test_costs_that_make_no_sense_are_refused(costs: dict[str, float]) -> None:
    with pytest.raises(ScheduleError, match="a cost is a number of seconds from 0 up"):
        dispatch_order(gpipe(2).table(2), costs=costs)


@settings(max_examples=50, deadline=None)
@given(st.randoms(use_true_random=False), st.integers(1, 4), st.integers(1, 5))
def test_actors_finish_in_whatever_order_they_fire(random: object, workers: int, microbatches: int) -> None:
    table = one_f_one_b(microbatches).table(workers)
    credits = [min(microbatches, workers - s) for s in range(workers)]
    system = ActorSystem(table, credits=credits, slots=edge_slots(chain_edges(workers)))
    fired: list[tuple[int, Action]] = []
    while ready := [worker for worker in range(workers) if system.ready(worker)]:
        worker = random.choice(ready)  # pyright: ignore[reportAttributeAccessIssue]
        fired += [(worker, action) for action in system.fire(worker)]
    assert system.finished
    assert not system.blocked().waits
    assert_in_order(table, chain(workers), fired)
    assert [pool.peak for pool in system.credit_pools] == credits
    assert all(pool.in_use == 0 for pool in (*system.credit_pools, *system.slot_pools.values()))
    assert all(pool.peak <= 2 for pool in system.slot_pools.values())


def test_credits_hold_a_forward_back() -> None:
    system = ActorSystem(gpipe(2).table(workers=1), credits=1)
    system.fire(0)
    assert system.ready(0) is None
    assert str(system.blocked()) == (
        "worker 0, step 1: 0F1 waits for a slot of stage 0 (1 in all, held by microbatch 0), "
        "which worker 0 frees at step 2"
    )
    assert len(system.blocked().cycle) == 1


def test_slots_hold_a_forward_back() -> None:
    system = ActorSystem(gpipe(3).table(workers=2), slots={(0, 1): 1})
    system.fire(0)
    (wait,) = [wait for wait in system.blocked().waits if wait.worker == 0]
    assert wait.edge == (0, 1)
    assert wait.holder == (1, 0)
    assert "held by microbatch 0" in wait.needs
    system.fire(1)
    assert system.ready(0) == (Action(0, "F", 1),)


def test_a_working_actor_is_neither_ready_nor_done() -> None:
    system = ActorSystem(forward_only(1).table(workers=2))
    system.start(0)
    assert system.ready(0) is None
    assert system.ready(1) is None
    assert not system.finished
    system.finish(0)
    assert system.ready(1) == (Action(1, "F", 0),)
    with pytest.raises(AssertionError, match="worker 0 cannot start"):
        system.start(0)
    with pytest.raises(AssertionError, match="worker 0 has started no cell"):
        system.finish(0)


def test_the_clock_respects_bounds() -> None:
    system = ActorSystem(forward_only(4).table(workers=2), slots={(0, 1): 1})
    ends = [firing.end_s for firing in run_clock(system, lambda action: 1.0 + 2.0 * action.stage)]
    assert max(ends) == 16.0  # four times 1 s and 3 s: the one slot stays filled while the later worker reads it
    starts = [f.start_s for f in run_clock(ActorSystem(forward_only(4).table(2), slots={(0, 1): 1}), {"F": 1.0})]
    assert sorted(starts) == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]  # without a second slot nothing overlaps


def test_register_pool_counts_and_refuses_misuse() -> None:
    pool: RegisterPool[int] = RegisterPool(2, "stage 0")
    pool.acquire(3)
    pool.acquire(1)
    assert (pool.in_use, pool.free, pool.peak, pool.holders) == (2, 0, 2, (3, 1))
    with pytest.raises(AssertionError, match="stage 0: no credit is free for 5; 2 slots, held by 3, 1"):
        pool.acquire(5)
    with pytest.raises(AssertionError, match="stage 0: 3 already fills a slot"):
        pool.acquire(3)
    pool.release(3)
    with pytest.raises(AssertionError, match=r"stage 0: 3 fills no slot \(released twice, or never acquired\)"):
        pool.release(3)
    assert (pool.in_use, pool.peak, str(pool)) == (1, 2, "2 slots, held by 1")
    with pytest.raises(AssertionError, match="at least 1 slot"):
        RegisterPool(0)


def test_a_pool_without_bound_measures() -> None:
    pool: RegisterPool[int] = RegisterPool()
    for key in range(100):
        pool.acquire(key)
    assert pool.free == float("inf")
    assert pool.peak == 100


def test_slots_of_edges() -> None:
    assert edge_slots([(0, 1), (1, 4)]) == {(0, 1): 2, (1, 4): 4}
    assert chain_edges(1) == frozenset()
