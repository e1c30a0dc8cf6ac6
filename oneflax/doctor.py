"""``oneflax doctor``: versions, devices, memory, what is missing, and settings that will bite, each with its mend.

Every check is a pure function from the facts about a machine (:class:`oneflax._machine.Machine`) to findings.
"""

import argparse
import dataclasses
import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from ._machine import EXTRA_MODULES, PACKAGES, Machine, gather

SUPPORTED: dict[str, tuple[str, str | None]] = {
    "python": ("3.11", None),
    "jax": ("0.10.2", "0.13"),
    "jaxlib": ("0.10.2", "0.13"),
    "flax": ("0.12.8", None),
    "optax": ("0.2.8", None),
    "orbax-checkpoint": ("0.12.8", None),
    "numpy": ("2.0", None),
    "rich": ("13.7", None),
}
"""Distribution → (lowest version, first version that is too new or None): the same ranges as in ``pyproject.toml``."""

DEVICE_COUNT_FLAG = "--xla_force_host_platform_device_count"
CUDA13_DRIVER = 580  # NVIDIA's lowest driver branch for CUDA 13
LOW_MEMORY_BYTES = 2 * 2**30  # compiling a small model with jax and flax loaded takes about 1 GiB
SAFE_THREADS_PER_DEVICE = 4  # jax 0.10, 8 CPU devices: queued collectives passed with 32 threads from two dispatchers
UNSAFE_THREADS_PER_DEVICE = 2  # the same with one dispatcher: passed with 16 threads, stuck with 8
FIXED_DEADLOCK = (0, 12)  # from this jax on the same programs finished with any number of threads

Level = Literal["bites", "note"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing to know about a machine.

    Args:
        level: ``"bites"``: it will fail, hang, or give something else than asked for. ``"note"``: good to know.
        what: What is so, and what comes of it.
        mend: What to do, as a command where possible.
    """

    level: Level
    what: str
    mend: str = ""

    def __str__(self) -> str:
        return f"{self.level}: {self.what}" + (f"\n  Mend: {self.mend}" if self.mend else "")


Check = Callable[[Machine], Iterator[Finding]]


def numbers(version: str) -> tuple[int, ...]:
    """The release numbers a version starts with: ``"0.12.0rc1"`` → ``(0, 12, 0)``."""
    match = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, match[0].split("."))) if match else ()


def supported(name: str, version: str) -> bool:
    """Whether `version` of a distribution is in the range that oneflax is tested with."""
    lowest, too_new = SUPPORTED.get(name, ("0", None))
    return numbers(lowest) <= numbers(version) and (too_new is None or numbers(version) < numbers(too_new))


def range_text(name: str) -> str:
    """The supported range as pip writes it: ``"jax>=0.10.2,<0.13"``."""
    lowest, too_new = SUPPORTED[name]
    return f"{name}>={lowest}" + (f",<{too_new}" if too_new else "")


def install_command(machine: Machine, extra: str) -> str:
    """The pip command that adds an extra to the running oneflax."""
    target = f'--editable "{machine.source_tree}[{extra}]"' if machine.source_tree else f'"oneflax[{extra}]"'
    return f"python -m pip install {target}"


def missing_modules(machine: Machine, extra: str) -> list[str]:
    """Those modules of an extra that are not installed."""
    return [module for module in EXTRA_MODULES[extra] if module in machine.missing]


def _on(machine: Machine, name: str) -> bool:
    """Whether a boolean setting is on, read as jax reads it."""
    return machine.environment.get(name, "").lower() in ("y", "yes", "t", "true", "on", "1")


def _jax_types(machine: Machine) -> set[str]:
    return {device.type for device in machine.devices}


def _jax_numbers(machine: Machine) -> tuple[int, ...]:
    return numbers(machine.versions.get("jax") or "")


def check_versions(machine: Machine) -> Iterator[Finding]:
    """Python and every dependency is there and in range; jax and jaxlib are of one release."""
    python = ".".join(map(str, machine.python))
    if not supported("python", python):
        yield Finding("bites", f"Python {python} is too old; oneflax needs {range_text('python')}.")
    for name in PACKAGES[1:]:
        version = machine.versions.get(name)
        mend = f'python -m pip install "{range_text(name)}"'
        if version is None:
            yield Finding("bites", f"{name} is not installed.", mend)
        elif not supported(name, version):
            yield Finding("bites", f"{name} {version} is outside the supported range {range_text(name)}.", mend)


def check_jax_answers(machine: Machine) -> Iterator[Finding]:
    """Jax imports and finds its devices."""
    if not machine.jax_error or not machine.versions.get("jax"):
        return
    suspects = [name for name in ("JAX_PLATFORMS", "XLA_FLAGS") if machine.environment.get(name)]
    given = " with " + " and ".join(f"{name}={machine.environment[name]}" for name in suspects) if suspects else ""
    said = machine.jax_error.replace("\n", "\n    ")
    if suspects:
        mend = f"unset {' '.join(suspects)}"
    elif machine.devices_timed_out:
        mend = "export JAX_PLATFORMS=cpu works without the device; --timeout gives it longer."
    else:
        mend = f'python -m pip install --force-reinstall "{range_text("jax")}"'
    yield Finding("bites", f"jax does not start{given}. It said:\n    {said}", mend)


def check_thread_pool(machine: Machine) -> Iterator[Finding]:
    """Jax 0.10 stops for ever when queued collectives of many CPU devices fill a small thread pool."""
    devices = len(machine.devices)
    if _jax_types(machine) != {"cpu"} or devices < 2 or _jax_numbers(machine) >= FIXED_DEADLOCK:
        return
    given = machine.environment.get("NPROC", "")
    threads = int(given) if given.isdecimal() else machine.cores
    if threads >= SAFE_THREADS_PER_DEVICE * devices:
        return
    source = f"NPROC={given}" if given.isdecimal() else f"{threads} CPU cores, NPROC unset"
    yield Finding(
        "bites" if threads < UNSAFE_THREADS_PER_DEVICE * devices else "note",
        f"{devices} virtual CPU devices on {threads} threads ({source}): with several collectives in flight jax "
        f"{machine.versions['jax']} can wait for ever for its own threads, then aborts the process.",
        f"export NPROC={max(32, SAFE_THREADS_PER_DEVICE * devices)}",
    )


def check_x64(machine: Machine) -> Iterator[Finding]:
    """64-bit requests give 32-bit arrays unless x64 is on."""
    if machine.x64 is False:
        what = "64-bit types are off: asking for int64 or float64 gives int32 or float32."
        yield Finding("note", what, "export JAX_ENABLE_X64=1")


def check_gpu_unused(machine: Machine) -> Iterator[Finding]:
    """An NVIDIA GPU is there, and jax runs on the CPU."""
    forced = machine.environment.get("JAX_PLATFORMS", "").lower()
    hidden = machine.environment.get("CUDA_VISIBLE_DEVICES", "0").strip() in ("", "-1")
    if not machine.gpus or _jax_types(machine) != {"cpu"} or hidden or forced == "cpu":
        return
    gpu = machine.gpus[0]
    driver = numbers(gpu.driver)
    fitting = "cuda13" if driver and driver[0] >= CUDA13_DRIVER else "cuda12"
    installed = [extra for extra in ("cuda12", "cuda13") if not missing_modules(machine, extra)]
    what = f"a GPU is here ({gpu.name}{gpu.driver and ', driver ' + gpu.driver}), but jax runs on the CPU"
    if installed:
        mend = "python -c 'import jax; jax.devices(\"cuda\")' says why."
        yield Finding("bites", f"{what}, although the plugin of {installed[0]} is installed.", mend)
    else:
        yield Finding("bites", f"{what}.", install_command(machine, fitting))


def check_gpu_memory(machine: Machine) -> Iterator[Finding]:
    """How much of a GPU's memory jax takes, and whether the settings for it can be read."""
    names = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")
    given = {name: machine.environment[name] for name in names if machine.environment.get(name)}
    if not machine.gpus and "gpu" not in _jax_types(machine):
        return
    if len(given) == 2:
        yield Finding("bites", f"{names[0]} and {names[1]} are both set: jax refuses its GPUs.", f"unset {names[1]}")
    for name, text in given.items():
        if not re.fullmatch(r"\d*\.?\d+", text.strip()):
            yield Finding("bites", f"{name}={text} is not a number: jax refuses its GPUs.", f"export {name}=0.75")
    preallocate = machine.environment.get("XLA_PYTHON_CLIENT_PREALLOCATE", "").lower() not in ("0", "false")
    if "gpu" in _jax_types(machine) and preallocate and not given:
        what = "jax takes 75 % of each GPU's memory when it starts: a second process on the same GPU runs out of it."
        mend = "to share a GPU: export XLA_PYTHON_CLIENT_PREALLOCATE=false, or XLA_CLIENT_MEM_FRACTION=0.4."
        yield Finding("note", what, mend)


def check_platforms(machine: Machine) -> Iterator[Finding]:
    """JAX_PLATFORMS decides what jax may use."""
    forced = machine.environment.get("JAX_PLATFORMS", "")
    if forced and not machine.jax_error:
        unused = ", though a GPU is here" if machine.gpus and forced.lower() == "cpu" else ""
        yield Finding("note", f"JAX_PLATFORMS={forced}: jax uses nothing else{unused}.", "unset JAX_PLATFORMS")


def check_xla_flags(machine: Machine) -> Iterator[Finding]:
    """XLA_FLAGS parses, and asks for one number of devices once."""
    text = machine.environment.get("XLA_FLAGS", "")
    flags = text.split()
    if flags and not flags[0].startswith("--"):
        what = f"XLA_FLAGS={text} does not start with --, so XLA takes it for a file's name and aborts."
        yield Finding("bites", what, f"export XLA_FLAGS=--{text}")
    counts = [flag.partition("=")[2] for flag in flags if flag.startswith(DEVICE_COUNT_FLAG)]
    if len(counts) > 1:
        level: Level = "bites" if len(set(counts)) > 1 else "note"
        what = f"XLA_FLAGS gives {DEVICE_COUNT_FLAG} {len(counts)} times ({', '.join(counts)}): the last one counts."
        yield Finding(level, what, "keep one of them.")
    configured = machine.environment.get("JAX_NUM_CPU_DEVICES", "")
    if counts and configured and configured != counts[-1]:
        what = f"JAX_NUM_CPU_DEVICES={configured} and {DEVICE_COUNT_FLAG}={counts[-1]} differ: the first one counts."
        yield Finding("bites", what, "keep one of them.")


def check_compilation_cache(machine: Machine) -> Iterator[Finding]:
    """Compiled programs are kept between runs, in a folder that can be written."""
    mend = "export JAX_COMPILATION_CACHE_DIR=$HOME/.cache/jax"
    if not machine.cache_dir:
        yield Finding("note", "JAX_COMPILATION_CACHE_DIR is unset: every run compiles everything again.", mend)
    elif not machine.cache_writable:
        what = f"the compilation cache {machine.cache_dir} cannot be written: every run compiles everything again."
        yield Finding("bites", what, mend)


def check_jit(machine: Machine) -> Iterator[Finding]:
    """Jit is on."""
    if _on(machine, "JAX_DISABLE_JIT"):
        what = "JAX_DISABLE_JIT is on: nothing compiles, so every operation of a step is dispatched by itself."
        yield Finding("bites", what, "unset JAX_DISABLE_JIT")


def check_installs(machine: Machine) -> Iterator[Finding]:
    """One copy of oneflax."""
    if len(machine.installs) > 1:
        what = "several copies of oneflax can be imported, and the working folder decides which: " + ", ".join(
            f"{folder} (running)" if i == 0 else folder for i, folder in enumerate(machine.installs)
        )
        yield Finding("bites", what + ".", "python -m pip uninstall oneflax, then install the one you want.")


def check_memory(machine: Machine) -> Iterator[Finding]:
    """Enough host memory to compile in."""
    free = machine.free_memory_bytes
    if free is not None and free < LOW_MEMORY_BYTES:
        what = f"only {gib(free)} of host memory is free: compiling a model may be killed."
        yield Finding("bites", what, "close other programs, or raise the container's memory limit.")


CHECKS: tuple[Check, ...] = (
    check_versions,
    check_jax_answers,
    check_xla_flags,
    check_platforms,
    check_thread_pool,
    check_gpu_unused,
    check_gpu_memory,
    check_jit,
    check_installs,
    check_memory,
    check_compilation_cache,
    check_x64,
)


def diagnose(machine: Machine) -> tuple[Finding, ...]:
    """All findings of all checks, those that bite first."""
    findings = [finding for check in CHECKS for finding in check(machine)]
    return tuple(sorted(findings, key=lambda finding: finding.level != "bites"))


def status(findings: Sequence[Finding]) -> int:
    """The exit status: 1 when something will bite."""
    return int(any(finding.level == "bites" for finding in findings))


def gib(size_bytes: int) -> str:
    """``"12.3 GiB"``."""
    return f"{size_bytes / 2**30:.1f} GiB"


def sections(machine: Machine) -> list[tuple[str, list[tuple[str, ...]]]]:
    """The report's tables, before any drawing: title and rows of cells."""
    python = ".".join(map(str, machine.python))
    versions = [("python", python, "" if supported("python", python) else f"needs {range_text('python')}")]
    for name in PACKAGES:
        version = machine.versions.get(name)
        fits = version is not None and supported(name, version)
        versions.append((name, version or "missing", "" if fits else f"needs {range_text(name)}"))
    memory = machine.free_memory_bytes
    host = [
        ("system", machine.system),
        ("cores", str(machine.cores)),
        ("free memory", gib(memory) if memory is not None else "unknown"),
        ("processes", str(machine.processes)),
        *((f"GPU {i}", f"{gpu.name} {gpu.driver}".strip()) for i, gpu in enumerate(machine.gpus)),
    ]
    extras = [
        (extra, f"missing {', '.join(lacking)}", install_command(machine, extra)) if lacking else (extra, "present", "")
        for extra in EXTRA_MODULES
        for lacking in [missing_modules(machine, extra)]
    ]
    return [
        ("Versions", versions),
        ("Machine", host),
        ("Devices", _device_rows(machine)),
        ("Settings", [(name, value) for name, value in machine.environment.items()] or [("none is set",)]),
        ("Extras", extras),
    ]


def _device_rows(machine: Machine) -> list[tuple[str, ...]]:
    """One row for all devices of a kind: type, count, kind, memory of each."""
    kinds = dict.fromkeys(machine.devices)
    rows: list[tuple[str, ...]] = [
        (d.type, f"x {machine.devices.count(d)}", d.kind, gib(d.memory_bytes) if d.memory_bytes else "") for d in kinds
    ]
    return rows or [("none: jax does not start",)]


def report_text(machine: Machine, findings: Sequence[Finding]) -> str:
    """The report as plain text, its columns lined up."""
    blocks: list[str] = []
    for title, rows in sections(machine):
        widths = [max(len(row[i]) for row in rows if len(row) > i) for i in range(max(map(len, rows)))]
        lines = ["  " + "  ".join(f"{cell:<{widths[i]}}" for i, cell in enumerate(row)).rstrip() for row in rows]
        blocks.append("\n".join([title, *lines]))
    blocks.append("\n".join(map(str, findings)) or "Nothing to mend.")
    return "\n\n".join(blocks)


def print_report(machine: Machine, findings: Sequence[Finding]) -> None:
    """Prints the report in colour where the terminal has it; as plain text without rich."""
    try:
        from rich.console import Console
        from rich.text import Text
    except ImportError:
        print(report_text(machine, findings))
        return
    text = Text(report_text(machine, findings))
    text.highlight_regex(r"(?m)^bites:|\bmissing\b|\bneeds .*$", "bold red")
    text.highlight_regex(r"(?m)^note:", "yellow")
    text.highlight_regex(r"(?m)^(Versions|Machine|Devices|Settings|Extras)$", "bold")
    text.highlight_regex(r"(?m)^  Mend: .*$", "green")
    Console(soft_wrap=True).print(text)


def report_json(machine: Machine, findings: Sequence[Finding]) -> str:
    """The facts and the findings, for programs."""
    facts = dataclasses.asdict(machine) | {"missing": sorted(machine.missing)}
    return json.dumps({"machine": facts, "findings": [dataclasses.asdict(f) for f in findings]}, indent=2)


def parser() -> argparse.ArgumentParser:
    """The flags of ``oneflax doctor``."""
    flags = argparse.ArgumentParser(
        prog="oneflax doctor",
        description="Report versions, devices, memory, and settings that will bite. Exit status 1 when one will.",
    )
    flags.add_argument("--json", action="store_true", help="print facts and findings as JSON")
    flags.add_argument(
        "--timeout", type=float, default=60.0, metavar="S", help="seconds jax may take to find its devices"
    )
    return flags


def main(argv: Sequence[str] | None = None) -> int:
    """Looks, reports, and gives the exit status."""
    options = parser().parse_args(argv)
    machine = gather(options.timeout)
    findings = diagnose(machine)
    if options.json:
        print(report_json(machine, findings))
    else:
        print_report(machine, findings)
    return status(findings)
