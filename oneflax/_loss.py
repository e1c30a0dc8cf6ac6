"""A user's loss as a function of flat lists of arrays, whatever it takes: an nnx module or a pytree."""

import inspect
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import jax

from oneflax.sbp.errors import Fault, PlanError

from ._paths import leaf_paths


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
        self.params = jax.tree.map(_shape_of, params)
        self.state = jax.tree.map(_shape_of, state)
        self.param_paths = leaf_paths(self.params)
        self.state_paths = leaf_paths(self.state)
        self.param_tree = jax.tree.structure(self.params)
        self.state_tree = jax.tree.structure(self.state)
        self._hash = hash(self._identity())
        self._check()

    def _check(self) -> None:
        faults = [
            Fault(
                "model",
                f"parameter {path} has dtype {leaf.dtype} and no gradient.",
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
        return jax.tree.leaves(params), jax.tree.leaves(state)

    def build(self, params: Sequence[Any], state: Sequence[Any]) -> Any:
        """The model from its arrays."""
        tree = self.param_tree.unflatten(params)
        if not self.is_module:
            return tree
        from .flax import nnx

        return nnx.merge(self._graphdef, tree, self.state_tree.unflatten(state))

    def state_after(self, model: Any) -> list[Any]:
        """The state of a model after a call."""
        if not self.is_module:
            return []
        from .flax import nnx

        return jax.tree.leaves(nnx.rest_of(model))

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
        self.takes_key = wants_key(fn)

    def __call__(
        self, params: Sequence[Any], state: Sequence[Any], batch: Sequence[Any], key: Any, microbatch: Any
    ) -> tuple[Any, list[Any]]:
        """The loss of one microbatch and the state after it; randomness depends on `key` and `microbatch` alone.

        Raises:
            PlanError: The loss is not one floating number.
        """
        model = self.form.build(params, state)
        arguments = [model, self.batch_tree.unflatten(batch)]
        if self.takes_key:
            arguments.append(jax.random.fold_in(key, microbatch))
        with self.form.scoped_calls(model):
            loss = self.fn(*arguments)
        shape = getattr(loss, "shape", ())
        dtype = jax.numpy.result_type(loss) if not isinstance(loss, (tuple, list, dict)) else None
        if shape != () or dtype is None or not jax.numpy.issubdtype(dtype, jax.numpy.floating):
            given = f"{type(loss).__name__}" if dtype is None else f"{dtype}{list(shape)}"
            what = f"returns {given}, not one floating number."
            raise PlanError(Fault(f"{self.name}(model, batch)", what, mend="loss.mean()"))
        return loss, self.form.state_after(model)

    @property
    def name(self) -> str:
        """The user's function, for messages."""
        return getattr(self.fn, "__name__", type(self.fn).__name__)


def wants_key(fn: Callable[..., Any]) -> bool:
    """Whether a loss takes a key: a parameter named ``key``, or a third positional one without a default."""
    try:
        parameters = list(inspect.signature(fn).parameters.values())
    except (TypeError, ValueError):
        return False
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return any(p.name == "key" or p.default is p.empty for p in positional[2:3])


def _is_module(model: Any) -> bool:
    import sys

    if "flax" not in sys.modules:  # a module cannot exist without it, and importing it takes a while
        return False
    from .flax import nnx

    return nnx.is_module(model)


def _shape_of(leaf: Any) -> Any:
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
    return jax.eval_shape(lambda: leaf) if not hasattr(leaf, "dtype") else jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
