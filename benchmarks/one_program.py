"""The demo's model on data 4 × model 2 without stages: the plan's program against one written by hand.

Both take the same steps from the same values. The compiled programs must be the same up to names; their times are
then those of one program, called in two ways.
"""

import collections
import re
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as Spec

import oneflax as flow
from benchmarks.timing import Row, alternate, both, ratio
from oneflax import S
from oneflax._demo_gpt import Gpt, Size, loss

SIZE = Size(vocab=512)
BATCH, ROUNDS, STEPS = 16, 21, 3
COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")


def rules() -> list[tuple[str, Any]]:
    """Tensor parallelism of the GPT: columns, then rows."""
    return [
        (r"(q|k|v|up)/kernel", {"model": S(-1)}),
        (r"(q|k|v|up)/bias", {"model": S(0)}),
        (r"(o|down)/kernel", {"model": S(-2)}),
    ]


def by_hand() -> tuple[Any, Any, Any]:
    """The step as one writes it with jit and NamedSharding; gives the jitted step, its first state, and a batch's."""
    mesh = Mesh(np.array(jax.devices()[:8]).reshape(4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    optimizer = optax.adamw(1e-3)
    graphdef, abstract = nnx.split(nnx.eval_shape(lambda: Gpt(SIZE, rngs=nnx.Rngs(jax.random.key(0)))))

    def spec(path: Any, _: Any) -> NamedSharding:
        name = "/".join(str(getattr(key, "key", "")) for key in path).strip("/")
        if re.search(r"(q|k|v|up)/kernel", name):
            return NamedSharding(mesh, Spec(None, "model"))
        if re.search(r"(q|k|v|up)/bias|(o|down)/kernel", name):
            return NamedSharding(mesh, Spec("model"))
        return NamedSharding(mesh, Spec())

    params = jax.tree_util.tree_map_with_path(spec, abstract)
    rest = NamedSharding(mesh, Spec())
    opt = optax.tree_utils.tree_map_params(
        optimizer, lambda _, s: s, jax.eval_shape(optimizer.init, abstract), params, transform_non_params=lambda _: rest
    )

    def step(params: Any, opt: Any, tokens: Any) -> tuple[Any, Any, dict[str, Any]]:
        value, gradients = jax.value_and_grad(lambda p: loss(nnx.merge(graphdef, p), tokens))(params)
        updates, opt = optimizer.update(gradients, opt, params)
        metrics = {"loss": value, "grad_norm": optax.tree_utils.tree_norm(gradients), "microbatch_losses": value[None]}
        return optax.apply_updates(params, updates), opt, metrics

    def make(key: Any) -> Any:
        return nnx.split(Gpt(SIZE, rngs=nnx.Rngs(key)))[1]

    values = jax.jit(make, out_shardings=params)(jax.random.key(0))
    state = values, jax.jit(optimizer.init, out_shardings=opt)(values)
    jitted = jax.jit(step, out_shardings=(params, opt, rest), donate_argnums=(0, 1))
    return jitted, state, NamedSharding(mesh, Spec("data"))


def by_plan() -> tuple[Any, Any]:
    """The same by a plan; gives the step and its first state."""
    plan = flow.Plan(flow.placement("auto", data=4, model=2), batch={"data": S(0)}, params=rules())
    step = plan.train_step(loss, optax.adamw(1e-3))
    state = step.init(lambda key: Gpt(SIZE, rngs=nnx.Rngs(key)), batch(), jax.random.key(0))
    return step, state


def batch() -> np.ndarray:
    """One batch of tokens."""
    return np.random.default_rng(0).integers(0, SIZE.vocab, (BATCH, SIZE.context + 1)).astype(np.int32)


def operations(text: str) -> collections.Counter[str]:
    """How often each operation with each result occurs in a compiled program: its contents without names."""
    found = re.findall(r"^\s*(?:ROOT )?%?[\w.-]+ = (\S+(?: \S+)*?) ([\w-]+)\(", text, re.MULTILINE)
    return collections.Counter(f"{name} {shape}" for shape, name in found)


def main() -> list[Row]:
    """Measures; prints the operations in which the programs differ, if any."""
    hand, (params, opt), layout = by_hand()
    step, state = by_plan()
    tokens = batch()
    placed = jax.device_put(tokens, layout)
    theirs = operations(hand.lower(params, opt, placed).compile().as_text())
    assert step.program is not None
    assert step.program.lower_step is not None
    ours = operations(step.program.lower_step().compile().as_text())
    difference = sum(((ours - theirs) + (theirs - ours)).values())
    for name, count in sorted(((ours - theirs) + (theirs - ours)).items()):
        print(f"   differs: {name}: ours {ours[name]}, by hand {theirs[name]} ({count})")
    count = sum(n for name, n in ours.items() if name.split()[0].removesuffix("-start") in COLLECTIVES)

    def take_ours() -> None:
        nonlocal state
        for _ in range(STEPS):
            state, _ = step(state, tokens)
        jax.block_until_ready(state)

    def take_theirs() -> None:
        nonlocal params, opt
        for _ in range(STEPS):
            params, opt, _ = hand(params, opt, jax.device_put(tokens, layout))
        jax.block_until_ready(params)

    take_ours()
    take_theirs()
    seconds = alternate({"plan": take_ours, "by hand": take_theirs}, ROUNDS)
    detail = f"{sum(ours.values())} operations, {count} collectives"
    return [
        Row("one program: operations that differ from the hand-written one", difference, "count", 0, detail),
        Row("one program: step time / hand-written", ratio(seconds, "plan", "by hand"), "ratio", 1.05, both(seconds)),
    ]
