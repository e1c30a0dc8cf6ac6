"""What has to run: a loss, its model's layout and its batch, gathered for whoever compiles it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import optax
from jax.sharding import NamedSharding

from oneflax.sbp.grid import Placement
from oneflax.sbp.layout import named_sharding
from oneflax.sbp.signature import B, NdSbp

from ._batch import BatchLayout
from ._loss import Loss, ModelForm
from ._paths import leaf_paths
from .flax.rules import LeafLayout

REDUCTIONS = ("mean", "sum")


@dataclass(frozen=True, slots=True)
class Problem:
    """One loss on one placement.

    Attributes:
        grid: The whole placement.
        form: The model. loss: The loss over its arrays.
        layouts: The sbp of every parameter, in the form's order.
        batch: How a batch lies on one stage. batch_shapes: Shape and dtype of one microbatch's leaves.
        reduce: How the losses of microbatches make the step's loss: ``"mean"`` or ``"sum"``.
        optimizer: The optax transformation, or None where only gradients are asked for.
        key_shape: Shape and dtype of a step's key, None where the loss takes none.
    """

    grid: Placement
    form: ModelForm
    loss: Loss
    layouts: Sequence[LeafLayout]
    batch: BatchLayout
    batch_shapes: Sequence[jax.ShapeDtypeStruct]
    reduce: str
    optimizer: optax.GradientTransformation | None
    key_shape: jax.ShapeDtypeStruct | None

    @property
    def microbatches(self) -> int:
        """How many microbatches a batch has."""
        return self.batch.microbatches

    def loss_of(self, losses: Any) -> Any:
        """The step's loss from those of its microbatches, shape ``(microbatches,)``."""
        return losses.mean() if self.reduce == "mean" else losses.sum()

    def gradient_of_sum(self, sums: Sequence[Any], params: Sequence[Any]) -> list[Any]:
        """The step's gradient from the sum over microbatches, in the parameters' dtypes.

        The mean is taken of the sum, and not by weights on the losses: a loss may pass through 16 bits, where a
        weight of 1/3 rounds.
        """
        weight = 1.0 / self.microbatches if self.reduce == "mean" else 1.0
        scaled = sums if weight == 1.0 else [total * weight for total in sums]
        return [total.astype(p.dtype) for total, p in zip(scaled, params)]

    @property
    def param_shapes(self) -> list[Any]:
        """Shape and dtype of every parameter."""
        return jax.tree.leaves(self.form.params)

    @property
    def state_shapes(self) -> list[Any]:
        """Shape and dtype of every other array of the model."""
        return jax.tree.leaves(self.form.state)


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Program:
    """A compiled problem; made by ``spmd_program`` (one program) or ``staged_program`` (stages on the actors).

    All arrays are flat lists in the model form's order, on the devices that the shardings say.

    Attributes:
        param_shardings, state_shardings, opt_shardings: Where each array lives.
        stages: The stage of each parameter.
        initialise: ``(make_leaves, key) -> (params, state)``, every array born in its place.
        init_optimizer: ``(params) -> opt``.
        value_and_grad: ``(params, state, batch, key) -> (loss, losses, gradients, state)``; losses by microbatch.
        step: ``(params, state, opt, batch, key) -> (params, state, opt, metrics)``; the first three are donated.
        lower_step: ``() -> jax.stages.Lowered`` of the step from shapes alone; None with stages.
        edges: What moves between stages for one microbatch: (source, target, shape and dtype).
        executor: The pipeline's executor, or None.
    """

    param_shardings: list[NamedSharding]
    state_shardings: list[NamedSharding]
    opt_shardings: list[NamedSharding]
    stages: list[int]
    initialise: Callable[..., tuple[list[Any], list[Any]]]
    init_optimizer: Callable[..., list[Any]]
    value_and_grad: Callable[..., tuple[Any, Any, list[Any], list[Any]]]
    step: Callable[..., tuple[list[Any], list[Any], list[Any], dict[str, Any]]]
    lower_step: Callable[[], Any] | None
    edges: list[tuple[int, int, Any]]
    executor: Any

    @property
    def shardings(self) -> tuple[list[NamedSharding], list[NamedSharding]]:
        """Where parameters and the rest of the model live."""
        return self.param_shardings, self.state_shardings

    def same_layout(self, other: "Program") -> bool:
        """Whether arrays that this program placed lie where another one wants them."""
        names = ("param_shardings", "state_shardings", "opt_shardings")
        return all(getattr(self, name) == getattr(other, name) for name in names)


@dataclass(frozen=True, slots=True)
class OptimizerForm:
    """An optimizer's state as flat arrays.

    Attributes:
        tree: Its structure. shapes: Shape and dtype of every leaf.
        owners: For each leaf the parameter that it belongs to, None where it belongs to none (step counts).
    """

    tree: Any
    shapes: list[Any]
    owners: list[int | None]

    @classmethod
    def of(cls, optimizer: optax.GradientTransformation | None, form: ModelForm) -> "OptimizerForm":
        """Reads the form off shapes; nothing is computed."""
        if optimizer is None:
            return cls(jax.tree.structure(()), [], [])
        state = jax.eval_shape(optimizer.init, form.params)
        leaves, tree = jax.tree.flatten(state)
        return cls(tree, leaves, _owners(state, form.params))

    def __str__(self) -> str:
        """The first arrays' paths, for messages."""
        paths = leaf_paths(self.tree.unflatten(self.shapes))
        return f"{', '.join(paths[:4]) or 'no arrays'}{f' and {len(paths) - 4} more' if len(paths) > 4 else ''}"

    def sbp_of(self, leaf: int, layouts: Sequence[LeafLayout], placement: Placement) -> NdSbp:
        """The sbp of a leaf: its parameter's, where it has the parameter's shape."""
        owner = self.owners[leaf]
        if owner is not None and layouts[owner].shape == self.shapes[leaf].shape:
            return layouts[owner].nd_sbp
        return NdSbp((B,) * placement.ndim)


def _owners(state: Any, params: Any) -> list[int | None]:
    """The parameter of each leaf of an optimizer's state: the one whose path ends the leaf's path.

    An optimizer keeps its moments in trees like the parameters'. Paths find them also where transformations that
    skip some parameters leave holes in those trees, which ``optax.tree_map_params`` does not take.
    """
    numbers = {keys: i for i, (keys, _) in enumerate(jax.tree_util.tree_flatten_with_path(params)[0])}
    owners = []
    for keys, _ in jax.tree_util.tree_flatten_with_path(state)[0]:
        tails = (keys[i:] for i in range(len(keys) + 1))
        owners.append(next((numbers[tail] for tail in tails if tail in numbers), None))
    return owners


def update_rule(problem: Problem, opt: OptimizerForm) -> Callable[..., list[Any]]:
    """The optimizer's step over flat arrays: gradient sums, parameters, state, loss → parameters, state, norm.

    The loss is handed on to transformations that ask for it (``value``, as a learning rate that drops on a plateau).
    """
    assert problem.optimizer is not None
    optimizer = optax.with_extra_args_support(problem.optimizer)
    params, count = problem.form.param_tree, problem.form.param_tree.num_leaves

    def update(*arrays: Any) -> list[Any]:
        values = params.unflatten(arrays[count : 2 * count])
        gradients = params.unflatten(problem.gradient_of_sum(arrays[:count], arrays[count : 2 * count]))
        state = opt.tree.unflatten(arrays[2 * count : -1])
        updates, new_state = optimizer.update(gradients, state, values, value=arrays[-1])
        new_values = optax.apply_updates(values, updates)
        return [*jax.tree.leaves(new_values), *jax.tree.leaves(new_state), optax.tree_utils.tree_norm(gradients)]

    return update


def replicated(placement: Placement, shape: Sequence[int]) -> NamedSharding:
    """The whole array on every device of a placement."""
    return named_sharding(shape, NdSbp((B,) * placement.ndim), placement)
