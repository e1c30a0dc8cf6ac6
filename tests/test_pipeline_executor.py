"""The executor: any schedule, any delay and any number of microbatches give the same bits, and nothing piles up."""

import functools
import gc
import itertools
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from pipelines import Pipeline, Step, assert_gradients, plain

from oneflax.pipeline.actions import Action
from oneflax.pipeline.actors import dispatch_order
from oneflax.pipeline.executor import MAX_IN_FLIGHT
from oneflax.pipeline.markers import stage
from oneflax.pipeline.recorder import Recorder, _Seen
from oneflax.pipeline.schedules import by_name, forward_only, gpipe, one_f_one_b
from oneflax.pipeline.stage_functions import StageArguments
from oneflax.pipeline.step_registers import Bounds, StepRegisters
from oneflax.pipeline.table import ScheduleTable
from oneflax.pipeline.trace import Trace
from oneflax.pipeline.validation import least_credits
from oneflax.sbp.errors import ScheduleError

pytestmark = pytest.mark.slow  # training runs; the quick tier is for what needs none


ROWS, WIDTH = 3, 4


def draw(*shape: int, seed: int = 0) -> Any:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def params_of(stages: int) -> list[Any]:
    weights = [0.7 * draw(WIDTH, WIDTH, seed=i) for i in range(stages)]
    biases = [draw(WIDTH, seed=50 + i) for i in range(stages)]
    # The gradient of an elementwise product is a product, which XLA would fuse with the sum over microbatches.
    return [*weights, *biases, *(draw(ROWS, WIDTH, seed=70 + i) for i in range(stages))]


def batches_of(microbatches: int) -> list[Any]:
    return [
        {"x": draw(ROWS, WIDTH, seed=100 + i), "y": draw(ROWS, WIDTH, seed=200 + i), "n": jnp.int32(i)}
        for i in range(microbatches)
    ]


def loss_of(stages: int) -> Callable[..., Any]:
    """A chain with a skip, a tied table, an auxiliary loss, an integer edge, dropout and a mask edge."""

    def loss(params: Sequence[Any], batch: Any) -> Any:
        weights, biases, scales = (params[i * stages : (i + 1) * stages] for i in range(3))
        key = jax.random.fold_in(jax.random.key(3), batch["n"])
        h, aux = batch["x"], 0.0
        for i, (w, b, scale) in enumerate(zip(weights, biases, scales)):
            h = stage(h, i) if i else h
            h = jnp.tanh(h @ w + b) * jnp.cos(scale)
            h = jnp.where(jax.random.bernoulli(jax.random.fold_in(key, i), 0.9, h.shape), h, 0)
            if i == 0:
                first, mask, best = h, h > 0, jnp.argmax(h, axis=1)
            aux += jnp.mean(h**4)
        h = (h + jnp.where(mask, first, 0.5 * first)) @ weights[0].T  # pyright: ignore[reportPossiblyUnboundVariable]
        picked = h[jnp.arange(ROWS), best]  # pyright: ignore[reportPossiblyUnboundVariable]
        return jnp.mean((h - batch["y"]) ** 2) + 0.1 * aux + 0.01 * jnp.sum(picked)

    return loss


def backwards_first_to_last(stages: int, microbatches: int) -> ScheduleTable:
    """All forwards, then the backwards from the last microbatch to the first."""
    rows = [
        [f"{s}F{i}" for i in range(microbatches)] + [f"{s}B{i}" for i in reversed(range(microbatches))]
        for s in range(stages)
    ]
    return ScheduleTable.of(rows, "reversed")


def shuffled(stages: int, microbatches: int, workers: int, seed: int, edges: set[tuple[int, int]]) -> ScheduleTable:
    """A table that runs: actions drawn at random from those whose inputs are there, forwards in order."""
    rng, rows, done = random.Random(seed), [[] for _ in range(workers)], set()
    left = {(s, kind, i) for s in range(stages) for kind in "FB" for i in range(microbatches)}

    def ready(s: int, kind: str, i: int) -> bool:
        if kind == "F":
            before = {(src, "F", i) for src, dst in edges if dst == s} | ({(s, "F", i - 1)} if i else set())
        else:
            before = {(s, "F", i)} | {(dst, "B", i) for src, dst in edges if src == s}
        return before <= done

    while left:
        s, kind, i = rng.choice(sorted(action for action in left if ready(*action)))
        left.remove((s, kind, i))
        done.add((s, kind, i))
        rows[s % workers].append(f"{s}{kind}{i}")
    return ScheduleTable.of(rows, f"shuffled {seed}")


def all_edges(stages: int) -> set[tuple[int, int]]:
    return {(src, dst) for dst in range(stages) for src in range(dst)}


def tables(stages: int, microbatches: int) -> list[ScheduleTable]:
    named = [by_name(name, microbatches=microbatches).table(stages) for name in ("gpipe", "1f1b")]
    return [
        *named,
        backwards_first_to_last(stages, microbatches),
        shuffled(stages, microbatches, stages, 1, all_edges(stages)),
    ]


@functools.cache
def pipeline_of(workers: tuple[int, ...], each: int) -> Pipeline:
    """The loss on the worker of each stage; one for all tables, or every case would compile anew."""
    by_worker = [[s for s, w in enumerate(workers) if w == worker] for worker in range(max(workers) + 1)]
    rows = [[*(f"{s}F0" for s in mine), *(f"{s}B0" for s in reversed(mine))] for mine in by_worker]
    stages = len(workers)
    return Pipeline(loss_of(stages), params_of(stages), batches_of(1)[0], ScheduleTable.of(rows), each=each)


def run(table: ScheduleTable, before: Any = None, each: int = 1) -> Step:
    pipeline = pipeline_of(table.worker_of_stage, each)
    pipeline.use(table)
    return pipeline.run(params_of(table.stages), batches_of(table.microbatches), before=before)


def assert_same_bits(one: Step, other: Step) -> None:
    for a, b in zip((*one.losses, *one.gradients), (*other.losses, *other.gradients), strict=True):
        assert a.dtype == b.dtype
        assert a.tobytes() == b.tobytes()


# Numbers.

SIZES = [
    pytest.param(p, m, marks=[pytest.mark.slow] if (p, m) not in [(2, 3), (4, 2)] else [])
    for p, m in itertools.product([1, 2, 4], [1, 2, 3, 5, 8])
]


@pytest.mark.parametrize(("stages", "microbatches"), SIZES)
def test_every_schedule_gives_the_same_bits_and_those_of_one_device(stages: int, microbatches: int) -> None:
    steps = [run(table) for table in tables(stages, microbatches)]
    for step in steps[1:]:
        assert_same_bits(step, steps[0])
    losses, gradients = plain(loss_of(stages), params_of(stages), batches_of(microbatches))
    np.testing.assert_allclose(steps[0].losses, losses, rtol=1e-6)
    assert_gradients(steps[0].gradients, gradients)
    evaluated = run(forward_only(microbatches).table(stages))
    np.testing.assert_allclose(evaluated.losses, losses, rtol=1e-6)
    assert not any(gradient.any() for gradient in evaluated.gradients)


@pytest.mark.newest
@pytest.mark.parametrize("each", [1, 2], ids=["one device a stage", "two devices a stage"])
def test_delays_change_no_bit(each: int) -> None:
    table = one_f_one_b(4).table(3)
    rng = random.Random(0)
    delayed = run(table, lambda s, i: time.sleep(rng.choice([0, 0, 0.02])), each)
    assert_same_bits(delayed, run(table, each=each))


def test_several_stages_a_worker() -> None:
    want = run(gpipe(3).table(4))
    for workers, seed in ((1, 0), (2, 1), (3, 2)):
        assert_same_bits(run(shuffled(4, 3, workers, seed, all_edges(4))), want)


def test_the_check_of_bits_sees_gradients_added_as_they_come(monkeypatch: pytest.MonkeyPatch) -> None:
    def add(self: Any, step: Any, index: int, microbatch: int, gradients: Any, in_order: bool) -> None:
        if in_order:
            step.gradients[index], step.added[index] = gradients, microbatch + 1
        else:
            step.gradients[index] = self.runners[index].add(step.gradients[index], gradients)
            step.added[index] += 1

    want = run(gpipe(5).table(2))
    monkeypatch.setattr("oneflax.pipeline.executor.Executor._add", add)
    with pytest.raises(AssertionError):
        assert_same_bits(run(backwards_first_to_last(2, 5)), want)


def test_a_stage_without_parameters_or_without_gradient() -> None:
    def loss(params: Sequence[Any], batch: Any) -> Any:
        h = jnp.tanh(batch["x"] @ params[0])
        h = stage(h, 1) * 2.0  # no parameters
        h = jax.lax.stop_gradient(stage(h, 2) @ params[1])  # no gradient flows back
        return jnp.mean((stage(h, 3) @ params[2] - batch["y"]) ** 2)

    params = [draw(WIDTH, WIDTH, seed=i) for i in range(4)]
    step = Pipeline(loss, params, batches_of(1)[0], one_f_one_b(3).table(4)).run(params, batches_of(3))
    losses, gradients = plain(loss, params, batches_of(3))
    np.testing.assert_allclose(step.losses, losses, rtol=1e-6)
    assert_gradients(step.gradients, gradients)
    assert [bool(gradient.any()) for gradient in step.gradients] == [False, False, True, False]


def test_a_loss_that_is_not_on_the_last_stage_and_other_results() -> None:
    def loss(params: Sequence[Any], batch: Any) -> Any:
        h = stage(jnp.tanh(batch["x"] @ params[0]), 1)
        return jnp.mean((h @ params[1]) ** 2), jnp.sum(stage(h, 2) @ params[2]), batch["n"] + 1, 7.0

    params = [draw(WIDTH, WIDTH, seed=i) for i in range(3)]
    step = Pipeline(loss, params, batches_of(1)[0], one_f_one_b(2).table(3)).run(params, batches_of(2))
    assert_gradients(step.gradients, plain(loss, params, batches_of(2))[1])
    want = [loss(params, batch) for batch in batches_of(2)]
    for position in range(4):
        np.testing.assert_allclose(step.results[position], [values[position] for values in want], rtol=1e-5)


def test_low_precision_parameters_and_key_edges() -> None:
    def loss(params: Sequence[Any], batch: Any) -> Any:
        h = (batch["x"].astype(jnp.bfloat16) @ params[0]).astype(jnp.float32)
        key = jax.random.key(jnp.argmax(h[0]))  # depends on stage 0
        h = stage(h, 1) + jax.random.normal(key, h.shape)
        return jnp.mean((h @ params[1] - batch["y"]) ** 2)

    params = [draw(WIDTH, WIDTH, seed=5).astype(jnp.bfloat16), draw(WIDTH, WIDTH, seed=6)]
    step = Pipeline(loss, params, batches_of(1)[0], one_f_one_b(2).table(2)).run(params, batches_of(2))
    assert [g.dtype for g in step.gradients] == [jnp.float32, jnp.float32]
    # bfloat16 holds 8 bits
    assert_gradients([g.astype(np.float64) for g in step.gradients], plain(loss, params, batches_of(2))[1], 1e-2)


@pytest.mark.parametrize(("dtype", "relative"), [(jnp.bfloat16, 2e-3), (jnp.float16, 2e-4)])
@pytest.mark.parametrize("make", [gpipe, backwards_first_to_last])
def test_many_low_precision_gradients_add_without_loss(make: Any, dtype: Any, relative: float) -> None:
    """64 microbatches against the same gradients, one a microbatch, added in float64."""
    microbatches, params = 64, [(0.5 * draw(WIDTH, WIDTH, seed=i)).astype(dtype) for i in range(2)]

    def loss(params: Sequence[Any], batch: Any) -> Any:
        h = stage(jnp.tanh(batch["x"].astype(dtype) @ params[0]), 1)
        return jnp.mean((h @ params[1]).astype(jnp.float32) - batch["y"])  # gradients of one sign, so that they grow

    batches = [{**batch, "x": abs(batch["x"])} for batch in batches_of(microbatches)]
    table = make(2, microbatches) if make is backwards_first_to_last else make(microbatches).table(2)
    step = Pipeline(loss, params, batches[0], table).run(params, batches)
    assert {g.dtype for g in step.gradients} == {np.dtype(np.float32)}
    one = jax.jit(jax.grad(loss))
    gradients = [[np.asarray(g) for g in one(params, batch)] for batch in batches]
    want = [np.sum(np.stack(g).astype(np.float64), axis=0) for g in zip(*gradients)]
    # A microbatch's own gradient is rounded to 8 or 11 bits in either program, not always to the same side.
    assert_gradients(step.gradients, want, relative)
    kept = [functools.reduce(lambda a, b: a + b, g) for g in zip(*gradients)]
    with pytest.raises(AssertionError):  # the planted fault: a sum in the parameters' dtype
        assert_gradients([g.astype(np.float64) for g in kept], want, relative)


# State.


def state_loss(params: Sequence[Any], batch: Any, state: Sequence[Any]) -> Any:
    h = jnp.tanh(batch["x"] @ params[0])
    first = 0.5 * state[0] + jnp.mean(h)
    h = stage(h + state[0], 1) @ params[1]
    noise = jax.random.normal(jax.random.fold_in(jax.random.key(0), state[1]), h.shape)
    return jnp.mean((h + noise - batch["y"]) ** 2), first, state[1] + 1


STATE = [jnp.float32(1), jnp.int32(5)]


@pytest.mark.parametrize("make", [gpipe, one_f_one_b, forward_only])
def test_state_goes_through_the_microbatches_in_order(make: Callable[[int], Any]) -> None:
    params, batches = [draw(WIDTH, WIDTH, seed=i) for i in range(2)], batches_of(4)
    pipeline = Pipeline(state_loss, params, batches[0], make(4).table(2), STATE)
    step = pipeline.run(params, batches, STATE)
    state: Sequence[Any] = STATE
    for loss, batch in zip(step.losses, batches):
        want, *state = state_loss(params, batch, state)
        np.testing.assert_allclose(loss, want, rtol=1e-6)
    np.testing.assert_allclose(step.state[0], state[0], rtol=1e-6)
    assert int(step.state[1]) == 9


def test_state_refuses_forwards_out_of_order() -> None:
    rows = [["0F0", "0F1", "0F2", "0B0", "0B1", "0B2"], ["1F0", "1F2", "1F1", "1B0", "1B1", "1B2"]]
    params = [draw(WIDTH, WIDTH, seed=i) for i in range(2)]
    with pytest.raises(ScheduleError) as caught:
        Pipeline(state_loss, params, batches_of(1)[0], ScheduleTable.of(rows, "hand"), STATE)
    assert str(caught.value) == (
        "table 'hand', stage 1: its state goes from microbatch to microbatch, but its forwards run in the order "
        "0, 2, 1.\n  Mend: forwards of stage 1 in the order of microbatches, or a model without state there"
    )
    assert_same_bits(run(ScheduleTable.of(rows)), run(gpipe(3).table(2)))


# Memory.


def weight_like(shape: tuple[int, ...]) -> int:
    """Live arrays with the elements of a weight, transposed or cast."""
    return sum(sorted(array.shape) == sorted(shape) for array in jax.live_arrays())


def low(x: Any) -> Any:
    return x.astype(jnp.bfloat16)


FORMS: dict[str, Callable[[Any, Any], Any]] = {
    "plain": lambda h, w: jnp.tanh(h @ w) @ w.T,
    "cast": lambda h, w: (jnp.tanh(low(h) @ low(w)) @ low(w).T).astype(jnp.float32),
    "scaled": lambda h, w: jnp.tanh(h @ (2.0 * w)) @ jnp.sin(w.T),
    "cast in jit": lambda h, w: jax.jit(FORMS["cast"])(h, w),
    "in remat": lambda h, w: jax.checkpoint(FORMS["plain"])(h, w),
    "in scan": lambda h, w: jax.lax.scan(lambda c, _: (FORMS["plain"](c, w), None), h, None, length=2)[0],
}


@pytest.mark.parametrize("form", FORMS)
def test_no_weight_is_held_for_each_microbatch(form: str) -> None:
    """Counts arrays of the weight's (odd) shape while more and more microbatches are in flight."""
    inner, microbatches = 7, 5

    def loss(params: Sequence[Any], batch: Any) -> Any:
        h = FORMS[form](stage(batch["x"] @ params[0], 1), params[1])
        return jnp.mean((h @ params[2] - batch["y"]) ** 2)

    params, batches = [draw(WIDTH, WIDTH), draw(WIDTH, inner), draw(WIDTH, WIDTH)], batches_of(microbatches)
    seen: dict[tuple[int, int], int] = {}
    pipeline = Pipeline(loss, params, batches[0], gpipe(microbatches).table(2))
    step = pipeline.run(params, batches, before=lambda s, i: seen.update({(s, i): weight_like((WIDTH, inner))}))
    assert len({seen[1, i] for i in range(microbatches)}) == 1
    tolerance = 2e-2 if "cast" in form else 1e-6  # bfloat16 has 8 bits
    assert_gradients(step.gradients, plain(loss, params, batches)[1], tolerance)


def test_the_count_of_weights_sees_a_copy_for_each_microbatch() -> None:
    params, batch = [draw(WIDTH, 7), draw(7, WIDTH)], batches_of(1)[0]

    @jax.jit
    def forward(w: Any, x: Any) -> Any:
        return jax.vjp(lambda w, x: jnp.tanh(x @ w), w, x)

    before = weight_like((WIDTH, 7))
    held = [forward(params[0], batch["x"]) for _ in range(3)]
    assert weight_like((WIDTH, 7)) == before + 3
    del held


def test_no_residual_equals_a_parameter_and_masks_are_made_again() -> None:
    def loss(params: Sequence[Any], batch: Any) -> Any:
        mask = jnp.arange(WIDTH)[:, None] >= jnp.arange(WIDTH)
        scale = jnp.exp(params[1])
        h = jnp.where(mask[:ROWS], jnp.sin(batch["x"] @ params[0]) * scale, 0)
        return jnp.mean((h - batch["y"]) ** 2)

    params, batch = [draw(WIDTH, WIDTH), draw(WIDTH)], batches_of(1)[0]
    pipeline = Pipeline(loss, params, batch, gpipe(1).table(1))
    inputs, (kind,) = pipeline.inputs(params, [batch]), pipeline.executor.kinds
    data = inputs.feed(pipeline.cut.stages[0], 0)
    out = kind.forward(StageArguments([], inputs.params[0], [], data, []))
    taken = [*params, jnp.exp(params[1]), jnp.broadcast_to(jnp.exp(params[1]), (1, WIDTH))]
    for residual in out.residuals:
        assert residual.dtype != bool
        for value in (*taken, *data):
            assert residual.shape != value.shape or not np.array_equal(residual, value)


@pytest.mark.parametrize("microbatches", [1, 3, 6])
def test_registers_hold_what_the_schedule_says(microbatches: int) -> None:
    stages = 3
    held = {
        gpipe: [microbatches] * stages,
        one_f_one_b: [min(microbatches, stages - s) for s in range(stages)],
        forward_only: [1] * stages,
    }
    for make, peaks in held.items():
        for _ in range(2):
            run(make(microbatches).table(stages))
            registers = pipeline_of((0, 1, 2), 1).executor.registers
            assert [pool.peak for pool in registers.stages] == peaks
            for pool in registers.pools:
                assert (pool.peak, pool.in_use) == (pool.capacity, 0)


def test_all_that_waits_is_in_a_pool() -> None:
    """Values on edges, cotangents and gradients that come too early, counted by hand."""
    table = backwards_first_to_last(2, 4)
    run(table)
    registers = pipeline_of((0, 1), 1).executor.registers
    # Stage 1 takes a value as soon as it is there; cotangent 2 leaves just before stage 0 reads cotangent 3.
    assert {edge: pool.peak for edge, pool in registers.edges.items()} == {(0, 1): 1, (1, 0): 2}
    # On both stages microbatches 3, 2 and 1 wait for 0.
    assert {s: pool.peak for s, pool in registers.parked.items()} == {0: 3, 1: 3}
    run(gpipe(4).table(2))
    assert pipeline_of((0, 1), 1).executor.registers.parked == {}
    run(forward_only(4).table(2))
    assert set(pipeline_of((0, 1), 1).executor.registers.edges) == {(0, 1)}


def test_the_pools_see_a_value_too_many() -> None:
    registers = StepRegisters(Bounds((1, 1), {(0, 1): 1}, {0: 1}))
    for pool in registers.pools:
        pool.acquire(0, [])
        with pytest.raises(AssertionError, match=r"no credit is free for 1; 1 slots, held by 0"):
            pool.acquire(1, [])


@pytest.mark.parametrize("seed", range(3))
def test_bounds_are_what_a_count_of_everything_held_gives(seed: int) -> None:
    """Any order of a DAG: after each action, what is there is counted from the definition."""
    stages, microbatches, edges = 4, 5, {(0, 1), (1, 2), (2, 3), (0, 3)}
    table = shuffled(stages, microbatches, 2, seed, edges)
    order = [action for _, action in dispatch_order(table, edges)]
    want: Counter[Any] = Counter()
    for n in range(1, len(order) + 1):
        done = {(a.stage, a.kind, a.microbatch) for a in order[:n]}
        for i in range(microbatches):
            for src, dst in edges:
                on_edge = {(src, dst): ((src, "F"), (dst, "F")), (dst, src): ((dst, "B"), (src, "B"))}
                for edge, (giver, reader) in on_edge.items():
                    want[n, edge] += (*giver, i) in done and (*reader, i) not in done
            for s in range(stages):
                first = next((j for j in range(microbatches) if (s, "B", j) not in done), microbatches)
                want[n, s] += (s, "B", i) in done and i > first
    bounds = Bounds.of(order, stages, edges, edges, False)
    for key, count in {**bounds.edges, **bounds.parked}.items():
        assert count == max(want[n, key] for n in range(1, len(order) + 1))
    assert set(bounds.parked) == {s for s in range(stages) if any(want[n, s] for n in range(1, len(order) + 1))}
    assert list(bounds.stages) == least_credits(table)


def test_threads_that_share_an_executor_take_turns() -> None:
    pipeline = pipeline_of((0, 1, 2), 1)
    pipeline.use(one_f_one_b(4).table(3))
    want = pipeline.run(params_of(3), batches_of(4))

    def steps(seed: int) -> list[Step]:
        rng = random.Random(seed)
        return [
            pipeline.run(params_of(3), batches_of(4), before=lambda s, i: time.sleep(rng.choice([0, 0, 0.002])))
            for _ in range(4)
        ]

    with ThreadPoolExecutor(3) as threads:
        for found in threads.map(steps, range(3)):
            for step in found:
                assert_same_bits(step, want)
    assert [pool.peak for pool in pipeline.executor.registers.stages] == [3, 2, 1]


def test_nothing_piles_up_over_thirty_steps() -> None:
    params, batches = params_of(2), batches_of(3)
    pipeline = pipeline_of((0, 1), 1)
    pipeline.use(one_f_one_b(3).table(2))
    inputs = pipeline.inputs(params, batches)
    counts = []
    for step in range(30):
        pipeline.step(inputs, params)
        if step % 9 == 2:  # a collection takes a while
            gc.collect()
            counts.append(len(jax.live_arrays()))
    assert counts == [counts[0]] * 4


def test_few_actions_are_queued_on_a_worker() -> None:
    pipeline = pipeline_of((0, 1), 1)
    pipeline.use(gpipe(12).table(2))
    queues: list[int] = []
    queued = pipeline.executor._in_flight
    pipeline.run(params_of(2), batches_of(12), before=lambda s, i: queues.append(max(map(len, queued))))
    assert max(queues) == MAX_IN_FLIGHT


# Traces.


def assert_a_trace_of(trace: Trace, table: ScheduleTable, edges: set[tuple[int, int]]) -> None:
    """Every action once, one after the other on its worker in the table's order, after all that it needs."""
    assert Counter(a.action for a in trace.actions) == Counter(a for row in table.actions for a in row)
    span = {a.action: (a.start_s, a.end_s) for a in trace.actions}
    assert min(start for start, _ in span.values()) == 0
    assert all(start <= end for start, end in span.values())
    for row in table.actions:
        for first, second in itertools.pairwise(row):
            assert span[first][1] <= span[second][0], f"{first} and {second} overlap"
    for action, (start, _) in span.items():
        s, i = action.stage, action.microbatch
        if action.kind == "F":
            needed = [Action(src, "F", i) for src, dst in edges if dst == s]
        else:
            needed = [Action(s, "F", i), *(Action(dst, "B", i) for src, dst in edges if src == s)]
        for other in needed:
            assert span[other][1] <= start, f"{action} starts before the end of {other}"


@pytest.mark.newest
@pytest.mark.parametrize("make", [gpipe, one_f_one_b, forward_only])
def test_a_recorded_step_has_every_action_in_order(make: Callable[[int], Any]) -> None:
    table = make(4).table(3)
    pipeline = pipeline_of((0, 1, 2), 1)
    pipeline.use(table)
    assert pipeline.executor.trace is None
    unrecorded = pipeline.run(params_of(3), batches_of(4))
    assert pipeline.executor.trace is None
    pipeline.executor.record = True
    assert_same_bits(pipeline.run(params_of(3), batches_of(4)), unrecorded)
    assert pipeline.executor.trace is not None
    assert_a_trace_of(pipeline.executor.trace, table, set(pipeline.cut.stage_edges))


def test_the_check_of_traces_sees_an_action_twice_and_an_overlap() -> None:
    pipeline = pipeline_of((0, 1), 1)
    pipeline.use(table := gpipe(2).table(2))
    pipeline.executor.record = True
    pipeline.run(params_of(2), batches_of(2))
    trace = pipeline.executor.trace
    assert trace is not None
    first = trace.actions[0]
    for actions in ((*trace.actions, first), (*trace.actions[1:], _stretched(first, trace.makespan_s))):
        with pytest.raises(AssertionError):
            assert_a_trace_of(Trace(actions, 2), table, set(pipeline.cut.stage_edges))


def _stretched(action: Any, seconds: float) -> Any:
    return type(action)(action.worker, action.stage, action.kind, action.microbatch, 0.0, seconds)


def test_what_is_observed_late_is_set_right() -> None:
    """The thread of worker 0 sleeps through the end of 0F0; worker 1 has its value at 2 s and is done at 3 s."""
    table = ScheduleTable.of([["0F0", "0B0"], ["1F0", "1B0"]])
    recorder = Recorder(table, {(0, 1)}, {(0, 1)})
    recorder.close()
    recorder._seen = [
        _Seen(0, Action(0, "F", 0), 1.0, None, 9.0),
        _Seen(1, Action(1, "F", 0), 1.1, 2.0, 3.0),
        _Seen(1, Action(1, "B", 0), 1.2, None, 4.0),
        _Seen(0, Action(0, "B", 0), 1.3, 4.5, 9.5),
    ]
    spans = {str(a): (a.start_s, a.end_s) for a in recorder.trace().actions}
    assert spans == {"0F0": (0.0, 1.0), "1F0": (1.0, 2.0), "1B0": (2.0, 3.0), "0B0": (3.5, 8.5)}


# Faults.


def test_a_table_for_another_number_of_stages_is_refused() -> None:
    for stages in (2, 4):
        with pytest.raises(ScheduleError, match=rf"the table is for {stages} stages and the loss has 3\."):
            Pipeline(loss_of(3), params_of(3), batches_of(1)[0], gpipe(2).table(stages), stages=3)


def test_a_split_backward_is_refused_before_anything_runs() -> None:
    table = ScheduleTable.of([["0F0", "0I0", "0W0"]], "split")
    with pytest.raises(ScheduleError, match=r"0I0 is half of a backward, which does not run yet\."):
        Pipeline(loss_of(1), params_of(1), batches_of(1)[0], table)


def test_a_feed_that_fails_leaves_the_executor_usable() -> None:
    params, batches = params_of(2), batches_of(3)
    pipeline = pipeline_of((0, 1), 1)
    pipeline.use(one_f_one_b(3).table(2))
    want = pipeline.run(params, batches)

    def fail(index: int, microbatch: int) -> None:
        if (index, microbatch) == (1, 1):
            raise OSError("the disk is gone")

    pipeline.executor.record = True
    with pytest.raises(OSError, match="the disk is gone"):
        pipeline.run(params, batches, before=fail)
    trace = pipeline.executor.trace
    assert trace is not None
    assert 0 < len(trace.actions) < 12
    assert_same_bits(pipeline.run(params, batches), want)
