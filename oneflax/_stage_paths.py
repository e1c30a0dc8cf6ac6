"""Which stage each module belongs to, from path patterns and the order in which the model runs its modules."""

from collections.abc import Sequence
from dataclasses import dataclass

from oneflax.sbp.errors import Fault, PlanError

from ._patterns import Pattern, nearest


@dataclass(frozen=True, slots=True)
class StagePaths:
    """Stages by path.

    Attributes:
        patterns: What was asked for.
        stage_of_layer: The stage of each layer, a layer being the part of a path that a pattern covers.
        root: A first segment that paths may have and patterns do not: linen puts the model's own name there.
    """

    patterns: tuple[Pattern, ...]
    stage_of_layer: dict[str, int]
    root: str = ""

    def __call__(self, path: str) -> int | None:
        """The stage of a module or parameter path, None where no pattern says one."""
        path = path.removeprefix(f"{self.root}/")
        for pattern in self.patterns:
            layer = pattern.find(path)
            if layer is not None:
                return self.stage_of_layer.get(layer)
        return None


def stages_by_path(patterns: Sequence[Pattern], paths: Sequence[str], stages: int, rooted: bool = False) -> StagePaths:
    """Divides layers over stages.

    One pattern: its layers, in the order in which the model runs them, in runs of nearly equal length (the first ones
    hold one more). Several patterns: one stage each.

    Args:
        patterns: One pattern, or one for each stage.
        paths: Module paths in execution order, repeats allowed.
        stages: How many stages the placement has.
        rooted: Paths may begin with the model's own name, as linen's do.

    Raises:
        PlanError: A pattern matches nothing, there are more stages than layers, or several patterns claim one layer
            or are not as many as the stages.
    """
    root = _root(paths) if rooted else ""
    unique = list(dict.fromkeys(path.removeprefix(f"{root}/") for path in paths if path))
    layers = [list(dict.fromkeys(layer for path in unique if (layer := p.find(path)))) for p in patterns]
    faults = [_no_match(pattern, unique) for pattern, found in zip(patterns, layers) if not found]
    if len(patterns) > 1 and len(patterns) != stages:
        what = f"{len(patterns)} patterns for placement axis 'stage' (size {stages})."
        given = (_list("patterns", [repr(pattern.text) for pattern in patterns]),)
        mend = "one pattern for each stage, or one glob for all layers"
        faults.append(Fault("Plan(stages=)", what, given, mend))
    if len(patterns) > 1:
        faults.extend(_claimed_twice(patterns, unique))
    if len(patterns) == 1 and layers[0] and len(layers[0]) < stages:
        count = "1 layer" if len(layers[0]) == 1 else f"{len(layers[0])} layers"
        what = f"{patterns[0].text!r} matches {count}, too few for placement axis 'stage' (size {stages})."
        mend = f'flow.placement("auto", stage={len(layers[0])}, data=-1)'
        faults.append(Fault("Plan(stages=)", what, (_list("layers", layers[0]),), mend))
    if faults:
        raise PlanError(faults, "Plan(stages=)")
    if len(patterns) > 1:
        return StagePaths(tuple(patterns), {layer: i for i, found in enumerate(layers) for layer in found}, root)
    return StagePaths(tuple(patterns), dict(zip(layers[0], _contiguous(len(layers[0]), stages))), root)


def check_patterns(patterns: Sequence[Pattern], paths: Sequence[str]) -> None:
    """Refuses a pattern that matches nothing, where there is only one stage and so nothing to cut.

    Raises:
        PlanError: A pattern matches none of the parameter paths.
    """
    modules = list(dict.fromkeys(path.rsplit("/", 1)[0] for path in paths))
    faults = [_no_match(p, modules) for p in patterns if not any(p.matches(path) for path in modules)]
    if faults:
        raise PlanError(faults, "Plan(stages=)")


def _contiguous(layers: int, stages: int) -> list[int]:
    each, longer = divmod(layers, stages)
    return [stage for stage in range(stages) for _ in range(each + (stage < longer))]


def _root(paths: Sequence[str]) -> str:
    """The first segment that all paths share, if they do."""
    first = {path.split("/", 1)[0] for path in paths if path}
    return first.pop() if len(first) == 1 else ""


def _no_match(pattern: Pattern, paths: Sequence[str]) -> Fault:
    what = f"{pattern.text!r} matches none of the {len(paths)} modules."
    near = nearest(pattern.text, paths, 5) or list(paths[:5])
    return Fault("Plan(stages=)", what, (_list("modules", near),) if near else (), _suggest(paths))


def _suggest(paths: Sequence[str]) -> str:
    for path in paths:
        segments = path.split("/")
        number = next((i for i, segment in enumerate(segments) if segment.isdigit()), 0)
        if number:
            return f'stages="{"/".join(segments[:number])}/*"'
    return "a glob over the layers' paths, or flow.stage marks"


def _claimed_twice(patterns: Sequence[Pattern], paths: Sequence[str]) -> list[Fault]:
    faults, seen = [], set()
    for path in paths:
        claims = tuple(i for i, pattern in enumerate(patterns) if pattern.matches(path))
        if len(claims) > 1 and claims not in seen:
            seen.add(claims)
            names = " and ".join(f"{i} {patterns[i].text!r}" for i in claims)
            faults.append(
                Fault("Plan(stages=)", f"{path} belongs to stages {names}.", mend="patterns that do not overlap")
            )
    return faults


def _list(name: str, items: Sequence[str], most: int = 8) -> str:
    rest = f", and {len(items) - most} more" if len(items) > most else ""
    return f"{name}: {', '.join(items[:most])}{rest}"
