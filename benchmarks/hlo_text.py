"""A compiled program's text without names and source positions, so that two programs compare line by line."""

import collections
import difflib
import re
from collections.abc import Iterator, Mapping, Sequence

_METADATA = re.compile(r',? metadata=\{(?:"(?:[^"\\]|\\.)*"|[^"}])*\}')
_TABLES = ("FileNames", "FunctionNames", "FileLocations", "StackFrames")
_MODULE = re.compile(r"^HloModule [\w.-]+")
_COMPUTATION = re.compile(r"^(?:ENTRY )?(%[\w.-]+) .*\{$")
_PARAMETER = re.compile(r"(?<=[(, ])[\w.-]+: ")  # in a computation's first line: (x.1: f32[], y.2: f32[])
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?(%[\w.-]+) = .*? ([\w-]+)\(")
_NAME = re.compile(r"%[\w.-]+")


def canonical(text: str) -> list[str]:
    """The lines of ``compiled.as_text()`` with everything in them but names, metadata and source positions.

    Instructions are numbered by operation within their computation and computations in their order, so that one line
    more leaves most of the others as they are. Layouts, constants, replica groups, channels, fusion bodies, aliases
    and backend settings stay.
    """
    lines = list(_without_positions(text))
    headers = [found[1] for line in lines if (found := _COMPUTATION.match(line))]
    computations = {name: f"%computation.{i}" for i, name in enumerate(headers)}
    out: list[str] = []
    for block in _blocks(lines):
        names = computations | _numbered(block)
        out += [_renamed(line, names) for line in block]
    return out


def differences(ours: Sequence[str], theirs: Sequence[str]) -> list[str]:
    """The lines that only one of two canonical programs has, in order: ``+`` is in ours, ``-`` in theirs."""
    if ours == theirs:  # difflib takes long on what it need not see
        return []
    lines = difflib.unified_diff(theirs, ours, lineterm="", n=0)
    return [line for line in list(lines)[2:] if not line.startswith("@@")]


def _without_positions(text: str) -> Iterator[str]:
    """The lines without metadata and names of parameters, and without the tables of source positions at the top."""
    in_table = False
    for line in text.splitlines():
        in_table = bool(line.strip()) and (in_table or line.strip() in _TABLES)
        if in_table or not line.strip():
            continue
        line = _MODULE.sub("HloModule", _METADATA.sub("", line))
        yield _PARAMETER.sub("", line) if _COMPUTATION.match(line) else line


def _blocks(lines: Sequence[str]) -> Iterator[list[str]]:
    """The module's line, then each computation's lines."""
    block: list[str] = []
    for line in lines:
        if _COMPUTATION.match(line):
            yield block
            block = []
        block.append(line)
    yield block


def _renamed(line: str, names: Mapping[str, str]) -> str:
    return _NAME.sub(lambda name: names[name[0]], line)


def _numbered(block: Sequence[str]) -> dict[str, str]:
    """A new name for each instruction of a computation: its operation, and how many of them came before."""
    counts: collections.Counter[str] = collections.Counter()
    names: dict[str, str] = {}
    for line in block:
        if found := _INSTRUCTION.match(line):
            names[found[1]] = f"%{found[2]}.{counts[found[2]]}"
            counts[found[2]] += 1
    return names
