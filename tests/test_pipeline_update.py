"""A function over the values of several stages gives what one device gives, and keeps large values where they are."""

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax import contrib

from oneflax.pipeline.update import MAX_SHARED_BYTES, StagedFunction
from oneflax.sbp import B, Placement, PlanError, named_sharding, placement

STAGES = 3


class Staged:
    """An optax transformation over parameters that live on stages, beside the same on one device."""

    def __init__(
        self,
        make: Callable[[], optax.GradientTransformation],
        params: Any,
        homes: Any,
        places: Sequence[Placement] | None = None,
    ) -> None:
        """`homes`: the stage of each parameter, as a tree like `params`."""
        self.optimizer = make()
        self.params, self.places = params, places or [placement("cpu", [i]) for i in range(STAGES)]
        self.tree, self.homes = jax.tree.structure(params), jax.tree.leaves(homes)
        self.state = jax.jit(self.optimizer.init)(params)
        self.opt_homes = homes_of_state(self.state, params, self.homes)
        self.opt_tree = jax.tree.structure(self.state)
        self.one_device = jax.jit(self.update)

    def update(self, *arrays: Any) -> list[Any]:
        count = len(self.homes)
        gradients, params = (self.tree.unflatten(arrays[i * count : (i + 1) * count]) for i in range(2))
        updates, state = self.optimizer.update(gradients, self.opt_tree.unflatten(arrays[2 * count :]), params)
        return [*jax.tree.leaves(optax.apply_updates(params, updates)), *jax.tree.leaves(state)]

    def shardings(self, values: Sequence[Any], homes: Sequence[int | None]) -> list[Any]:
        return [named_sharding(np.shape(x), (B,), self.places[home or 0]) for x, home in zip(values, homes)]

    def init(self) -> tuple[StagedFunction, list[Any]]:
        leaves = jax.tree.leaves(self.params)
        function = StagedFunction(
            lambda *arrays: jax.tree.leaves(self.optimizer.init(self.tree.unflatten(arrays))),
            leaves,
            self.homes,
            self.shardings(leaves, self.homes),
            self.opt_homes,
            self.shardings(jax.tree.leaves(self.state), self.opt_homes),
            [place.mesh for place in self.places],
            [False] * len(leaves),
            "optimizer.init",
        )
        return function, self.placed(leaves, self.homes)

    def function(self, donate: bool = True) -> StagedFunction:
        params, opt = jax.tree.leaves(self.params), jax.tree.leaves(self.state)
        homes = [*self.homes, *self.homes, *self.opt_homes]
        return StagedFunction(
            self.update,
            [*params, *params, *opt],
            homes,
            self.shardings([*params, *params, *opt], homes),
            [*self.homes, *self.opt_homes],
            self.shardings([*params, *opt], homes[len(params) :]),
            [place.mesh for place in self.places],
            [False] * len(params) + [donate] * (len(params) + len(opt)),
            "optimizer.update",
        )

    def placed(self, values: Sequence[Any], homes: Sequence[int | None]) -> list[Any]:
        return jax.device_put([jnp.copy(x) for x in values], self.shardings(values, homes))

    def gradients(self, step: int) -> list[Any]:
        random = np.random.default_rng(step)
        return [jnp.asarray(random.normal(size=x.shape), x.dtype) for x in jax.tree.leaves(self.params)]


def homes_of_state(state: Any, params: Any, homes: Sequence[int]) -> list[int | None]:
    """The stage of each leaf of an optimizer's state: its parameter's, whose path ends its own."""
    with_paths = jax.tree_util.tree_flatten_with_path
    known = {tuple(path): home for (path, _), home in zip(with_paths(params)[0], homes)}
    depth = len(next(iter(known)))
    return [known.get(tuple(path[-depth:])) for path, _ in with_paths(state)[0]]


def model(width: int = 4) -> tuple[Any, Any]:
    """Parameters and their stages; the biases are small enough to be sent, matrices of width 32 are not."""
    random = np.random.default_rng(0)
    shapes = {f"layer{i}": {"kernel": (width, width), "bias": (width,)} for i in range(STAGES)}
    params = jax.tree.map(
        lambda shape: jnp.asarray(random.normal(size=shape), jnp.float32),
        shapes,
        is_leaf=lambda x: isinstance(x, tuple),
    )
    return params, {f"layer{i}": {"kernel": i, "bias": i} for i in range(STAGES)}


def assert_close(got: Sequence[Any], want: Sequence[Any], relative: float = 1e-6) -> None:
    for a, b in zip(got, want, strict=True):
        assert a.dtype == b.dtype
        if jnp.issubdtype(b.dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        if not jnp.issubdtype(b.dtype, jnp.inexact):
            np.testing.assert_array_equal(a, b)
            continue
        scale = max(1.0, float(jnp.abs(b).max(initial=0)))
        np.testing.assert_allclose(a, b, rtol=0, atol=relative * scale)


def follow(
    make: Callable[[], optax.GradientTransformation],
    width: int = 4,
    steps: int = 3,
    spoil: int | None = None,
    places: Sequence[Placement] | None = None,
) -> StagedFunction:
    """Steps on the stages and on one device side by side; everything donated as in training."""
    params, homes = model(width)
    staged = Staged(make, params, homes, places)
    function = staged.function()
    init, at_home = staged.init()
    state = init(*at_home)
    assert_close(state, jax.tree.leaves(staged.state))
    values = [*at_home, *state]
    want = [*jax.tree.leaves(params), *jax.tree.leaves(staged.state)]
    for step in range(steps):
        gradients = staged.gradients(step)
        if step == spoil:
            gradients[1] = gradients[1].at[0].set(jnp.nan)
        want = staged.one_device(*gradients, *want)
        values = function(*staged.placed(gradients, staged.homes), *values)
        assert_close(values, want)
        for value, home in zip(values, [*staged.homes, *staged.opt_homes]):
            assert value.sharding.device_set == set(staged.places[home or 0].mesh.devices.flat)
    return function


def groups(params: Any) -> Any:
    return {name: jax.tree.map(lambda _, n=name: n, layer) for name, layer in params.items()}


def clipped_twice() -> optax.GradientTransformation:
    return optax.chain(optax.clip_by_global_norm(1.0), optax.scale(3.0), optax.clip_by_global_norm(0.5), optax.sgd(0.1))


def scheduled() -> optax.GradientTransformation:
    return optax.adamw(optax.warmup_cosine_decay_schedule(0.0, 0.1, 2, 10), mask=lambda p: jax.tree.map(_is_matrix, p))


def _is_matrix(x: Any) -> bool:
    return jnp.ndim(x) > 1


def by_group() -> optax.GradientTransformation:
    chain = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(0.01))
    return optax.multi_transform({"layer0": optax.sgd(0.1), "layer1": chain, "layer2": optax.set_to_zero()}, groups)


def mixed_groups() -> optax.GradientTransformation:
    """Two groups over all stages, each with its own norm."""
    kinds: dict[Hashable, optax.GradientTransformation] = {
        "matrix": optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1)),
        "vector": optax.lion(0.01),
    }
    return optax.multi_transform(kinds, lambda p: jax.tree.map(lambda x: "matrix" if _is_matrix(x) else "vector", p))


def masked_to_one_stage() -> optax.GradientTransformation:
    """A norm over the parameters of stage 1 alone, then one over all."""
    mask = {f"layer{i}": i == 1 for i in range(STAGES)}
    return optax.chain(optax.masked(optax.clip_by_global_norm(0.5), mask), optax.clip_by_global_norm(1.0), optax.sgd(1))


OPTIMIZERS: dict[str, tuple[Callable[[], optax.GradientTransformation], int]] = {
    "sgd": (lambda: optax.sgd(0.1), 1),
    "adamw": (lambda: optax.adamw(0.01), 1),
    "momentum": (lambda: optax.sgd(0.1, momentum=0.9, nesterov=True), 1),
    "lion": (lambda: optax.lion(0.01), 1),
    "adafactor": (lambda: optax.adafactor(0.01, min_dim_size_to_factor=4), 1),
    "lamb": (lambda: optax.lamb(0.01), 1),
    "rmsprop": (lambda: optax.rmsprop(0.01, centered=True), 1),
    "clip by block rms": (lambda: optax.chain(optax.clip_by_block_rms(0.5), optax.adam(0.01)), 1),
    "clip by value": (lambda: optax.chain(optax.clip(0.5), optax.sgd(0.1)), 1),
    "scheduled and masked": (scheduled, 1),
    "hyperparams": (lambda: optax.inject_hyperparams(optax.adamw)(optax.linear_schedule(0.1, 0.01, 5)), 1),
    "hyperparams, fixed": (lambda: optax.inject_hyperparams(optax.sgd)(0.1, momentum=0.9), 1),
    "clip by global norm": (lambda: optax.chain(optax.clip_by_global_norm(1.0), optax.adam(0.01)), 2),
    "clip after adam": (lambda: optax.chain(optax.scale_by_adam(), optax.clip_by_global_norm(1.0)), 2),
    "clip twice": (clipped_twice, 3),
    "by group": (by_group, 1),
    "groups over all stages": (mixed_groups, 2),
    "masked norm": (masked_to_one_stage, 2),
    "ema": (lambda: optax.chain(optax.sgd(0.1), optax.ema(0.9)), 1),
    "noise": (lambda: optax.chain(optax.add_noise(0.1, 0.5, jax.random.key(1)), optax.sgd(0.1)), 1),
    "prodigy": (lambda: contrib.prodigy(1.0), 2),
    "schedule-free": (lambda: contrib.schedule_free_sgd(0.1), 1),
    "copies of the parameters": (lambda: _keeps_copies(), 1),
    "nothing": (lambda: optax.set_to_zero(), 1),
    "zero nans": (lambda: optax.chain(optax.zero_nans(), optax.sgd(0.1)), 1),
}


def _keeps_copies() -> optax.GradientTransformation:
    """State that is the parameters themselves, twice, and a constant: results that nothing computes."""

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        return jax.tree.map(lambda g, w, old: 0.1 * (old - w) - 0.1 * g, updates, params, state[0]), (params, params, 7)

    return optax.GradientTransformation(lambda params: (params, params, jnp.int32(7)), update)


QUICK = ("adamw", "clip by global norm", "clip twice", "by group", "copies of the parameters")


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n in QUICK else [pytest.mark.slow]) for n in OPTIMIZERS])
def test_an_optimizer_on_stages_is_the_optimizer_on_one_device(name: str) -> None:
    follow(OPTIMIZERS[name][0])


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_phases_and_bytes_with_large_parameters(name: str) -> None:
    """Matrices of 4 KiB on each of three stages: what goes between stages is less than one of them."""
    make, phases = OPTIMIZERS[name]
    params, homes = model(width=32)
    function = Staged(make, params, homes).function()
    assert function.phases == phases
    assert function.shared_bytes < 1024


@pytest.mark.newest
@pytest.mark.parametrize(("name", "spoil"), [("apply if finite", None), ("apply if finite", 1), ("multi steps", None)])
def test_conditions_over_all_stages_work_while_parameters_are_small(name: str, spoil: int | None) -> None:
    clipped = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(0.1))
    make = {
        "apply if finite": lambda: optax.apply_if_finite(optax.adam(0.1), 2),
        "multi steps": lambda: optax.MultiSteps(clipped, 2).gradient_transformation(),
    }[name]
    follow(make, spoil=spoil)


def test_a_condition_over_large_parameters_of_several_stages_is_refused() -> None:
    params, homes = model(width=128)
    with pytest.raises(PlanError) as caught:
        Staged(lambda: optax.apply_if_finite(optax.sgd(0.1), 2), params, homes).function()
    text = str(caught.value)
    assert text.startswith("optimizer.update: one operation mixes ")
    assert "bytes of stages [0, 1, 2]; a stage never holds another's parameters." in text
    assert "\n  Mend: a transformation that looks at each parameter alone" in text


def test_every_operation_that_mixes_large_values_is_told() -> None:
    def fn(a: Any, b: Any) -> list[Any]:
        jax.debug.callback(lambda a, b: None, a, b)
        return [a + b, jnp.sin(a * b)]

    with pytest.raises(PlanError) as caught:
        simple(fn, [ones(MAX_SHARED_BYTES)] * 2, [0, 1], [0, 1])
    names = [fault.given[0].split(" at ")[0] for fault in caught.value.faults]
    assert names == ["debug_callback", "add", "mul"]
    assert str(caught.value).startswith("function: 3 faults\n1. function: one operation mixes ")


def test_effects_run_once_where_their_inputs_are() -> None:
    """A callback on each stage, one on a value of all stages, one on small and large values, one on nothing."""
    seen: list[tuple[str, float]] = []

    def note(name: str, *values: Any) -> None:
        jax.debug.callback(lambda *xs: seen.append((name, sum(float(np.sum(x)) for x in xs))), *values)

    def fn(a: Any, b: Any, count: Any) -> list[Any]:
        norm = jnp.sum(a) + jnp.sum(b)
        note("nothing")
        note("a", a)
        note("b", b)
        note("count", count)
        note("norm", norm)
        note("a norm and b", a, norm, b)
        return [a / norm, b / norm, count + 1]

    large = ones(MAX_SHARED_BYTES)
    function, arguments = simple(fn, [2 * ones(2), large, jnp.int32(7)], [0, 1, None], [0, 1, None])
    size = float(MAX_SHARED_BYTES)
    want = [("nothing", 0), ("a", 4), ("b", size), ("count", 7), ("norm", 4 + size), ("a norm and b", 8 + 2 * size)]
    stages = [part.stage for part in function._parts for op in part.ops if op.equation.effects]
    assert sorted(stages) == [0, 0, 0, 0, 1, 1]
    function(*arguments)
    jax.effects_barrier()
    seen.clear()
    results = function(*arguments)
    jax.effects_barrier()
    assert sorted(seen) == sorted(want)
    np.testing.assert_allclose(results[0], np.full(2, 2 / (4 + size)), rtol=1e-6)


def test_an_optimizer_that_prints_steps_as_without() -> None:
    seen: list[float] = []

    def printing() -> optax.GradientTransformation:
        def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
            jax.debug.callback(lambda norm: seen.append(float(norm)), optax.tree_utils.tree_norm(updates))
            return updates, state

        return optax.chain(optax.GradientTransformation(lambda params: optax.EmptyState(), update), optax.sgd(0.1))

    function = follow(printing, steps=2)
    jax.effects_barrier()
    assert function.phases == 2
    assert len(seen) == 4  # a step on the stages and one on one device
    assert sorted(seen)[0] == pytest.approx(sorted(seen)[1])


def test_two_devices_a_stage_keep_their_layout() -> None:
    places = [placement("cpu", [2 * i, 2 * i + 1], axes=("data",)) for i in range(STAGES)]
    follow(OPTIMIZERS["clip by global norm"][0], places=places)


def simple(
    fn: Callable[..., Sequence[Any]],
    values: Sequence[Any],
    homes: Sequence[int | None],
    out_homes: Sequence[int | None],
    donate: bool | Sequence[bool] = False,
    places: Sequence[Placement] | None = None,
) -> tuple[StagedFunction, list[Any]]:
    """A function over arrays on stages, and its arguments in place."""
    at = places or [placement("cpu", [i]) for i in range(STAGES)]
    outs = jax.eval_shape(lambda *args: list(fn(*args)), *values)

    def layouts(arrays: Sequence[Any], where: Sequence[int | None]) -> list[Any]:
        return [named_sharding(np.shape(x), (B,), at[home or 0]) for x, home in zip(arrays, where)]

    flags = [donate] * len(values) if isinstance(donate, bool) else donate
    meshes = [place.mesh for place in at]
    shardings = layouts(values, homes)
    function = StagedFunction(
        fn, values, homes, shardings, out_homes, layouts(outs, out_homes), meshes, flags, "function"
    )
    return function, jax.device_put([np.asarray(x) for x in values], shardings)


def ones(*shape: int) -> Any:
    return jnp.ones(shape, jnp.float32)


def test_donated_arguments_are_gone_and_others_stay() -> None:
    function, (a, b) = simple(lambda a, b: [a + 1, b + 1], [ones(64), ones(64)], [0, 1], [0, 1], [True, False])
    results = function(a, b)
    assert a.is_deleted()
    assert not b.is_deleted()
    np.testing.assert_array_equal(np.stack(results), np.full((2, 64), 2.0))


def test_an_argument_that_another_stage_reads_is_not_given_away() -> None:
    function, (a, b) = simple(lambda a, b: [a + 1, a + b], [ones(4), ones(4)], [0, 1], [0, 1], True)
    for _ in range(3):
        want = [np.asarray(a) + 1, np.asarray(a) + np.asarray(b)]
        a, b = function(a, b)
        np.testing.assert_array_equal(a, want[0])
        np.testing.assert_array_equal(b, want[1])


def test_every_result_has_memory_of_its_own() -> None:
    """Results that are arguments, one value twice, or constants: each may be donated to the next call."""
    table = jnp.arange(3.0)

    def fn(a: Any, b: Any) -> list[Any]:
        total = a + b
        return [a, a, total, total, table, table, jnp.float32(7), jnp.float32(7)]

    function, arguments = simple(fn, [ones(3), 2 * ones(3)], [0, 0], [0] * 8)
    results = function(*arguments)
    want = fn(ones(3), 2 * ones(3))
    for result, value in zip(results, want, strict=True):
        np.testing.assert_array_equal(result, value)
    everything = [*arguments, *results, table]
    addresses = [x.unsafe_buffer_pointer() for x in everything]
    assert len(set(addresses)) == len(addresses)


def test_results_on_other_stages_than_their_values() -> None:
    table = jnp.arange(3.0)
    function, arguments = simple(
        lambda a, n: [a, a * 2, n, n + 1, table, jnp.float32(7)], [ones(3), jnp.int32(4)], [1, None], [2, 0, 1, 2, 1, 2]
    )
    results = function(*arguments)
    assert [next(iter(x.devices())).id for x in results] == [2, 0, 1, 2, 1, 2]
    for result, value in zip(results, [np.ones(3), 2 * np.ones(3), 4, 5, np.arange(3), 7], strict=True):
        np.testing.assert_array_equal(result, value)


def test_stages_on_the_same_devices() -> None:
    same = [placement("cpu", [0])] * STAGES
    params, homes = model()
    staged = Staged(OPTIMIZERS["clip twice"][0], params, homes, same)
    function, want = staged.function(), [*jax.tree.leaves(params), *jax.tree.leaves(staged.state)]
    values = staged.placed(want, [*staged.homes, *staged.opt_homes])
    for step in range(3):
        gradients = staged.gradients(step)
        want = staged.one_device(*gradients, *want)
        values = function(*staged.placed(gradients, staged.homes), *values)
        assert_close(values, want)


def test_a_scalar_of_one_stage_goes_to_a_large_value_of_another() -> None:
    size = MAX_SHARED_BYTES  # four times as many bytes as may be shared
    function, arguments = simple(
        lambda small, large: [jnp.sum(small) * large, jnp.max(large * jnp.sum(small)) + small],
        [ones(3), ones(size)],
        [0, 1],
        [1, 0],
    )
    assert function.shared_bytes < 64
    large, small = function(*arguments)
    np.testing.assert_array_equal(large, np.full(size, 3.0))
    np.testing.assert_array_equal(small, np.full(3, 4.0))


def test_a_stage_that_shares_nothing_hears_nothing() -> None:
    function, arguments = simple(lambda a, b, c: [a + b, c * 2], [ones(3)] * 3, [0, 1, 2], [0, 2])
    assert function.phases == 2
    assert function.shared_bytes == 12
    for result, value in zip(function(*arguments), [2, 2], strict=True):
        np.testing.assert_array_equal(result, np.full(3, value))


def test_custom_derivatives_loops_and_effects_inside() -> None:
    def fn(a: Any, b: Any) -> list[Any]:
        gradient = jax.grad(lambda x: jnp.sum(jax.nn.relu(x) ** 2))(a)
        looped = jax.lax.fori_loop(0, 3, lambda i, x: x * 2, b)
        return [jax.jit(jnp.sin)(gradient), looped + jnp.sum(gradient)]

    function, arguments = simple(fn, [ones(3), ones(3)], [0, 1], [0, 1])
    for result, value in zip(function(*arguments), [np.sin(np.full(3, 2.0)), np.full(3, 14.0)], strict=True):
        np.testing.assert_allclose(result, value, rtol=1e-6)


def test_the_check_sees_a_norm_over_one_stage_alone() -> None:
    """A clip that sees one stage's gradients gives other numbers, and the comparison says so."""
    params, homes = model()
    staged = Staged(OPTIMIZERS["clip by global norm"][0], params, homes)
    gradients, rest = staged.gradients(0), [*jax.tree.leaves(params), *jax.tree.leaves(staged.state)]
    want = staged.one_device(*gradients, *rest)
    apart = staged.one_device(*(g if home == 0 else 0 * g for g, home in zip(gradients, staged.homes)), *rest)
    with pytest.raises(AssertionError):
        assert_close(apart, want)
