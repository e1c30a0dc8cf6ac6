"""Every block of README and docs that claims to run does run, and prints what the page says."""

import doctest
import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
MODULES = sorted(
    f"oneflax{'.' + package if package else ''}.{path.stem}"
    for package, folder in (("", "oneflax"), ("sbp", "sbp"), ("pipeline", "pipeline"), ("flax", "oneflax/flax"))
    for path in (ROOT / folder).glob("*.py")
    if path.stem not in ("__init__", "__main__")
)


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


@pytest.mark.slow
@pytest.mark.newest
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_python_blocks_run_one_after_another(page: Path) -> None:
    space: dict[str, object] = {"__name__": "__main__"}
    for block in blocks(page, "python"):
        exec(compile(block, str(page), "exec"), space)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_print_what_the_page_shows(page: Path) -> None:
    for block in blocks(page, "console"):
        command, _, shown = block.partition("\n")
        words = command.removeprefix("$ ").split()
        assert words[:3] == ["python", "-m", "oneflax"], "a console block shows one oneflax command"
        env = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "120"}
        shown_now = subprocess.check_output([sys.executable, *words[1:]], text=True, env=env, timeout=60)
        assert shown_now == shown


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_and_pictures_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text(encoding="utf-8")):
        assert (page.parent / target).exists(), target


@pytest.mark.parametrize("name", MODULES)
def test_docstring_examples(name: str) -> None:
    failed, _ = doctest.testmod(importlib.import_module(name), optionflags=doctest.NORMALIZE_WHITESPACE)
    assert failed == 0


def test_every_example_has_a_test_and_a_main() -> None:
    here = Path(__file__).parent
    tests = "\n".join(path.read_text(encoding="utf-8") for path in here.glob("test_*.py"))
    for path in (ROOT / "examples").glob("*.py"):
        assert "def main(argv: list[str]) -> dict" in path.read_text(encoding="utf-8"), path.name
        assert path.stem in tests, f"{path.name} has no test"
