"""The cutter: every stage runs on exactly the values that it declares, and together they are the loss."""

import random
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback
from pipelines import BATCH, WIDTH, assert_same_loss, cut_loss, edge_pairs, names, run_in_order, values

from oneflax.pipeline.graph import Literal, evaluate, path_of, trace
from oneflax.pipeline.markers import stage
from oneflax.pipeline.stages import Cut, StageGraph
from oneflax.sbp.errors import PlanError


def chain_loss(layers: int, mark: bool) -> Callable[..., Any]:
    def loss(params: Sequence[Any], batch: Any) -> Any:
        h = batch["x"]
        for i in range(layers):
            if mark and i:
                h = stage(h, i)
            with jax.named_scope(f"model/s{i}"):
                h = jnp.tanh(h @ params[i])
        return jnp.mean((h - batch["y"]) ** 2)

    return loss


@pytest.mark.newest
@pytest.mark.parametrize("stages", [1, 2, 4])
@pytest.mark.parametrize("mark", [True, False], ids=["marks", "paths"])
def test_a_chain_by_marks_and_by_paths(mark: bool, stages: int) -> None:
    params, loss = values(stages), chain_loss(stages, mark)
    made = cut_loss(loss, stages, params, BATCH, paths=not mark)
    assert edge_pairs(made) == [(s, s + 1) for s in range(stages - 1)]
    assert [len(part.params) for part in made.stages] == [1] * stages
    assert [names(part).count("dot_general") for part in made.stages] == [1] * stages
    x, y = made.graph.inputs[stages], made.graph.inputs[stages + 1]
    assert [part.data for part in made.stages][-1] == ((x, y) if stages == 1 else (y,))
    assert made.stages_reading(x) == (0,)
    assert [list(part.results) for part in made.stages] == [[]] * (stages - 1) + [[0]]
    assert_same_loss(made, loss, params, BATCH)


def test_the_checker_sees_a_value_that_is_not_declared() -> None:
    made = cut_loss(chain_loss(2, True), 2, values(2), BATCH)
    last = made.stages[1]
    blind = StageGraph(1, last.ops, last.params, (), last.data, (), (), {}, last.results)
    with pytest.raises(KeyError):
        run_in_order(Cut(made.graph, made.roles, (made.stages[0], blind), made.edges), values(2), BATCH)


def test_the_checker_sees_a_wrong_gradient() -> None:
    made = cut_loss(chain_loss(2, True), 2, values(2), BATCH)
    with pytest.raises(AssertionError):
        assert_same_loss(made, lambda p, b: chain_loss(2, True)([p[0], p[1] + 1e-4], b), values(2), BATCH)


# Losses in stages, each with what goes from stage to stage.


def skip_over_several(params: Any, batch: Any) -> Any:
    first = jnp.tanh(batch["x"] @ params[0])
    h = jnp.tanh(stage(first, 1) @ params[1])
    h = jnp.tanh(stage(h, 2) @ params[2])
    return jnp.mean((stage(h, 3) @ params[3] + first - batch["y"]) ** 2)


def used_by_two_later_stages(params: Any, batch: Any) -> Any:
    first = jnp.sin(batch["x"] @ params[0])
    h = jnp.tanh(stage(first, 1) @ params[1]) * first
    h = stage(h, 2) @ params[2] + 3 * first
    return jnp.mean((h - batch["y"]) ** 2)


def tied(params: Any, batch: Any) -> Any:
    h = jnp.tanh(batch["x"] @ params[0])
    h = jnp.tanh(stage(h, 1) @ params[1])
    return jnp.mean((stage(h, 2) @ params[0].T - batch["y"]) ** 2)


def aux_losses(params: Any, batch: Any) -> Any:
    h, aux = batch["x"], []
    for i, w in enumerate(params):
        h = jnp.tanh(stage(h, i) @ w)
        aux.append(jnp.mean(h**4))
    return jnp.mean((h - batch["y"]) ** 2) + 0.1 * sum(aux)


def integer_and_bool_edges(params: Any, batch: Any) -> Any:
    h = batch["x"] @ params[0]
    best, mask = jnp.argmax(h, axis=1), h > 0
    h = stage(jnp.tanh(h), 1) @ params[1]
    h = jnp.where(mask, h, 0.5 * h)
    h = stage(h, 2) @ params[2]
    return -jnp.mean(jax.nn.log_softmax(h)[jnp.arange(WIDTH), best])


def mark_inside_jit(params: Any, batch: Any) -> Any:
    @jax.jit
    def twice(h: Any, w0: Any, w1: Any) -> Any:
        return jnp.tanh(stage(jnp.tanh(h @ w0), 1) @ w1)

    h = jax.jit(lambda *args: twice(*args))(batch["x"], params[0], params[1])
    return jnp.mean((h - batch["y"]) ** 2)


def unused_parameter(params: Any, batch: Any) -> Any:
    h = stage(jnp.tanh(batch["x"] @ params[0]), 1)
    return jnp.mean((h @ params[2] - batch["y"]) ** 2)


def loss_not_on_the_last_stage(params: Any, batch: Any) -> Any:
    h = stage(jnp.tanh(batch["x"] @ params[0]), 1)
    return jnp.mean((h @ params[1] - batch["y"]) ** 2), jnp.sum(stage(h, 2) @ params[2])


def marks_on_a_pytree(params: Any, batch: Any) -> Any:
    h = {"a": batch["x"] @ params[0], "b": (jnp.arange(WIDTH), None, "text", 3)}
    h = stage(h, 1)
    return jnp.mean((h["a"] @ params[1] + h["b"][0] + h["b"][3] - batch["y"]) ** 2)


def inner_gradient(params: Any, batch: Any) -> Any:
    def energy(x: Any) -> Any:
        return jnp.sum(jnp.sin(stage(jnp.tanh(x @ params[0]), 1) @ params[1]))

    return jnp.mean((jax.grad(energy)(batch["x"]) - batch["y"]) ** 2)


LOSSES = {
    skip_over_several: (4, [(0, 1), (0, 3), (1, 2), (2, 3)]),
    used_by_two_later_stages: (3, [(0, 1), (0, 2), (1, 2)]),
    tied: (3, [(0, 1), (1, 2)]),
    aux_losses: (3, [(0, 1), (0, 1), (1, 2), (1, 2)]),
    integer_and_bool_edges: (3, [(0, 1), (0, 1), (0, 2), (1, 2)]),
    mark_inside_jit: (2, [(0, 1)]),
    unused_parameter: (2, [(0, 1)]),
    loss_not_on_the_last_stage: (3, [(0, 1), (1, 2)]),
    marks_on_a_pytree: (2, [(0, 1)]),
    inner_gradient: (2, [(0, 1)]),
}


@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.__name__)
def test_what_flows_and_what_comes_out(loss: Callable[..., Any]) -> None:
    stages, edges = LOSSES[loss]
    params = values(max(stages, 3))
    made = cut_loss(loss, stages, params, BATCH)
    assert edge_pairs(made) == edges
    assert made.stage_edges == set(edges)
    for part in made.stages:
        assert set(part.edges_in) == {e.value for e in made.edges if e.target == part.index}
        assert set(part.edges_out) == {e.value for e in made.edges if e.source == part.index}
    assert_same_loss(made, loss, params, BATCH)


def test_a_tied_parameter_belongs_to_both_stages_and_an_unused_one_to_none() -> None:
    made = cut_loss(tied, 3, values(2), BATCH)
    assert made.stages_reading(made.roles.params[0]) == (0, 2)
    made = cut_loss(unused_parameter, 2, values(3), BATCH)
    assert [made.stages_reading(value) for value in made.roles.params] == [(0,), (), (1,)]


# Random programs.

CHOICES: dict[str, Callable[[Any, Any, Any], Any]] = {
    "add": lambda a, b, w: a + 0.5 * b,
    "mul": lambda a, b, w: jnp.sin(a) * b,
    "where": lambda a, b, w: jnp.where(a > 0, b, 0.1 * a),
    "integer": lambda a, b, w: 0.5 * a[jnp.argmax(b, axis=0)],
    "weight": lambda a, b, w: jnp.tanh(a @ w),
    "remat": lambda a, b, w: jax.checkpoint(lambda a, w: jnp.tanh(a @ w) * b)(a, w),
    "jit": lambda a, b, w: jax.jit(lambda a, b: jax.nn.relu(a) - b)(a, b),
    "stop": lambda a, b, w: jax.lax.stop_gradient(a) * b,
    "cond": lambda a, b, w: jax.lax.cond(jnp.sum(a) > 0, jnp.multiply, jnp.subtract, a, b),
    "params": lambda a, b, w: a * jnp.exp(-(w**2)),
    "mask": lambda a, b, w: jnp.where(jnp.arange(WIDTH)[:, None] >= jnp.arange(WIDTH), a, b),
}


def random_loss(seed: int) -> tuple[Callable[..., Any], int]:
    """A loss of some stages whose operations read whatever was made before, and the number of stages."""
    stages = random.Random(seed).randint(1, 4)

    def loss(params: Any, batch: Any) -> Any:
        rng = random.Random(seed)
        made = [batch["x"], batch["y"]]
        for index in range(rng.randint(1, 4)):
            made.append(stage(jnp.tanh(made[-1] @ params[index % len(params)]), index))
            for _ in range(rng.randint(1, 4)):
                operation = CHOICES[rng.choice(sorted(CHOICES))]
                value = operation(rng.choice(made), rng.choice(made), rng.choice(params))
                made.append(stage(value, index) if rng.random() < 0.3 else value)
        return jnp.mean((made[-1] - batch["y"]) ** 2) + 0.1 * sum(jnp.mean(jnp.sin(value)) for value in made)

    return loss, stages


@pytest.mark.parametrize("seed", [pytest.param(i, marks=[pytest.mark.slow] if i > 2 else []) for i in range(12)])
def test_random_programs(seed: int) -> None:
    loss, stages = random_loss(seed)
    params = [0.5 * w for w in values(3, seed)]
    made = cut_loss(loss, stages, params, BATCH)
    assert all(edge.source < edge.target for edge in made.edges)
    assert_same_loss(made, loss, params, BATCH)


# Where operations go that have no place of their own.


def test_casts_of_parameters_and_masks_are_copied_to_every_user() -> None:
    def loss(params: Any, batch: Any) -> Any:
        low = jax.tree.map(lambda w: w.astype(jnp.bfloat16), params)
        mask = jnp.arange(WIDTH)[:, None] >= jnp.arange(WIDTH)
        keep = batch["x"] > 0  # from the batch alone
        h = jnp.where(mask, batch["x"].astype(jnp.bfloat16) @ low[0], 0)
        h = jnp.where(mask & keep, stage(h, 1) @ low[1], 0)
        h = jnp.where(mask, stage(h, 2) @ low[0], 0)
        return jnp.mean((h.astype(jnp.float32) - batch["y"]) ** 2)

    made = cut_loss(loss, 3, values(2), BATCH)
    assert edge_pairs(made) == [(0, 1), (1, 2)]
    assert [names(part).count("iota") for part in made.stages] == [2, 2, 2]
    assert [len(part.params) for part in made.stages] == [1, 1, 1]
    assert [names(part).count("gt") for part in made.stages] == [0, 1, 0]
    got, want = run_in_order(made, values(2), BATCH)[0][0], loss(values(2), BATCH)
    np.testing.assert_array_equal(got, want)  # the same operations one by one: the same bits


def test_what_mixes_parameters_and_data_goes_to_its_earliest_user_once() -> None:
    def loss(params: Any, batch: Any) -> Any:
        embedded = jnp.sin(batch["x"] @ params[0])  # before any mark, used by stages 1 and 3
        h = stage(batch["x"], 0)
        h = stage(h, 1) * embedded
        h = stage(h, 2) @ params[1]
        return jnp.mean((stage(h, 3) * embedded - batch["y"]) ** 2)

    made = cut_loss(loss, 4, values(2), BATCH)
    assert [names(part).count("sin") for part in made.stages] == [0, 1, 0, 0]
    assert edge_pairs(made) == [(0, 1), (1, 2), (1, 3), (2, 3)]
    assert_same_loss(made, loss, values(2), BATCH)


def test_what_depends_on_stages_follows_the_latest() -> None:
    def loss(params: Any, batch: Any) -> Any:
        with jax.named_scope("s0"):
            a = batch["x"] @ params[0]
        with jax.named_scope("s1"):
            b = a @ params[1]
        with jax.named_scope("s2"):
            c = b @ params[2]
        return jnp.mean(jnp.cos(a) * jnp.sin(b)) + jnp.mean(c)

    made = cut_loss(loss, 3, values(3), BATCH, paths=True)
    assert [name for part in made.stages for name in names(part) if name in ("cos", "sin")] == ["cos", "sin"]
    assert ["cos" in names(part) for part in made.stages] == [True, False, False]
    assert ["sin" in names(part) for part in made.stages] == [False, True, False]
    assert_same_loss(made, loss, values(3), BATCH)


def test_dead_operations_are_dropped_and_effects_stay_once() -> None:
    seen: list[float] = []

    def loss(params: Any, batch: Any) -> Any:
        jnp.exp(batch["x"])
        scale = io_callback(_note(seen), jax.ShapeDtypeStruct((), jnp.float32), batch["x"][0, 0])
        h = stage(batch["x"] @ params[0], 1)
        jax.debug.callback(lambda value: seen.append(float(value)), jnp.zeros(()) + 7)
        return jnp.mean((h @ params[1] - batch["y"]) ** 2) + jnp.sum(stage(h, 2) @ params[2]) * scale

    made = cut_loss(loss, 3, values(3), BATCH)
    assert "exp" not in [name for part in made.stages for name in names(part)]
    assert sum("callback" in name for part in made.stages for name in names(part)) == 2
    run_in_order(made, values(3), BATCH)
    jax.effects_barrier()
    assert sorted(seen) == sorted([float(BATCH["x"][0, 0]), 7.0])


def _note(seen: list[float]) -> Callable[[Any], np.float32]:
    def note(value: Any) -> np.float32:
        seen.append(float(value))
        return np.float32(0.5)

    return note


def test_an_effect_is_not_copied_to_its_users() -> None:
    seen: list[float] = []

    def loss(params: Any, batch: Any) -> Any:
        scale = io_callback(_note(seen), jax.ShapeDtypeStruct((), jnp.float32), batch["x"][0, 0])
        h = stage(batch["x"] @ params[0], 0) * scale
        return jnp.mean((stage(h, 1) @ params[1] * scale - batch["y"]) ** 2)

    made = cut_loss(loss, 2, values(2), BATCH)
    run_in_order(made, values(2), BATCH)
    jax.effects_barrier()
    assert len(seen) == 1
    assert edge_pairs(made) == [(0, 1), (0, 1)]


# Faults.


def test_stages_against_the_order_of_the_model() -> None:
    def loss(params: Any, batch: Any) -> Any:
        with jax.named_scope("s1"):
            h = batch["x"] @ params[0]
        with jax.named_scope("s0"):
            h = h @ params[1]
        return jnp.mean(h)

    with pytest.raises(PlanError) as caught:
        cut_loss(loss, 2, values(2), BATCH, paths=True)
    where = r"dot_general at .*test_pipeline_stages\.py:\d+"
    assert re.fullmatch(
        r"Plan\(stages=\): stage 0 \(s0\) reads a value that stage 1 \(s1\) makes\.\n"
        rf"  reads: {where}    made: {where}\n"
        r"  Mend: list the stages in the order in which the model runs them",
        str(caught.value),
    )


def test_every_fault_is_told_at_once() -> None:
    def loss(params: Any, batch: Any) -> Any:
        h = stage(batch["x"] @ params[0], 1)
        h = stage(h @ params[1], 0)
        return jnp.mean(stage(h, 5))

    with pytest.raises(PlanError) as caught:
        cut_loss(loss, 2, values(2), BATCH)
    assert caught.value.faults[0].what == "marks stage 5, but the placement has 2 stages (0 to 1)."
    assert len(caught.value.faults) == 2
    assert 'Mend: flow.placement("auto", stage=6, data=-1)' in str(caught.value)


@pytest.mark.parametrize(("marks", "stages", "empty"), [((1,), 3, [2]), ((2,), 3, [1]), ((), 2, [1]), ((), 3, [1, 2])])
def test_a_stage_without_work(marks: tuple[int, ...], stages: int, empty: list[int]) -> None:
    def loss(params: Any, batch: Any) -> Any:
        h = batch["x"] @ params[0]
        for index in marks:
            h = stage(h, index)
        return jnp.mean(h)

    with pytest.raises(PlanError) as caught:
        cut_loss(loss, stages, values(1), BATCH)
    assert [fault.what for fault in caught.value.faults] == [
        f"stage {index} of {stages} holds no operation." for index in empty
    ]


def test_a_loss_that_is_a_constant_is_refused() -> None:
    with pytest.raises(PlanError, match="holds no operation"):
        cut_loss(lambda params, batch: jnp.float32(3), 1, values(1), BATCH)


# State.


def test_each_stage_replaces_its_own_state() -> None:
    def loss(params: Any, batch: Any, state: Any) -> Any:
        h = jnp.tanh(batch["x"] @ params[0])
        first = 0.9 * state[0] + 0.1 * jnp.mean(h)
        h = stage(h - first, 1) @ params[1]
        second = 0.9 * state[1] + 0.1 * jnp.mean(h)
        return jnp.mean((h - second - batch["y"]) ** 2), first, second, state[2]

    state = [jnp.float32(1), jnp.float32(2), jnp.float32(3)]
    made = cut_loss(loss, 2, values(2), BATCH, state)
    assert [tuple(part.new_state) for part in made.stages] == [made.roles.state[:1], made.roles.state[1:2]]
    results, replaced = run_in_order(made, values(2), BATCH, state)
    want = loss(values(2), BATCH, state)
    np.testing.assert_allclose(results[0], want[0], rtol=1e-6)
    assert {made.roles.state.index(old): float(new) for old, new in replaced.items()} == {
        0: float(want[1]),
        1: float(want[2]),
    }


def test_a_counter_follows_the_stage_that_draws_from_it() -> None:
    def loss(params: Any, batch: Any, state: Any) -> Any:
        h = jnp.tanh(batch["x"] @ params[0])
        keep = jax.random.bernoulli(jax.random.fold_in(jax.random.key(0), state[0]), 0.5, (WIDTH, WIDTH))
        h = stage(h, 1) * keep  # the key depends on nothing placed: it is copied to its user, and so is the counter
        return jnp.mean((h @ params[1] - batch["y"]) ** 2), state[0] + 1

    state = [jnp.int32(4)]
    made = cut_loss(loss, 2, values(2), BATCH, state)
    assert [len(part.new_state) for part in made.stages] == [0, 1]
    results, replaced = run_in_order(made, values(2), BATCH, state)
    np.testing.assert_allclose(results[0], loss(values(2), BATCH, state)[0], rtol=1e-6)
    assert int(replaced[made.roles.state[0]]) == 5


def test_a_counter_that_two_stages_draw_from_is_kept_by_both() -> None:
    def loss(params: Any, batch: Any, state: Any) -> Any:
        noise = [jax.random.normal(jax.random.fold_in(jax.random.key(i), state[0]), (WIDTH, WIDTH)) for i in range(2)]
        h = stage(batch["x"] @ params[0], 0) + noise[0]
        return jnp.mean((stage(h, 1) @ params[1] + noise[1]) ** 2), state[0] + 1

    made = cut_loss(loss, 2, values(2), BATCH, [jnp.int32(4)])
    assert [len(part.new_state) for part in made.stages] == [1, 1]
    assert edge_pairs(made) == [(0, 1)]
    run_in_order(made, values(2), BATCH, [jnp.int32(4)])


def test_states_that_replace_each_other_stay_together() -> None:
    def loss(params: Any, batch: Any, state: Any) -> Any:
        h = stage(batch["x"] @ params[0], 1)
        return jnp.mean(h * state[0]), state[1], state[0] + 1

    made = cut_loss(loss, 2, values(1), BATCH, [jnp.float32(1), jnp.float32(2)])
    assert [len(part.new_state) for part in made.stages] == [0, 2]
    _, replaced = run_in_order(made, values(1), BATCH, [jnp.float32(1), jnp.float32(2)])
    assert [float(replaced[old]) for old in made.roles.state] == [2.0, 2.0]


def test_state_that_nobody_reads_but_the_loss_replaces() -> None:
    def loss(params: Any, batch: Any, state: Any) -> Any:
        return jnp.mean(stage(batch["x"] @ params[0], 1)), jnp.float32(7), state[1] + 1

    made = cut_loss(loss, 2, values(1), BATCH, [jnp.float32(1), jnp.float32(2)])
    _, replaced = run_in_order(made, values(1), BATCH, [jnp.float32(1), jnp.float32(2)])
    assert [float(replaced[old]) for old in made.roles.state] == [7.0, 3.0]


def test_state_of_one_stage_that_another_reads_is_refused() -> None:
    def loss(params: Any, batch: Any, state: Any) -> Any:
        h = stage(batch["x"] @ params[0] * state[0], 0)
        h = stage(h, 1) @ params[1]
        return jnp.mean(h), state[0] + jnp.mean(h)

    with pytest.raises(PlanError) as caught:
        cut_loss(loss, 2, values(2), BATCH, [jnp.float32(1)])
    assert str(caught.value) == (
        "Plan(stages=): model state number 0 is replaced by stage [1] and read by [0, 1].\n"
        "  float32[]\n"
        "  Mend: give each module a state (rng stream, statistics) of its own"
    )


# Paths and graphs.


def test_paths_of_scopes() -> None:
    assert path_of(()) == ""
    assert path_of(("model", "layers_0")) == "model/layers_0"
    assert path_of(("author", "oneflax::model/layers/0", "oneflax::model/layers/0/attn", "inner")) == (
        "model/layers/0/attn"
    )


def test_small_jitted_functions_stay_closed_and_evaluate_runs_them() -> None:
    def f(x: Any) -> Any:
        with jax.named_scope("block"):
            return jax.nn.silu(x) + jnp.where(x > 0, x, 1.0), 3.0

    graph, _ = trace(f, jnp.arange(4.0))
    assert [op.path for op in graph.ops] == ["block"] * len(graph.ops)
    assert any(op.equation.primitive.name in ("jit", "pjit") for op in graph.ops)
    env = {graph.inputs[0]: jnp.arange(4.0)}
    evaluate(graph.ops, env)
    want = np.arange(4.0) / (1 + np.exp(-np.arange(4.0))) + [1, 1, 2, 3]
    first, second = graph.outputs
    assert isinstance(first, int)
    np.testing.assert_allclose(env[first], want, rtol=1e-6)
    assert isinstance(second, Literal)
    opened, _ = trace(f, jnp.arange(4.0), open_all=True)
    assert not any(op.equation.primitive.name in ("jit", "pjit") for op in opened.ops)


def test_a_closed_over_array_is_one_constant() -> None:
    table = jnp.arange(8.0)
    graph, _ = trace(lambda x: jax.jit(lambda x: jnp.sum(stage(x, 1) * table))(x) + jnp.sum(table), jnp.ones(8))
    assert [np.asarray(value).tolist() for value in graph.constants.values()] == [list(range(8))]
