# ruff: noqa: E501 (messages stand here whole, as the user reads them)
"""Every error of a plan and its step, word for word."""

import functools
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import oneflax as flow
from oneflax import B, FlowError, P, PlanError, S

GRID = flow.placement("cpu", [[0, 1], [2, 3]], axes=("data", "model"))
STAGES = flow.placement("cpu", [[0, 1], [2, 3]], axes=("stage", "data"))
FOUR_STAGES = flow.placement("cpu", [0, 1, 2, 3], axes=("stage",))
FORWARD_ONLY = flow.pipeline.forward_only(4)
SGD = optax.sgd(0.1)
KEY = jax.random.key(0)
PARAMS = {"w0": np.ones((4, 6), np.float32), "w1": np.ones((6, 2), np.float32)}
BATCH = {"x": np.ones((8, 4), np.float32), "y": np.ones((8, 2), np.float32)}


class Layer(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.linear = nnx.Linear(4, 4, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return jnp.tanh(self.linear(x))


class Net(nnx.Module):
    """Runs its layers in order; `grows` makes it change the shape of a variable."""

    def __init__(self, rngs: nnx.Rngs, grows: bool = False) -> None:
        self.layers = nnx.List([Layer(rngs) for _ in range(3)])
        self.seen = nnx.BatchStat(jnp.zeros(2))
        self.grows = grows

    def __call__(self, x: jax.Array) -> jax.Array:
        for layer in self.layers:
            x = layer(x)
        if self.grows:
            self.seen.set_value(jnp.zeros(3))
        return x


def plain(params: Any, batch: Any) -> jax.Array:
    return jnp.mean((jnp.tanh(batch["x"] @ params["w0"]) @ params["w1"] - batch["y"]) ** 2)


def marked(params: Any, batch: Any) -> jax.Array:
    hidden = flow.stage(jnp.tanh(batch["x"] @ params["w0"]), 2)
    return jnp.mean((hidden @ params["w1"] - batch["y"]) ** 2)


def keyed(params: Any, batch: Any, key: jax.Array) -> jax.Array:
    return plain(params, batch) + jax.random.normal(key)


def of_net(model: Net, x: jax.Array) -> jax.Array:
    return jnp.mean(model(x))


def take_step(plan: flow.Plan, loss: Callable[..., Any] = plain, batch: Any = BATCH, params: Any = PARAMS) -> None:
    step = plan.train_step(loss, SGD)
    step(step.place(params), batch)


def init_net(grid: Any = STAGES, loss: Callable[..., Any] = of_net, grows: bool = False, **plan: Any) -> None:
    step = flow.Plan(grid, **plan).train_step(loss, SGD)
    step.init(lambda key: Net(nnx.Rngs(key), grows), np.ones((8, 4), np.float32), KEY)


def foreign_state() -> None:
    plan = flow.Plan(GRID)
    adam, sgd = plan.train_step(plain, optax.scale_by_adam()), plan.train_step(plain, SGD)
    state, _ = adam(adam.place(PARAMS), BATCH)
    sgd(state, BATCH)


def wrong(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Calls with arguments of types that a type checker refuses."""
    return call(*args, **kwargs)


CASES: dict[str, tuple[Callable[[], Any], str]] = {
    "no placement": (lambda: wrong(flow.Plan, "cpu"), """\
Plan(grid): a placement is needed, not 'cpu'.
  Mend: flow.Plan(flow.placement("auto", data=-1))"""),
    "several faults at once": (lambda: flow.Plan(GRID, batch={"date": S(0)}, params=["w0", ("[", B)], stages=["(", "layers/*"], schedule=flow.pipeline.gpipe(4), microbatches=2), """\
Plan: 6 faults
1. Plan(params=): rule 1 is not a pair (pattern, sbp) but 'w0'.
     Mend: params=[(r"q_proj/kernel", {"model": S(-1)})]
2. Plan(params=) rule 2: '[' is no regular expression: unterminated character set at position 0.
     Mend: '\\\\[', or a glob
3. Plan(stages=): '(' is no regular expression: missing ), unterminated subpattern at position 0.
     Mend: '\\\\(', or a glob
4. Plan(stages=): cpu[[0, 1], [2, 3]] (data=2, model=2) has no placement axis named 'stage' to hold them.
     Mend: flow.placement("auto", stage=2, data=-1)
5. Plan(microbatches=): the schedule gpipe has 4 microbatches, not 2.
     Mend: leave microbatches= out: the schedule tells
6. Plan(batch=): there is no placement axis 'date'; the placement axes are data, model.
     placement cpu[[0, 1], [2, 3]] (data=2, model=2)
     Mend: use 'data'."""),
    "an axis name that does not exist": (lambda: flow.Plan(GRID, batch={"date": S(0)}), """\
Plan(batch=): there is no placement axis 'date'; the placement axes are data, model.
  placement cpu[[0, 1], [2, 3]] (data=2, model=2)
  Mend: use 'data'."""),
    "an sbp of the wrong length": (lambda: flow.Plan(GRID, batch=S(0)), """\
Plan(batch=): 1 sbp for 2 placement axes.
  nd-sbp S(0)    placement cpu[[0, 1], [2, 3]] (data=2, model=2)
  Mend: batch=(S(0), B)."""),
    "a batch in parts": (lambda: flow.Plan(GRID, batch={"data": P}), """\
Plan(batch=): a batch is whole or split over one tensor axis, its examples, not (P, B).
  nd-sbp (P, B)    placement cpu[[0, 1], [2, 3]] (data=2, model=2)
  Mend: batch={"data": S(0)}"""),
    "a batch split twice": (lambda: flow.Plan(GRID, batch=(S(0), S(1))), """\
Plan(batch=): a batch is whole or split over one tensor axis, its examples, not (S(0), S(1)).
  nd-sbp (S(0), S(1))    placement cpu[[0, 1], [2, 3]] (data=2, model=2)
  Mend: batch={"data": S(0)}"""),
    "stages without a stage axis": (lambda: flow.Plan(GRID, stages="layers/*"), """\
Plan(stages=): cpu[[0, 1], [2, 3]] (data=2, model=2) has no placement axis named 'stage' to hold them.
  Mend: flow.placement("auto", stage=2, data=-1)"""),
    "no stage pattern": (lambda: flow.Plan(STAGES, stages=[]), """\
Plan(stages=): an empty list names no stage.
  Mend: stages="blocks/*\""""),
    "microbatches that the schedule does not have": (lambda: flow.Plan(STAGES, schedule=flow.pipeline.gpipe(4), microbatches=2), """\
Plan(microbatches=): the schedule gpipe has 4 microbatches, not 2.
  Mend: leave microbatches= out: the schedule tells"""),
    "no count of microbatches": (lambda: flow.Plan(STAGES, microbatches=0), """\
Plan(microbatches=): a whole number of at least 1 is needed, not 0.
  Mend: microbatches=4"""),
    "no schedule": (lambda: wrong(flow.Plan, STAGES, schedule="1f1b"), """\
Plan(schedule=): a schedule is needed, not '1f1b'.
  Mend: schedule=flow.pipeline.one_f_one_b(microbatches=8)"""),
    "a schedule without backward": (lambda: flow.Plan(STAGES, schedule=FORWARD_ONLY), """\
Plan(schedule=): forward-only has no backward, so it trains nothing.
  Mend: schedule=flow.pipeline.one_f_one_b(microbatches=4)"""),
    "a table for other workers": (lambda: flow.Plan(STAGES, schedule=flow.pipeline.gpipe(4).table(workers=4)), """\
table 'gpipe'.table(workers=2): the table is laid out for 4 workers and cannot be laid out anew.
  Mend: use 4 workers, or a schedule that is laid out for any number, as one_f_one_b(microbatches=4)."""),
    "an unknown reduction": (lambda: flow.Plan(GRID).train_step(plain, SGD, reduce="max"), """\
train_step(reduce=): 'max' is none of 'mean', 'sum'.
  Mend: reduce="mean\""""),
    "no optimizer": (lambda: wrong(flow.Plan(GRID).train_step, plain, None), """\
train_step(optimizer): an optax transformation is needed, not None.
  Mend: plan.train_step(loss_fn, optax.adamw(3e-4))"""),
    "a rank that does not exist": (lambda: take_step(flow.Plan(flow.placement("cpu", [6, 9], axes=("data",)))), """\
placement.mesh: there are 8 cpu ranks here, only ranks 0 to 7 exist: no rank 9.
  placement cpu[6, 9] (data=2)
  Mend: set XLA_FLAGS=--xla_force_host_platform_device_count=10 before jax starts, or call jax.config.update("jax_num_cpu_devices", 10) first."""),
    "a rule that matches nothing": (lambda: take_step(flow.Plan(GRID, params=[("kernel", {"model": S(0)})])), """\
Plan(params=) rule 1 'kernel': matches none of the 2 paths.
  paths: w0, w1
  Mend: ("w0", {"model": S(0)}), or drop the rule"""),
    "a shadowed rule": (lambda: take_step(flow.Plan(GRID, params=[("w", {"model": S(0)}), ("w1", {"model": S(1)})])), """\
Plan(params=) rule 2 'w1': is shadowed: earlier rules take the one path that it matches.
  earlier rules: 1 'w'    first path: w1
  Mend: move it before rule 1, or drop it"""),
    "a split axis out of range": (lambda: take_step(flow.Plan(GRID, params=[("w1", {"model": S(-3)})])), """\
Plan(params=) rule 1 'w1': S(-3) over placement axis 'model' (size 2): there is no tensor axis -3; they are 0 to 1.
  w1: float32[6, 2] (B, S(-3)) placement cpu[[0, 1], [2, 3]] (data=2, model=2)
  Mend: S(0) to S(1), or B."""),
    "a split that does not divide": (lambda: take_step(flow.Plan(flow.placement("cpu", [[0, 1, 2, 3]], axes=("data", "model")), params=[("w0", {"model": S(1)})])), """\
Plan(params=) rule 1 'w0': tensor axis 1 of w0 (size 6) does not split evenly over placement axis 'model' (size 4).
  w0: float32[4, 6] (B, S(1)) placement cpu[[0, 1, 2, 3]] (data=1, model=4)
  Mend: ("w0", (B, B)), or pad tensor axis 1 to 8."""),
    "a stage pattern that matches nothing": (lambda: init_net(stages="blocks/*"), """\
Plan(stages=): 'blocks/*' matches none of the 6 modules.
  modules: layers/2, layers/1, layers/0
  Mend: stages="layers/*\""""),
    "a stage pattern that matches nothing on one stage": (lambda: init_net(flow.placement("cpu", [[0, 1]], axes=("stage", "data")), stages="blocks/*"), """\
Plan(stages=): 'blocks/*' matches none of the 3 modules.
  modules: layers/0/linear, layers/1/linear, layers/2/linear
  Mend: stages="layers/*\""""),
    "patterns that are not one a stage": (lambda: init_net(stages=["layers/0", "layers/1", "layers/2"]), """\
Plan(stages=): 3 patterns for placement axis 'stage' (size 2).
  patterns: 'layers/0', 'layers/1', 'layers/2'
  Mend: one pattern for each stage, or one glob for all layers"""),
    "patterns that overlap": (lambda: init_net(stages=["layers/[01]", "layers/[12]"]), """\
Plan(stages=): layers/1/linear belongs to stages 0 'layers/[01]' and 1 'layers/[12]'.
  Mend: patterns that do not overlap"""),
    "patterns against the order of the model": (lambda: init_net(stages=["layers/2", "layers/[01]"]), """\
Plan(stages=): stage 0 (layers/2/linear) reads a value that stage 1 (layers/1) makes.
  reads: dot_general at HERE    made: tanh at HERE
  Mend: list the stages in the order in which the model runs them"""),
    "more stages than layers": (lambda: init_net(FOUR_STAGES, stages="layers/*"), """\
Plan(stages=): 'layers/*' matches 3 layers, too few for placement axis 'stage' (size 4).
  layers: layers/0, layers/1, layers/2
  Mend: flow.placement("auto", stage=3, data=-1)"""),
    "a mark of a stage that is not there": (lambda: take_step(flow.Plan(STAGES), marked), """\
flow.stage(x, index): marks stage 2, but the placement has 2 stages (0 to 1).
  oneflax_stage at HERE
  Mend: flow.placement("auto", stage=3, data=-1)"""),
    "a stage without work": (lambda: take_step(flow.Plan(STAGES)), """\
Plan(stages=): stage 1 of 2 holds no operation.
  Mend: a stage pattern or flow.stage(x, i) marks for every stage, or fewer stages"""),
    "a loss for each example": (lambda: take_step(flow.Plan(GRID), lambda params, batch: batch["x"] @ params["w0"]), """\
<lambda>(params, batch): returns float32[8, 6], not one floating number.
  Mend: loss.mean()"""),
    "a loss with more than a loss": (lambda: init_net(loss=lambda model, x: (of_net(model, x), x), stages="layers/*"), """\
<lambda>(model, batch): returns tuple, not one floating number.
  Mend: return the loss alone"""),
    "a loss that counts": (lambda: take_step(flow.Plan(GRID), functools.partial(lambda params, batch, of: of, of=3)), """\
<lambda>(params, batch): returns int32[], not one floating number.
  Mend: return a loss of dtype float32"""),
    "no key": (lambda: take_step(flow.Plan(GRID), keyed), """\
step(state, batch, key): the loss takes a key, and the step got none.
  Mend: step(state, batch, jax.random.key(0))"""),
    "an integer parameter": (lambda: take_step(flow.Plan(GRID), params=PARAMS | {"ids": np.arange(3), "on": True}), """\
model: 2 faults
1. model: parameter ids has no gradient: its dtype is int32.
     ids: int32[3]
     Mend: keep it outside of the parameters (in nnx: a Variable that is no Param)
2. model: parameter on has no gradient: its dtype is bool.
     on: bool[]
     Mend: keep it outside of the parameters (in nnx: a Variable that is no Param)"""),
    "a parameter that is no array": (lambda: take_step(flow.Plan(GRID), params=PARAMS | {"name": "net"}), """\
model: parameter name is a str, not an array.
  Mend: close over it in the loss"""),
    "no parameters": (lambda: take_step(flow.Plan(GRID), params={}), """\
model: it has no parameters.
  Mend: a module with nnx.Param, or a pytree of arrays"""),
    "a state of another kind": (lambda: wrong(flow.Plan(GRID).train_step(plain, SGD), PARAMS, BATCH), """\
step(state, batch): the state is a dict, not what step.init or step.place gave.
  Mend: state = step.place(params_or_model)"""),
    "a state of another optimizer": (foreign_state, """\
step(state, batch): the state holds another optimizer's state than this step's.
  state: count, mu/w0, mu/w1, nu/w0 and 1 more    step: no arrays
  Mend: state = step.place(state.model())"""),
    "an optimizer state before its time": (lambda: flow.Plan(GRID).train_step(plain, optax.adam(0.1)).place(PARAMS).opt_state, """\
state.opt_state: the optimizer's state is made at the first call of the step.
  Mend: state, metrics = step(state, batch)"""),
    "a variable that changes its form": (lambda: init_net(stages="layers/*", grows=True), """\
model state: the loss changes its form: seen is float32[3] after the call.
  seen: float32[2]
  Mend: keep the shape and dtype of a Variable"""),
    "a batch that does not divide over the ranks": (lambda: take_step(flow.Plan(GRID, batch={"data": S(0)}), batch={"x": np.ones((5, 4)), "y": np.ones((5, 2))}), """\
batch: tensor axis 0 (size 5) does not divide into 2 parts over placement axis 'data' (size 2).
  x: float64[5, 4]    y: float64[5, 2]    nd-sbp (S(0), B)    placement cpu[[0, 1], [2, 3]] (data=2, model=2)
  Mend: a batch of 4 examples"""),
    "a batch that does not divide into microbatches": (lambda: take_step(flow.Plan(GRID, microbatches=4), batch={"x": np.ones((6, 4)), "y": np.ones((6, 2))}), """\
batch: tensor axis 0 (size 6) does not divide into 4 microbatches.
  x: float64[6, 4]    y: float64[6, 2]    nd-sbp (B, B)    placement cpu[[0, 1], [2, 3]] (data=2, model=2)
  Mend: a batch of 8 examples"""),
    "a batch that does not divide into both": (lambda: take_step(flow.Plan(GRID, batch=(S(0), S(0)), microbatches=2), batch={"x": np.ones((12, 4)), "y": np.ones((12, 2))}), """\
batch: tensor axis 0 (size 12) does not divide into 2 microbatches of 4 parts over placement axis 'data' (size 2) and placement axis 'model' (size 2).
  x: float64[12, 4]    y: float64[12, 2]    nd-sbp (S(0), S(0))    placement cpu[[0, 1], [2, 3]] (data=2, model=2)
  Mend: a batch of 16 examples"""),
    "a batch without examples": (lambda: take_step(flow.Plan(GRID), batch={"x": np.ones((0, 4)), "y": np.ones((0, 2))}), """\
batch: tensor axis 0 (size 0) has no examples for 1 microbatch.
  x: float64[0, 4]    y: float64[0, 2]    nd-sbp (B, B)    placement cpu[[0, 1], [2, 3]] (data=2, model=2)
  Mend: a batch of 1 example"""),
    "an empty batch": (lambda: take_step(flow.Plan(GRID), batch={}), """\
batch: it holds no arrays.
  Mend: {"x": inputs, "y": labels}"""),
    "leaves of different length": (lambda: take_step(flow.Plan(GRID), batch={"x": np.ones((8, 4)), "y": np.ones((6, 2))}), """\
batch: its leaves differ in tensor axis 0, which counts examples.
  x: float64[8, 4]    y: float64[6, 2]
  Mend: leaves of one length, as the first 6 of each"""),
    "a scalar leaf": (lambda: take_step(flow.Plan(GRID), batch=BATCH | {"scale": 2.0}), """\
batch scale: has no tensor axis 0 that counts examples.
  scale: float64[]
  Mend: one value an example, as np.full(examples, value), or close over it in the loss"""),
    "a plan that saw no model": (lambda: flow.Plan(GRID).explain(), """\
plan.explain(): the plan has not seen a model yet.
  Mend: step = plan.train_step(loss_fn, optimizer); state = step.init(make, sample_batch, key)"""),
}  # fmt: skip


def without_places(message: str) -> str:
    """Source lines of the user's code differ with the file's location and the version of jax."""
    return re.sub(r" at \S+:\d+(?: \([^)]*\))?", " at HERE", message)


@pytest.mark.parametrize("name", CASES)
def test_whole_message(name: str) -> None:
    call, message = CASES[name]
    with pytest.raises(FlowError) as caught:
        call()
    assert without_places(str(caught.value)) == message


def test_a_state_that_an_earlier_step_took() -> None:
    step = flow.Plan(GRID).train_step(lambda params, batch: (params["w"] * batch["x"]).sum(), optax.sgd(0.1))
    old = step.place({"w": np.ones(4, np.float32)}, {"x": np.ones((8, 4), np.float32)})
    step(old, {"x": np.ones((8, 4), np.float32)})
    message = (
        "step(state, batch): the state was given to an earlier step, which took over its memory.\n"
        "  Mend: state, metrics = step(state, batch)"
    )
    with pytest.raises(PlanError) as caught:
        step(old, {"x": np.ones((8, 4), np.float32)})
    assert str(caught.value) == message
