"""The command line: what it prints, its exit status, and that help and schedules load no jax."""

import csv
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import pytest

from oneflax import __main__ as cli
from oneflax.sbp.errors import Fault, FlowError

ROOT = Path(__file__).parents[1]
HELP = """\
usage: oneflax [-h] [--version] COMMAND ...

OneFlow's placement and SBP semantics over JAX and Flax.

options:
  -h, --help  show this help message and exit
  --version   show program's version number and exit

commands:
  demo      train a small model with data, tensor and pipeline parallelism, and check the result
  doctor    versions, devices, memory, and settings that will bite, each with its mend
  schedule  print a pipeline schedule as a table; write it as CSV or SVG

'oneflax COMMAND --help' shows a command's flags.
"""


def oneflax(*words: str) -> subprocess.CompletedProcess[str]:
    """Runs ``python -m oneflax`` in a process of its own."""
    command = [sys.executable, "-m", "oneflax", *words]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=120)


@pytest.mark.parametrize("words", [[], ["--help"], ["-h"]])
def test_help(words: list[str]) -> None:
    run = oneflax(*words)
    assert (run.returncode, run.stdout, run.stderr) == (0, HELP, "")


def test_version() -> None:
    run = oneflax("--version")
    assert (run.returncode, run.stdout, run.stderr) == (0, "oneflax 0.1.0\n", "")


@pytest.mark.parametrize(
    ("name", "mend"), [("docter", "oneflax doctor"), ("Schedule", "oneflax schedule"), ("zzz", "oneflax --help")]
)
def test_unknown_command_names_the_nearest(name: str, mend: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([name]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err == f"oneflax: there is no command {name!r}; there are demo, doctor, schedule.\n  Mend: {mend}\n"


def test_unknown_flag(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(["--nope"])
    assert end.value.code == 2
    assert "unrecognized arguments: --nope" in capsys.readouterr().err


def _raising(error: BaseException) -> Callable[[list[str]], int]:
    def run(words: list[str]) -> int:
        raise error

    return run


def test_a_user_s_mistake_is_a_message_not_a_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    error = FlowError(Fault("demo(devices=)", "3 devices do not split.", mend="--devices 4"))
    monkeypatch.setitem(cli.COMMANDS, "demo", cli.Command("", _raising(error)))
    assert cli.main(["demo"]) == 2
    assert capsys.readouterr().err == "demo(devices=): 3 devices do not split.\n  Mend: --devices 4\n"


def test_our_own_mistake_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(cli.COMMANDS, "demo", cli.Command("", _raising(AssertionError("ours"))))
    with pytest.raises(AssertionError, match="ours"):
        cli.main(["demo"])


def test_ctrl_c_ends_quietly(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(cli.COMMANDS, "demo", cli.Command("", _raising(KeyboardInterrupt())))
    assert cli.main(["demo"]) == 130
    assert capsys.readouterr() == ("", "")


def test_a_command_gets_its_own_words_and_gives_the_exit_status(monkeypatch: pytest.MonkeyPatch) -> None:
    got: list[list[str]] = []

    def run(words: list[str]) -> int:
        got.append(words)
        return 7

    monkeypatch.setitem(cli.COMMANDS, "demo", cli.Command("", run))
    assert cli.main(["demo", "--help", "-h", "--version", "x"]) == 7
    assert got == [["--help", "-h", "--version", "x"]]


@pytest.mark.parametrize("command", sorted(cli.COMMANDS))
def test_every_command_shows_its_flags(command: str) -> None:
    run = oneflax(command, "--help")
    assert run.returncode == 0, run.stderr
    assert f"usage: oneflax {command}" in run.stdout


def test_a_reader_that_leaves_is_no_error() -> None:
    command = f"{sys.executable} -m oneflax schedule 1f1b --workers 4 --microbatches 400 | head -c 1 >/dev/null"
    run = subprocess.run(["sh", "-c", command], capture_output=True, text=True, cwd=ROOT, timeout=120)
    assert run.stderr == ""


def test_schedule_prints_the_table() -> None:
    run = oneflax("schedule", "1f1b", "--workers", "2", "--microbatches", "2")
    assert run.returncode == 0, run.stderr
    # 1F1B by hand for 2 workers: the first runs one forward ahead, the last alternates.
    for row in (["0F0", "0F1", "0B0", "0B1"], ["1F0", "1B0", "1F1", "1B1"]):
        line = next(line for line in run.stdout.splitlines() if row[0] in line)
        assert [line.index(action) for action in row] == sorted(line.index(action) for action in row)


def test_schedule_writes_csv_and_svg(tmp_path: Path) -> None:
    table, picture = tmp_path / "t.csv", tmp_path / "t.svg"
    words = ["--workers", "2", "--microbatches", "2", "--csv", str(table), "--svg", str(picture)]
    run = oneflax("schedule", "gpipe", *words)
    assert run.returncode == 0, run.stderr
    cells = [[cell for cell in row if cell] for row in csv.reader(table.read_text().splitlines())]
    actions = [[cell for cell in row if cell[1:2] in "FB"] for row in cells]
    # GPipe by hand: all forwards in order, then all backwards, in the same or the opposite order.
    for stage, row in enumerate(row for row in actions if row):
        assert row[:2] == [f"{stage}F0", f"{stage}F1"]
        assert sorted(row[2:]) == [f"{stage}B0", f"{stage}B1"]
    assert ElementTree.parse(picture).getroot().tag.endswith("svg")


def test_schedule_that_is_unknown() -> None:
    run = oneflax("schedule", "1f1bb")
    assert (run.returncode, run.stdout) == (2, "")
    assert "there is no schedule '1f1bb'" in run.stderr
    assert "1f1b" in run.stderr
    assert "Traceback" not in run.stderr


@pytest.mark.parametrize("words", [["--workers", "0"], ["--microbatches", "0"], ["--csv", "/no/such/folder/t.csv"]])
def test_schedule_with_a_wrong_value(words: list[str]) -> None:
    run = oneflax("schedule", "1f1b", *words)
    assert run.returncode == 2
    assert run.stderr
    assert "Traceback" not in run.stderr


JAX = {"jax", "jaxlib", "flax", "optax", "orbax"}


@pytest.mark.parametrize(
    ("words", "heavy"),
    [
        (["--help"], JAX | {"numpy", "rich"}),
        (["schedule", "1f1b"], JAX | {"numpy", "rich"}),
        (["doctor", "--help"], JAX | {"numpy", "rich"}),
        (["demo", "--help"], JAX),
    ],
)
def test_no_jax_is_loaded(words: list[str], heavy: set[str]) -> None:
    code = (
        "import sys\n"
        "from oneflax.__main__ import main\n"
        "try: main(sys.argv[1:])\n"
        "except SystemExit as end: assert not end.code\n"
        "print('LOADED', *sorted({name.partition('.')[0] for name in sys.modules}))\n"
    )
    run = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, cwd=ROOT, timeout=60)
    last = run.stdout.splitlines()[-1:]
    assert [line.partition(" ")[0] for line in last] == ["LOADED"], run.stderr
    assert heavy & set(last[0].split()) == set()
