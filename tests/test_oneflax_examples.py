"""The examples run, and learn what they say."""

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"


def run(name: str, *argv: str) -> dict[str, Any]:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.main(list(argv))


@pytest.mark.slow
def test_stage_marks_gives_the_losses_of_one_device() -> None:
    staged = run("stage_marks", "--steps", "10")["losses"]
    single = run("stage_marks", "--steps", "10", "--stages", "1")["losses"]
    np.testing.assert_allclose(staged, single, rtol=1e-5)
    assert staged[-1] < staged[0] / 2
