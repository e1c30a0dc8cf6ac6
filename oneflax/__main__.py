"""The command line: ``python -m oneflax COMMAND``, installed as ``oneflax``.

A command's module loads when the command runs, so that help, version and ``schedule`` start no jax.
"""

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from oneflax.sbp.errors import Fault, FlowError

from ._version import VERSION

USER_ERROR = 2  # argparse's status for a wrong command line
INTERRUPTED = 130  # what a shell reports after Ctrl-C


@dataclass(frozen=True, slots=True)
class Command:
    """A subcommand: its line in the help, and what runs it. `run` takes the remaining words, gives the exit status."""

    summary: str
    run: Callable[[list[str]], int]


def demo(words: list[str]) -> int:
    """Trains a small model; flags and work are in ``oneflax.demo``. Says what is wrong with the results."""
    from .demo import failures
    from .demo import main as run_demo

    wrong = failures(run_demo(words))
    for line in wrong:
        print(f"oneflax demo: {line}", file=sys.stderr)
    return int(bool(wrong))


def doctor(words: list[str]) -> int:
    """Reports on this machine; flags and work are in ``oneflax.doctor``."""
    from .doctor import main as run_doctor

    return run_doctor(words)


def schedule_parser() -> argparse.ArgumentParser:
    """The flags of ``oneflax schedule``."""
    parser = argparse.ArgumentParser(prog="oneflax schedule", description="Lay a pipeline schedule out and print it.")
    parser.add_argument("name", metavar="NAME", help="gpipe, 1f1b, ...: an unknown name lists those that exist")
    parser.add_argument("--workers", type=int, default=4, metavar="P", help="workers (default: 4)")
    parser.add_argument("--microbatches", type=int, default=8, metavar="M", help="microbatches (default: 8)")
    parser.add_argument("--csv", type=Path, metavar="FILE", help="write the schedule table: a row for each worker")
    parser.add_argument("--svg", type=Path, metavar="FILE", help="draw the schedule table")
    return parser


def schedule(words: list[str]) -> int:
    """Prints a schedule table, and writes it as CSV or SVG."""
    options = schedule_parser().parse_args(words)
    from oneflax.pipeline.schedules import by_name

    table = by_name(options.name, microbatches=options.microbatches).table(options.workers)
    table.validate()
    print(table)
    try:
        if options.csv:
            table.to_csv(options.csv)
        if options.svg:
            table.to_svg(options.svg)
    except OSError as error:
        fault = Fault("oneflax schedule", f"cannot write {error.filename}: {error.strerror}.")
        raise FlowError(fault) from error
    return 0


COMMANDS = {
    "demo": Command("train a small model with data, tensor and pipeline parallelism, and check the result", demo),
    "doctor": Command("versions, devices, memory, and settings that will bite, each with its mend", doctor),
    "schedule": Command("print a pipeline schedule as a table; write it as CSV or SVG", schedule),
}


def parser() -> argparse.ArgumentParser:
    """The flags that stand before any command."""
    width = max(map(len, COMMANDS))
    listing = "\n".join(f"  {name:<{width}}  {command.summary}" for name, command in COMMANDS.items())
    top = argparse.ArgumentParser(
        prog="oneflax",
        usage="oneflax [-h] [--version] COMMAND ...",
        description="OneFlow's placement and SBP semantics over JAX and Flax.",
        epilog=f"commands:\n{listing}\n\n'oneflax COMMAND --help' shows a command's flags.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    top.add_argument("--version", action="version", version=f"oneflax {VERSION}")
    return top


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command.

    Args:
        argv: The words after the program's name; by default those of this process.

    Returns:
        The exit status: 0 done, 1 the command found something wrong, 2 a user's mistake (its message is on stderr).
    """
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0].startswith("-"):
        top = parser()
        top.parse_args(words)
        top.print_help()
        return 0
    try:  # everything after the command's name is the command's own
        return _command(words[0]).run(words[1:])
    except FlowError as error:
        print(error, file=sys.stderr)
        return USER_ERROR
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:  # the reader of our output, such as `head`, has left
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _command(name: str) -> Command:
    return COMMANDS[name] if name in COMMANDS else _unknown(name)


def _unknown(name: str) -> NoReturn:
    from difflib import get_close_matches

    near = get_close_matches(name, COMMANDS, n=1)
    what = f"there is no command {name!r}; there are {', '.join(COMMANDS)}."
    raise FlowError(Fault("oneflax", what, mend=f"oneflax {near[0] if near else '--help'}"))


if __name__ == "__main__":
    sys.exit(main())
