"""Batches: which axis counts examples, how they divide into microbatches, and how they reach the devices."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from oneflax.sbp.errors import Fault, PlanError, describe
from oneflax.sbp.grid import Placement
from oneflax.sbp.signature import B, NdSbp, Partial, Split, as_nd_sbp

from ._paths import leaf_paths


@dataclass(frozen=True, slots=True)
class BatchLayout:
    """How a batch lies on one stage's devices.

    Attributes:
        axis: The tensor axis that counts examples. ways: Into how many parts it is split.
        nd_sbp: The sbp of every leaf on `placement`. microbatches: Into how many a batch is cut first.
    """

    placement: Placement
    nd_sbp: NdSbp
    axis: int
    ways: int
    microbatches: int

    @classmethod
    def of(cls, sbp: Any, placement: Placement, microbatches: int) -> "BatchLayout":
        """Reads ``Plan(batch=)``.

        Raises:
            PlanError, SbpError: The sbp does not fit the placement, has P, or splits more than one tensor axis.
        """
        nd_sbp = as_nd_sbp(sbp, placement, "Plan(batch=)") if sbp is not None else NdSbp((B,) * placement.ndim)
        axes = {item.axis for item in nd_sbp if isinstance(item, Split)}
        if any(isinstance(item, Partial) for item in nd_sbp) or len(axes) > 1:
            what = f"{nd_sbp} does not split a batch over its examples."
            raise PlanError(Fault("Plan(batch=)", what, mend='batch={"data": S(0)}'))
        ways = 1
        for item, size in zip(nd_sbp, placement.shape):
            ways *= size if isinstance(item, Split) else 1
        return cls(placement, nd_sbp, axes.pop() if axes else 0, ways, microbatches)

    def flatten(self, batch: Any) -> tuple[list[Any], Any]:
        """A batch as numpy or jax arrays and its structure, checked.

        Raises:
            PlanError: It is empty, a leaf has no axis of examples, leaves differ in length, or the length does not
                divide into microbatches and parts.
        """
        leaves, tree = jax.tree.flatten(batch)
        arrays = [leaf if isinstance(leaf, (np.ndarray, jax.Array)) else np.asarray(leaf) for leaf in leaves]
        self._check([(path, a) for path, a in zip(leaf_paths(batch), arrays)])
        return arrays, tree

    def _check(self, leaves: Sequence[tuple[str, Any]]) -> None:
        if not leaves:
            raise PlanError(Fault("batch", "it holds no arrays.", mend='{"x": inputs, "y": labels}'))
        faults = []
        for path, array in leaves:
            if not -array.ndim <= self.axis < array.ndim:
                what = f"has no tensor axis {self.axis} that counts examples."
                given = describe(path, array.dtype, array.shape)
                faults.append(Fault(f"batch {path}", what, (given,), "give it one value an example, or close over it"))
        if faults:
            raise PlanError(faults, "batch")
        sizes = {array.shape[self.axis] for _, array in leaves}
        texts = tuple(describe(path, array.dtype, array.shape) for path, array in leaves)
        if len(sizes) > 1:
            what = f"its leaves differ in tensor axis {self.axis}, which counts examples."
            raise PlanError(Fault("batch", what, texts, "leaves of one length"))
        size, parts = sizes.pop(), self.microbatches * self.ways
        if size % parts or size == 0:
            split = f"{self.microbatches} microbatches of {self.ways} parts each"
            what = f"tensor axis {self.axis} (size {size}) does not divide into {split}, placement {self.placement}."
            raise PlanError(Fault("batch", what, texts, f"a batch of {max(1, round(size / parts)) * parts} examples"))

    def microbatch(self, array: np.ndarray, index: int) -> np.ndarray:
        """Microbatch `index`: a view of consecutive examples."""
        size = array.shape[self.axis] // self.microbatches
        window = [slice(None)] * array.ndim
        window[self.axis % array.ndim] = slice(index * size, (index + 1) * size)
        return array[tuple(window)]

    def stacked(self, array: Any) -> np.ndarray:
        """All microbatches stacked on a new first axis, on the host; a view where the examples come first."""
        array = np.asarray(array)
        if self.axis % array.ndim == 0:
            return array.reshape(self.microbatches, -1, *array.shape[1:])
        return np.stack([self.microbatch(array, i) for i in range(self.microbatches)])

    @property
    def stacked_sbp(self) -> NdSbp:
        """The sbp of what :meth:`stacked` gives: every rank holds its examples of every microbatch."""
        return NdSbp(tuple(Split(self.axis + (self.axis >= 0)) if isinstance(i, Split) else i for i in self.nd_sbp))

    def microbatch_shape(self, array: Any) -> jax.ShapeDtypeStruct:
        """Shape and dtype of one microbatch, as jax holds it."""
        shape = list(array.shape)
        shape[self.axis % len(shape)] //= self.microbatches
        return jax.ShapeDtypeStruct(tuple(shape), jax.dtypes.canonicalize_dtype(array.dtype))

    def whole_shape(self, microbatch: Any) -> jax.ShapeDtypeStruct:
        """What one program receives for a leaf: the microbatch itself if there is one, else all of them stacked."""
        many = () if self.microbatches == 1 else (self.microbatches,)
        return jax.ShapeDtypeStruct((*many, *microbatch.shape), microbatch.dtype)
