"""Parameter rules: a path pattern and the sbp of what it matches. The first rule that matches wins."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from oneflax.sbp.errors import Fault, PlanError, describe
from oneflax.sbp.extent import check_layout
from oneflax.sbp.grid import Placement
from oneflax.sbp.signature import B, NdSbp, as_nd_sbp

from .._patterns import Pattern, nearest

DEFAULT_RULE = "default"


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule: which paths, and the sbp they get, in any form that ``as_nd_sbp`` reads."""

    pattern: Pattern
    sbp: Any

    def __str__(self) -> str:
        return f"{self.pattern.text!r} -> {_sbp_text(self.sbp)}"


@dataclass(frozen=True, slots=True)
class LeafLayout:
    """What a rule decided about one array: `rule` is its text, or ``"default"``."""

    path: str
    shape: tuple[int, ...]
    dtype: Any
    nd_sbp: NdSbp
    rule: str


def read_rules(rules: Any, where: str) -> tuple[Rule, ...]:
    """Rules from what the user wrote: a sequence of pairs, or a dict.

    Raises:
        PlanError: An entry is no pair of a pattern and an sbp. All faults at once.
    """
    items = list(rules.items()) if isinstance(rules, dict) else list(rules)
    read, faults = [], []
    for i, item in enumerate(items, 1):
        if not isinstance(item, (tuple, list)) or len(item) != 2:
            mend = f'{where}=[(r"q_proj/kernel", {{"model": S(-1)}})]'
            faults.append(Fault(f"Plan({where}=)", f"rule {i} is not a pair (pattern, sbp) but {item!r}.", mend=mend))
            continue
        try:
            read.append(Rule(Pattern(item[0], f"Plan({where}=) rule {i}"), item[1]))
        except PlanError as error:
            faults.extend(error.faults)
    if faults:
        raise PlanError(faults, f"Plan({where}=)")
    return tuple(read)


def lay_out(
    rules: Sequence[Rule], leaves: Sequence[tuple[str, Any]], placement: Placement, where: str = "params"
) -> list[LeafLayout]:
    """The layout of every leaf by the first rule that matches its path; B where none does.

    Args:
        rules: The rules in order.
        leaves: Path and shape-and-dtype of each array.
        placement: The placement of one stage.
        where: The argument's name in messages.

    Raises:
        PlanError: A rule matches nothing, is shadowed by earlier ones, or its sbp does not fit the placement or an
            array. All faults at once.
    """
    faults: list[Fault] = []
    usable = [_check_sbp(i, rule, placement, where, faults) for i, rule in enumerate(rules, 1)]
    winners = [next((i for i, rule in enumerate(rules) if rule.pattern.matches(path)), None) for path, _ in leaves]
    faults.extend(_unused(rules, [path for path, _ in leaves], winners, where))
    everywhere = NdSbp((B,) * placement.ndim)
    layouts = []
    for (path, aval), winner in zip(leaves, winners):
        if winner is None:
            layouts.append(LeafLayout(path, aval.shape, aval.dtype, everywhere, DEFAULT_RULE))
        elif (nd_sbp := usable[winner]) is not None:
            name = f"Plan({where}=) rule {winner + 1} {rules[winner].pattern.text!r}"
            faults.extend(check_layout(aval.shape, nd_sbp, placement, path, name))
            layouts.append(LeafLayout(path, aval.shape, aval.dtype, nd_sbp, str(rules[winner])))
    if faults:
        raise PlanError(faults, f"Plan({where}=)")
    return layouts


def _check_sbp(number: int, rule: Rule, placement: Placement, where: str, faults: list[Fault]) -> NdSbp | None:
    try:
        return as_nd_sbp(rule.sbp, placement, f"Plan({where}=) rule {number} {rule.pattern.text!r}")
    except ValueError as error:
        faults.extend(getattr(error, "faults", (Fault(f"Plan({where}=)", str(error)),)))
        return None


def _unused(rules: Sequence[Rule], paths: Sequence[str], winners: Sequence[int | None], where: str) -> list[Fault]:
    faults = []
    for i, rule in enumerate(rules):
        if i in winners:
            continue
        call = f"Plan({where}=) rule {i + 1} {rule.pattern.text!r}"
        hits = [winner for path, winner in zip(paths, winners) if rule.pattern.matches(path)]
        if not hits:
            near = nearest(rule.pattern.text, paths)
            given = (f"paths like it: {', '.join(near)}",) if near else ()
            faults.append(
                Fault(call, f"matches none of {len(paths)} paths.", given, "mend the pattern, or drop the rule")
            )
        else:
            earlier = sorted({w + 1 for w in hits if w is not None})
            names = ", ".join(f"{n} {rules[n - 1].pattern.text!r}" for n in earlier)
            what = f"is shadowed: all {len(hits)} paths that it matches go to earlier rules ({names})."
            faults.append(Fault(call, what, mend=f"move it before rule {earlier[0]}, or drop it"))
    return faults


def _sbp_text(sbp: Any) -> str:
    if isinstance(sbp, dict):
        return "{" + ", ".join(f"{axis}: {item}" for axis, item in sbp.items()) + "}"
    return str(sbp)


def leaf_text(path: str, aval: Any) -> str:
    """One array, worded for a message."""
    return describe(path, aval.dtype, aval.shape)
