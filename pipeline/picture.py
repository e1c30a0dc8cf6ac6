"""Pictures of timelines: one SVG with a lane for each worker, readable without colour.

Kinds differ by colour (Okabe and Ito's palette, safe for the colour-blind), by pattern and by the weight of the label.
Idle time is the lane's bare ground, so that the bubble is what one sees first.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

from .actions import KINDS
from .trace import TimedAction, TimedTransfer, Trace, bytes_text

_LEFT, _RIGHT, _TOP, _GAP = 92.0, 24.0, 84.0, 6.0  # pixels
_LANE, _EDGE_LANE = 34.0, 14.0  # heights of a worker's lane and of an edge's
_FONT = 12.0
_CHAR = 0.62 * _FONT  # width of a digit, a little more than in common fonts
_NARROWEST, _WIDEST = 640.0, 2400.0  # of the time axis
_TICKS = 10


@dataclass(frozen=True, slots=True)
class _Look:
    """How a kind is drawn: the fill, the ink of pattern and frame, the pattern's strokes, the label, the legend."""

    fill: str
    ink: str
    pattern: str
    label: str
    legend: str


_LOOKS: dict[str, _Look] = {
    "F": _Look("#d5ebf8", "#0072b2", "", 'font-weight="400"', "F  forward"),
    "B": _Look(
        "#fbe3b5", "#b35900", '<path d="M-2,2 l4,-4 M0,8 l8,-8 M6,10 l4,-4"/>', 'font-weight="700"', "B  backward"
    ),
    "I": _Look("#cdeee3", "#00785a", '<path d="M0,1.5 h8 M0,5.5 h8"/>', 'font-style="italic"', "I  input gradient"),
    "W": _Look(
        "#f3dceb",
        "#99497c",
        '<circle cx="2" cy="2" r="0.8"/><circle cx="6" cy="6" r="0.8"/>',
        'font-weight="700" font-style="italic"',
        "W  weight gradient",
    ),
}


def draw(trace: Trace) -> str:
    """The SVG text of a trace or simulation: a lane a worker, a thin lane an edge with transfers, legend and bubble.

    Every box is labelled with its action (or only its microbatch where it is narrow) and has a tooltip with the whole.
    Actions of one worker that overlap in time share its lane, one above the other.

    >>> from oneflax.pipeline.schedules import one_f_one_b
    >>> draw(one_f_one_b(microbatches=2).table(workers=2).simulate())[:4]
    '<svg'
    """
    scale = _scale(trace)
    width = _LEFT + scale * trace.makespan_s + _RIGHT
    edges = sorted({_edge(transfer) for transfer in trace.transfers})
    edges_top = _TOP + trace.workers * (_LANE + _GAP)
    bottom = edges_top + len(edges) * (_EDGE_LANE + _GAP)
    height = bottom + 34
    kinds = [kind for kind in KINDS if any(a.kind == kind for a in trace.actions)]
    width = max(width, _LEFT + 170 * len(kinds))
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_px(width)}" height="{_px(height)}" '
        f'viewBox="0 0 {_px(width)} {_px(height)}" {_FAMILY}>',
        f"<title>{escape(_title(trace))}</title>",
        f"<defs>{''.join(map(_pattern, kinds))}</defs>",
        f'<rect width="{_px(width)}" height="{_px(height)}" fill="#ffffff"/>',
        f'<text x="16" y="26"><tspan font-size="16" font-weight="700">{escape(trace.name)}</tspan>'
        f'<tspan dx="10" font-size="13" fill="#444444">{escape(_title(trace, name=False))}</tspan></text>',
        *_legend(kinds),
        *_lanes(trace, scale),
    ]
    for at, edge in enumerate(edges):
        mine = [transfer for transfer in trace.transfers if _edge(transfer) == edge]
        parts += _edge_lane(edge, mine, trace, scale, edges_top + at * (_EDGE_LANE + _GAP))
    return "\n".join([*parts, *_axis(trace, scale, bottom), "</svg>", ""])


def _title(trace: Trace, name: bool = True) -> str:
    workers = "1 worker" if trace.workers == 1 else f"{trace.workers} workers"
    text = f"{workers}, {_short_s(trace.makespan_s)}, bubble {100 * trace.bubble:.1f} %"
    return f"{trace.name}: {text}" if name else text


def _scale(trace: Trace) -> float:
    """Pixels for a second: most labels fit, and the picture is neither tiny nor endless."""
    if not trace.makespan_s:
        return 1.0
    lengths = sorted(a.end_s - a.start_s for a in trace.actions)
    typical_s = lengths[len(lengths) // 8] or trace.makespan_s  # an eighth of the boxes may be narrower
    label = max(len(str(a)) for a in trace.actions) * _CHAR + 8
    return min(max(label / typical_s * trace.makespan_s, _NARROWEST), _WIDEST) / trace.makespan_s


def _lanes(trace: Trace, scale: float) -> Iterable[str]:
    span = scale * trace.makespan_s
    for worker in range(trace.workers):
        top = _TOP + worker * (_LANE + _GAP)
        yield f'<rect x="{_px(_LEFT)}" y="{_px(top)}" width="{_px(span)}" height="{_px(_LANE)}" fill="#f1f1f1"/>'
        mine = sorted((a for a in trace.actions if a.worker == worker), key=lambda a: (a.start_s, a.end_s))
        stages = sorted({a.stage for a in mine})
        named = "stage" if len(stages) == 1 else "stages"
        label = f"{named} {', '.join(map(str, stages))}" if len(stages) <= 4 else f"stages {stages[0]}..{stages[-1]}"
        yield _text(_LEFT - 10, top + _LANE / 2 - 2, f"worker {worker}", 'text-anchor="end" font-weight="700"')
        yield _text(_LEFT - 10, top + _LANE / 2 + 12, label if mine else "idle", _SMALL + ' text-anchor="end"')
        for a, level, levels in _stacked(mine, 1e-6 * trace.makespan_s):
            yield _box(a, trace, scale, top + level * _LANE / levels, _LANE / levels)


def _stacked(actions: Sequence[TimedAction], slack_s: float) -> Iterable[tuple[TimedAction, int, int]]:
    """Each action with its level and the number of levels of the group of actions that overlap with it."""
    group: list[tuple[TimedAction, int]] = []
    ends: list[float] = []  # of each level
    for a in actions:
        if group and a.start_s >= max(ends) - slack_s:
            yield from ((b, level, len(ends)) for b, level in group)
            group, ends = [], []
        level = next((at for at, end in enumerate(ends) if a.start_s >= end - slack_s), len(ends))
        ends[level : level + 1] = [a.end_s]
        group.append((a, level))
    yield from ((b, level, len(ends)) for b, level in group)


def _box(a: TimedAction, trace: Trace, scale: float, top: float, height: float) -> str:
    look = _LOOKS[a.kind]
    left = _LEFT + scale * (a.start_s - trace.start_s)
    width = scale * (a.end_s - a.start_s)
    place = f'x="{_px(left)}" y="{_px(top)}" width="{_px(width)}" height="{_px(height)}" rx="2"'
    tip = (
        f"{a}: {look.legend[3:]} of stage {a.stage}, microbatch {a.microbatch}, worker {a.worker}, "
        f"from {_short_s(a.start_s - trace.start_s)} for {_short_s(a.end_s - a.start_s)}"
    )
    shapes = f'<rect {place} fill="{look.fill}"/><rect {place} fill="url(#{_pattern_id(a.kind)})" stroke="{look.ink}"/>'
    label = next((text for text in (str(a), str(a.microbatch)) if len(text) * _CHAR + 3 <= width), "")
    middle = _text(
        left + width / 2, top + height / 2 + 0.35 * _FONT, label, f'text-anchor="middle" {look.label} {_HALO}'
    )
    return f"<g><title>{escape(tip)}</title>{shapes}{middle if label else ''}</g>"


_HALO = 'fill="#111111" stroke="#ffffff" stroke-width="3" stroke-opacity="0.85" paint-order="stroke"'
_FAMILY = f'font-family="Helvetica, Arial, sans-serif" font-size="{_FONT:g}"'
_SMALL = 'font-size="10" fill="#555555"'


def _edge(transfer: TimedTransfer) -> tuple[bool, int, int]:
    return (transfer.direction != "F", transfer.src_stage, transfer.dst_stage)


def _edge_lane(
    edge: tuple[bool, int, int], transfers: Sequence[TimedTransfer], trace: Trace, scale: float, top: float
) -> Iterable[str]:
    ink = _LOOKS["B" if edge[0] else "F"].ink
    yield _text(_LEFT - 10, top + 11, f"stage {edge[1]} → {edge[2]}", _SMALL + ' text-anchor="end"')
    for transfer in transfers:
        left = _LEFT + scale * (transfer.start_s - trace.start_s)
        width = max(1.0, scale * (transfer.end_s - transfer.start_s))
        time = _short_s(transfer.end_s - transfer.start_s)
        tip = f"microbatch {transfer.microbatch}, {bytes_text(transfer.bytes)}, {time}"
        place = f'x="{_px(left)}" y="{_px(top + 3)}" width="{_px(width)}" height="{_px(_EDGE_LANE - 6)}"'
        yield f'<g><title>{escape(tip)}</title><rect {place} fill="{ink}"/></g>'


def _legend(kinds: Sequence[str]) -> Iterable[str]:
    left = _LEFT
    for kind in kinds:
        look = _LOOKS[kind]
        place = f'x="{_px(left)}" y="44" width="26" height="18" rx="2"'
        yield f'<rect {place} fill="{look.fill}"/><rect {place} fill="url(#{_pattern_id(kind)})" stroke="{look.ink}"/>'
        yield _text(left + 34, 57, look.legend, look.label)
        left += 34 + 7.0 * len(look.legend) + 18


def _axis(trace: Trace, scale: float, top: float) -> Iterable[str]:
    """Ticks at round times below the lanes, with faint lines through them."""
    step = _round_step(trace.makespan_s / _TICKS)
    for at in range(int(trace.makespan_s / step + 1e-9) + 1) if step else ():
        x = _LEFT + scale * at * step
        yield f'<path d="M{_px(x)},{_px(_TOP - 4)} V{_px(top)}" stroke="#000000" stroke-opacity="0.12" fill="none"/>'
        yield _text(x, top + 14, _short_s(at * step), _SMALL + ' text-anchor="middle"')


def _round_step(step: float) -> float:
    """The next of 1, 2, 5 times a power of ten."""
    if step <= 0:
        return 0.0
    power = 10.0 ** math.floor(math.log10(step))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= step * (1 - 1e-9))


def _short_s(seconds: float) -> str:
    """A duration without needless zeros: ``"2 s"``."""
    unit, size = next(((u, s) for u, s in (("s", 1.0), ("ms", 1e-3)) if seconds >= s), ("us", 1e-6))
    return f"{seconds / size:.6g} {unit}" if seconds else "0 s"


def _pattern_id(kind: str) -> str:
    return f"pattern-{kind}"


def _pattern(kind: str) -> str:
    look = _LOOKS[kind]
    return (
        f'<pattern id="{_pattern_id(kind)}" width="8" height="8" patternUnits="userSpaceOnUse">'
        f'<g stroke="{look.ink}" stroke-opacity="0.45" fill="{look.ink}" fill-opacity="0.5">{look.pattern}</g>'
        "</pattern>"
    )


def _text(x: float, y: float, text: str, attributes: str) -> str:
    return f'<text x="{_px(x)}" y="{_px(y)}" {attributes}>{escape(text)}</text>'


def _px(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".")
