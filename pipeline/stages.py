"""Cuts a traced loss into stages along its dataflow.

Three kinds of operation have a place of their own: those under a module path that a stage pattern names, marks of
``flow.stage``, and operations whose body holds such a path. The rest follows from dataflow:

- what depends on a placed value runs where its latest input is made (the head and the loss on the last stage);
- what depends on parameters alone, or on no parameter at all (casts, masks, positions), is copied to every user;
- what mixes both before the first stage (an embedding) runs with its earliest user, or, if it makes the value that a
  mark hands to a stage, on the stage before.

A value that a later stage reads is an *edge*, over any number of stages: skips need nothing special.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from oneflax.sbp import _compat
from oneflax.sbp.errors import Fault, PlanError

from .graph import Atom, Graph, Op, flatten, hands_over, has_marks, inner_paths
from .markers import marked_stage

#: The argument that messages name: what says where a model is cut.
WHERE = "Plan(stages=)"

#: A module path → its stage, or None where the pattern says nothing.
StageOfPath = Callable[[str], int | None]


@dataclass(frozen=True, slots=True)
class Roles:
    """Which argument of the traced loss is what, by value number.

    Attributes:
        params: Differentiated arguments.
        state: Arguments that every microbatch reads and replaces (batch statistics, rng counters); results
            ``1 .. len(state)`` of the loss are their new values.
        data: The rest: batch leaves, key, microbatch number, closed-over arrays.
        state_names: What messages call the state, in its order.
    """

    params: tuple[int, ...]
    state: tuple[int, ...]
    data: tuple[int, ...]
    state_names: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ValueEdge:
    """A value that stage `source` makes and stage `target` reads."""

    value: int
    source: int
    target: int


@dataclass(frozen=True, slots=True)
class StageGraph:
    """What one stage computes for one microbatch.

    Attributes:
        index: The stage.
        ops: Its operations in order, copies of shared cheap ones included.
        params, state, data: Value numbers of the arguments that it reads.
        edges_in: Values from earlier stages. edges_out: Values for later ones.
        new_state: Argument that is state → the value that replaces it, for the state that this stage replaces.
        results: Position among the loss's results → value, for what this stage makes of them (the loss is 0).
    """

    index: int
    ops: tuple[Op, ...]
    params: tuple[int, ...]
    state: tuple[int, ...]
    data: tuple[int, ...]
    edges_in: tuple[int, ...]
    edges_out: tuple[int, ...]
    new_state: Mapping[int, Atom]
    results: Mapping[int, Atom]


@dataclass(frozen=True, slots=True)
class Cut:
    """A loss in stages: their graphs and the edges between them."""

    graph: Graph
    roles: Roles
    stages: tuple[StageGraph, ...]
    edges: tuple[ValueEdge, ...]

    @property
    def stage_edges(self) -> frozenset[tuple[int, int]]:
        """Pairs of stages between which a value moves forward."""
        return frozenset((edge.source, edge.target) for edge in self.edges)

    def stages_reading(self, value: int) -> tuple[int, ...]:
        """The stages that read an argument of the loss."""
        return tuple(s.index for s in self.stages if value in s.params or value in s.state or value in s.data)


def cut(graph: Graph, roles: Roles, stages: int, stage_of_path: StageOfPath = lambda path: None) -> Cut:
    """Cuts `graph` into `stages` stages.

    Args:
        graph: The traced loss of one microbatch; its results are the loss, the new state, then auxiliary values.
        roles: What each argument is.
        stages: How many stages there are.
        stage_of_path: Gives the stage of a module path. Marks of ``flow.stage`` count as well.

    Raises:
        PlanError: A value would flow to an earlier stage, one operation holds modules of several stages, a mark
            names a stage that does not exist, a stage is empty, or state is shared by stages. All faults at once.
    """
    ops = _live_ops(graph)
    faults: list[Fault] = []
    explicit = [_place(op, stages, stage_of_path, faults) for op in ops]
    stage_of_op = _follow_dataflow(ops, explicit, faults)
    if not faults:
        faults.extend(_empty_stages(stage_of_op, stages))
    if faults:
        raise PlanError(faults, WHERE)
    homes, readers = _spread(graph, roles, ops, stage_of_op, stages)
    built = _build(graph, roles, ops, homes, readers, stages)
    faults.extend(_shared_state(graph, roles, built))
    if faults:
        raise PlanError(faults, WHERE)
    return built


def _live_ops(graph: Graph) -> list[Op]:
    """Operations that a result needs, or that have effects, in order."""
    needed = {atom for atom in graph.outputs if isinstance(atom, int)}
    live: list[Op] = []
    for op in reversed(graph.ops):
        if needed.intersection(op.outputs) or op.equation.effects:
            live.append(op)
            needed.update(op.value_inputs)
    return live[::-1]


def _place(op: Op, stages: int, stage_of_path: StageOfPath, faults: list[Fault]) -> int | None:
    marked = marked_stage(op.equation)
    if marked is not None:
        if marked >= stages:
            faults.append(_no_such_stage(op, marked, stages))
        return min(marked, stages - 1)
    own = stage_of_path(op.path)
    inner = {own} if own is not None else {stage_of_path(path) for path in inner_paths(op.equation, (op.path,))}
    for index, at_entry in _inner_marks(op.equation):
        inner.add(min(index, stages - 1))
        if index >= stages:
            faults.append(_no_such_stage(op, index, stages))
        elif not at_entry:
            faults.append(_mark_in_the_middle(op, index))
    found = sorted(stage for stage in inner if stage is not None)
    if len(found) > 1:
        faults.append(_holds_several_stages(op, found))
    return min(found, default=None)


def _inner_marks(equation: Any) -> Iterable[tuple[int, bool]]:
    """Marks in an operation's body, each with whether nothing that the body computes before a mark flows into it."""
    for body in _compat.inner_jaxprs(equation):
        if not has_marks(body):
            continue
        marked: set[int] = set()
        early: set[int] = set()
        for op in flatten(body, open_all=True).ops:
            own = marked_stage(op.equation)
            marks = [(own, True)] if own is not None else list(_inner_marks(op.equation))
            yield from ((index, at_entry and early.isdisjoint(op.value_inputs)) for index, at_entry in marks)
            follows = bool(marks) or not marked.isdisjoint(op.value_inputs)
            (marked if follows else early).update(op.outputs)


def _follow_dataflow(ops: Sequence[Op], explicit: Sequence[int | None], faults: list[Fault]) -> list[int | None]:
    """The stage of each operation; None where it depends on no placed value."""
    made_in: dict[int, int] = {}
    made_by: dict[int, Op] = {}
    stages: list[int | None] = []
    backwards: set[tuple[int, int]] = set()
    for op, own in zip(ops, explicit):
        sources = {made_in[value]: value for value in op.value_inputs if value in made_in}
        latest = max(sources, default=None)
        if own is not None and latest is not None and latest > own and (latest, own) not in backwards:
            backwards.add((latest, own))
            producer = made_by[sources[latest]]
            what = (
                f"stage {own} ({op.path or op}) reads a value that stage {latest} ({producer.path or producer}) makes."
            )
            mend = "list the stages in the order in which the model runs them"
            faults.append(Fault(WHERE, what, (f"reads: {op}", f"made: {producer}"), mend))
        stage = own if own is not None else latest
        stages.append(stage)
        for value in op.outputs:
            made_by[value] = op
            if stage is not None:
                made_in[value] = stage
    return stages


def _empty_stages(stage_of_op: Sequence[int | None], stages: int) -> Iterable[Fault]:
    for stage in sorted(set(range(stages)) - {s for s in stage_of_op if s is not None}):
        if stage or not any(s is None for s in stage_of_op):  # stage 0 may hold only what runs before the first mark
            what = f"stage {stage} of {stages} holds no operation."
            yield Fault(WHERE, what, mend="a stage pattern or flow.stage(x, i) marks for every stage, or fewer stages")


def _spread(
    graph: Graph, roles: Roles, ops: Sequence[Op], stage_of_op: Sequence[int | None], stages: int
) -> tuple[list[tuple[int, ...]], Mapping[int, set[int]]]:
    """The stages that run each operation (one, or several for a copied one), and those that read each value."""
    once = _run_once(roles, ops)
    seeds: dict[int, set[int]] = {atom: {stages - 1} for atom in graph.outputs[:1] if isinstance(atom, int)}
    homes, readers = _homes(ops, stage_of_op, once, seeds, ())
    # State is replaced where it is read, which may make more operations read state, and so on. What nobody wants after
    # that (auxiliary results, effects, state that is only written) runs on stage 0.
    for unwanted in ((), (0,)):
        while True:
            before = {value: set(wanted) for value, wanted in seeds.items()}
            for old, new in zip(roles.state, graph.outputs[1:]):
                if isinstance(new, int) and old in readers:
                    seeds.setdefault(new, set()).update(readers[old])
            homes, readers = _homes(ops, stage_of_op, once, seeds, unwanted)
            if seeds == before:
                break
    return homes, readers


def _run_once(roles: Roles, ops: Sequence[Op]) -> list[bool]:
    """Whether each operation must not be copied: it mixes parameters with data, or has effects."""
    touches_params, touches_data = set(roles.params), {*roles.data, *roles.state}
    once = []
    for op in ops:
        inputs = set(op.value_inputs)
        params, data = not inputs.isdisjoint(touches_params), not inputs.isdisjoint(touches_data)
        if params:
            touches_params.update(op.outputs)
        if data:
            touches_data.update(op.outputs)
        once.append((params and data) or bool(op.equation.effects))
    return once


def _homes(
    ops: Sequence[Op],
    stage_of_op: Sequence[int | None],
    once: Sequence[bool],
    seeds: Mapping[int, set[int]],
    unwanted: tuple[int, ...],
) -> tuple[list[tuple[int, ...]], dict[int, set[int]]]:
    """The stages of each operation when the stages of `seeds` want those values; what no stage wants is `unwanted`."""
    readers = {value: set(wanted) for value, wanted in seeds.items()}
    marked: dict[int, set[int]] = {}  # values that a mark makes the input of a stage
    homes: list[tuple[int, ...]] = [()] * len(ops)
    for i in reversed(range(len(ops))):
        op, stage = ops[i], stage_of_op[i]
        if stage is not None:
            homes[i] = (stage,)
        else:
            wanted = set().union(*(readers.get(value, ()) for value in op.outputs))
            for target in set().union(*(marked.get(value, ()) for value in op.outputs)):
                wanted.add(max(0, target - 1) if once[i] else target)  # what makes a stage's input comes before it
            homes[i] = tuple(sorted(wanted)) or unwanted
            if once[i]:
                homes[i] = homes[i][:1]
        asks = marked if hands_over(op.equation) else readers
        for value in op.value_inputs if homes[i] else ():
            asks.setdefault(value, set()).update(homes[i])
    for value, wanted in marked.items():
        readers.setdefault(value, set()).update(wanted)
    return homes, readers


def _build(
    graph: Graph,
    roles: Roles,
    ops: Sequence[Op],
    homes: Sequence[tuple[int, ...]],
    readers: Mapping[int, set[int]],
    stages: int,
) -> Cut:
    made_in: dict[int, tuple[int, ...]] = {value: where for op, where in zip(ops, homes) for value in op.outputs}
    new_state, results = _split_results(graph, roles, made_in, readers, stages)
    edges: list[ValueEdge] = []
    parts: list[StageGraph] = []
    for stage in range(stages):
        mine = tuple(op for op, where in zip(ops, homes) if stage in where)
        read = {value for op in mine for value in op.value_inputs}
        read.update(atom for atom in (*new_state[stage].values(), *results[stage].values()) if isinstance(atom, int))
        foreign = sorted(value for value in read if value in made_in and stage not in made_in[value])
        edges.extend(ValueEdge(value, made_in[value][0], stage) for value in foreign)
        parts.append(
            StageGraph(
                index=stage,
                ops=mine,
                params=tuple(v for v in roles.params if v in read),
                state=tuple(v for v in roles.state if v in read or v in new_state[stage]),
                data=tuple(v for v in roles.data if v in read),
                edges_in=tuple(foreign),
                edges_out=(),
                new_state=new_state[stage],
                results=results[stage],
            )
        )
    outgoing = [tuple(sorted({e.value for e in edges if e.source == stage})) for stage in range(stages)]
    parts = [replace(part, edges_out=out) for part, out in zip(parts, outgoing)]
    return Cut(graph, roles, tuple(parts), tuple(edges))


def _split_results(
    graph: Graph,
    roles: Roles,
    made_in: Mapping[int, tuple[int, ...]],
    readers: Mapping[int, set[int]],
    stages: int,
) -> tuple[list[dict[int, Atom]], list[dict[int, Atom]]]:
    """For each stage, the state that it replaces and the results that it makes."""
    new_state: list[dict[int, Atom]] = [{} for _ in range(stages)]
    results: list[dict[int, Atom]] = [{} for _ in range(stages)]
    for position, atom in enumerate(graph.outputs):
        if 1 <= position <= len(roles.state):
            old = roles.state[position - 1]
            if atom == old:
                continue
            where = made_in.get(atom, ()) if isinstance(atom, int) else ()
            for stage in where or readers.get(old, {0}):
                new_state[stage][old] = atom
            continue
        where = made_in.get(atom, (stages - 1,)) if isinstance(atom, int) else (stages - 1,)
        results[max(where)][position] = atom
    return new_state, results


def _shared_state(graph: Graph, roles: Roles, built: Cut) -> Iterable[Fault]:
    """State that one stage replaces and another reads would make the stages wait for each other: refused."""
    for position, value in enumerate(roles.state):
        writers = {s.index for s in built.stages if value in s.new_state}
        readers = {s.index for s in built.stages if value in s.state}
        if writers and not readers <= writers:
            name = roles.state_names[position] if roles.state_names else f"number {position}"
            what = f"model state {name} is replaced by stage {sorted(writers)} and read by {sorted(readers)}."
            mend = "give each module a state (rng stream, statistics) of its own"
            yield Fault(WHERE, what, (str(graph.avals[value]),), mend)


def _no_such_stage(op: Op, index: int, stages: int) -> Fault:
    what = f"marks stage {index}, but the placement has {stages} stages (0 to {stages - 1})."
    return Fault("flow.stage(x, index)", what, (str(op),), f'flow.placement("auto", stage={index + 1}, data=-1)')


def _mark_in_the_middle(op: Op, index: int) -> Fault:
    name = op.equation.primitive.name
    what = f"one {name} operation holds a mark of stage {index} behind work of its own; it cannot be cut."
    return Fault("flow.stage(x, index)", what, (str(op),), "put the boundary outside of it")


def _holds_several_stages(op: Op, stages: Sequence[int]) -> Fault:
    what = f"one {op.equation.primitive.name} operation holds modules of stages {list(stages)}; it cannot be cut."
    mend = "put the boundary outside of it, or write the loop over layers as a Python loop"
    return Fault(WHERE, what, (str(op),), mend)
