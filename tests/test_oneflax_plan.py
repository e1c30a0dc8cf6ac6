"""A plan's numbers against plain jax on one device, and where its arrays lie."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import oneflax as flow
from oneflax import B, S

pytestmark = pytest.mark.slow  # training runs; the quick tier is for what needs none


ONE = flow.placement("cpu", [0])
SPLIT = flow.placement("cpu", data=4, model=2)
TWO_STAGES = flow.placement("cpu", stage=2, data=2, model=2)
FOUR_STAGES = flow.placement("cpu", stage=4, data=1, model=2)
SMALL_STAGES = flow.placement("cpu", [[0, 1], [2, 3]], axes=("stage", "data"))
GRIDS = {"one": ONE, "split": SPLIT, "two stages": TWO_STAGES, "four stages": FOUR_STAGES}
SCHEDULES = {"gpipe": flow.pipeline.gpipe, "1f1b": flow.pipeline.one_f_one_b}
KEY = jax.random.key(7)
VOCAB, WIDTH, TIME, ROWS = 12, 8, 4, 16

# A gradient that should be zero is rounding noise, which Adam scales up to whole steps unless its eps is large.
ADAMW = optax.adamw(1e-2, eps=1e-3)
CLIPPED = optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-2, eps=1e-3))
OPTIMIZERS = {"adamw": ADAMW, "clipped": CLIPPED}


# ---- the reference: plain jax on one device ----


def reference(
    split: tuple[Any, Any],
    loss: Callable[..., tuple[Any, Any]],
    optimizer: optax.GradientTransformation,
    batches: Sequence[Any],
    microbatches: int,
    key: Any = None,
    mean: bool = True,
) -> tuple[list[dict[str, Any]], Any, Any]:
    """Trains on `batches`; ``loss(params, rest, batch, key)`` gives the loss and the new rest."""

    gradient_of = jax.jit(jax.value_and_grad(loss, has_aux=True))

    @jax.jit
    def update(gradient: Any, opt: Any, params: Any) -> tuple[Any, Any, Any]:
        updates, opt = optimizer.update(gradient, opt, params)
        norm = jnp.sqrt(sum(jnp.sum(x * x) for x in jax.tree.leaves(gradient)))
        return optax.apply_updates(params, updates), opt, norm

    params, rest = split
    opt, metrics = optimizer.init(params), []
    for number, batch in enumerate(batches):
        total, losses = jax.tree.map(jnp.zeros_like, params), []
        for i in range(microbatches):
            part = jax.tree.map(lambda x, i=i: np.split(x, microbatches)[i], batch)
            own = None if key is None else jax.random.fold_in(jax.random.fold_in(key, number), i)
            (value, rest), gradient = gradient_of(params, rest, part, own)
            total = jax.tree.map(jnp.add, total, gradient)
            losses.append(value)
        parts = jnp.stack(losses)
        if mean:
            total = jax.tree.map(lambda x: x / microbatches, total)
        params, opt, norm = update(total, opt, params)
        value = parts.mean() if mean else parts.sum()
        metrics.append({"loss": value, "grad_norm": norm, "microbatch_losses": parts})
    return metrics, params, rest


def train(step: flow.TrainStep, state: flow.TrainState, batches: Sequence[Any], key: Any = None) -> tuple[Any, Any]:
    metrics = []
    for batch in batches:
        state, measured = step(state, batch, key)
        metrics.append(measured)
    return metrics, state


def assert_close(got: Any, want: Any, tolerance: float = 2e-6) -> None:
    """Leaf for leaf, relative to the largest number of each leaf."""
    got_leaves, want_leaves = jax.tree.leaves(got), jax.tree.leaves(want)
    assert len(got_leaves) == len(want_leaves) > 0
    for a, b in zip(got_leaves, want_leaves):
        if jnp.issubdtype(b.dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        a, b = np.asarray(a), np.asarray(b)
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * max(1e-3, np.abs(b).max(initial=0)))


def assert_same_bits(got: Any, want: Any) -> None:
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        if jnp.issubdtype(b.dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


# ---- an nnx model with everything in it ----


class Attention(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.q, self.v, self.o = (nnx.Linear(WIDTH, WIDTH, rngs=rngs) for _ in range(3))
        self.k = nnx.Linear(WIDTH, WIDTH, use_bias=False, rngs=rngs)  # softmax cancels a bias of the keys

    def __call__(self, x: jax.Array) -> jax.Array:
        q, k, v = (f(x).reshape(*x.shape[:-1], 2, WIDTH // 2) for f in (self.q, self.k, self.v))
        weights = jax.nn.softmax(jnp.einsum("bthd,bshd->bhts", q, k) / 2)
        return self.o(jnp.einsum("bhts,bshd->bthd", weights, v).reshape(x.shape))


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.attn = Attention(rngs)
        self.batch_norm = nnx.BatchNorm(WIDTH, momentum=0.5, rngs=rngs)
        self.up = nnx.Linear(WIDTH, 2 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(2 * WIDTH, WIDTH, rngs=rngs)
        self.drop = nnx.Dropout(0.25, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.attn(self.norm(x))
        return x + self.drop(self.down(nnx.gelu(self.up(self.batch_norm(x)))))


class Net(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.token = nnx.Embed(VOCAB, WIDTH, rngs=rngs)
        self.blocks = nnx.List([Block(rngs) for _ in range(2)])
        self.head = nnx.Linear(WIDTH, VOCAB, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.token(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


RULES = [
    ("(q|k|v|up)/kernel", {"model": S(-1)}),
    ("(o|down)/kernel", {"model": S(-2)}),
    ("token/embedding", {"model": S(0)}),
]
TOKENS = [np.random.default_rng(i).integers(0, VOCAB, (ROWS, TIME + 1)).astype(np.int32) for i in range(3)]


def make_net(key: Any) -> Net:
    return Net(nnx.Rngs(key))


def next_token(model: Any, tokens: Any) -> jax.Array:
    logits = model(tokens[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


def split_net(model: nnx.Module) -> tuple[tuple[Any, Any], Callable[..., tuple[Any, Any]]]:
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)

    def loss(params: Any, rest: Any, tokens: Any, key: Any) -> tuple[Any, Any]:
        model = nnx.merge(graphdef, params, rest, copy=True)
        return next_token(model, tokens), nnx.split(model, nnx.Param, ...)[2]

    return (params, rest), loss


@functools.cache
def net_reference(microbatches: int, optimizer: str) -> tuple[list[dict[str, Any]], Any, Any]:
    split, loss = split_net(make_net(KEY))
    return reference(split, loss, OPTIMIZERS[optimizer], TOKENS, microbatches)


def net_plan(grid: str, microbatches: int, schedule: str | None = None) -> flow.Plan:
    stages = {} if schedule is None else {"stages": "blocks/*", "schedule": SCHEDULES[schedule](microbatches)}
    split: dict[str, Any] = {} if grid == "one" else {"batch": {"data": S(0)}, "params": RULES}
    return flow.Plan(GRIDS[grid], microbatches=microbatches, **split, **stages)


NETS = [
    ("one", 2, None, "clipped"),
    ("split", 1, None, "adamw"),
    pytest.param("split", 4, None, "clipped", marks=pytest.mark.newest),
    pytest.param("two stages", 4, "1f1b", "clipped", marks=pytest.mark.newest),
    ("two stages", 4, "gpipe", "clipped"),
    pytest.param("two stages", 1, "gpipe", "adamw", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("grid", "microbatches", "schedule", "optimizer"), NETS)
def test_nnx_model(grid: str, microbatches: int, schedule: str | None, optimizer: str) -> None:
    want, params, rest = net_reference(microbatches, optimizer)
    step = net_plan(grid, microbatches, schedule).train_step(next_token, OPTIMIZERS[optimizer])
    metrics, state = train(step, step.place(make_net(KEY)), TOKENS)
    assert_close(metrics, want, 5e-6)
    # A dozen operations deep in each block, three steps long: rounding grows with the depth.
    assert_close(state.params, params, 2e-5)
    assert_close(state.collections, rest, 1e-5)
    assert int(jax.tree.leaves(state.collections)[0].size) > 0
    assert state.step == len(TOKENS)


@pytest.mark.parametrize("grid", GRIDS)
def test_init_gives_the_same_values_on_every_grid(grid: str) -> None:
    def make(key: Any) -> Tied:
        return Tied(nnx.Rngs(key), blocks=4 if grid == "four stages" else 2)

    want = jax.jit(lambda key: nnx.state(make(key)))(KEY)
    stages = "blocks/*" if "stages" in grid else None
    state = flow.Plan(GRIDS[grid], stages=stages).train_step(next_token, ADAMW).init(make, TOKENS[0], KEY)
    assert_same_bits(state.params, want)
    assert not jax.tree.leaves(state.collections)
    if grid in ("one", "four stages"):
        return
    rules = [("token", {"model": S(0)}), ("kernel", {"model": S(1)})]
    step = flow.Plan(GRIDS[grid], params=rules, stages=stages).train_step(next_token, ADAMW)
    # The drawn bits are the same; XLA's code for a part of another shape may round their erf_inv the other way.
    assert_close(step.init(make, TOKENS[0], KEY).params, want, 2e-7)


# ---- pytrees: with marks, and without stages ----


def layered(stages: int) -> tuple[Any, list[Any], Callable[..., jax.Array]]:
    """Parameters, three batches, and a loss of `stages` layers with marks between them."""
    rng = np.random.default_rng(3)
    params = {
        "layers": [
            {"w": rng.normal(0, 0.5, (6, 6)).astype(np.float32), "b": rng.normal(0, 0.1, 6).astype(np.float32)}
            for _ in range(stages)
        ],
        "head": rng.normal(0, 0.5, (6, 2)).astype(np.float32),
    }
    batches = [
        {"x": rng.normal(size=(8, 6)).astype(np.float32), "y": rng.normal(size=(8, 2)).astype(np.float32)}
        for _ in range(3)
    ]

    def loss(params: Any, batch: Any) -> jax.Array:
        x = batch["x"]
        for i, layer in enumerate(params["layers"]):
            x = flow.stage(x, i)
            x = jnp.tanh(x @ layer["w"] + layer["b"])
        return jnp.mean((x @ params["head"] - batch["y"]) ** 2)

    return params, batches, loss


def without_rest(loss: Callable[..., Any]) -> Callable[..., tuple[Any, Any]]:
    return lambda params, rest, batch, key: (loss(params, batch) if key is None else loss(params, batch, key), rest)


LAYER_RULES = {"layers/*/w": {"model": S(-1)}}


@pytest.mark.parametrize(("microbatches", "optimizer"), [(1, "clipped"), (2, "adamw"), (4, "clipped")])
@pytest.mark.parametrize("grid", ["two stages", "four stages"])
def test_marked_pytree(grid: str, microbatches: int, optimizer: str) -> None:
    params, batches, loss = layered(GRIDS[grid].shape[0])
    tx = OPTIMIZERS[optimizer]
    want, after, _ = reference((params, ()), without_rest(loss), tx, batches, microbatches)
    found = []
    for schedule in SCHEDULES.values():
        plan = flow.Plan(GRIDS[grid], {"data": S(0)}, LAYER_RULES, schedule=schedule(microbatches))
        step = plan.train_step(loss, tx)
        metrics, state = train(step, step.place(params), batches)
        assert_close(metrics, want)
        assert_close(state.params, after)
        found.append((metrics, state.params, state.opt_state))
    assert_same_bits(found[0], found[1])  # a schedule is an order of work and nothing else


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize(("grid", "microbatches"), [("one", 1), ("one", 4), ("split", 2)])
def test_pytree_without_stages(grid: str, microbatches: int, optimizer: str) -> None:
    params, batches, loss = layered(2)
    tx = OPTIMIZERS[optimizer]
    want, after, _ = reference((params, ()), without_rest(loss), tx, batches, microbatches)
    split: dict[str, Any] = {} if grid == "one" else {"batch": {"data": S(0)}, "params": LAYER_RULES}
    step = flow.Plan(GRIDS[grid], microbatches=microbatches, **split).train_step(loss, tx)
    metrics, state = train(step, step.init(lambda key: jax.tree.map(jnp.asarray, params), batches[0], KEY), batches)
    assert_close(metrics, want)
    assert_close(state.params, after)


def noisy(params: Any, batch: Any, key: jax.Array) -> jax.Array:
    x = flow.stage(jnp.tanh(batch["x"] @ params["w0"]), 1)
    x = jnp.where(jax.random.bernoulli(key, 0.5, x.shape), x, 0)
    return jnp.mean((x @ params["w1"]) ** 2)


@pytest.mark.parametrize("kind", ["typed", "raw", "rbg"])
@pytest.mark.parametrize("grid", [SPLIT, SMALL_STAGES], ids=["split", "stages"])
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_keys_are_folded_by_step_and_microbatch(grid: flow.placement, kind: str) -> None:
    keys = {"typed": KEY, "raw": jax.random.PRNGKey(3), "rbg": jax.random.key(3, impl="rbg")}
    params = {"w0": np.eye(4, 6, dtype=np.float32), "w1": np.ones((6, 2), np.float32)}
    batches = [{"x": np.random.default_rng(i).normal(size=(8, 4)).astype(np.float32)} for i in range(3)]
    want, after, _ = reference((params, ()), without_rest(noisy), ADAMW, batches, 2, keys[kind])
    step = flow.Plan(grid, {"data": S(0)}, microbatches=2).train_step(noisy, ADAMW)
    metrics, state = train(step, step.place(params), batches, keys[kind])
    if kind == "rbg":  # its bits depend on the layout; that it runs, and draws, is what counts
        assert len({float(m["loss"]) for m in metrics}) == 3
        return
    assert_close(metrics, want)
    assert_close(state.params, after)


class Tied(nnx.Module):
    """The table is read by the first stage and, transposed, by the last."""

    def __init__(self, rngs: nnx.Rngs, blocks: int = 2) -> None:
        self.token = nnx.Embed(VOCAB, WIDTH, rngs=rngs)
        self.blocks = nnx.List([nnx.Linear(WIDTH, WIDTH, rngs=rngs) for _ in range(blocks)])

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.token(tokens)
        for block in self.blocks:
            x = jnp.tanh(block(x))
        return self.token.attend(x)


@pytest.mark.newest
@pytest.mark.parametrize("stages", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_tied_embeddings(stages: int) -> None:
    split, loss = split_net(Tied(nnx.Rngs(KEY), stages))
    want, params, _ = reference(split, loss, CLIPPED, TOKENS, 2)
    grid = TWO_STAGES if stages == 2 else FOUR_STAGES
    plan = flow.Plan(grid, {"data": S(0)}, {"token": {"model": S(0)}}, stages="blocks/*", microbatches=2)
    step = plan.train_step(next_token, CLIPPED)
    metrics, state = train(step, step.place(Tied(nnx.Rngs(KEY), stages)), TOKENS)
    assert_close(metrics, want)
    assert_close(state.params, params)
    assert {row.stage for row in plan.explain().params if row.path == "token/embedding"} == {0}


def test_a_skip_from_the_first_stage_to_the_last() -> None:
    params, batches, _ = layered(4)

    def loss(params: Any, batch: Any) -> jax.Array:
        x = skip = jnp.tanh(batch["x"] @ params["layers"][0]["w"])
        for i, layer in enumerate(params["layers"][1:], 1):
            x = jnp.tanh(flow.stage(x, i) @ layer["w"] + layer["b"])
        return jnp.mean(((x + skip) @ params["head"] - batch["y"]) ** 2)

    want, after, _ = reference((params, ()), without_rest(loss), ADAMW, batches, 4)
    plan = flow.Plan(FOUR_STAGES, microbatches=4)
    step = plan.train_step(loss, ADAMW)
    metrics, state = train(step, step.place(params), batches)
    assert_close(metrics, want)
    assert_close(state.params, after)  # layer 0's bias is used nowhere: its gradient is 0
    assert {(e.source, e.target) for e in plan.explain().edges} == {(0, 1), (1, 2), (2, 3), (0, 3)}


@pytest.mark.parametrize("grid", [SPLIT, SMALL_STAGES], ids=["split", "stages"])
def test_losses_that_add_up(grid: flow.placement) -> None:
    params, batches, loss = layered(2)
    summed = lambda params, batch: loss(params, batch) * batch["x"].shape[0]  # noqa: E731
    want, after, _ = reference((params, ()), without_rest(summed), ADAMW, batches, 2, mean=False)
    step = flow.Plan(grid, {"data": S(0)}, microbatches=2).train_step(summed, ADAMW, reduce="sum")
    metrics, state = train(step, step.place(params), batches)
    assert_close(metrics, want)
    assert_close(state.params, after)


# ---- value_and_grad ----


@pytest.mark.parametrize("grid", ["split", "two stages"])
def test_value_and_grad_is_a_drop_in(grid: str) -> None:
    plain, spread = make_net(KEY), make_net(KEY)
    plan = net_plan(grid, 1, None if grid == "split" else "1f1b")
    value_and_grad = plan.value_and_grad(next_token)
    before = [np.asarray(leaf) for leaf in jax.tree.leaves(nnx.state(spread, nnx.Param))]
    for tokens in TOKENS:
        want_loss, want = nnx.jit(nnx.value_and_grad(next_token))(plain, jnp.asarray(tokens))
        loss, gradients = value_and_grad(spread, tokens)
        assert type(gradients) is type(want)
        assert jax.tree.structure(gradients) == jax.tree.structure(want)
        assert_close((loss, gradients), (want_loss, want), 1e-5)
    assert_same_bits(nnx.state(spread, nnx.Param), before)
    assert_close(nnx.split(spread, nnx.Param, ...)[2], nnx.split(plain, nnx.Param, ...)[2], 1e-5)


def test_value_and_grad_under_nnx_optimizer() -> None:
    def trained(value_and_grad: Callable[..., Any]) -> Any:
        model = Tied(nnx.Rngs(KEY))
        optimizer = nnx.Optimizer(model, ADAMW, wrt=nnx.Param)
        for tokens in TOKENS:
            _, gradients = value_and_grad(model, tokens)
            optimizer.update(model, gradients)
        return nnx.state(model, nnx.Param)

    plan = flow.Plan(SPLIT, {"data": S(0)}, microbatches=2)
    assert_close(trained(plan.value_and_grad(next_token)), trained(nnx.value_and_grad(next_token)))


def test_value_and_grad_of_a_pytree_with_a_key() -> None:
    params = {"w0": np.eye(4, 6, dtype=np.float32), "w1": np.ones((6, 2), np.float32)}
    batch = {"x": np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)}
    own = jax.random.fold_in(jax.random.fold_in(KEY, 0), 0)
    want = jax.value_and_grad(noisy)(params, batch, own)
    got = flow.Plan(SPLIT, {"data": S(0)}).value_and_grad(noisy)(params, batch, KEY)
    assert_close(got, want)


# ---- where things are ----


@pytest.fixture
def placed(monkeypatch: pytest.MonkeyPatch) -> list[jax.Array]:
    """Every array that is put on devices while the test runs."""
    seen: list[jax.Array] = []
    put = jax.device_put

    def spy(*args: Any, **kwargs: Any) -> Any:
        arrays = put(*args, **kwargs)
        seen.extend(leaf for leaf in jax.tree.leaves(arrays) if isinstance(leaf, jax.Array))
        return arrays

    monkeypatch.setattr(jax, "device_put", spy)
    return seen


def shard_shapes(array: jax.Array) -> set[tuple[int, ...]]:
    return {shard.data.shape for shard in array.addressable_shards}


@pytest.mark.parametrize(("microbatches", "shape"), [(1, (2, 6)), (2, (2, 1, 6))])
def test_a_batch_is_split_over_the_data_axis(
    placed: list[jax.Array], microbatches: int, shape: tuple[int, ...]
) -> None:
    params, batches, loss = layered(2)
    step = flow.Plan(SPLIT, {"data": S(0)}, LAYER_RULES, microbatches=microbatches).train_step(loss, ADAMW)
    state = step.place(params)
    placed.clear()
    step(state, batches[0])
    (x,) = [array for array in placed if array.size == 8 * 6 and array.shape != (6, 6)]
    assert shard_shapes(x) == {shape}
    assert len(x.sharding.device_set) == 8


def test_a_stage_gets_only_the_leaves_that_it_reads(placed: list[jax.Array]) -> None:
    params, batches, loss = layered(2)
    step = flow.Plan(TWO_STAGES, {"data": S(0)}, LAYER_RULES, microbatches=2).train_step(loss, ADAMW)
    state, _ = step(step.place(params), batches[0])
    placed.clear()
    step(state, batches[1])
    first, second = (set(TWO_STAGES.at(stage=i).mesh.devices.flat) for i in range(2))
    inputs = [array for array in placed if array.shape == (4, 6)]
    labels = [array for array in placed if array.shape == (4, 2)]
    assert [(shard_shapes(x), x.sharding.device_set) for x in inputs[:1]] == [({(2, 6)}, first)]
    assert {frozenset(x.sharding.device_set) for x in labels} == {frozenset(second)}
    assert all(shard_shapes(x) == {(2, 2)} for x in labels)


def test_parameters_and_optimizer_state_are_split_over_the_model_axis() -> None:
    step = net_plan("split", 1).train_step(next_token, ADAMW)
    state = step.init(make_net, TOKENS[0], KEY)
    block = state.params["blocks"][0]
    assert shard_shapes(block["attn"]["q"]["kernel"].get_value()) == {(8, 4)}
    assert shard_shapes(block["attn"]["o"]["kernel"].get_value()) == {(4, 8)}
    assert shard_shapes(block["attn"]["q"]["bias"].get_value()) == {(8,)}
    assert shard_shapes(state.params["token"]["embedding"].get_value()) == {(6, 8)}
    mu = state.opt_state[0].mu["blocks"][0]["attn"]["q"]["kernel"].get_value()
    assert shard_shapes(mu) == {(8, 4)}
    state, _ = step(state, TOKENS[0])
    assert shard_shapes(state.params["blocks"][0]["attn"]["q"]["kernel"].get_value()) == {(8, 4)}


@pytest.mark.parametrize("how", ["init", "place"])
def test_no_device_holds_another_stage(how: str) -> None:
    params, batches, loss = layered(4)
    plan = flow.Plan(FOUR_STAGES, params=LAYER_RULES, microbatches=2)
    step = plan.train_step(loss, ADAMW)
    if how == "init":
        state = step.init(lambda key: jax.tree.map(jnp.asarray, params), batches[0], KEY)
    else:
        state, _ = step(step.place(params), batches[0])
    devices = [set(FOUR_STAGES.at(stage=i).mesh.devices.flat) for i in range(4)]
    for tree in (state.params, state.opt_state[0].mu, state.opt_state[0].nu):
        for i, layer in enumerate(tree["layers"]):
            assert layer["w"].sharding.device_set == layer["b"].sharding.device_set == devices[i]
            assert shard_shapes(layer["w"]) == {(6, 3)}
        assert tree["head"].sharding.device_set == devices[3]


# ---- states ----


@pytest.mark.parametrize("grid", [ONE, flow.placement("cpu", [0, 1], axes=("data",)), SMALL_STAGES])
@pytest.mark.parametrize("kind", [np.array, jnp.array])
def test_placing_leaves_the_users_arrays_alone(grid: flow.placement, kind: Callable[..., Any]) -> None:
    values, batches, loss = layered(2)
    params = jax.tree.map(kind, values)
    step = flow.Plan(grid).train_step(loss, ADAMW)
    for state in (step.place(params), step.place(params)):  # before the step has compiled, and after
        train(step, state, batches[:2])
        assert_same_bits(params, values)


def test_what_is_placed_can_change_afterwards() -> None:
    values, batches, loss = layered(2)
    step = flow.Plan(SPLIT).train_step(loss, ADAMW)
    want = train(step, step.place(values), batches[:1])
    for _ in range(2):
        params = jax.tree.map(np.copy, values)
        state = step.place(params)
        jax.tree.map(lambda x: x.fill(7), params)
        assert_same_bits(train(step, state, batches[:1]), want)


@pytest.mark.parametrize("grid", [ONE, SPLIT, TWO_STAGES], ids=["one", "split", "stages"])
def test_gathered_arrays_outlive_the_next_step(grid: flow.placement) -> None:
    params, batches, loss = layered(2)
    plan = flow.Plan(grid)
    step = plan.train_step(loss, ADAMW)
    _, state = train(step, step.place(params), batches[:1])
    gathered = plan.gather(state)
    values = jax.tree.map(np.array, gathered.params)
    assert {leaf.sharding for leaf in jax.tree.leaves(gathered)} == {
        jax.sharding.SingleDeviceSharding(jax.devices()[0])
    }
    want = train(step, state, batches[1:])
    assert_same_bits(gathered.params, values)
    assert_same_bits(train(step, gathered, batches[1:]), want)


@pytest.mark.parametrize(("grid", "schedule"), [("split", None), ("two stages", "1f1b")])
def test_the_model_comes_back(grid: str, schedule: str | None) -> None:
    step = net_plan(grid, 1, schedule).train_step(next_token, ADAMW)
    state = step.place(make_net(KEY))
    assert_same_bits(nnx.state(state.model()), nnx.state(make_net(KEY)))
    _, state = train(step, state, TOKENS[:1])
    _, params, rest = net_reference_of_one_step()
    model = state.model()
    assert isinstance(model, Net)
    _, got_params, got_rest = nnx.split(model, nnx.Param, ...)
    assert_close((got_params, got_rest), (params, rest), 1e-5)
    assert np.isfinite(float(nnx.jit(next_token)(model, jnp.asarray(TOKENS[1]))))


@functools.cache
def net_reference_of_one_step() -> Any:
    split, loss = split_net(make_net(KEY))
    return reference(split, loss, ADAMW, TOKENS[:1], 1)


def test_a_state_of_another_plan() -> None:
    params, batches, loss = layered(2)
    plans = [flow.Plan(SPLIT, {"data": S(0)}, LAYER_RULES), flow.Plan(TWO_STAGES, microbatches=2), flow.Plan(ONE)]
    steps = [plan.train_step(loss, CLIPPED) for plan in plans]
    want, after, _ = reference((params, ()), without_rest(loss), CLIPPED, batches, 1)
    state = steps[0].place(params)
    for step, batch, metrics in zip(steps, batches, want):
        state, measured = step(state, batch)
        assert_close((measured["loss"], measured["grad_norm"]), (metrics["loss"], metrics["grad_norm"]))
    assert_close(state.params, after)
    assert state.step == 3


def test_one_step_serves_several_models_and_batch_shapes() -> None:
    def loss(params: Any, batch: Any) -> jax.Array:
        return sum(jnp.sum(x**2) for x in jax.tree.leaves(params)) * batch.mean()

    step = flow.Plan(SPLIT, {"data": S(0)}).train_step(loss, optax.adam(0.5))
    small, large = {"a": np.ones(3, np.float32)}, {"a": np.ones(2, np.float32), "b": np.full(2, 2, np.float32)}
    states = {name: step.place(tree) for name, tree in (("small", small), ("large", large))}
    for rows in (4, 8, 4):
        for name, square in (("small", 3.0), ("large", 10.0)):
            _, measured = step(step.place({"small": small, "large": large}[name]), np.ones((rows, 1), np.float32))
            assert float(measured["loss"]) == square
            states[name], measured = step(states[name], np.ones((rows, 1), np.float32))
    assert {state.step for state in states.values()} == {3}


def test_another_batch_shape_moves_no_state(placed: list[jax.Array]) -> None:
    params, batches, loss = layered(2)
    step = flow.Plan(SPLIT, {"data": S(0)}).train_step(loss, ADAMW)
    _, state = train(step, step.place(params), batches[:1])
    placed.clear()
    smaller = jax.tree.map(lambda x: x[:4], batches[1])
    _, state = train(step, state, [smaller])
    assert sorted(array.shape for array in placed) == [(4, 2), (4, 6)]
    _, after, _ = reference((params, ()), without_rest(loss), ADAMW, [batches[0], smaller], 1)
    assert_close(state.params, after)


def test_a_state_is_a_pytree() -> None:
    params, batches, loss = layered(2)
    step = flow.Plan(SPLIT).train_step(loss, ADAMW)
    _, state = train(step, step.place(params), batches[:1])
    doubled = jax.tree.map(lambda x: 2 * x, state)
    assert_same_bits(doubled.params, jax.tree.map(lambda x: 2 * np.asarray(x), state.params))
    assert doubled.step == 2  # the count is a leaf as well
    _, after = train(step, doubled, batches[1:2])
    assert after.step == 3
    for leaf in jax.tree.leaves((state, doubled)):  # the step took copies of what it had not placed itself
        np.asarray(leaf)


# ---- batches and losses in every form ----


FORMS: dict[str, Callable[[Any], Any]] = {
    "float64": lambda batch: jax.tree.map(lambda x: x.astype(np.float64), batch),
    "jax": lambda batch: jax.tree.map(jnp.asarray, batch),
    "on another device": lambda batch: jax.device_put(batch, jax.devices()[5]),
    "read only": lambda batch: jax.tree.map(lambda x: np.broadcast_to(x, x.shape), batch),
    "not contiguous": lambda batch: jax.tree.map(lambda x: np.asfortranarray(x), batch),
}


@pytest.mark.parametrize("grid", [SPLIT, SMALL_STAGES], ids=["split", "stages"])
def test_batches_in_every_form(grid: flow.placement) -> None:
    params, batches, loss = layered(2)
    step = flow.Plan(grid, {"data": S(0)}, microbatches=2).train_step(loss, ADAMW)
    want = train(step, step.place(params), batches[:1])
    for form in FORMS.values():
        assert_same_bits(train(step, step.place(params), [form(batches[0])]), want)


def test_tokens_of_64_bits() -> None:
    step = net_plan("split", 4).train_step(next_token, CLIPPED)
    want, params, _ = net_reference(4, "clipped")
    metrics, state = train(step, step.place(make_net(KEY)), [tokens.astype(np.int64) for tokens in TOKENS])
    assert_close((metrics, state.params), (want, params), 2e-5)


@pytest.mark.parametrize("microbatches", [1, 4])
@pytest.mark.parametrize("grid", [ONE, SPLIT, SMALL_STAGES], ids=["one", "split", "stages"])
def test_a_batch_can_be_filled_again_at_once(grid: flow.placement, microbatches: int) -> None:
    params = {"w0": np.ones((256, 256), np.float32), "w1": np.ones((256, 2), np.float32)}

    def loss(params: Any, batch: Any) -> jax.Array:
        x = flow.stage(batch["x"] @ params["w0"], 1)
        return jnp.mean(x @ params["w1"] + batch["y"])

    step = flow.Plan(grid, microbatches=microbatches).train_step(loss, optax.sgd(0.0))
    batch = {"x": np.ones((1024, 256), np.float32), "y": np.ones((1024, 2), np.float32)}
    state, measured = step(step.place(params), batch)
    expected = float(measured["loss"])
    for _ in range(3):
        jax.tree.map(lambda x: x.fill(1), batch)
        state, measured = step(state, batch)
        jax.tree.map(lambda x: x.fill(7), batch)
        assert float(measured["loss"]) == expected == 256 * 256 + 1


def test_a_batch_whose_examples_come_second() -> None:
    params, batches, loss = layered(2)
    turned = lambda params, batch: loss(params, jax.tree.map(jnp.transpose, batch))  # noqa: E731
    want, after, _ = reference((params, ()), without_rest(loss), ADAMW, batches, 2)
    for grid, sbp in ((SPLIT, S(1)), (SMALL_STAGES, S(-1))):
        step = flow.Plan(grid, {"data": sbp}, microbatches=2).train_step(turned, ADAMW)
        metrics, state = train(step, step.place(params), [jax.tree.map(np.transpose, batch) for batch in batches])
        assert_close(metrics, want)
        assert_close(state.params, after)


def test_init_takes_shapes_for_a_batch() -> None:
    shape = jax.ShapeDtypeStruct((ROWS, TIME + 1), np.int32)
    step = net_plan("split", 1).train_step(next_token, ADAMW)
    metrics, _ = train(step, step.init(make_net, shape, KEY), TOKENS[:1])
    assert_close(metrics[0]["loss"], net_reference_of_one_step()[0][0]["loss"], 5e-6)


def scaled(params: Any, batch: Any, scale: float = 3.0) -> jax.Array:
    return scale * jnp.sum(params["w"] * batch["x"].mean())


def scaled_by(params: Any, batch: Any, scale: float, *, key: Any = None) -> jax.Array:
    return scaled(params, batch, scale) + (0.0 if key is None else 100.0)


class Scaled:
    def __init__(self, scale: float) -> None:
        self.scale = scale

    def __call__(self, params: Any, batch: Any) -> jax.Array:
        return scaled(params, batch, self.scale)

    def with_key(self, params: Any, batch: Any, scale: float = 3.0, key: Any = None) -> jax.Array:
        return scaled_by(params, batch, scale, key=key)

    def draw(self, params: Any, batch: Any, noise: jax.Array) -> jax.Array:
        return scaled(params, batch, self.scale) + jax.random.bernoulli(noise, 1.0)


LOSSES: dict[str, tuple[Callable[..., Any], float]] = {
    "a function with a default": (scaled, 3.0),
    "a lambda": (lambda params, batch: scaled(params, batch, 2.0), 2.0),
    "a partial": (functools.partial(scaled, scale=5.0), 5.0),
    "a partial that leaves a key": (functools.partial(scaled_by, scale=5.0), 105.0),
    "a partial that binds the key": (functools.partial(scaled_by, scale=5.0, key=None), 5.0),
    "an object": (Scaled(4.0), 4.0),
    "a method with a key after a default": (Scaled(4.0).with_key, 103.0),
    "a method with a third parameter": (Scaled(4.0).draw, 5.0),
    "a jitted function": (jax.jit(scaled), 3.0),
    "any arguments": (lambda *args: scaled(*args), 3.0),
}


@pytest.mark.parametrize("name", LOSSES)
def test_losses_in_every_form(name: str) -> None:
    loss, expected = LOSSES[name]
    step = flow.Plan(ONE).train_step(loss, optax.sgd(0.0))
    _, metrics = step(step.place({"w": np.float32(1)}), {"x": np.ones(4, np.float32)}, KEY)
    assert float(metrics["loss"]) == expected


def test_a_loss_without_arrays_is_a_number_too() -> None:
    step = flow.Plan(ONE, microbatches=2).train_step(lambda params, batch: 2.0, ADAMW)
    _, metrics = step(step.place({"w": np.float32(1), "scale": 1.0}), np.ones(4, np.float32))
    assert (float(metrics["loss"]), float(metrics["grad_norm"])) == (2.0, 0.0)


class Sown(nnx.Module):
    """Adds a variable to itself in every call, before and after its own in the order of names."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.linear = nnx.Linear(4, 4, rngs=rngs)
        self.mean = nnx.BatchStat(jnp.zeros(()))
        self.count = nnx.Variable(jnp.zeros((), jnp.int32))

    def __call__(self, x: jax.Array) -> jax.Array:
        self.adds, self.zz = nnx.Intermediate(x), nnx.Intermediate(2 * x)
        self.mean[...] = x.mean()
        self.count[...] += 1
        return self.linear(x)


@pytest.mark.parametrize("microbatches", [1, 2])
def test_what_a_call_adds_to_a_model_is_left_out(microbatches: int) -> None:
    step = flow.Plan(SPLIT, microbatches=microbatches).train_step(lambda m, x: jnp.mean(m(x) ** 2), ADAMW)
    state = step.init(lambda key: Sown(nnx.Rngs(key)), np.ones((8, 4), np.float32), KEY)
    _, state = train(step, state, [np.full((8, 4), 3.0, np.float32)])
    assert {str(path[0]): float(value.get_value()) for path, value in nnx.to_flat_state(state.collections)} == {
        "count": microbatches,
        "mean": 3.0,
    }


def test_placement_axes_of_size_one_and_whole_batches() -> None:
    params, batches, loss = layered(2)
    grid = flow.placement("cpu", [[[0]], [[1]]], axes=("stage", "data", "model"))
    want, after, _ = reference((params, ()), without_rest(loss), ADAMW, batches, 1)
    step = flow.Plan(grid, (S(0), B), LAYER_RULES).train_step(loss, ADAMW)
    metrics, state = train(step, step.place(params), batches)
    assert_close(metrics, want)
    assert_close(state.params, after)
