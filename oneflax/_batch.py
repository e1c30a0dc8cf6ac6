"""Batches: which axis counts examples, how they divide into microbatches, and how they reach the devices."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from oneflax.sbp.errors import Fault, PlanError, SbpError, describe
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
        try:
            nd_sbp = NdSbp((B,) * placement.ndim) if sbp is None else as_nd_sbp(sbp, placement, "Plan(batch=)")
        except SbpError as error:
            raise SbpError([fault.as_argument("batch={}") for fault in error.faults], "Plan(batch=)") from None
        axes = {item.axis for item in nd_sbp if isinstance(item, Split)}
        if any(isinstance(item, Partial) for item in nd_sbp) or len(axes) > 1:
            what = f"a batch is whole or split over one tensor axis, its examples, not {nd_sbp}."
            given = (f"nd-sbp {nd_sbp}", f"placement {placement}")
            raise PlanError(Fault("Plan(batch=)", what, given, f'batch={{"{placement.axis_names[0]}": S(0)}}'))
        ways = 1
        for item, size in zip(nd_sbp, placement.shape):
            ways *= size if isinstance(item, Split) else 1
        return cls(placement, nd_sbp, axes.pop() if axes else 0, ways, microbatches)

    def flatten(self, batch: Any) -> tuple[list[Any], Any]:
        """A batch as numpy or jax arrays and its structure, checked. Arrays that may change are copied.

        Raises:
            PlanError: It is empty, a leaf has no axis of examples, leaves differ in length, or the length does not
                divide into microbatches and parts.
        """
        leaves, tree = jax.tree.flatten(batch)
        arrays = [_own(leaf) for leaf in leaves]
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
                mend = "one value an example, as np.full(examples, value), or close over it in the loss"
                faults.append(Fault(f"batch {path}", what, (given,), mend))
        if faults:
            raise PlanError(faults, "batch")
        sizes = {array.shape[self.axis] for _, array in leaves}
        texts = tuple(describe(path, array.dtype, array.shape) for path, array in leaves)
        if len(sizes) > 1:
            what = f"its leaves differ in tensor axis {self.axis}, which counts examples."
            raise PlanError(Fault("batch", what, texts, f"leaves of one length, as the first {min(sizes)} of each"))
        size, parts = sizes.pop(), self.microbatches * self.ways
        if size % parts or size == 0:
            does = "has no examples for" if size == 0 else "does not divide into"
            what = f"tensor axis {self.axis} (size {size}) {does} {self._division()}."
            given = (*texts, f"nd-sbp {self.nd_sbp}", f"placement {self.placement}")
            fits = max(1, round(size / parts)) * parts
            raise PlanError(Fault("batch", what, given, f"a batch of {fits} example{'s' if fits > 1 else ''}"))

    def _division(self) -> str:
        """Words into what a batch is cut: ``4 microbatches of 2 parts over placement axis 'data' (size 2)``."""
        over = [self.placement.describe_axis(i) for i, item in enumerate(self.nd_sbp) if isinstance(item, Split)]
        microbatches = f"{self.microbatches} microbatch{'es' if self.microbatches > 1 else ''}"
        if not over:
            return microbatches
        parts = f"{self.ways} part{'s' if self.ways > 1 else ''} over {' and '.join(over)}"
        return f"{microbatches} of {parts}" if self.microbatches > 1 else parts

    def microbatch(self, array: Any, index: int) -> Any:
        """Microbatch `index`: consecutive examples, of a numpy array a view. A jax array is cut where it lies."""
        size = array.shape[self.axis] // self.microbatches
        window = [slice(None)] * array.ndim
        window[self.axis % array.ndim] = slice(index * size, (index + 1) * size)
        return array[tuple(window)]

    def stacked(self, array: Any) -> Any:
        """All microbatches stacked on a new first axis; of a numpy array a view, where the examples come first."""
        if self.axis % array.ndim == 0:
            return array.reshape(self.microbatches, -1, *array.shape[1:])
        numpy = jax.numpy if isinstance(array, jax.Array) else np
        return numpy.stack([self.microbatch(array, i) for i in range(self.microbatches)])

    @property
    def stacked_sbp(self) -> NdSbp:
        """The sbp of what :meth:`stacked` gives: every rank holds its examples of every microbatch."""
        return NdSbp(tuple(Split(self.axis + (self.axis >= 0)) if isinstance(i, Split) else i for i in self.nd_sbp))

    def microbatch_shape(self, array: Any) -> jax.ShapeDtypeStruct:
        """Shape and dtype of one microbatch, as jax holds it."""
        shape = list(array.shape)
        shape[self.axis % len(shape)] //= self.microbatches
        return jax.ShapeDtypeStruct(tuple(shape), jax_dtype(array.dtype))

    def whole_shape(self, microbatch: Any) -> jax.ShapeDtypeStruct:
        """What one program receives for a leaf: the microbatch itself if there is one, else all of them stacked."""
        many = () if self.microbatches == 1 else (self.microbatches,)
        return jax.ShapeDtypeStruct((*many, *microbatch.shape), microbatch.dtype)


def jax_dtype(dtype: Any) -> Any:
    """The dtype that jax gives an array of `dtype`: without x64, 64 bits become 32."""
    return dtype if jax.numpy.issubdtype(dtype, jax.dtypes.extended) else jax.dtypes.canonicalize_dtype(dtype)


def _own(leaf: Any) -> Any:
    """A leaf as an array that nobody else writes to: a step runs on after its call returns, and reads it then."""
    return leaf if isinstance(leaf, (jax.Array, jax.ShapeDtypeStruct)) else np.array(leaf)
