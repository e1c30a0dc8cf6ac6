"""A user's loss as a function of flat lists of arrays, whatever it takes: an nnx module or a pytree."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, Literal

import jax

from oneflax.sbp.errors import Fault, PlanError, describe

from ._batch import jax_dtype
from ._paths import leaf_paths
from ._placing import strongly_typed


class ModelForm:
    """How a model comes apart into arrays and goes together again.

    Attributes:
        params: The parameters' shapes as the pytree that the optimizer sees. state: The same for the rest.
        param_paths, state_paths: The leaves' paths.
    """

    def __init__(self, model: Any) -> None:
        """Args: an nnx module or a pytree of arrays; their shapes are enough."""
        self._graphdef: Any = None
        self.is_module = _is_module(model)
        if self.is_module:
            from .flax import nnx

            self._graphdef, params, state = nnx.split(model)
        else:
            params, state = model, ()
        _check_arrays(params)
        self.params = jax.tree.map(_shape_of, params)
        self.state = jax.tree.map(_shape_of, state)
        self.param_paths = leaf_paths(self.params)
        self.state_paths = leaf_paths(self.state)
        self.param_tree = jax.tree.structure(self.params)
        self.state_tree = jax.tree.structure(self.state)
        # Not of the whole identity: a module may hold lists or dicts as plain attributes, which do not hash.
        self._hash = hash((self.param_tree, self.state_tree, tuple(self.param_paths)))
        self._check()

    def _check(self) -> None:
        faults = [
            Fault(
                "model",
                f"parameter {path} has no gradient: its dtype is {leaf.dtype}.",
                (describe(path, leaf.dtype, leaf.shape),),
                mend="keep it outside of the parameters (in nnx: a Variable that is no Param)",
            )
            for path, leaf in zip(self.param_paths, jax.tree.leaves(self.params))
            if not jax.numpy.issubdtype(leaf.dtype, jax.numpy.inexact)
        ]
        if faults:
            raise PlanError(faults, "model")
        if not self.param_paths:
            raise PlanError(
                Fault("model", "it has no parameters.", mend="a module with nnx.Param, or a pytree of arrays")
            )

    def _identity(self) -> tuple[Any, ...]:
        shapes = tuple((x.shape, x.dtype) for x in (*jax.tree.leaves(self.params), *jax.tree.leaves(self.state)))
        return (self._graphdef, self.param_tree, self.state_tree, shapes)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ModelForm) and self._identity() == other._identity()

    def __hash__(self) -> int:
        return self._hash

    def leaves_of(self, model: Any) -> tuple[list[Any], list[Any]]:
        """The arrays of a model of this form.

        Raises:
            PlanError: It is another model (the first differences are listed).
        """
        if self.is_module:
            from .flax import nnx

            _, params, state = nnx.split(model)
        else:
            params, state = model, ()
        if jax.tree.structure(params) != self.param_tree:
            missing = sorted(set(self.param_paths) - set(leaf_paths(params)))[:5]
            extra = sorted(set(leaf_paths(params)) - set(self.param_paths))[:5]
            given = tuple(
                f"{what}: {', '.join(paths)}" for what, paths in (("missing", missing), ("extra", extra)) if paths
            )
            raise PlanError(Fault("model", "its parameters are not those that the step was made for.", given))
        return self._strong(params, self.params), self._strong(state, self.state)

    def _strong(self, tree: Any, shapes: Any) -> list[Any]:
        return [strongly_typed(x, shape.dtype) for x, shape in zip(jax.tree.leaves(tree), jax.tree.leaves(shapes))]

    def build(self, params: Sequence[Any], state: Sequence[Any]) -> Any:
        """The model from its arrays."""
        tree = self.param_tree.unflatten(params)
        if not self.is_module:
            return tree
        from .flax import nnx

        return nnx.merge(self._graphdef, tree, self.state_tree.unflatten(state))

    def state_after(self, model: Any) -> list[Any]:
        """The state of a model after a call. What the call added to the model (sown values, caches) is left out.

        Raises:
            PlanError: The call took an array of the state away, or changed its shape or dtype.
        """
        if not self.is_module:
            return []
        from .flax import nnx

        rest = nnx.rest_of(model)
        after = dict(zip(leaf_paths(rest), jax.tree.leaves(rest)))
        faults = []
        for path, old in zip(self.state_paths, jax.tree.leaves(self.state)):
            new = _shape_of(after[path]) if path in after else None
            if new is None or (new.shape, new.dtype) != (old.shape, old.dtype):
                becomes = "is gone" if new is None else f"is {new.dtype}{list(new.shape)}"
                what = f"the loss changes its form: {path} {becomes} after the call."
                given = (describe(path, old.dtype, old.shape),)
                faults.append(Fault("model state", what, given, "keep the shape and dtype of a Variable"))
        if faults:
            raise PlanError(faults, "model state")
        return [after[path] for path in self.state_paths]

    def update_state(self, model: Any, state: Sequence[Any]) -> None:
        """Writes new statistics and rng streams into a module."""
        if self.is_module:
            from .flax import nnx

            nnx.update(model, self.state_tree.unflatten(state))

    def scoped_calls(self, model: Any) -> Any:
        """A context in which the operations of the model's modules carry their paths."""
        if not self.is_module:
            return nullcontext()
        from .flax import nnx

        return nnx.scoped_calls(model)


class Loss:
    """A user's loss over the arrays of one microbatch.

    Attributes:
        form: The model's form.
        takes_key: Whether the user's function wants a key.
    """

    def __init__(self, fn: Callable[..., Any], form: ModelForm, batch_tree: Any) -> None:
        """Args: the user's function, the model's form, and the structure of a batch."""
        self.fn, self.form, self.batch_tree = fn, form, batch_tree
        self._pass_key = key_passing(fn)
        self.takes_key = self._pass_key is not None

    def __call__(
        self, params: Sequence[Any], state: Sequence[Any], batch: Sequence[Any], key: Any, microbatch: Any
    ) -> tuple[Any, list[Any]]:
        """The loss of one microbatch and the state after it; randomness depends on `key` and `microbatch` alone.

        Raises:
            PlanError: The loss is not one floating number.
        """
        model = self.form.build(params, state)
        arguments, named = [model, self.batch_tree.unflatten(batch)], {}
        if self._pass_key == "by name":
            named["key"] = jax.random.fold_in(key, microbatch)
        elif self._pass_key == "by position":
            arguments.append(jax.random.fold_in(key, microbatch))
        with self.form.scoped_calls(model):
            loss = self.fn(*arguments, **named)
        if (wrong := _no_loss(loss)) is not None:
            call = f"{self.name}({'model' if self.form.is_module else 'params'}, batch)"
            raise PlanError(Fault(call, f"returns {wrong[0]}, not one floating number.", mend=wrong[1]))
        # Weights and sums of microbatches' losses would round in 16 bits.
        wide = jax.numpy.promote_types(jax.numpy.result_type(loss), jax.numpy.float32)
        return jax.numpy.asarray(loss, wide), self.form.state_after(model)

    @property
    def name(self) -> str:
        """The user's function, for messages."""
        fn = self.fn
        while isinstance(fn, partial):
            fn = fn.func
        return getattr(fn, "__name__", type(fn).__name__)


def _no_loss(loss: Any) -> tuple[str, str] | None:
    """What a loss function returned, worded, and the mend, if it is no loss."""
    if not hasattr(loss, "dtype") and not isinstance(loss, (bool, int, float)):
        return type(loss).__name__, "return the loss alone"
    shape, dtype = getattr(loss, "shape", ()), jax.numpy.result_type(loss)
    text = f"{dtype}{list(shape)}"
    if not jax.numpy.issubdtype(dtype, jax.numpy.floating):
        return text, "return a loss of dtype float32"
    return None if shape == () else (text, "loss.mean()")


def key_passing(fn: Callable[..., Any]) -> Literal["by name", "by position"] | None:
    """How a loss takes its key, if it does: a parameter named ``key``, else a third positional one without a default.

    A ``key`` that ``functools.partial`` has bound is the user's own.
    """
    try:
        parameters = list(inspect.signature(fn).parameters.values())
    except (TypeError, ValueError):
        return None
    bound = isinstance(fn, partial) and "key" in fn.keywords
    for parameter in parameters[2:]:
        if parameter.name == "key" and not bound and parameter.kind in _BY_NAME:
            return "by name"
    third = parameters[2:3]
    taken = any(p.kind in _BY_POSITION and (p.default is p.empty or p.name == "key") for p in third)
    return "by position" if taken else None


_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
_BY_POSITION = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def _is_module(model: Any) -> bool:
    import sys

    if "flax" not in sys.modules:  # a module cannot exist without it, and importing it takes a while
        return False
    from .flax import nnx

    return nnx.is_module(model)


def _check_arrays(params: Any) -> None:
    if isinstance(params, Mapping) and "params" in params and len(params) > 1:
        others = ", ".join(repr(key) for key in params if key != "params")
        what = f"holds the collections 'params' and {others}: an optimizer would train all of them."
        mend = "model.init(key, x)['params'], and the other collections closed over in the loss"
        raise PlanError(Fault("model", what, mend=mend))
    faults = [
        Fault("model", f"parameter {path} is a {type(leaf).__name__}, not an array.", mend="close over it in the loss")
        for path, leaf in zip(leaf_paths(params), jax.tree.leaves(params))
        if not hasattr(leaf, "dtype") and not isinstance(leaf, (bool, int, float, complex))
    ]
    if faults:
        raise PlanError(faults, "model")


def _shape_of(leaf: Any) -> Any:
    if not hasattr(leaf, "dtype"):  # a Python number
        leaf = jax.eval_shape(lambda: leaf)
    return jax.ShapeDtypeStruct(leaf.shape, jax_dtype(leaf.dtype))
