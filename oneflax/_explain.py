"""What a plan decided about a model, as a table to read and as JSON."""

import io
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from oneflax.pipeline.stage_functions import accumulation_dtype, is_float
from oneflax.pipeline.trace import bytes_text
from oneflax.sbp.extent import part_shape
from oneflax.sbp.grid import Placement
from oneflax.sbp.signature import Split

from ._problem import OptimizerForm, Problem, Program

if TYPE_CHECKING:
    from ._plan import Plan


@dataclass(frozen=True, slots=True)
class ParamRow:
    """One parameter: `device_bytes` is what each device of its stage holds of it, `rule` what decided its sbp."""

    path: str
    shape: tuple[int, ...]
    dtype: str
    sbp: str
    device_bytes: int
    stage: int
    rule: str


@dataclass(frozen=True, slots=True)
class EdgeRow:
    """A value that moves from one stage to another for each microbatch, whole: all devices of a stage together.

    Attributes:
        there_bytes: Its bytes. back_bytes: Those of its gradient; 0 where it is an integer, a flag or a key.
    """

    source: int
    target: int
    shape: tuple[int, ...]
    dtype: str
    there_bytes: int
    back_bytes: int


@dataclass(frozen=True, slots=True)
class TiedRow:
    """A parameter that lives on stage `home` and is used on `stage` as well.

    Attributes:
        device_bytes: What each device of `stage` holds of the copy during a step.
        there_bytes: What is copied to `stage` at the beginning of each step, whole. back_bytes: Its gradient, summed
            over microbatches, which comes back at the end.
    """

    path: str
    home: int
    stage: int
    device_bytes: int
    there_bytes: int
    back_bytes: int


@dataclass(frozen=True, slots=True)
class StageRow:
    """What one device of a stage holds, in bytes; `tied_bytes`: copies of parameters that live on another stage."""

    stage: int
    placement: str
    param_bytes: int
    tied_bytes: int
    optimizer_bytes: int


@dataclass(frozen=True, slots=True)
class Explanation:
    """A plan applied to a model. ``print`` shows tables.

    Attributes:
        placement: The grid as text.
        params, edges, tied, stages: The rows. rules: The plan's rules in order, as the rows name them.
        idle_axes: Placement axes of more than one rank over which nothing is split.
        schedule: The schedule's name, None without stages. bubble: The idle share of its workers at equal stages, a
            backward taking twice a forward. microbatches: How many a step has.
    """

    placement: str
    rules: tuple[str, ...]
    idle_axes: tuple[str, ...]
    params: tuple[ParamRow, ...]
    edges: tuple[EdgeRow, ...]
    tied: tuple[TiedRow, ...]
    stages: tuple[StageRow, ...]
    schedule: str | None
    bubble: float | None
    microbatches: int

    @classmethod
    def of(cls, plan: "Plan", problem: Problem, program: Program) -> "Explanation":
        """Reads it off a compiled problem."""
        placements = plan._placements
        params = tuple(_param_row(*item, placements[0]) for item in zip(problem.layouts, program.stages))
        tied = _tied_rows(problem, program, params)
        executor = program.executor
        table = executor.table if executor is not None else None
        return cls(
            placement=str(plan.grid),
            rules=tuple(map(str, plan.rules)),
            idle_axes=_idle_axes(placements[0], problem),
            params=params,
            edges=tuple(_edge_row(*edge) for edge in program.edges),
            tied=tied,
            stages=_stage_rows(placements, params, tied, problem, program),
            schedule=table.name if table is not None else None,
            bubble=executor.table.simulate(edges=executor.cut.stage_edges).bubble if executor is not None else None,
            microbatches=problem.microbatches,
        )

    def to_json(self) -> str:
        """All rows as JSON text."""
        return json.dumps(asdict(self), indent=1)

    def __str__(self) -> str:
        """Tables for a terminal 120 columns wide."""
        from rich.console import Console

        console = Console(width=120, file=io.StringIO(), color_system=None)
        for table in self._tables():
            console.print(table, highlight=False, markup=False)
        assert isinstance(console.file, io.StringIO)
        return console.file.getvalue().rstrip()

    def __rich_console__(self, console: Any, options: Any) -> Any:
        yield from self._tables()

    def _tables(self) -> list[Any]:
        schedule = f", {self.schedule}, bubble {self.bubble:.1%} at equal stages" if self.bubble is not None else ""
        plural = "" if self.microbatches == 1 else "es"
        title = f"Plan on {self.placement}: {self.microbatches} microbatch{plural}{schedule}"
        number = {rule: f"rule {i}" for i, rule in reversed(list(enumerate(self.rules, 1)))}
        columns = ("parameter", "shape", "dtype", "sbp", "a device", "stage", "by")
        rows = [
            (*_array(r.path, r), r.sbp, bytes_text(r.device_bytes), str(r.stage), number.get(r.rule, r.rule))
            for r in self.params
        ]
        rules = [f"  rule {i}: {rule}" for i, rule in enumerate(self.rules, 1)]
        idle = [f"  {axis} splits nothing: its ranks repeat the same work" for axis in self.idle_axes]
        tables: list[Any] = [title, *rules, *idle, _table(columns, rows, right=(4, 5))]
        tables.append(self._stage_table())
        if self.tied:
            columns = ("tied parameter", "copied", "copy a device", "whole, there a step", "back a step")
            rows = [
                (r.path, f"{r.home} -> {r.stage}", *_sizes(r.device_bytes, r.there_bytes, r.back_bytes))
                for r in self.tied
            ]
            tables.append(_table(columns, rows, right=(2, 3, 4)))
        if self.edges:
            rows = [(*_array(f"{r.source} -> {r.target}", r), *_sizes(r.there_bytes, r.back_bytes)) for r in self.edges]
            tables.append(_table(("edge", "whole microbatch", "dtype", "there", "back"), rows, right=(3, 4)))
        return tables

    def _stage_table(self) -> Any:
        tied = ("tied copies a device",) if self.tied else ()
        rows = [
            (
                str(r.stage),
                r.placement,
                *_sizes(r.param_bytes, *((r.tied_bytes,) if self.tied else ()), r.optimizer_bytes),
            )
            for r in self.stages
        ]
        columns = ("stage", "placement", "parameters a device", *tied, "optimizer a device")
        return _table(columns, rows, right=range(2, len(columns)))


def _idle_axes(placement: Placement, problem: Problem) -> tuple[str, ...]:
    """Placement axes over which neither the batch nor any parameter is split."""
    laid_out = [problem.batch.nd_sbp, *(layout.nd_sbp for layout in problem.layouts)]
    return tuple(
        placement.describe_axis(i)
        for i, size in enumerate(placement.shape)
        if size > 1 and not any(isinstance(nd_sbp[i], Split) for nd_sbp in laid_out)
    )


def _array(name: str, row: ParamRow | EdgeRow) -> tuple[str, str, str]:
    return name, str(list(row.shape)), row.dtype


def _sizes(*sizes: int) -> tuple[str, ...]:
    return tuple(map(bytes_text, sizes))


def _edge_row(source: int, target: int, aval: Any) -> EdgeRow:
    size = _bytes(aval.shape, aval.dtype)
    return EdgeRow(source, target, aval.shape, str(aval.dtype), size, size if is_float(aval) else 0)


def _tied_rows(problem: Problem, program: Program, params: Sequence[ParamRow]) -> tuple[TiedRow, ...]:
    """A row for each parameter and stage, other than its home, that reads it."""
    if program.executor is None:
        return ()
    cut = program.executor.cut
    return tuple(
        TiedRow(
            layout.path,
            home,
            stage.index,
            row.device_bytes,
            _bytes(layout.shape, layout.dtype),
            _bytes(layout.shape, accumulation_dtype(layout.dtype)),
        )
        for value, layout, home, row in zip(cut.roles.params, problem.layouts, program.stages, params)
        for stage in cut.stages
        if stage.index != home and value in stage.params
    )


def _param_row(layout: Any, stage: int, placement: Placement) -> ParamRow:
    part = part_shape(layout.shape, layout.nd_sbp, placement, layout.path, layout.dtype)
    size = _bytes(part, layout.dtype)
    return ParamRow(layout.path, tuple(layout.shape), str(layout.dtype), str(layout.nd_sbp), size, stage, layout.rule)


def _stage_rows(
    placements: Sequence[Placement],
    params: Sequence[ParamRow],
    tied: Sequence[TiedRow],
    problem: Problem,
    program: Program,
) -> tuple[StageRow, ...]:
    optimizer = [0] * len(placements)
    form = OptimizerForm.of(problem.optimizer, problem.form)
    for i, (owner, shape) in enumerate(zip(form.owners, form.shapes)):
        stage = 0 if owner is None else program.stages[owner]
        part = part_shape(shape.shape, form.sbp_of(i, problem.layouts, placements[0]), placements[stage])
        optimizer[stage] += _bytes(part, shape.dtype)
    held, copies = (
        [sum(row.device_bytes for row in rows if row.stage == stage) for stage in range(len(placements))]
        for rows in (params, tied)
    )
    return tuple(StageRow(i, str(p), held[i], copies[i], optimizer[i]) for i, p in enumerate(placements))


def _bytes(shape: Sequence[int], dtype: Any) -> int:
    return math.prod(shape) * dtype.itemsize


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[int]) -> Any:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for i, name in enumerate(columns):
        table.add_column(name, justify="right" if i in right else "left", overflow="fold", no_wrap=i in right)
    for row in rows:
        table.add_row(*map(Text, row))  # plain text: brackets of shapes and patterns are no markup
    return table
