"""Marks of ``flow.stage``: identities everywhere, and places for operations that stay whole around them."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from pipelines import BATCH, assert_same_loss, cut_loss, edge_pairs, names, values

from oneflax.pipeline.markers import stage
from oneflax.sbp.errors import PlanError


@pytest.mark.parametrize("index", [-1, True, 1.0, "1", None])
def test_a_mark_is_a_whole_number(index: Any) -> None:
    with pytest.raises(PlanError) as caught:
        stage(jnp.zeros(()), index)
    assert str(caught.value) == (
        f"flow.stage(x, index): a stage is a whole number ≥ 0, not {index!r}.\n  Mend: flow.stage(x, 1)"
    )


def test_a_mark_outside_of_a_pipeline_gives_its_argument() -> None:
    x = {"a": jnp.ones(2), "c": (None, 1.5, "text"), "key": jax.random.key(0)}
    marked = stage(x, 3)
    assert marked["a"] is x["a"]
    assert marked["c"] == x["c"]
    assert marked["key"] is x["key"]


def test_a_mark_under_every_transformation() -> None:
    def f(x: Any) -> Any:
        return jnp.sum(stage(jnp.sin(x), 1) ** 2)

    x = jnp.arange(3.0)
    want = 2 * np.sin(np.arange(3.0)) * np.cos(np.arange(3.0))
    np.testing.assert_allclose(jax.jit(jax.grad(f))(x), want, rtol=1e-6)
    np.testing.assert_allclose(jax.vmap(jax.grad(f))(jnp.stack([x, x]))[1], want, rtol=1e-6)
    np.testing.assert_allclose(jax.jvp(f, (x,), (jnp.ones(3),))[1], want.sum(), rtol=1e-6)
    np.testing.assert_allclose(jax.hessian(f)(x).diagonal(), 2 * np.cos(2 * np.arange(3.0)), atol=1e-6)


# Marks and modules inside operations that stay whole.


def test_remat_goes_where_its_module_is() -> None:
    def loss(params: Any, batch: Any) -> Any:
        h = batch["x"]
        for i, w in enumerate(params):

            @jax.checkpoint
            def block(h: Any, w: Any, i: int = i) -> Any:
                with jax.named_scope(f"s{i}"):
                    return jnp.tanh(h @ w)

            h = block(h, w)
        return jnp.mean((h - batch["y"]) ** 2)

    made = cut_loss(loss, 2, values(2), BATCH, paths=True)
    assert [sum(n in ("remat", "remat2", "checkpoint") for n in names(part)) for part in made.stages] == [1, 1]
    assert_same_loss(made, loss, values(2), BATCH)


@jax.custom_jvp
def marked_square(h: Any) -> Any:
    return stage(h, 1) ** 2


@marked_square.defjvp
def _(primals: Any, tangents: Any) -> Any:
    return marked_square(*primals), 2 * primals[0] * tangents[0]


WHOLE = {
    "remat": lambda h, w: jax.checkpoint(lambda h, w: jnp.tanh(stage(h, 1) @ w))(h, w),
    "custom_jvp": lambda h, w: marked_square(h) @ w,
    "scan": lambda h, w: jax.lax.scan(lambda c, _: (jnp.tanh(stage(c, 1) @ w), None), h, None, length=2)[0],
    "cond": lambda h, w: jax.lax.cond(w[0, 0] > 9, lambda h: h, lambda h: stage(h, 1) @ w, h),
    "jit in remat": lambda h, w: jax.checkpoint(lambda h, w: jax.jit(lambda h: jnp.tanh(stage(h, 1) @ w))(h))(h, w),
}


@pytest.mark.parametrize("name", WHOLE)
def test_a_mark_at_the_entry_of_a_whole_operation_places_it(name: str) -> None:
    def loss(params: Any, batch: Any) -> Any:
        h = WHOLE[name](jnp.sin(batch["x"] @ params[0]), params[1])
        return jnp.mean((h - batch["y"]) ** 2)

    made = cut_loss(loss, 2, values(2), BATCH)
    assert edge_pairs(made) == [(0, 1)]
    assert "sin" in names(made.stages[0])
    assert_same_loss(made, loss, values(2), BATCH)


def _with_jvp(body: Callable[..., Any]) -> Callable[..., Any]:
    function = jax.custom_jvp(body)
    function.defjvp(lambda primals, tangents: jax.jvp(body, primals, tangents))
    return function


@pytest.mark.parametrize("kind", ["remat", "custom_jvp", "jit in remat"])
def test_a_mark_in_the_middle_of_a_whole_operation_is_refused(kind: str) -> None:
    def body(h: Any, w: Any) -> Any:
        return stage(jnp.tanh(h @ w), 1) ** 2

    whole = {
        "remat": jax.checkpoint(body),
        "custom_jvp": _with_jvp(body),
        "jit in remat": jax.checkpoint(lambda h, w: jax.jit(lambda h: stage(h, 1) ** 2)(jnp.tanh(h @ w))),
    }[kind]
    with pytest.raises(PlanError, match=r"holds a mark of stage 1 .*cannot be cut"):
        cut_loss(lambda p, b: jnp.mean(whole(b["x"] @ p[0], p[1])), 2, values(2), BATCH)


@pytest.mark.parametrize("by", ["marks", "paths"])
@pytest.mark.parametrize("kind", ["remat", "scan"])
def test_a_remat_or_scan_over_two_stages_is_refused(kind: str, by: str) -> None:
    def layer(h: Any, w: Any, i: int) -> Any:
        with jax.named_scope(f"s{i}" if by == "paths" else "block"):
            return jnp.tanh((stage(h, i) if by == "marks" else h) @ w)

    def both(h: Any, w0: Any, w1: Any) -> Any:
        return layer(layer(h, w0, 0), w1, 1)

    def loss(params: Any, batch: Any) -> Any:
        if kind == "remat":
            return jnp.mean(jax.checkpoint(both)(batch["x"], *params))
        return jnp.mean(jax.lax.scan(lambda h, _: (both(h, *params), None), batch["x"], None, length=2)[0])

    with pytest.raises(PlanError, match=r"holds modules of stages \[0, 1\]; it cannot be cut|cannot be cut") as caught:
        cut_loss(loss, 2, values(2), BATCH, paths=by == "paths")
    assert "put the boundary outside of it" in str(caught.value)
