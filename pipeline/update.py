"""Runs one function of all stages' values, such as an optimizer's update, where those values live.

The function is traced whole, as for one device, and its operations are given to the stages that hold their inputs.
What mixes stages (the global norm of a clip) is a *shared* operation: the few small values that it needs are sent,
and every stage that wants the result computes it for itself. Operations are ordered in phases: phase k + 1 reads what
other stages sent in phase k. An optimizer that looks at each parameter alone has one phase. Operations with effects
(``jax.debug.print``) run once, on the first stage that holds large inputs of theirs, else any, else on stage 0.
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding

from oneflax.sbp.errors import Fault, PlanError

from .graph import Atom, Graph, Op, evaluate, trace
from .transfer import send

#: Most bytes that one operation over several stages may ask other stages for. Norms and flags are a few bytes; more
#: means that the function wants whole parameters of other stages, which no device should ever hold.
MAX_SHARED_BYTES = 1 << 16

#: A stage input of at most this many bytes is sent to where a shared value is, instead of the other way round.
SMALL_BYTES = 256


@dataclass(frozen=True, slots=True)
class _Where:
    """Where a value is made: `stage` (None: anywhere, from anything), whether it is shared, and its phase."""

    stage: int | None
    shared: bool = False
    phase: int = 0


@dataclass(slots=True)
class _Part:
    """What one stage does in one phase."""

    stage: int
    phase: int
    ops: list[Op] = field(default_factory=list)
    inputs: list[int] = field(default_factory=list)
    outputs: list[int] = field(default_factory=list)
    run: Callable[..., Any] | None = None
    donated: list[int] = field(default_factory=list)


class StagedFunction:
    """A function over arrays that live on several stages, traced and divided when made; nothing runs before a call.

    Args:
        fn: Takes one array for each entry of `shapes`, gives a flat list of arrays.
        shapes: Shape and dtype of every argument.
        homes: The stage where each argument lives; None for one that belongs to all of them (a step count), which is
            kept on stage 0.
        shardings: How each argument is laid out there.
        out_homes, out_shardings: The same for the results.
        meshes: The devices of each stage.
        donate: Whether each argument's memory may be used again.
        what: The function's name in errors.

    Raises:
        PlanError: Operations need large values of several stages. All of them at once.

    Attributes:
        phases: How many rounds of messages the function needs, plus one.
        shared_bytes: Bytes that the stages send to each other in one call.
    """

    def __init__(
        self,
        fn: Callable[..., Sequence[Any]],
        shapes: Sequence[Any],
        homes: Sequence[int | None],
        shardings: Sequence[NamedSharding],
        out_homes: Sequence[int | None],
        out_shardings: Sequence[NamedSharding | None],
        meshes: Sequence[Mesh],
        donate: Sequence[bool],
        what: str,
    ) -> None:
        self._graph, _ = trace(lambda *args: list(fn(*args)), *shapes, open_all=True)
        self._meshes = meshes
        self._where, places = _place(self._graph, homes, what)
        targets = [0 if home is None else home for home in out_homes]
        self._parts = _divide(self._graph, self._where, places, targets, len(meshes))
        self._outputs = list(zip(self._graph.outputs, targets))
        self._constants = _constant_results(self._graph, out_shardings)
        self._homes = dict(zip(self._graph.inputs, homes))
        self.phases = 1 + max((part.phase for part in self._parts), default=0)
        donated = {value for value, yes in zip(self._graph.inputs, donate) if yes}
        self._copied = self._results_to_copy(donated)
        self._compile(out_shardings, dict(zip(self._graph.inputs, shardings)), donated)
        self.shared_bytes = sum(_bytes(self._graph, v) for part in self._parts for v in self._foreign(part))

    def _results_to_copy(self, donated: set[int]) -> set[int]:
        """Results that share memory with another one or with an argument that stays: their owner may donate them."""
        copied = set(self._constants)
        given: set[tuple[int, Mesh]] = {
            (value, self._meshes[home or 0]) for value, home in self._homes.items() if value not in donated
        }
        for i, (atom, target) in enumerate(self._outputs):
            if isinstance(atom, int):
                if (atom, self._meshes[target]) in given:
                    copied.add(i)
                given.add((atom, self._meshes[target]))
        return copied

    def _foreign(self, part: _Part) -> list[int]:
        """Values that a part reads and another stage makes."""
        return [v for v in part.inputs if self._maker(v) not in (None, part.stage)]

    def _maker(self, value: int) -> int | None:
        where = self._where[value]
        if value in self._homes:
            return 0 if where.stage is None else where.stage
        return where.stage if not where.shared else None

    def _compile(
        self,
        out_layouts: Sequence[NamedSharding | None],
        in_layouts: Mapping[int, NamedSharding],
        donated: set[int],
    ) -> None:
        layouts = {(atom, t): s for (atom, t), s in zip(self._outputs, out_layouts) if isinstance(atom, int)}
        kept = {atom for atom, _ in self._outputs if isinstance(atom, int)}
        readers: dict[int, list[_Part]] = {}
        for part in self._parts:
            for value in part.inputs:
                readers.setdefault(value, []).append(part)
        # The last reader may use an argument's memory again, unless another stage still wants a copy.
        free = {
            v for v in donated - kept if self._homes[v] is not None and len({p.stage for p in readers.get(v, ())}) == 1
        }
        for part in self._parts:
            shardings = [layouts.get((v, part.stage)) for v in part.outputs]
            reusable = [v for v in part.inputs if v in free and readers[v][-1] is part]
            part.donated = [part.inputs.index(v) for v in self._fitting(reusable, part.outputs, shardings, in_layouts)]
            part.run = jax.jit(_body(self._graph, part), out_shardings=shardings, donate_argnums=tuple(part.donated))

    def _fitting(
        self,
        reusable: Sequence[int],
        outputs: Sequence[int],
        shardings: Sequence[NamedSharding | None],
        in_layouts: Mapping[int, NamedSharding],
    ) -> list[int]:
        """The arguments whose memory a result of the same shape and layout can take over."""
        avals = self._graph.avals
        room = Counter((avals[v].shape, avals[v].dtype, s) for v, s in zip(outputs, shardings) if s is not None)
        fitting = []
        for value in reusable:
            form = (avals[value].shape, avals[value].dtype, in_layouts[value])
            if room[form] > 0:
                room[form] -= 1
                fitting.append(value)
        return fitting

    def __call__(self, *arrays: Any) -> list[Any]:
        """Runs the function; arguments and results as `fn` has them. Donated arguments are gone afterwards."""
        known: dict[tuple[int, int], Any] = {}
        for value, array in zip(self._graph.inputs, arrays):
            home = self._homes[value]
            known[value, 0 if home is None else home] = array
        for part in self._parts:
            self._fetch(known, part)
            assert part.run is not None
            results = part.run(*(known[v, part.stage] for v in part.inputs))
            known.update(((v, part.stage), result) for v, result in zip(part.outputs, results))
        return [self._result(known, i, atom, target) for i, (atom, target) in enumerate(self._outputs)]

    def _result(self, known: Mapping[tuple[int, int], Any], position: int, atom: Atom, target: int) -> Any:
        if position in self._constants:
            value = self._constants[position]
        else:
            assert isinstance(atom, int)
            value = known.get((atom, target))
            if value is None:
                value = send([known[atom, self._maker(atom) or 0]], self._meshes[target])[0]
        return jax.numpy.copy(value) if position in self._copied else value

    def _fetch(self, known: dict[tuple[int, int], Any], part: _Part) -> None:
        missing = [v for v in part.inputs if (v, part.stage) not in known]
        if missing:
            values = [known[v, self._maker(v) or 0] for v in missing]
            copies = send(values, self._meshes[part.stage])
            known.update(((v, part.stage), copy) for v, copy in zip(missing, copies))


def _constant_results(graph: Graph, layouts: Sequence[NamedSharding | None]) -> dict[int, Any]:
    """Results that depend on no argument and no operation, by position, where they are wanted."""
    values = {
        i: graph.constants.get(atom) if isinstance(atom, int) else atom.value for i, atom in enumerate(graph.outputs)
    }
    return {i: jax.device_put(value, layouts[i]) for i, value in values.items() if value is not None}


def _place(graph: Graph, homes: Sequence[int | None], what: str) -> tuple[dict[int, _Where], list[_Where]]:
    """Where each value is made, and where each operation runs."""
    where = {value: _Where(home) for value, home in zip(graph.inputs, homes)}
    where.update((value, _Where(None)) for value in graph.constants)
    places: list[_Where] = []
    faults: list[Fault] = []
    for op in graph.ops:
        inputs = {value: where[value] for value in op.value_inputs}
        place = _place_of(graph, inputs, bool(op.equation.effects))
        asked = {v: w.stage for v, w in inputs.items() if w.stage not in (None, place.stage)}
        asked_bytes = sum(_bytes(graph, v) for v in asked)
        if (place.shared or op.equation.effects) and asked_bytes > MAX_SHARED_BYTES:
            stages = {w.stage for w in inputs.values() if w.stage is not None}
            faults.append(_mixes_stages(op, asked_bytes, sorted(stages), what))
        places.append(place)
        where.update((value, place) for value in op.outputs)
    if faults:
        raise PlanError(dict.fromkeys(faults), what)
    return where, places


def _place_of(graph: Graph, inputs: Mapping[int, _Where], once: bool) -> _Where:
    """Where an operation runs that reads `inputs`; `once`: on one stage, whatever it reads."""
    owned = {v: w for v, w in inputs.items() if w.stage is not None}
    shared = any(w.shared for w in inputs.values())
    phase = max((w.phase for w in inputs.values()), default=0)

    def on(home: int) -> _Where:
        return _Where(home, False, max([phase, *(1 + w.phase for w in owned.values() if w.stage != home)]))

    stages = {w.stage for w in owned.values() if w.stage is not None}
    large = {w.stage for v, w in owned.items() if w.stage is not None and _bytes(graph, v) > SMALL_BYTES}
    if once:
        return on(min(large or stages, default=0))
    if not stages:
        return _Where(None, shared, phase)
    if len(large) == 1:
        return on(*large)
    if len(stages) == 1 and not (shared and sum(_bytes(graph, v) for v in owned) <= SMALL_BYTES):
        return on(*stages)
    return _Where(None, True, max(phase, 1 + max(w.phase for w in owned.values())))


def _mixes_stages(op: Op, owned_bytes: int, stages: list[int], what: str) -> Fault:
    text = f"one operation mixes {owned_bytes} bytes of stages {stages}; a stage never holds another's parameters."
    mend = "a transformation that looks at each parameter alone, or at sums over each (norms, means, flags)"
    return Fault(what, text, (str(op),), mend)


def _divide(
    graph: Graph, where: Mapping[int, _Where], places: Sequence[_Where], targets: Sequence[int], stages: int
) -> list[_Part]:
    """The parts in the order in which they can run."""
    wanted: list[set[int]] = [set() for _ in range(stages)]
    wanted_by = [(atom, target) for atom, target in zip(graph.outputs, targets) if isinstance(atom, int)]
    for atom, target in wanted_by:
        wanted[target].add(atom)
    parts: dict[tuple[int, int], _Part] = {}
    for op, place in reversed([*zip(graph.ops, places)]):  # who wants a result comes later, so one pass is enough
        users = [stage for stage in range(stages) if wanted[stage].intersection(op.outputs)]
        needed = users or op.equation.effects
        for stage in users if place.stage is None else [place.stage] if needed else []:
            parts.setdefault((place.phase, stage), _Part(stage, place.phase)).ops.append(op)
            wanted[stage].update(op.value_inputs)
    for part in parts.values():
        part.ops.reverse()
    ordered = [parts[key] for key in sorted(parts)]
    for part in ordered:
        made = {v for op in part.ops for v in op.outputs}
        part.inputs = sorted({v for op in part.ops for v in op.value_inputs} - made - set(graph.constants))
        results = {a for a, t in wanted_by if t == part.stage or where[a].stage == part.stage}
        readers = [p for p in ordered if p is not part]
        sent = {
            v
            for p in readers
            for op in p.ops
            for v in op.value_inputs
            if p.stage == part.stage or where[v].stage == part.stage
        }
        part.outputs = sorted(made & (sent | results))
    return ordered


def _body(graph: Graph, part: _Part) -> Callable[..., list[Any]]:
    def run(*values: Any) -> list[Any]:
        env: dict[int, Any] = {**graph.constants, **dict(zip(part.inputs, values))}
        evaluate(part.ops, env)
        return [env[v] for v in part.outputs]

    return run


def _bytes(graph: Graph, value: int) -> int:
    aval = graph.avals[value]
    return math.prod(aval.shape) * aval.dtype.itemsize
