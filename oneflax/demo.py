"""``oneflax demo``: trains a small GPT on a grid of stages, data and model, and checks it against one device.

The model (`oneflax._demo_gpt`) is ordinary flax code. What spreads it over devices stands in `grid_plan`: a placement,
three rules and a schedule. The reference run, `one_device_step`, is the jitted flax and optax loop that one writes for
one device, with the same start, batches and microbatches; it does not use oneflax.

No jax is loaded before `main` has said how many CPU devices it shall have.
"""

import argparse
import contextlib
import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console
from rich.panel import Panel
from rich.text import Text

from oneflax.pipeline.schedules import Schedule
from oneflax.sbp.errors import Fault, PlanError

from . import _demo_report as report
from ._demo_grid import ROWS, Grid, Settings, blocks_of, device_count, settings
from ._demo_run import Run, Show, Step, Stop, train
from ._demo_text import BytePairs, batch_of, stdlib_text, unigram_entropy

if TYPE_CHECKING:
    import jax
    import optax

    from ._demo_gpt import Gpt

TEXT_BYTES = 1_000_000
VOCAB = 1024
SAMPLE_TOKENS = 160

LEARNT_STEPS = 200
"""So many steps must have taught the model more than how frequent each token is."""


def parser() -> argparse.ArgumentParser:
    """The flags of ``oneflax demo``."""
    flags = argparse.ArgumentParser(
        prog="oneflax demo",
        description="Train a small GPT on the source of Python's standard library, on a grid of stages x data x model "
        "devices, and compare it with the same training on one device.",
        epilog="Axes that are not given take two devices each while the number of devices left is even: stages first, "
        "then data, then model; what is left goes to data. So 8 devices are 2 x 2 x 2, 4 are 2 x 2 x 1, 2 are "
        "2 x 1 x 1.",
    )
    flags.add_argument("--devices", type=int, metavar="N", help="devices (default: 8, 4, 2 or 1, as there are)")
    flags.add_argument("--stages", type=int, metavar="N", help="devices along the stage axis")
    flags.add_argument("--data", type=int, metavar="N", help="devices along the data axis")
    flags.add_argument("--model", type=int, metavar="N", help="devices along the model axis")
    flags.add_argument("--schedule", default="1f1b", metavar="NAME", help="pipeline schedule (default: 1f1b)")
    flags.add_argument("--microbatches", type=int, default=4, metavar="N", help="microbatches a step (default: 4)")
    flags.add_argument(
        "--batch", type=int, metavar="ROWS", help=f"rows a step (default: {ROWS}, or the next that fits)"
    )
    flags.add_argument("--steps", type=int, default=200, metavar="N", help="training steps (default: 200)")
    flags.add_argument("--seed", type=int, default=0, metavar="N", help="of weights and batches (default: 0)")
    flags.add_argument("--out", type=Path, default=Path("out/demo"), metavar="DIR", help="files (default: out/demo)")
    return flags


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Runs the demo.

    Args:
        argv: The flags, see `parser`; by default those of this process.

    Returns:
        The results, as in ``results.json`` (where NaN is null): ``losses``, ``one_device_losses``,
        ``max_relative_difference`` (None when Ctrl-C came before the one-device run), ``unigram_entropy``,
        ``tokens_per_s``, ``files`` and more.

    Raises:
        PlanError: Flags that do not fit each other, the model, or the devices.
    """
    chosen = settings(parser().parse_args(argv))
    if chosen.devices is not None:
        chosen.layout(chosen.devices)  # most mistakes show before jax starts
    _make_folder(chosen.out)
    devices = start_jax(chosen.devices or device_count(chosen.fixed, 8))
    wanted = chosen.devices or device_count(chosen.fixed, len(devices))
    grid, rows = chosen.layout(wanted)
    if wanted > len(devices):
        raise PlanError(_too_few_devices(wanted, devices))
    import jax

    # GPUs round the inputs of float32 products to 10 bits unless told otherwise: the two runs would drift apart.
    with Stop().listening() as stop, jax.default_matmul_precision("float32"):
        return _Demo(chosen, grid, rows, stop).run()


def failures(results: Mapping[str, Any]) -> list[str]:
    """What is wrong with a demo's results, a line each; a difference that is not known (None) is not.

    Example:
        >>> failures({"max_relative_difference": float("nan"), "losses": [7.0], "last_loss": 7.0,
        ...           "unigram_entropy": 6.2})
        ['the largest relative difference from one device is nan, not within 1e-04']
    """
    found: list[str] = []
    apart, last, entropy = (results[name] for name in ("max_relative_difference", "last_loss", "unigram_entropy"))
    if apart is not None and not apart <= report.LIMIT:
        found.append(f"the largest relative difference from one device is {apart:.1e}, not within {report.LIMIT:.0e}")
    if len(results["losses"]) >= LEARNT_STEPS and not last < entropy:
        found.append(f"the last loss is {last:.4f}, not below the text's unigram entropy, {entropy:.4f}")
    return found


def strict_json(results: Mapping[str, Any]) -> str:
    """The results as JSON that every reader takes: null for NaN and infinities.

    Example:
        >>> strict_json({"losses": [7.0, float("nan")]}).split()
        ['{', '"losses":', '[', '7.0,', 'null', ']', '}']
    """

    def finite(value: Any) -> Any:
        if isinstance(value, list):
            return [finite(item) for item in value]
        return None if isinstance(value, float) and not math.isfinite(value) else value

    return json.dumps({name: finite(value) for name, value in results.items()}, indent=1, allow_nan=False)


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        what = f"cannot make the folder {folder}: {error.strerror}."
        raise PlanError(Fault("demo(--out)", what, mend="--out out/demo")) from error


# ---- devices ----


def start_jax(cpu_devices: int) -> list[Any]:
    """Starts jax with so many virtual CPU devices, should it find no accelerator; gives the devices it chose."""
    if cpu_devices > 1:
        # XLA's thread pool: with fewer threads than the devices' queued collectives need, jax 0.10 waits for ever.
        os.environ.setdefault("NPROC", "32")
    import jax

    if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
        # RuntimeError: jax has started before, and keeps the devices that it has.
        with contextlib.suppress(RuntimeError):
            jax.config.update("jax_num_cpu_devices", cpu_devices)
    return jax.devices()


def _too_few_devices(wanted: int, devices: Sequence[Any]) -> Fault:
    count, kind = len(devices), devices[0].platform
    what = f"the grid takes {wanted} devices, and jax has {count} ({kind})."
    if kind == "cpu":
        what += " XLA_FLAGS sets their number, or jax had started before the demo."
        return Fault("demo(--devices)", what, mend=f"a process of its own without XLA_FLAGS, or --devices {count}")
    return Fault("demo(--devices)", what, mend=f"JAX_PLATFORMS=cpu for virtual devices, or --devices {count}")


# ---- the two programs ----


def grid_plan(grid: Grid, schedule: Schedule) -> Any:
    """All that oneflax is told: where the devices stand, who splits what, and where the model is cut."""
    import oneflax as flow
    from oneflax import S

    ranks = np.arange(grid.devices).reshape(grid.stages, grid.data, grid.model)
    placement = flow.placement("auto", ranks.tolist(), axes=("stage", "data", "model"))
    rules = [
        (r"(attn/[qkv]|mlp/up|head)/kernel", {"model": S(-1)}),  # columns
        (r"(attn/[qkv]|mlp/up)/bias", {"model": S(0)}),
        (r"(attn/o|mlp/down)/kernel", {"model": S(-2)}),  # rows
    ]
    cut: dict[str, Any] = {"microbatches": schedule.microbatches}
    if grid.stages > 1:
        cut = {"stages": "blocks/*", "schedule": schedule}
    return flow.Plan(placement, batch={"data": S(0)}, params=rules, **cut)


def one_device_step(
    make: "Callable[[jax.Array], Gpt]", tx: "optax.GradientTransformation", microbatches: int, key: "jax.Array"
) -> tuple[Step, Any]:
    """The reference: the training step that one writes for one device, and its first state.

    The gradient is the mean of the microbatches' gradients, added in their order.
    """
    import jax
    import jax.numpy as jnp
    import optax
    from flax import nnx

    from ._demo_gpt import loss

    device = jax.devices()[0]
    graph = nnx.graphdef(nnx.eval_shape(lambda: make(key)))

    def start(key: jax.Array) -> Any:
        params = nnx.state(make(key), nnx.Param)
        return params, tx.init(params)

    def step(state: Any, batch: jax.Array) -> tuple[Any, jax.Array]:
        params, opt_state = state
        value_and_grad = jax.value_and_grad(lambda params, rows: loss(nnx.merge(graph, params), rows))

        def one_more(total: Any, rows: jax.Array) -> tuple[Any, None]:
            return jax.tree.map(jnp.add, total, value_and_grad(params, rows)), None

        zero = (jnp.zeros(()), jax.tree.map(jnp.zeros_like, params))
        total, _ = jax.lax.scan(one_more, zero, batch.reshape(microbatches, -1, batch.shape[-1]))
        mean_loss, grads = jax.tree.map(lambda x: x / microbatches, total)
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), mean_loss

    compiled = jax.jit(step, donate_argnums=0)
    first = jax.jit(start)(jax.device_put(key, device))
    return lambda state, batch: compiled(state, jax.device_put(batch, device)), first


def optimizer(steps: int) -> "optax.GradientTransformation":
    """AdamW with warm-up and cosine decay.

    The rate is high, so that 200 steps teach something, but not so high that roundings grow from step to step.
    """
    import optax

    warmup = min(20, steps // 10)
    rate = optax.warmup_cosine_decay_schedule(5e-4, 5e-3, warmup, max(steps, warmup + 1), 5e-4)
    return optax.adamw(rate, b2=0.99, eps=1e-6, weight_decay=0.01)


# ---- the flow ----


class _Demo:
    """The demo after its flags: text, two runs, a piece of writing, and the report."""

    def __init__(self, chosen: Settings, grid: Grid, rows: int, stop: Stop) -> None:
        import jax
        from flax import nnx

        from ._demo_gpt import Gpt, Size

        self.chosen, self.grid, self.rows, self.stop = chosen, grid, rows, stop
        self.console, self.platform = Console(), jax.default_backend()
        text = stdlib_text(TEXT_BYTES)
        self.code = BytePairs.train(text, VOCAB)
        self.tokens = self.code.encode(text)
        self.entropy = unigram_entropy(self.tokens)
        self.size = size = Size(self.code.vocab, blocks=blocks_of(grid, chosen.schedule))
        self.make = lambda key: Gpt(size, rngs=nnx.Rngs(key))
        self.key = jax.random.key(chosen.seed)
        self.tx = optimizer(chosen.steps)

    def run(self) -> dict[str, Any]:
        """Makes both runs and reports."""
        self._print(f"grid: {self.grid}, {self.grid.devices} {self.platform} devices")
        self._print(f"text: Python's standard library, {len(self.tokens):,} tokens of {self.size.vocab} kinds")
        plan, sample, trace, run = self._train_on_grid()
        one_run = None if self.stop.asked else self._train_on_one_device(len(run.losses))
        results = self._results(run, one_run) | {"bubble": trace.bubble if trace is not None else None}
        results["sample"] = sample
        results["files"] = self._write(results, plan, trace)
        self._print(f"\n{plan.explain()}\n")
        self.console.print(Panel(Text(results["sample"]), title="what the model writes", title_align="left"))
        self.console.print(report.summary(results))
        return results

    def _print(self, text: str) -> None:
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def _batch(self, step: int) -> np.ndarray:
        return batch_of(self.tokens, step, rows=self.rows, length=self.size.context + 1, seed=self.chosen.seed)

    def _train(self, name: str, step: Step, state: Any, steps: int) -> tuple[Any, Run]:
        batches = (self._batch(number) for number in range(steps))
        with Show(self.console, name, steps, self.rows * self.size.context) as show:
            return train(step, state, batches, show, self.stop)

    def _train_on_grid(self) -> tuple[Any, str, Any, Run]:
        """The plan, what the trained model writes, the timeline of one step (None without stages), and the run."""
        from flax import nnx

        from ._demo_gpt import loss

        plan = grid_plan(self.grid, self.chosen.schedule)
        step = plan.train_step(loss, self.tx)
        state = step.init(self.make, self._batch(0), self.key)

        def take(state: Any, batch: np.ndarray) -> tuple[Any, Any]:
            state, metrics = step(state, batch)
            return state, metrics["loss"]

        state, run = self._train("grid", take, state, self.chosen.steps)
        model = state.model()
        nnx.update(model, plan.gather(nnx.state(model)))
        sample = self._sample(model)
        if self.grid.stages > 1:  # the timeline is that of one step more, alone on the devices
            step.record = True
            step(state, self._batch(len(run.losses)))
        return plan, sample, step.trace, run

    def _train_on_one_device(self, steps: int) -> Run:
        step, state = one_device_step(self.make, self.tx, self.chosen.schedule.microbatches, self.key)
        return self._train("one device", step, state, steps)[1]

    def _sample(self, model: "Gpt") -> str:
        """What the model writes after a line end."""
        import jax

        from ._demo_gpt import sample

        tokens = sample(model, jax.numpy.int32(ord("\n")), jax.random.fold_in(self.key, 1), SAMPLE_TOKENS)
        return self.code.decode(np.asarray(tokens)).strip("\n")

    def _results(self, run: Run, one_run: Run | None) -> dict[str, Any]:
        import jax
        from flax import nnx

        shapes = jax.tree.leaves(nnx.state(nnx.eval_shape(lambda: self.make(self.key))))
        apart = report.relative_differences(run.losses, one_run.losses) if one_run else []
        return {
            "grid": str(self.grid),
            "devices": self.grid.devices,
            "platform": self.platform,
            "schedule": str(self.chosen.schedule) if self.grid.stages > 1 else None,
            "microbatches": self.chosen.schedule.microbatches,
            "blocks": self.size.blocks,
            "parameters": sum(leaf.size for leaf in shapes),
            "tokens_per_step": self.rows * self.size.context,
            "losses": run.losses,
            "one_device_losses": one_run.losses if one_run else [],
            "max_relative_difference": float(np.max(apart)) if apart else None,
            "unigram_entropy": self.entropy,
            "last_loss": float(np.mean(run.losses[-10:])),
            "tokens_per_s": self.rows * self.size.context / run.step_s,
            "step_s": run.step_s,
            "first_step_s": run.first_step_s,
            "one_device_step_s": one_run.step_s if one_run else None,
            "one_device_first_step_s": one_run.first_step_s if one_run else None,
        }

    def _write(self, results: dict[str, Any], plan: Any, trace: Any) -> dict[str, str]:
        """Writes the files and gives their paths."""
        files = {"loss": "loss.svg", "explain": "explain.txt", "results": "results.json"}
        if trace is not None:
            files |= {"pipeline": "pipeline.svg", "chrome": "pipeline.trace.json"}
        paths = {name: self.chosen.out / file for name, file in files.items()}
        paths["loss"].write_text(report.loss_curve(results), encoding="utf-8")
        paths["explain"].write_text(f"{plan.explain()}\n", encoding="utf-8")
        if trace is not None:
            trace.to_svg(paths["pipeline"])
            trace.to_chrome(paths["chrome"])
        named = {name: str(path) for name, path in paths.items()}
        paths["results"].write_text(strict_json(results | {"files": named}), encoding="utf-8")
        return named
