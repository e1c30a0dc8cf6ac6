"""Pictures: valid XML, a box for every action, and kinds told apart by more than colour."""

import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from oneflax.pipeline.picture import draw
from oneflax.pipeline.schedules import gpipe, one_f_one_b
from oneflax.pipeline.table import ScheduleTable
from oneflax.pipeline.trace import TimedAction, TimedTransfer, Trace

SVG = "{http://www.w3.org/2000/svg}"


def boxes(root: ET.Element) -> dict[str, ET.Element]:
    """The group of each action, by the text of its tooltip up to the colon."""
    groups = root.findall(f"{SVG}g")
    return {str(group.findtext(f"{SVG}title")).split(":")[0]: group for group in groups}


def test_every_action_has_a_box_in_its_place(tmp_path: Path) -> None:
    table = one_f_one_b(3).table(workers=2)
    table.to_svg(tmp_path / "table.svg")
    root = ET.parse(tmp_path / "table.svg").getroot()
    found = boxes(root)
    simulation = table.simulate()
    assert set(found) == {str(action) for action in simulation.actions}
    rects = {name: group.find(f"{SVG}rect") for name, group in found.items()}
    places = {
        name: [float(rect.get(key, "")) for key in ("x", "y", "width")]
        for name, rect in rects.items()
        if rect is not None
    }
    scale = places["0F0"][2]
    for action in simulation.actions:
        x, y, width = places[str(action)]
        assert x == pytest.approx(places["0F0"][0] + action.start_s * scale, abs=0.1)
        assert width == pytest.approx((action.end_s - action.start_s) * scale, abs=0.1)
        assert y == places[f"{action.worker}F0"][1]
    assert found["1B2"].findtext(f"{SVG}text") == "1B2"


def test_title_has_the_bubble_and_tooltips_have_all() -> None:
    root = ET.fromstring(draw(gpipe(4).table(workers=2).simulate()))
    assert root.findtext(f"{SVG}title") == "gpipe: 2 workers, 15 s, bubble 20.0 %"
    tip = boxes(root)["1B3"].findtext(f"{SVG}title")
    assert tip == "1B3: backward of stage 1, microbatch 3, worker 1, from 11 s for 2 s"


def test_kinds_differ_in_pattern_and_label_and_all_are_in_the_legend() -> None:
    rows = [["0F0", "0F1", "0B0", "0I1", "0W1"]]
    text = draw(ScheduleTable.of(rows).simulate())
    root = ET.fromstring(text)
    patterns = {p.get("id"): ET.tostring(p[0]) for p in root.iter(f"{SVG}pattern")}
    assert len(patterns) == len(set(patterns.values())) == 4
    found = boxes(root)
    looks = []
    for name in ("0F0", "0B0", "0I1", "0W1"):
        label = found[name].find(f"{SVG}text")
        assert label is not None
        looks.append((label.get("font-weight"), label.get("font-style")))
    assert len(set(looks)) == 4
    for legend in ("F  forward", "B  backward", "I  input gradient", "W  weight gradient"):
        assert legend in text


def test_text_is_escaped() -> None:
    trace = Trace((TimedAction(0, 0, "F", 0, 0.0, 1.0),), 1, name='<a & "b">')
    root = ET.fromstring(draw(trace))
    assert str(root.findtext(f"{SVG}title")).startswith('<a & "b">: 1 worker')


def test_transfers_idle_workers_and_overlaps() -> None:
    actions = (
        TimedAction(0, 0, "F", 0, 7.0, 8.0),
        TimedAction(0, 0, "F", 1, 7.5, 8.5),
        TimedAction(0, 0, "F", 2, 8.5, 9),
    )
    transfers = (TimedTransfer(0, 1, 0, "F", 8.0, 8.2, 1 << 20), TimedTransfer(1, 0, 0, "B", 8.3, 8.4, 10))
    text = draw(Trace(actions, workers=2, transfers=transfers))
    root = ET.fromstring(text)
    rects = {name: group.find(f"{SVG}rect") for name, group in boxes(root).items()}
    heights = {name: float(rect.get("height", "")) for name, rect in rects.items() if rect is not None}
    assert heights["0F0"] == heights["0F1"] == heights["0F2"] / 2
    assert "stage 0 → 1" in text
    assert "microbatch 0, 1.0 MiB, 200 ms" in text
    assert ">idle<" in text


@pytest.mark.parametrize("trace", [Trace((), 0), Trace((), 2), Trace((TimedAction(0, 0, "F", 0, 1.0, 1.0),), 1)])
def test_traces_without_time_are_drawn(trace: Trace) -> None:
    assert ET.fromstring(draw(trace)).tag == f"{SVG}svg"


@pytest.mark.parametrize("seconds", [3e-7, 0.004, 1.0, 700.0, 1e6])
def test_the_axis_has_round_ticks_at_any_scale(seconds: float) -> None:
    trace = Trace((TimedAction(0, 0, "F", 0, 0.0, seconds),), 1)
    root = ET.fromstring(draw(trace))
    ticks = [t for t in root.findall(f"{SVG}text") if t.get("text-anchor") == "middle"]
    assert 5 <= len(ticks) <= 12
    assert len({tick.text for tick in ticks}) == len(ticks)
