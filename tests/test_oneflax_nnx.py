"""The call hook: every operation knows its module's path, however the model runs, and nothing stays changed."""

import inspect
import threading
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import oneflax as flow
from oneflax import S
from oneflax.flax.nnx import abstract, is_module, merge, rest_of, scoped_calls, split
from oneflax.pipeline.graph import inner_paths, trace

X = np.ones((2, 4), np.float32)


class Mlp(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.up = nnx.Linear(4, 4, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.drop(jnp.tanh(self.up(x)))


class RematMlp(Mlp):
    @nnx.remat
    def __call__(self, x: jax.Array) -> jax.Array:
        return super().__call__(x)


class JitMlp(Mlp):
    @nnx.jit
    def __call__(self, x: jax.Array) -> jax.Array:  # pyright: ignore[reportIncompatibleMethodOverride]
        return super().__call__(x)


class LouderMlp(Mlp):
    def __call__(self, x: jax.Array) -> jax.Array:
        return 2 * super().__call__(x)


class SameMlp(Mlp):
    """Inherits its call."""


class Stack(nnx.Module):
    def __init__(self, mlp: type[Mlp], rngs: nnx.Rngs) -> None:
        self.blocks = nnx.List([mlp(rngs) for _ in range(2)])

    def __call__(self, x: jax.Array) -> jax.Array:
        for block in self.blocks:
            x = block(x)
        return x


class JitStack(Stack):
    @nnx.jit
    def __call__(self, x: jax.Array) -> jax.Array:  # pyright: ignore[reportIncompatibleMethodOverride]
        return super().__call__(x)


@nnx.remat
def rematted(block: Mlp, x: jax.Array) -> jax.Array:
    return block(x)


@nnx.jit
def jitted(block: Mlp, x: jax.Array) -> jax.Array:
    return block(x)


class RematFunctionStack(Stack):
    def __call__(self, x: jax.Array) -> jax.Array:
        for block in self.blocks:
            x = rematted(block, x)
        return x


class JitFunctionStack(Stack):
    def __call__(self, x: jax.Array) -> jax.Array:
        for block in self.blocks:
            x = jitted(block, x)
        return x


MLPS = [Mlp, RematMlp, JitMlp, LouderMlp, SameMlp]
STACKS = [Stack, JitStack, RematFunctionStack, JitFunctionStack]
PATHS = {"blocks/0", "blocks/0/up", "blocks/0/drop", "blocks/1", "blocks/1/up", "blocks/1/drop"}


def call(model: Any, x: Any) -> Any:
    return model(x)


def traced(model: nnx.Module, run: Callable[[Any, Any], Any] = call, x: Any = X) -> list[tuple[str, str]]:
    """The operations of a model's call as (path, primitive), bodies of remat and the like included."""
    graphdef, params, rest = split(model)

    def scoped(params: Any, rest: Any, x: Any) -> tuple[Any, Any]:
        copy = merge(graphdef, params, rest)
        with scoped_calls(copy):
            out = run(copy, x)
        return out, rest_of(copy)

    graph, _ = trace(scoped, params, rest, x)
    ops = [(op.path, op.equation.primitive.name) for op in graph.ops]
    return ops + [(path, "inner") for op in graph.ops for path in inner_paths(op.equation, (op.path,))]


def paths_of(model: nnx.Module, run: Callable[[Any, Any], Any] = call) -> set[str]:
    return {path for path, _ in traced(model, run)} - {""}


@pytest.mark.parametrize("mlp", MLPS)
@pytest.mark.parametrize("stack", STACKS)
def test_every_way_to_run_a_block(stack: type[Stack], mlp: type[Mlp]) -> None:
    model = stack(mlp, nnx.Rngs(0))
    model(jnp.asarray(X))  # a trace that nnx.jit keeps from outside has no paths, and must not be used
    assert paths_of(model) == PATHS


def test_what_belongs_to_whom() -> None:
    ops = traced(Stack(LouderMlp, nnx.Rngs(0)))
    assert [path for path, name in ops if name == "dot_general"] == ["blocks/0/up", "blocks/1/up"]
    assert [path for path, name in ops if name == "tanh"] == ["blocks/0", "blocks/1"]
    assert ("blocks/1", "mul") in ops


MERGED: dict[str, Callable[[Any, Any], Any]] = {
    "merge": lambda model, x: nnx.merge(*nnx.split(model))(x),
    "clone": lambda model, x: nnx.clone(model)(x),
    "nnx.jit": lambda model, x: nnx.jit(lambda m, x: m(x))(model, x),
    "jax.jit": lambda model, x: jax.jit(lambda state, x: nnx.merge(nnx.graphdef(model), state)(x))(nnx.state(model), x),
    "nnx.remat": lambda model, x: nnx.remat(lambda m, x: m(x))(model, x),
}


@pytest.mark.parametrize("how", MERGED)
def test_a_model_merged_again_inside_the_loss(how: str) -> None:
    assert paths_of(Stack(Mlp, nnx.Rngs(0)), MERGED[how]) == PATHS


def test_a_model_that_was_split_outside() -> None:
    teacher = Stack(Mlp, nnx.Rngs(1))
    graphdef, state = nnx.split(teacher)
    student = Stack(Mlp, nnx.Rngs(0))
    assert paths_of(student, lambda _, x: nnx.merge(graphdef, state, copy=True)(x)) == PATHS


class Shared(nnx.Module):
    """Runs one block twice, under two names."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.first = nnx.Linear(4, 4, rngs=rngs)
        self.second = self.first

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.second(self.first(x))


def test_a_shared_module_has_its_first_path() -> None:
    assert [path for path, name in traced(Shared(nnx.Rngs(0))) if name == "dot_general"] == ["first", "first"]


class Deep(nnx.Module):
    """Modules without a call in between, a dict of modules, and a branch that runs inside of scan."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.towers = nnx.Dict(left=Holder(rngs), right=Holder(rngs))

    def __call__(self, x: jax.Array) -> jax.Array:
        left, right = self.towers["left"], self.towers["right"]
        assert not callable(left)
        y, _ = jax.lax.scan(lambda carry, _: (right.layers[1](carry), None), left.layers[0](x), length=2)
        return y


class Holder(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.layers = nnx.List([nnx.Linear(4, 4, rngs=rngs) for _ in range(2)])


def test_modules_without_a_call() -> None:
    assert paths_of(Deep(nnx.Rngs(0))) == {"towers/left/layers/0", "towers/right/layers/1"}
    assert not callable(Holder(nnx.Rngs(0)))


def snapshot(model: nnx.Module) -> dict[str, Any]:
    classes = {type(module) for _, module in nnx.iter_modules(model)}
    found = {f"class {cls.__name__}": dict(vars(cls)) for cls in classes}
    return found | {f"module {path}": set(vars(module)) for path, module in nnx.iter_modules(model)}


def test_classes_and_modules_are_put_back() -> None:
    model = Stack(SameMlp, nnx.Rngs(0))
    before = snapshot(model)
    signature = inspect.signature(Mlp.__call__)
    with scoped_calls(model):
        assert snapshot(model) != before
        assert inspect.signature(SameMlp.__call__) == signature
    assert snapshot(model) == before
    with pytest.raises(RuntimeError, match="halt"), scoped_calls(model):
        raise RuntimeError("halt")
    assert snapshot(model) == before


def test_a_loss_that_raises_leaves_nothing_behind() -> None:
    model = Stack(Mlp, nnx.Rngs(0))
    before = snapshot(model)

    def loss(model: Stack, x: Any) -> Any:
        model(x)
        raise RuntimeError("halt")

    step = flow.Plan(flow.placement("cpu", [0])).train_step(loss, optax.sgd(0.1))
    with pytest.raises(RuntimeError, match="halt"):
        step(step.place(model), X)
    assert snapshot(model) == before


def test_two_models_in_one_loss() -> None:
    teacher = Stack(Mlp, nnx.Rngs(1))
    before = snapshot(teacher)
    pair = nnx.Dict(a=Stack(Mlp, nnx.Rngs(0)), b=Stack(RematMlp, nnx.Rngs(0)))
    paths = paths_of(pair, lambda pair, x: pair["a"](pair["b"](x)))
    assert paths == {f"{name}/{path}" for name in "ab" for path in PATHS}

    def closes_over(model: Any, x: Any) -> Any:
        return model(nnx.merge(*nnx.split(teacher), copy=True)(x))

    assert paths_of(Stack(Mlp, nnx.Rngs(0)), closes_over) == PATHS
    assert snapshot(teacher) == before


def test_nested_scopes() -> None:
    outer, inner = Stack(Mlp, nnx.Rngs(0)), Stack(LouderMlp, nnx.Rngs(0))
    before = snapshot(outer), snapshot(inner)

    def both(model: Any, x: Any) -> Any:
        with scoped_calls(inner):
            pass
        return model(x)

    assert paths_of(outer, both) == PATHS
    assert (snapshot(outer), snapshot(inner)) == before


def test_threads_that_trace_wait_for_each_other() -> None:
    models = [Stack(Mlp, nnx.Rngs(i)) for i in range(3)]
    before = [snapshot(model) for model in models]
    found: list[set[str]] = []
    threads = [threading.Thread(target=lambda m=m: found.append(paths_of(m))) for m in models]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [PATHS] * 3
    assert [snapshot(model) for model in models] == before


def test_a_thread_that_only_calls_is_left_alone() -> None:
    model, other = Stack(Mlp, nnx.Rngs(0)), Stack(Mlp, nnx.Rngs(1))
    other.eval()
    seen: dict[str, Any] = {}

    def elsewhere() -> None:
        seen["jaxpr"] = jax.make_jaxpr(lambda x: other(x))(X).pretty_print(name_stack=True)
        seen["attributes"] = snapshot(other)["module ('blocks', 0)"]

    with scoped_calls(model):
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
    assert "oneflax" not in seen["jaxpr"]
    assert seen["attributes"] == snapshot(other)["module ('blocks', 0)"]


@pytest.mark.newest
@pytest.mark.parametrize(("stack", "mlp"), [(Stack, RematMlp), (JitStack, Mlp), (RematFunctionStack, LouderMlp)])
def test_stages_of_a_model_that_hides_its_blocks(stack: type[Stack], mlp: type[Mlp]) -> None:
    grid = flow.placement("cpu", [[0, 1], [2, 3]], axes=("stage", "data"))
    plan = flow.Plan(grid, batch={"data": S(0)}, stages="blocks/*", microbatches=2)
    step = plan.train_step(lambda model, x: jnp.mean(model(x) ** 2), optax.sgd(0.1))
    step.init(lambda key: stack(mlp, nnx.Rngs(key)), np.ones((8, 4), np.float32), jax.random.key(0))
    explained = plan.explain()
    assert {row.stage for row in explained.params if row.path.startswith("blocks/1")} == {1}
    assert [(edge.source, edge.target, edge.shape) for edge in explained.edges] == [(0, 1, (4, 4))]


def test_parameters_and_the_rest() -> None:
    model = Stack(Mlp, nnx.Rngs(0))
    assert is_module(model)
    assert not is_module({"w": X})
    shapes = abstract(lambda key: Stack(Mlp, nnx.Rngs(key)), jax.random.key(0))
    _, params, rest = split(shapes)
    assert {leaf.shape for leaf in jax.tree.leaves(params)} == {(4, 4), (4,)}
    assert len(jax.tree.leaves(rest)) == 4  # a key and a count for each Dropout
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(params))


def test_a_module_may_hold_lists_and_dicts_as_attributes() -> None:
    class Configured(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.config = {"scale": 2.0}
            self.names = ["a", "b"]
            self.linear = nnx.Linear(4, 2, rngs=rngs)

        def __call__(self, x: jax.Array) -> jax.Array:
            return self.config["scale"] * self.linear(x)

    def loss(model: Configured, x: jax.Array) -> jax.Array:
        return model(x).sum()

    model, x = Configured(nnx.Rngs(0)), np.ones((8, 4), np.float32)
    value, _ = flow.Plan(flow.placement("cpu", [0, 1], axes=("data",)), {"data": S(0)}).value_and_grad(loss)(model, x)
    np.testing.assert_allclose(value, loss(model, jnp.asarray(x)), rtol=1e-6)
