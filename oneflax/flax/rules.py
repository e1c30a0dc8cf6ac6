"""Parameter rules: a path pattern and the sbp of what it matches. The first rule that matches wins."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from oneflax.sbp.errors import Fault, PlanError, SbpError
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
    mend = f'{where}=[(r"q_proj/kernel", {{"model": S(-1)}})]'
    if rules is None:
        return ()
    if isinstance(rules, str) or not isinstance(rules, Iterable):
        raise PlanError(
            Fault(f"Plan({where}=)", f"rules are a list of pairs (pattern, sbp), not {rules!r}.", mend=mend)
        )
    items = list(rules.items()) if isinstance(rules, dict) else list(rules)
    read, faults = [], []
    for i, item in enumerate(items, 1):
        if not isinstance(item, (tuple, list)) or len(item) != 2:
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
    usable = [_check_sbp(rule, placement, _call(where, i, rule), faults) for i, rule in enumerate(rules)]
    winners = [next((i for i, rule in enumerate(rules) if rule.pattern.matches(path)), None) for path, _ in leaves]
    faults.extend(_unused(rules, [path for path, _ in leaves], winners, where))
    everywhere = NdSbp((B,) * placement.ndim)
    layouts = []
    for (path, aval), winner in zip(leaves, winners):
        if winner is None:
            layouts.append(LeafLayout(path, aval.shape, aval.dtype, everywhere, DEFAULT_RULE))
        elif (nd_sbp := usable[winner]) is not None:
            call = _call(where, winner, rules[winner])
            found = check_layout(aval.shape, nd_sbp, placement, path, dtype=aval.dtype)
            faults.extend(replace(fault, where=call).as_argument(_rule_code(rules[winner])) for fault in found)
            layouts.append(LeafLayout(path, aval.shape, aval.dtype, nd_sbp, str(rules[winner])))
    if faults:
        raise PlanError(faults, f"Plan({where}=)")
    return layouts


def _call(where: str, index: int, rule: Rule) -> str:
    return f"Plan({where}=) rule {index + 1} {rule.pattern.text!r}"


def _check_sbp(rule: Rule, placement: Placement, call: str, faults: list[Fault]) -> NdSbp | None:
    try:
        return as_nd_sbp(rule.sbp, placement, call)
    except SbpError as error:
        faults.extend(fault.as_argument(_rule_code(rule)) for fault in error.faults)
        return None


def _unused(rules: Sequence[Rule], paths: Sequence[str], winners: Sequence[int | None], where: str) -> list[Fault]:
    faults = []
    for i, rule in enumerate(rules):
        if i in winners:
            continue
        call = _call(where, i, rule)
        hits = [(path, winner) for path, winner in zip(paths, winners) if rule.pattern.matches(path)]
        if not hits:
            near = nearest(rule.pattern.text, paths) or list(dict.fromkeys(paths))[:3]
            what = f"matches none of the {len(paths)} paths."
            given = (f"paths: {', '.join(near)}",) if near else ()
            rule_for_near = [_rule_code(rule, path).replace("{}", _sbp_code(rule.sbp)) for path in near[:1]]
            faults.append(Fault(call, what, given, ", or ".join([*rule_for_near, "drop the rule"])))
        else:
            earlier = sorted({winner for _, winner in hits if winner is not None})
            names = ", ".join(f"{n + 1} {rules[n].pattern.text!r}" for n in earlier)
            count = "the one path" if len(hits) == 1 else f"all {len(hits)} paths"
            what = f"is shadowed: earlier rules take {count} that it matches."
            given = (f"earlier rules: {names}", f"first path: {hits[0][0]}")
            faults.append(Fault(call, what, given, f"move it before rule {earlier[0] + 1}, or drop it"))
    return faults


def _rule_code(rule: Rule, pattern: str | None = None) -> str:
    """A rule as the user writes it, with ``{}`` for its nd-sbp and, if told, another pattern."""
    text = rule.pattern.text if pattern is None else pattern
    return f'({"r" if chr(92) in text else ""}"{text}", {{}})'


def _sbp_code(sbp: Any) -> str:
    """What the user gave as an nd-sbp, as Python code."""
    if isinstance(sbp, dict):
        items = (f'"{axis}": {item}' if isinstance(axis, str) else f"{axis}: {item}" for axis, item in sbp.items())
        return "{" + ", ".join(items) + "}"
    return f'"{sbp}"' if isinstance(sbp, str) else str(sbp)


def _sbp_text(sbp: Any) -> str:
    if isinstance(sbp, dict):
        return "{" + ", ".join(f"{axis}: {item}" for axis, item in sbp.items()) + "}"
    return str(sbp)
