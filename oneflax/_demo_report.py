"""What the demo shows at its end: the loss curve as SVG, and the figures in a table.

The picture has two panels over one axis of steps: the loss of the grid and of the one device, which lie on top of each
other, and below them, on a logarithmic scale, how far they are apart.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from xml.sax.saxutils import escape

from rich.table import Table

LIMIT = 1e-4
"""The largest relative difference of the loss between the grid and one device that the demo accepts."""

_WIDTH, _LEFT, _RIGHT = 860.0, 74.0, 24.0  # pixels
_LOSS_TOP, _LOSS_HEIGHT, _APART_TOP, _APART_HEIGHT = 92.0, 280.0, 420.0, 110.0
_HEIGHT = _APART_TOP + _APART_HEIGHT + 54
# The grid's curve is broad and pale, so that the other is seen on top of it.
_GRID_LINE = 'stroke="#0072b2" stroke-width="5" stroke-opacity="0.45"'
_ONE_LINE = 'stroke="#d55e00" stroke-width="1.5"'
_APART_LINE = 'stroke="#00785a" stroke-width="1.5"'
_LEVEL_LINE = 'stroke="#555555" stroke-dasharray="2 4"'
_LEVEL_TEXT = 'text-anchor="end" font-size="11" fill="#555555"'
_SMALL = 'font-size="11" fill="#555555"'


def relative_differences(losses: Sequence[float], reference: Sequence[float]) -> list[float]:
    """How far each loss is from the reference's, relative to it, for the steps that both made.

    Example:
        >>> relative_differences([2.0, 1.0, 0.5], [2.0, 1.25])
        [0.0, 0.2]
    """
    return [abs(loss - other) / abs(other) for loss, other in zip(losses, reference)]


@dataclass(frozen=True, slots=True)
class Panel:
    """A frame with a horizontal axis of steps and a vertical one that is linear or logarithmic.

    Args:
        top: Upper edge in pixels.
        height: Height in pixels.
        steps: Number of steps; they are numbered from 1.
        low: Value at the lower edge.
        high: Value at the upper edge.
        log: Whether the vertical axis is logarithmic.
    """

    top: float
    height: float
    steps: int
    low: float
    high: float
    log: bool = False

    @property
    def bottom(self) -> float:
        """The lower edge in pixels."""
        return self.top + self.height

    def x(self, step: int) -> float:
        """Pixels of a step, counted from 1."""
        return _LEFT + (_WIDTH - _LEFT - _RIGHT) * (step - 1) / max(1, self.steps - 1)

    def y(self, value: float) -> float:
        """Pixels of a value; what lies outside the frame is drawn on its edge."""
        low, high, at = self.low, self.high, min(max(value, self.low), self.high)
        if self.log:
            low, high, at = math.log(low), math.log(high), math.log(at)
        return self.bottom - self.height * (at - low) / (high - low)


def loss_curve(results: Mapping[str, Any]) -> str:
    """The SVG text of a training: both losses, the text's unigram entropy, and the relative difference.

    Args:
        results: What `oneflax.demo.main` gives; ``one_device_losses`` may be shorter than ``losses``, or empty.
    """
    losses, one_device = results["losses"], results["one_device_losses"]
    entropy = results["unigram_entropy"]
    values = [value for value in (*losses, *one_device, entropy) if math.isfinite(value)]
    low, high, tick = round_scale(min(values), max(values))
    subtitle = f"{_model(results)}, {_cut(results)}, {results['tokens_per_step']:,} tokens a step"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH:g}" height="{_HEIGHT:g}" '
        f'viewBox="0 0 {_WIDTH:g} {_HEIGHT:g}" font-family="Helvetica, Arial, sans-serif" font-size="12">',
        "<title>Training loss, on the grid and on one device</title>",
        f'<rect width="{_WIDTH:g}" height="{_HEIGHT:g}" fill="#ffffff"/>',
        _text(_LEFT, 30, "Training loss", 'font-size="17" font-weight="700"'),
        _text(_LEFT, 49, subtitle, 'font-size="12" fill="#555555"'),
        *_legend([(results["grid"], _GRID_LINE), *([("one device", _ONE_LINE)] if one_device else [])]),
        *_loss_panel(Panel(_LOSS_TOP, _LOSS_HEIGHT, len(losses), low, high), tick, losses, one_device, entropy),
        *_apart_panel(relative_differences(losses, one_device), len(losses)),
        "</svg>",
        "",
    ]
    return "\n".join(parts)


def summary(results: Mapping[str, Any]) -> Table:
    """The figures of the demo in a table of names and values."""
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_column(style="cyan", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in _figures(results):
        table.add_row(name, value)
    return table


def _figures(results: Mapping[str, Any]) -> Iterable[tuple[str, str]]:
    yield "grid", f"{results['grid']} on {results['devices']} {results['platform']} devices, {_cut(results)}"
    yield "model", _model(results)
    step = f"{1e3 * results['step_s']:.0f} ms a step, {results['tokens_per_s']:,.0f} tokens/s"
    yield "speed", f"{step}; the first step {results['first_step_s']:.1f} s"
    if results["one_device_step_s"] is not None:
        step = f"{1e3 * results['one_device_step_s']:.0f} ms a step"
        yield "one device", f"{step}; the first step {results['one_device_first_step_s']:.1f} s"
    if results["bubble"] is not None:
        yield "bubble", f"{100 * results['bubble']:.1f} % of the stages' time in the measured step"
    steps = len(results["losses"])
    last = f"{results['last_loss']:.4f} nats per token, the mean of the last {min(10, steps)} of {steps} steps"
    yield "loss", f"{last}; the text's unigram entropy is {results['unigram_entropy']:.4f}"
    yield "largest difference", _largest(results)
    yield "files", "\n".join(results["files"].values())


def _largest(results: Mapping[str, Any]) -> str:
    largest, steps = results["max_relative_difference"], len(results["one_device_losses"])
    if largest is None:
        return "not known: the training was stopped before the one-device run"
    verdict = "within" if largest <= LIMIT else "[bold red]above[/]"
    return f"{largest:.1e} relative to the loss on one device, over {steps} steps: {verdict} {LIMIT:.0e}"


def _model(results: Mapping[str, Any]) -> str:
    return f"GPT of {results['blocks']} blocks, {results['parameters']:,} parameters"


def _cut(results: Mapping[str, Any]) -> str:
    count = results["microbatches"]
    return results["schedule"] or f"{count} microbatch{'' if count == 1 else 'es'}"


def round_scale(low: float, high: float, ticks: int = 6) -> tuple[float, float, float]:
    """Ends of an axis that holds ``low`` to ``high``, and the step of its ticks: 1, 2 or 5 times a power of ten.

    Example:
        >>> round_scale(4.1, 6.9)
        (4.0, 7.0, 0.5)
    """
    span = (high - low) or max(abs(high), 1.0)
    power = 10.0 ** math.floor(math.log10(span / ticks))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= span / ticks * (1 - 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return first * step, max(first + 1, last) * step, step


def _loss_panel(
    panel: Panel, tick: float, losses: Sequence[float], one_device: Sequence[float], unigram_entropy: float
) -> Iterable[str]:
    ticks = [panel.low + i * tick for i in range(round((panel.high - panel.low) / tick) + 1)]
    yield from _frame(panel, [(value, f"{value:.10g}") for value in ticks], "nats per token")
    entropy = panel.y(unigram_entropy)
    yield _line(_LEFT, entropy, _WIDTH - _RIGHT, entropy, _LEVEL_LINE)
    label = f"unigram entropy of the text: {unigram_entropy:.3f}"
    yield _text(_WIDTH - _RIGHT - 8, entropy - 7, label, _LEVEL_TEXT)
    yield _curve(panel, losses, _GRID_LINE)
    yield _curve(panel, one_device, _ONE_LINE)


def _apart_panel(apart: Sequence[float], steps: int) -> Iterable[str]:
    # The floor is one rounding of float32: equal losses are drawn there, having no place on a logarithmic axis.
    floor = 1e-8
    ceiling = max([1e-3, *(10.0 ** math.ceil(math.log10(d)) for d in apart if 0 < d < math.inf)])
    panel = Panel(_APART_TOP, _APART_HEIGHT, steps, floor, ceiling, log=True)
    powers = range(round(math.log10(floor)), round(math.log10(ceiling)) + 1)
    ticks = [(10.0**power, f"1e{power}") for power in powers if power % 2 == 0 or len(powers) < 5]
    title = f"relative difference, largest {max(apart):.1e}" if apart else "relative difference: no one-device run"
    yield _text(_LEFT, _APART_TOP - 10, title, 'font-size="12" font-weight="700"')
    yield from _frame(panel, ticks, "")
    limit = panel.y(LIMIT)
    yield _line(_LEFT, limit, _WIDTH - _RIGHT, limit, _LEVEL_LINE)
    yield _text(_WIDTH - _RIGHT - 8, limit - 5, "limit", _LEVEL_TEXT)
    yield _curve(panel, apart, _APART_LINE)
    for step in _step_ticks(steps):
        yield _text(panel.x(step), panel.bottom + 18, str(step), f'text-anchor="middle" {_SMALL}')
    yield _text((_LEFT + _WIDTH - _RIGHT) / 2, panel.bottom + 38, "step", f'text-anchor="middle" {_SMALL}')


def _frame(panel: Panel, ticks: Sequence[tuple[float, str]], unit: str) -> Iterable[str]:
    for step in _step_ticks(panel.steps):
        yield _line(panel.x(step), panel.top, panel.x(step), panel.bottom, 'stroke="#eeeeee"')
    for value, label in ticks:
        y = panel.y(value)
        yield _line(_LEFT, y, _WIDTH - _RIGHT, y, 'stroke="#e4e4e4"')
        yield _text(_LEFT - 8, y + 4, label, f'text-anchor="end" {_SMALL}')
    yield _line(_LEFT, panel.top, _LEFT, panel.bottom, 'stroke="#888888"')
    yield _line(_LEFT, panel.bottom, _WIDTH - _RIGHT, panel.bottom, 'stroke="#888888"')
    if unit:
        middle = panel.top + panel.height / 2
        yield _text(0, 0, unit, f'transform="translate(22 {middle:.1f}) rotate(-90)" text-anchor="middle" {_SMALL}')


def _step_ticks(steps: int) -> list[int]:
    """The first step and round ones after it."""
    every = max(1, round(round_scale(0, steps, 8)[2]))
    return [1, *(step for step in range(every, steps + 1, every) if step > 1)]


def _legend(curves: Iterable[tuple[str, str]]) -> Iterable[str]:
    left = _LEFT
    for name, line in curves:
        yield _line(left, 70, left + 28, 70, line)
        yield _text(left + 36, 74, name)
        left += 36 + 6.4 * len(name) + 28


def _curve(panel: Panel, values: Sequence[float], style: str) -> str:
    """A line through the finite values; it breaks at the others."""
    pieces, pen = [], "M"
    for step, value in enumerate(values, 1):
        if not math.isfinite(value):
            pen = "M"
            continue
        pieces.append(f"{pen}{panel.x(step):.1f},{panel.y(value):.1f}")
        pen = "L"
    if len(pieces) == 1:  # a dot: a path of one point shows nothing
        pieces.append("h0.1")
    return f'<path d="{" ".join(pieces)}" fill="none" stroke-linejoin="round" stroke-linecap="round" {style}/>'


def _line(x1: float, y1: float, x2: float, y2: float, style: str) -> str:
    return f'<path d="M{x1:.1f},{y1:.1f} L{x2:.1f},{y2:.1f}" fill="none" {style}/>'


def _text(x: float, y: float, text: str, style: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" {style}>{escape(text)}</text>'
