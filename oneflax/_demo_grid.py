"""What the demo's flags mean: they are checked, and the devices are dealt out to stages, data and model.

Plain values only; nothing here needs jax.
"""

import argparse
from dataclasses import dataclass
from math import prod
from pathlib import Path

from oneflax.pipeline.schedules import Schedule, by_name
from oneflax.sbp.errors import Fault, PlanError, ScheduleError

AXES = ("stages", "data", "model")
"""The grid's axes, as the flags spell them."""

DEVICES = (8, 4, 2, 1)
"""How many devices are used when ``--devices`` does not say: the first of these that are there."""

ROWS = 32
"""Pieces of text a step, unless the grid takes a multiple of something else."""

BLOCKS = 4
"""Blocks of the model, unless the stages take a multiple of something else."""

MODEL = (1, 2, 4, 8, 16, 32)
"""Devices along the model axis: these divide the model's width, 96, and its vocabulary, 1024."""


@dataclass(frozen=True, slots=True)
class Grid:
    """The sizes of the placement's axes."""

    stages: int
    data: int
    model: int

    @property
    def devices(self) -> int:
        """How many devices the grid has."""
        return self.stages * self.data * self.model

    def __str__(self) -> str:
        return f"stage {self.stages} x data {self.data} x model {self.model}"


@dataclass(frozen=True, slots=True)
class Settings:
    """The flags, checked. ``fixed`` holds the grid's axes that were given."""

    devices: int | None
    fixed: dict[str, int]
    schedule: Schedule
    batch: int | None
    steps: int
    seed: int
    out: Path

    def layout(self, devices: int) -> tuple[Grid, int]:
        """The grid of so many devices, and the rows of text a step.

        Raises:
            PlanError: The flags do not fit so many devices, or the batch does not divide.
        """
        grid = grid_of(devices, self.fixed)
        return grid, rows_of(grid, self.schedule.microbatches, self.batch)


def settings(flags: argparse.Namespace) -> Settings:
    """Checks what can be checked before the devices are known.

    Raises:
        PlanError: Flags that no machine could follow; the message names all of them.
    """
    counts = ("devices", "stages", "data", "model", "microbatches", "batch", "steps")
    given = {name: getattr(flags, name) for name in counts if getattr(flags, name) is not None}
    faults = [_not_positive(name, count) for name, count in given.items() if count < 1]
    if flags.seed < 0:
        faults.append(
            Fault("demo(--seed)", f"the seed is a whole number from 0 up, not {flags.seed}.", mend="--seed 0")
        )
    schedule = None
    try:
        schedule = by_name(flags.schedule, microbatches=max(1, flags.microbatches))
    except ScheduleError as error:
        faults += [Fault("demo(--schedule)", fault.what, mend="--schedule 1f1b") for fault in error.faults]
    if schedule is not None and schedule.forward_only:
        faults.append(Fault("demo(--schedule)", f"{schedule.name} has no backward.", mend="--schedule 1f1b"))
    if faults or schedule is None:
        raise PlanError(faults, "demo")
    fixed = {name: given[name] for name in AXES if name in given}
    return Settings(flags.devices, fixed, schedule, flags.batch, flags.steps, flags.seed, flags.out)


def device_count(fixed: dict[str, int], available: int) -> int:
    """How many devices are used when ``--devices`` does not say.

    The first of 8, 4, 2 and 1 that are there and that the given axes divide; otherwise exactly the given axes.

    Example:
        >>> device_count({}, 8), device_count({}, 7), device_count({"stages": 4}, 8), device_count({"data": 3}, 8)
        (8, 4, 8, 3)
    """
    given = prod(fixed.values())
    return next((count for count in DEVICES if count <= available and count % given == 0), given)


def grid_of(devices: int, fixed: dict[str, int]) -> Grid:
    """Deals the devices out to the axes.

    Axes that are given stay. Of the others each takes 2 devices while the count left is even: stages first, then data,
    then model. What is left goes to data, or else to model, or else to stages.

    Example:
        >>> [str(grid_of(n, {})) for n in (1, 2, 4, 6)]  # doctest: +NORMALIZE_WHITESPACE
        ['stage 1 x data 1 x model 1', 'stage 2 x data 1 x model 1', 'stage 2 x data 2 x model 1',
         'stage 2 x data 3 x model 1']
        >>> str(grid_of(8, {"stages": 4}))
        'stage 4 x data 2 x model 1'

    Raises:
        PlanError: The given axes do not divide the devices or do not use them all, or the model does not split evenly.
    """
    left, rest = divmod(devices, prod(fixed.values()))
    if rest:
        raise PlanError(_does_not_divide(devices, fixed))
    sizes = dict(fixed)
    for axis in AXES:
        if axis not in sizes:
            sizes[axis] = 2 if left % 2 == 0 else 1
            left //= sizes[axis]
    spare = next((axis for axis in ("data", "model", "stages") if axis not in fixed), None)
    if left > 1 and spare is None:
        raise PlanError(_devices_left(devices, fixed))
    if spare is not None:
        sizes[spare] *= left
    if sizes["model"] not in MODEL:
        raise PlanError(_bad_model(sizes["model"]))
    return Grid(sizes["stages"], sizes["data"], sizes["model"])


def rows_of(grid: Grid, microbatches: int, batch: int | None) -> int:
    """Rows of text a step: ``batch``, or the first multiple of microbatches x data from 32 up.

    Raises:
        PlanError: The batch does not fall into equal microbatches on equal devices.
    """
    unit = microbatches * grid.data
    if batch is None:
        return -(-ROWS // unit) * unit
    if batch % unit:
        what = (
            f"the batch has {batch} rows, which do not fall into {microbatches} microbatches over placement axis "
            f"data (size {grid.data}): it takes a multiple of {unit}."
        )
        raise PlanError(Fault("demo(--batch)", what, mend=f"--batch {-(-batch // unit) * unit}, or leave --batch out."))
    return batch


def blocks_of(grid: Grid, schedule: Schedule) -> int:
    """How many blocks the model has: 4, or the first multiple of the pipeline's stages from 4 up."""
    cuts = grid.stages * schedule.chunks if grid.stages > 1 else 1
    return -(-BLOCKS // cuts) * cuts


def _not_positive(name: str, count: int) -> Fault:
    return Fault(f"demo(--{name})", f"{name} is a whole number from 1 up, not {count}.", mend=f"leave --{name} out.")


def _flags(values: dict[str, int]) -> str:
    return " ".join(f"--{name} {value}" for name, value in values.items())


def _does_not_divide(devices: int, fixed: dict[str, int]) -> Fault:
    given = prod(fixed.values())
    what = f"the given axes take {given} devices, which does not divide {devices} devices."
    return Fault("demo(--devices)", what, (_flags(fixed),), f"--devices {given}, or other axes.")


def _devices_left(devices: int, fixed: dict[str, int]) -> Fault:
    given = prod(fixed.values())
    what = f"the axes take {given} devices of {devices}: all three are given, so none can take the rest."
    return Fault("demo(--devices)", what, (_flags(fixed),), f"--devices {given}, or leave one axis out.")


def _bad_model(size: int) -> Fault:
    what = (
        f"placement axis model (size {size}) does not split the model evenly: it may be {', '.join(map(str, MODEL))}."
    )
    return Fault("demo(--model)", what, mend="--model 2")
