"""The demo with its defaults, as a process of its own: how long a user waits, and what comes of it."""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.timing import Row
from oneflax._demo_report import LIMIT


def main() -> list[Row]:
    """Runs ``python -m oneflax demo`` and reads its results."""
    # The demo chooses the number of devices and threads itself.
    environment = {name: value for name, value in os.environ.items() if name not in ("XLA_FLAGS", "NPROC")}
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        command = [sys.executable, "-m", "oneflax", "demo", "--out", folder]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        seconds = time.perf_counter() - start
        if done.returncode not in (0, 1):  # 1: it ran, and found something wrong; the rows say what
            raise RuntimeError(done.stderr)
        results = json.loads(Path(folder, "results.json").read_text(encoding="utf-8"))
    figures = (results["max_relative_difference"], results["last_loss"])
    apart, loss = (float("nan") if figure is None else figure for figure in figures)
    entropy, steps = results["unigram_entropy"], len(results["losses"])
    step = f"{results['step_s'] * 1e3:.0f} ms a step, first {results['first_step_s']:.1f} s; one device "
    step += f"{results['one_device_step_s'] * 1e3:.0f} ms, first {results['one_device_first_step_s']:.1f} s"
    return [
        Row("demo: whole process", seconds, "s", 180, f"{results['grid']}, {steps} steps; {step}"),
        Row("demo: largest difference from one device", apart * 1e6, "1e-6", LIMIT * 1e6, f"over {steps} steps"),
        Row("demo: loss minus unigram entropy", loss - entropy, "nats", 0, f"{loss:.3f} - {entropy:.3f}"),
    ]
