"""The demo's step on data 4 x model 2 without stages: the plan's program against one written by hand.

`by_plan` is what ``oneflax demo --stages 1 --data 4 --model 2`` does: its plan, model, optimizer and batch shape.
`by_hand` is the same step written out with jit, NamedSharding and lax.scan; oneflax has no part in it. Once with the
demo's four microbatches, once with one. The compiled programs must be the same, line by line, up to names; their times
are then those of one program, called in two ways.
"""

import re
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as Spec

from benchmarks.hlo_text import canonical, differences
from benchmarks.timing import Row, alternate, both
from oneflax import demo
from oneflax._demo_gpt import Gpt, Size, loss
from oneflax._demo_grid import Grid, Settings, blocks_of, settings

ROUNDS, MOST_ROUNDS, STANDARD_ERROR, SHOWN = 21, 147, 0.01, 20
COLLECTIVES = re.compile(r" (all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)(-start)?\(")

Step = Callable[[], Any]
"""Takes one step and gives the new parameters."""


@dataclass(frozen=True, slots=True)
class Case:
    """The demo's settings, and a batch of the shape that it trains on."""

    chosen: Settings
    grid: Grid
    size: Size
    tokens: np.ndarray

    @classmethod
    def of(cls, microbatches: int) -> "Case":
        """The demo with these flags."""
        flags = ["--stages", "1", "--data", "4", "--model", "2", "--microbatches", str(microbatches)]
        chosen = settings(demo.parser().parse_args(flags))
        grid, rows = chosen.layout(8)
        size = Size(demo.VOCAB, blocks=blocks_of(grid, chosen.schedule))
        tokens = np.random.default_rng(0).integers(0, size.vocab, (rows, size.context + 1), np.int32)
        return cls(chosen, grid, size, tokens)

    @property
    def key(self) -> jax.Array:
        """The key of the model's first values."""
        return jax.random.key(self.chosen.seed)

    def make(self, key: jax.Array) -> Gpt:
        """The demo's model."""
        return Gpt(self.size, rngs=nnx.Rngs(key))


def by_plan(case: Case) -> tuple[str, Step]:
    """The demo's own: the compiled program's text, and a step."""
    step = demo.grid_plan(case.grid, case.chosen.schedule).train_step(loss, demo.optimizer(case.chosen.steps))
    state = step.init(case.make, case.tokens, case.key)
    assert step.program is not None
    assert step.program.lower_step is not None

    def take() -> Any:
        nonlocal state
        state, _ = step(state, case.tokens)
        return state

    return step.program.lower_step().compile().as_text(), take


# ---- by hand ----


def by_hand(case: Case) -> tuple[str, Step]:
    """The same as one writes it."""
    microbatches, optimizer = case.chosen.schedule.microbatches, demo.optimizer(case.chosen.steps)
    devices = np.array(jax.devices()[: case.grid.devices]).reshape(case.grid.data, case.grid.model)
    mesh = Mesh(devices, ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    graphdef, abstract = nnx.split(nnx.eval_shape(lambda: case.make(case.key)))
    of_params, of_opt = layouts(mesh, abstract, optimizer)
    step = jax.jit(
        hand_step(graphdef, optimizer, microbatches),
        out_shardings=(of_params, of_opt, NamedSharding(mesh, Spec())),
        donate_argnums=(0, 1),
    )
    params = jax.jit(lambda key: nnx.state(case.make(key)), out_shardings=of_params)(case.key)
    opt = jax.jit(optimizer.init, out_shardings=of_opt)(params)

    def place() -> jax.Array:
        if microbatches == 1:
            return jax.device_put(case.tokens, NamedSharding(mesh, Spec("data")))
        stacked = case.tokens.reshape(microbatches, -1, case.tokens.shape[1])
        return jax.device_put(stacked, NamedSharding(mesh, Spec(None, "data")))

    def take() -> Any:
        nonlocal params, opt
        params, opt, _ = step(params, opt, place())
        return params

    return step.lower(params, opt, place()).compile().as_text() or "", take


def layouts(mesh: Mesh, abstract: Any, optimizer: optax.GradientTransformation) -> tuple[Any, Any]:
    """Where parameters and optimizer state lie: tensor parallelism, columns then rows."""

    def of_param(path: Any, _: Any) -> NamedSharding:
        name = "/".join(str(getattr(key, "key", "")) for key in path).strip("/")
        if re.search(r"(attn/[qkv]|mlp/up|head)/kernel", name):
            return NamedSharding(mesh, Spec(None, "model"))
        if re.search(r"(attn/[qkv]|mlp/up)/bias|(attn/o|mlp/down)/kernel", name):
            return NamedSharding(mesh, Spec("model"))
        return NamedSharding(mesh, Spec())

    of_params = jax.tree_util.tree_map_with_path(of_param, abstract)
    state = jax.eval_shape(optimizer.init, abstract)
    whole = NamedSharding(mesh, Spec())
    of_opt = optax.tree_utils.tree_map_params(
        optimizer, lambda _, sharding: sharding, state, of_params, transform_non_params=lambda _: whole
    )
    return of_params, of_opt


def hand_step(graphdef: Any, optimizer: optax.GradientTransformation, microbatches: int) -> Callable[..., Any]:
    """The step to jit; with more than one microbatch their gradients are added up in a scan."""

    def value_and_grad(params: Any, rows: jax.Array) -> tuple[jax.Array, Any]:
        return jax.value_and_grad(lambda params: loss(nnx.merge(graphdef, params), rows))(params)

    def step(params: Any, opt: Any, batch: jax.Array) -> tuple[Any, Any, dict[str, jax.Array]]:
        def add(total: Any, rows: jax.Array) -> tuple[Any, jax.Array]:
            value, gradients = value_and_grad(params, rows)
            return jax.tree.map(jnp.add, total, gradients), value

        if microbatches == 1:
            value, gradients = value_and_grad(params, batch)
            losses = value[None]
        else:
            total, losses = jax.lax.scan(add, jax.tree.map(jnp.zeros_like, params), batch)
            gradients = jax.tree.map(lambda x: x / microbatches, total)
        updates, opt = optimizer.update(gradients, opt, params)
        norm = optax.tree_utils.tree_norm(gradients)
        metrics = {"loss": losses.mean(), "grad_norm": norm, "microbatch_losses": losses}
        return optax.apply_updates(params, updates), opt, metrics

    return step


# ---- the comparison ----


def compare(microbatches: int) -> list[Row]:
    """Compiles both, prints the first lines in which they differ, and times them in turn."""
    case = Case.of(microbatches)
    our_text, ours = by_plan(case)
    their_text, theirs = by_hand(case)
    lines = canonical(our_text)
    different = differences(lines, canonical(their_text))
    for line in different[:SHOWN]:
        print(f"   {line[:400]}")

    calls = {"plan": lambda: jax.block_until_ready(ours()), "by hand": lambda: jax.block_until_ready(theirs())}
    for call in calls.values():
        call()
    seconds, ratio = until_certain(calls)
    name = f"one program, {microbatches} microbatch{'es' if microbatches > 1 else ''}"
    detail = f"{len(lines)} lines, {sum(bool(COLLECTIVES.search(line)) for line in lines)} collectives"
    return [
        Row(f"{name}: lines of HLO unlike the hand-written one's", len(different), "count", 0, detail),
        Row(f"{name}: step time / hand-written", ratio, "ratio", 1.05, both(seconds)),
    ]


def until_certain(calls: Mapping[str, Callable[[], object]]) -> tuple[dict[str, list[float]], float]:
    """Times two calls in turn until the median ratio within a round is known to 1 %: a busy machine takes longer."""
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    while True:
        for name, more in alternate(calls, ROUNDS).items():
            seconds[name] += more
        ratios = [a / b for a, b in zip(*seconds.values())]
        low, middle, high = statistics.quantiles(ratios, n=4)
        error = 0.93 * (high - low) / len(ratios) ** 0.5  # of the median of a normal distribution
        if error <= STANDARD_ERROR or len(ratios) >= MOST_ROUNDS:
            return seconds, middle


def main() -> list[Row]:
    """Compares with the demo's microbatches and with one."""
    with jax.default_matmul_precision("float32"):  # as the demo does
        return [*compare(demo.parser().get_default("microbatches")), *compare(1)]
