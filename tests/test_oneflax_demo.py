import itertools
import json
import math
import os
import signal
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from oneflax import __main__ as cli
from oneflax import _demo_grid as grids
from oneflax import _demo_report as report
from oneflax import _demo_text as text
from oneflax.demo import failures, main, parser, strict_json
from oneflax.sbp.errors import PlanError

ROOT = Path(__file__).resolve().parent.parent


# ---- text ----


def slow_encode(code: text.BytePairs, source: bytes) -> list[int]:
    """Byte pairs as in the textbook: one merge after the other, from left to right."""
    tokens = list(source)
    for token, pair in enumerate(code.merges, 256):
        merged: list[int] = []
        for at in tokens:
            if merged and (merged[-1], at) == pair:
                merged[-1] = token
            else:
                merged.append(at)
        tokens = merged
    return tokens


@given(source=st.binary(max_size=60), sample=st.binary(min_size=2, max_size=200))
def test_byte_pairs_are_the_textbooks_and_come_back(source: bytes, sample: bytes) -> None:
    code = text.BytePairs.train(sample, 300)
    tokens = code.encode(source)
    assert tokens.tolist() == slow_encode(code, source)
    assert code.decode(tokens) == source.decode(errors="replace")


@given(runs=st.lists(st.sampled_from(["a", "aa", "aaa", "aaaa", "b"]), max_size=12))
def test_runs_of_one_letter_merge_from_the_left(runs: list[str]) -> None:
    code = text.BytePairs(((97, 97), (256, 256)))
    source = "".join(runs).encode()
    assert code.encode(source).tolist() == slow_encode(code, source)


def test_training_joins_the_most_frequent_pair_first() -> None:
    sample = b"the then there"
    pairs = Counter(itertools.pairwise(sample))
    best = max(pairs.values())
    assert text.BytePairs.train(sample, 257).merges == (min(pair for pair, count in pairs.items() if count == best),)


def test_training_ends_when_no_pair_stands_twice() -> None:
    assert text.BytePairs.train(b"abcd", 1000).vocab == 256


def test_the_standard_library_is_the_text() -> None:
    source = text.stdlib_text(300_000)
    assert len(source) == 300_000
    assert source == text.stdlib_text(400_000)[:300_000]
    assert b"def " in source
    code = text.BytePairs.train(source[:50_000], 400)
    assert code.vocab == 400
    assert len(code.encode(source)) < len(source) / 1.5
    assert code.decode(code.encode(source)) == source.decode(errors="replace")


def test_unigram_entropy_is_that_of_the_frequencies() -> None:
    tokens = np.random.default_rng(0).zipf(1.5, 1000).astype(np.int32) % 50
    share = np.unique(tokens, return_counts=True)[1] / 1000
    assert text.unigram_entropy(tokens) == pytest.approx(-np.sum(share * np.log(share)), rel=1e-12)


def test_batches_are_pieces_of_the_text_and_differ_by_step_and_seed() -> None:
    tokens = np.arange(100, dtype=np.int32)
    batch = text.batch_of(tokens, 3, rows=4, length=10, seed=1)
    assert batch.shape == (4, 10)
    assert (np.diff(batch, axis=1) == 1).all()
    assert (batch == text.batch_of(tokens, 3, rows=4, length=10, seed=1)).all()
    for step, seed in ((4, 1), (3, 2)):
        assert (batch != text.batch_of(tokens, step, rows=4, length=10, seed=seed)).any()


# ---- grid ----


@pytest.mark.parametrize(
    ("devices", "fixed", "expected"),
    [
        (1, {}, (1, 1, 1)),
        (2, {}, (2, 1, 1)),
        (4, {}, (2, 2, 1)),
        (8, {}, (2, 2, 2)),
        (16, {}, (2, 4, 2)),
        (6, {}, (2, 3, 1)),
        (3, {}, (1, 3, 1)),
        (8, {"stages": 4}, (4, 2, 1)),
        (8, {"stages": 1}, (1, 4, 2)),
        (8, {"data": 1}, (2, 1, 4)),
        (8, {"data": 1, "model": 1}, (8, 1, 1)),
        (8, {"stages": 1, "data": 1, "model": 8}, (1, 1, 8)),
    ],
)
def test_devices_are_dealt_out_by_the_rule(devices: int, fixed: dict[str, int], expected: tuple[int, int, int]) -> None:
    grid = grids.grid_of(devices, fixed)
    assert (grid.stages, grid.data, grid.model) == expected
    assert grid.devices == devices


@given(devices=st.integers(1, 64), axes=st.dictionaries(st.sampled_from(grids.AXES), st.integers(1, 8)))
def test_a_grid_uses_every_device_and_keeps_the_given_axes(devices: int, axes: dict[str, int]) -> None:
    try:
        grid = grids.grid_of(devices, axes)
    except PlanError:
        divides = devices % math.prod(axes.values()) == 0
        assert not divides or len(axes) == 3 or devices > 32 or max(axes.get("model", 1), devices) > 2
        return
    assert grid.devices == devices
    assert all(getattr(grid, axis) == size for axis, size in axes.items())


@pytest.mark.parametrize(
    ("fixed", "available", "expected"),
    [({}, 8, 8), ({}, 100, 8), ({}, 7, 4), ({}, 3, 2), ({}, 1, 1), ({"stages": 4}, 8, 8), ({"data": 3}, 8, 3)],
)
def test_without_devices_as_many_as_there_are(fixed: dict[str, int], available: int, expected: int) -> None:
    assert grids.device_count(fixed, available) == expected


@given(stages=st.integers(1, 8), data=st.integers(1, 8), microbatches=st.integers(1, 40))
def test_rows_and_blocks_divide(stages: int, data: int, microbatches: int) -> None:
    chosen = grids.settings(parser().parse_args(["--microbatches", str(microbatches)]))
    grid = grids.Grid(stages, data, 1)
    rows = grids.rows_of(grid, microbatches, None)
    assert rows % (microbatches * data) == 0
    assert grids.ROWS <= rows < grids.ROWS + microbatches * data
    blocks = grids.blocks_of(grid, chosen.schedule)
    assert blocks % stages == 0
    assert blocks >= 4


MISTAKES = {
    "--steps 0": """\
demo(--steps): steps is a whole number from 1 up, not 0.
  Mend: leave --steps out.""",
    "--steps -3 --microbatches 0 --seed -1": """\
demo: 3 faults
1. demo(--microbatches): microbatches is a whole number from 1 up, not 0.
     Mend: leave --microbatches out.
2. demo(--steps): steps is a whole number from 1 up, not -3.
     Mend: leave --steps out.
3. demo(--seed): the seed is a whole number from 0 up, not -1.
     Mend: --seed 0""",
    "--schedule forward-only": """\
demo(--schedule): forward-only has no backward.
  Mend: --schedule 1f1b""",
    "--devices 8 --stages 3": """\
demo(--devices): the given axes take 3 devices, which does not divide 8 devices.
  --stages 3
  Mend: --devices 3, or other axes.""",
    "--devices 8 --stages 2 --data 2 --model 1": """\
demo(--devices): the axes take 4 devices of 8: all three are given, so none can take the rest.
  --stages 2 --data 2 --model 1
  Mend: --devices 4, or leave one axis out.""",
    "--devices 8 --batch 12": """\
demo(--batch): the batch has 12 rows, which do not fall into 4 microbatches over placement axis data (size 2): \
it takes a multiple of 8.
  Mend: --batch 16, or leave --batch out.""",
    "--devices 3 --model 3": """\
demo(--model): placement axis model (size 3) does not split the model evenly: it may be 1, 2, 4, 8, 16, 32.
  Mend: --model 2""",
}


@pytest.mark.parametrize("flags", MISTAKES)
def test_mistakes_are_named_before_jax_starts(flags: str, tmp_path: Path) -> None:
    with pytest.raises(PlanError) as caught:
        main([*flags.split(), "--out", str(tmp_path)])
    assert str(caught.value) == MISTAKES[flags]


def test_an_unknown_schedule_names_those_that_exist() -> None:
    with pytest.raises(PlanError, match=r"^demo\(--schedule\): there is no schedule '2f2b'; the nearest first: .*1f1b"):
        main(["--schedule", "2f2b"])


def test_an_output_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("")
    with pytest.raises(PlanError, match=r"^demo\(--out\): cannot make the folder .*taken: File exists\."):
        main(["--out", str(tmp_path / "taken")])


def test_more_devices_than_there_are(tmp_path: Path) -> None:
    with pytest.raises(PlanError) as caught:
        main(["--devices", "16", "--out", str(tmp_path)])
    assert str(caught.value) == (
        "demo(--devices): the grid takes 16 devices, and jax has 8 (cpu). XLA_FLAGS sets their number, or jax had "
        "started before the demo.\n  Mend: a process of its own without XLA_FLAGS, or --devices 8"
    )


def test_flags_and_mistakes_need_no_jax() -> None:
    code = (
        "import sys\nfrom oneflax.demo import parser, main\nparser().format_help()\n"
        "try: main(['--steps', '0'])\nexcept ValueError: pass\nassert 'jax' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, timeout=60)


# ---- report ----


def results_of(losses: list[float], one_device: list[float]) -> dict[str, Any]:
    apart = report.relative_differences(losses, one_device)
    return {
        "grid": "stage 2 x data 2 x model 2",
        "devices": 8,
        "platform": "cpu",
        "schedule": "1f1b(microbatches=4)",
        "microbatches": 4,
        "blocks": 4,
        "parameters": 650_304,
        "tokens_per_step": 2048,
        "losses": losses,
        "one_device_losses": one_device,
        "max_relative_difference": max(apart) if apart else None,
        "unigram_entropy": 6.19,
        "last_loss": 4.1,
        "tokens_per_s": 10_000.0,
        "step_s": 0.2,
        "first_step_s": 9.0,
        "one_device_step_s": 0.1 if one_device else None,
        "one_device_first_step_s": 3.0 if one_device else None,
        "bubble": 0.2,
        "files": {"loss": "out/demo/loss.svg"},
    }


CURVES = {
    "whole": ([6.9 - 0.01 * i for i in range(200)], [6.9 - 0.01 * i + 1e-6 for i in range(200)]),
    "one step": ([6.9], [6.9]),
    "stopped": ([6.9, 6.5, 6.0], []),
    "broken": ([6.9, math.nan, math.inf, 6.0], [6.9, 6.5, math.nan, 6.0]),
    "level": ([6.19] * 5, [6.19] * 5),
}


@pytest.mark.parametrize("case", CURVES)
def test_the_loss_curve_is_a_picture_within_its_frame(case: str) -> None:
    losses, one_device = CURVES[case]
    svg = ElementTree.fromstring(report.loss_curve(results_of(losses, one_device)))
    width, height = float(svg.attrib["width"]), float(svg.attrib["height"])
    texts = ["".join(node.itertext()) for node in svg.iter("{http://www.w3.org/2000/svg}text")]
    assert "unigram entropy of the text: 6.190" in texts
    assert ("one device" in texts) == bool(one_device)
    for path in svg.iter("{http://www.w3.org/2000/svg}path"):
        points = [piece.lstrip("ML").split(",") for piece in path.attrib["d"].split() if piece[0] in "ML"]
        assert all(0 <= float(x) <= width and 0 <= float(y) <= height for x, y in points)


def test_both_curves_have_a_point_for_each_step_where_they_belong() -> None:
    losses, one_device = CURVES["whole"]
    svg = ElementTree.fromstring(report.loss_curve(results_of(losses, one_device)))
    paths = [path.attrib["d"].split() for path in svg.iter("{http://www.w3.org/2000/svg}path")]
    curves = [path for path in paths if len(path) == 200]
    assert len(curves) == 3  # two losses and their difference
    panel = report.Panel(92, 280, 200, 4.5, 7.0)
    for step in (1, 100, 200):
        assert curves[0][step - 1][1:] == f"{panel.x(step):.1f},{panel.y(losses[step - 1]):.1f}"


@given(low=st.floats(-100, 100), span=st.floats(0.01, 1000))
def test_a_scale_holds_its_values_in_few_round_steps(low: float, span: float) -> None:
    bottom, top, step = report.round_scale(low, low + span)
    assert bottom <= low + 1e-6 * step
    assert top >= low + span - 1e-6 * step
    assert f"{step:.3e}"[:5] in ("1.000", "2.000", "5.000")
    assert 2 <= round((top - bottom) / step) <= 8


def figures(results: dict[str, Any]) -> str:
    from rich.console import Console

    console = Console(width=200)
    with console.capture() as capture:
        console.print(report.summary(results))
    return "\n".join(line.rstrip() for line in capture.get().splitlines())


def test_the_figures() -> None:
    assert (
        figures(results_of([7.0, 4.0], [7.0, 4.0 * (1 + 1e-7)]))
        == """\
grid                stage 2 x data 2 x model 2 on 8 cpu devices, 1f1b(microbatches=4)
model               GPT of 4 blocks, 650,304 parameters
speed               200 ms a step, 10,000 tokens/s; the first step 9.0 s
one device          100 ms a step; the first step 3.0 s
bubble              20.0 % of the stages' time in the measured step
loss                4.1000 nats per token, the mean of the last 2 of 2 steps; the text's unigram entropy is 6.1900
largest difference  1.0e-07 relative to the loss on one device, over 2 steps: within 1e-04
files               out/demo/loss.svg"""
    )


@pytest.mark.parametrize(
    ("one_device", "words"),
    [([7.0, 4.1], "over 2 steps: above 1e-04"), ([7.0, math.nan], "nan"), ([], "stopped before the one-device run")],
)
def test_a_difference_that_is_large_or_unknown_is_said(one_device: list[float], words: str) -> None:
    results = results_of([7.0, 4.0], one_device)
    if one_device:
        results["max_relative_difference"] = float(np.max(report.relative_differences([7.0, 4.0], one_device)))
    shown = figures(results)
    assert words in shown
    assert "within" not in shown


@pytest.mark.parametrize(
    ("losses", "one_device", "last_loss", "said"),
    [
        ([7.0] * 3, [7.0] * 3, 7.0, []),
        ([7.0] * 3, [], 7.0, []),  # stopped: nothing to compare with
        ([7.0] * 3, [7.0, 7.0, 7.001], 7.0, ["the largest relative difference from one device is 1.4e-04"]),
        ([7.0, math.nan], [7.0, 7.0], math.nan, ["the largest relative difference from one device is nan"]),
        ([7.0] * 199, [7.0] * 199, 6.19, []),
        ([7.0] * 200, [7.0] * 200, 6.18, []),
        ([7.0] * 200, [7.0] * 200, 6.19, ["the last loss is 6.1900"]),
        ([7.0] * 200, [7.1] * 200, math.nan, ["the largest relative difference", "the last loss is nan"]),
    ],
)
def test_what_is_wrong_is_said_and_is_the_exit_status(
    losses: list[float],
    one_device: list[float],
    last_loss: float,
    said: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    results = results_of(losses, one_device) | {"last_loss": last_loss}
    if one_device:
        results["max_relative_difference"] = float(np.max(report.relative_differences(losses, one_device)))
    found = failures(results)
    assert len(found) == len(said)
    assert all(line.startswith(start) for line, start in zip(found, said))
    monkeypatch.setattr("oneflax.demo.main", lambda words: results)
    assert cli.main(["demo"]) == int(bool(said))
    assert capsys.readouterr().err.splitlines() == [f"oneflax demo: {line}" for line in found]


def test_the_results_are_strict_json() -> None:
    results = results_of([7.0, math.nan, math.inf], [7.0, 6.0, -math.inf]) | {"max_relative_difference": math.nan}

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    read = json.loads(strict_json(results), parse_constant=refuse)
    assert read["losses"] == [7.0, None, None]
    assert read["one_device_losses"] == [7.0, 6.0, None]
    assert read["max_relative_difference"] is None
    assert read["grid"] == results["grid"]
    assert read["files"] == results["files"]


# ---- the whole, each in a process of its own ----


def environment() -> dict[str, str]:
    """This process's, without the number of devices and threads: the demo sets them."""
    return {name: value for name, value in os.environ.items() if name not in ("XLA_FLAGS", "NPROC")}


def command(out: Path, *flags: str) -> list[str]:
    return [sys.executable, "-m", "oneflax", "demo", "--out", str(out), *flags]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "grid"),
    [
        ("--devices 1 --microbatches 2", "stage 1 x data 1 x model 1"),
        ("--devices 2 --schedule gpipe --batch 16", "stage 2 x data 1 x model 1"),
        ("", "stage 2 x data 2 x model 2"),
    ],
)
def test_the_demo_trains_as_one_device_does(flags: str, grid: str, tmp_path: Path) -> None:
    done = subprocess.run(
        command(tmp_path, "--steps", "3", *flags.split()),
        capture_output=True, text=True, cwd=ROOT, env=environment(), timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["grid"] == grid
    assert len(results["losses"]) == len(results["one_device_losses"]) == 3
    assert results["losses"][-1] < results["losses"][0]
    assert results["max_relative_difference"] < 1e-5
    staged = not grid.startswith("stage 1 ")
    assert (tmp_path / "pipeline.svg").exists() == (tmp_path / "pipeline.trace.json").exists() == staged
    for name in results["files"].values():
        if name.endswith(".svg"):
            ElementTree.parse(name)
        assert Path(name).stat().st_size > 0
    assert "blocks/3/mlp/up/kernel" in (tmp_path / "explain.txt").read_text()
    assert "step 3/3" in done.stdout
    assert "what the model writes" in done.stdout


@pytest.mark.slow
def test_the_demo_learns_and_stays_with_one_device(tmp_path: Path) -> None:
    """The defaults, with only as many steps as it takes to be below the entropy."""
    done = subprocess.run(
        command(tmp_path, "--steps", "60"),
        capture_output=True, text=True, cwd=ROOT, env=environment(), timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["grid"] == "stage 2 x data 2 x model 2"
    assert len(results["losses"]) == len(results["one_device_losses"]) == 60
    assert results["max_relative_difference"] <= 1e-4
    assert results["last_loss"] < results["unigram_entropy"]


@pytest.mark.slow
def test_ctrl_c_ends_the_training_and_still_reports(tmp_path: Path) -> None:
    process = subprocess.Popen(
        command(tmp_path, "--devices", "2", "--steps", "100000"),
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT, env=environment(),
    )  # fmt: skip
    assert process.stdout is not None
    assert any("step 1/" in line for line in process.stdout)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=200)
    assert process.returncode == 0, err
    assert "stopping after this step" in err
    assert "stopped before the one-device run" in " ".join(out.split())
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["max_relative_difference"] is None
    assert 1 <= len(results["losses"]) < 100000
