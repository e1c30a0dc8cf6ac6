"""The state of training: parameters, other model state, optimizer state and the step count."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from oneflax.sbp.errors import Fault, PlanError

from ._loss import ModelForm
from ._placing import gathered

if TYPE_CHECKING:
    from ._problem import OptimizerForm


@jax.tree_util.register_pytree_node_class
@dataclass(frozen=True, eq=False)
class TrainState:
    """What one training step turns into the next. A pytree; every leaf lives where its plan put it.

    Attributes:
        step: How many steps were taken; an integer, and a leaf of the pytree like the arrays.

    A step donates the state that it is given: use the one that it returns.
    """

    _params: list[Any]
    _state: list[Any]
    _opt: list[Any]
    step: Any
    _form: ModelForm = field(repr=False)
    _opt_form: "OptimizerForm" = field(repr=False)
    _owner: Any = field(default=None, repr=False)  # the layout that placed the leaves; None: nobody yet

    @property
    def params(self) -> Any:
        """The parameters as the optimizer sees them: an ``nnx.State``, or the user's pytree."""
        return self._form.param_tree.unflatten(self._params)

    @property
    def collections(self) -> Any:
        """The model's other arrays (statistics, rng streams)."""
        return self._form.state_tree.unflatten(self._state)

    @property
    def opt_state(self) -> Any:
        """The optimizer's state.

        Raises:
            PlanError: ``step.place`` gave the state before any step ran: the first call places and makes the rest.
        """
        if self._owner is None and len(self._opt) != self._opt_form.tree.num_leaves:
            what = "the optimizer's state is made at the first call of the step."
            raise PlanError(Fault("state.opt_state", what, mend="state, metrics = step(state, batch)"))
        return self._opt_form.tree.unflatten(self._opt)

    def model(self) -> Any:
        """The model: an nnx module, or the parameters' pytree.

        With stages, its arrays are copied to one device first, so that it can be called; without, they are the
        state's own: they stay split, and the next step takes their memory.
        """
        leaves = [*self._params, *self._state]
        spread = len({getattr(getattr(leaf, "sharding", None), "mesh", None) for leaf in leaves}) > 1
        leaves = gathered(leaves) if spread else leaves
        count = len(self._params)
        return self._form.build(leaves[:count], leaves[count:])

    def tree_flatten(self) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """For jax."""
        step = np.int32(self.step) if isinstance(self.step, int) else self.step
        return (self._params, self._state, self._opt, step), (self._form, self._opt_form)

    @classmethod
    def tree_unflatten(cls, aux: tuple[Any, ...], children: tuple[Any, ...]) -> "TrainState":
        """For jax."""
        return cls(*children, *aux)
