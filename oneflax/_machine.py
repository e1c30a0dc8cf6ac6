"""The facts that ``oneflax doctor`` judges, and how they are gathered without trusting jax to import or to answer.

jax is asked in a process of its own with a time limit: a broken install, a flag that aborts the process, or a device
driver that hangs is then a fact like any other.
"""

import contextlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlparse

PACKAGES = ("oneflax", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy", "rich")
"""Distributions whose versions are reported, in this order."""

EXTRA_MODULES: Mapping[str, tuple[str, ...]] = {
    "cuda12": ("jax_cuda12_plugin",),
    "cuda13": ("jax_cuda13_plugin",),
    "viz": ("tensorboardX", "matplotlib"),
    "data": ("grain",),
    "examples": ("sklearn", "tokenizers"),
    "test": ("pytest", "pytest_timeout", "hypothesis", "build", "ruff", "pyright"),
}
"""Extra → the top-level modules that it brings."""

SETTINGS = (
    "CUDA_VISIBLE_DEVICES",
    "JAX_COMPILATION_CACHE_DIR",
    "JAX_DISABLE_JIT",
    "JAX_ENABLE_X64",
    "JAX_NUM_CPU_DEVICES",
    "JAX_PLATFORMS",
    "NPROC",
    "OMPI_COMM_WORLD_SIZE",
    "SLURM_NTASKS",
    "WORLD_SIZE",
    "XLA_CLIENT_MEM_FRACTION",
    "XLA_FLAGS",
    "XLA_PYTHON_CLIENT_MEM_FRACTION",
    "XLA_PYTHON_CLIENT_PREALLOCATE",
)
"""Environment variables that are read and shown."""

PROBE = """
import json
import jax
def limit(device):
    try:
        return (device.memory_stats() or {}).get("bytes_limit")
    except Exception:
        return None
print("\\noneflax-probe:" + json.dumps({
    "devices": [[d.platform, d.device_kind, limit(d)] for d in jax.devices()],
    "processes": jax.process_count(),
    "x64": bool(jax.config.jax_enable_x64),
    "cache_dir": jax.config.jax_compilation_cache_dir,
}))
"""
TIMED_OUT = "jax did not finish looking for devices"
PROBE_MARK = "oneflax-probe:"  # so that whatever else a plugin prints is not taken for the answer


@dataclass(frozen=True, slots=True)
class Device:
    """One rank's device: its type (``cpu``, ``gpu``, ``tpu``), the kind jax names, its memory where known."""

    type: str
    kind: str
    memory_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Gpu:
    """An NVIDIA GPU that the driver reports, whether or not jax uses it. `driver` is empty when unknown."""

    name: str
    driver: str = ""


@dataclass(frozen=True, slots=True)
class Machine:
    """What is known about this machine and this process's environment.

    Args:
        python: Version of the interpreter.
        system: Operating system and processor, in words.
        cores: CPU cores this process may use.
        versions: Distribution → version, None when it is not installed.
        free_memory_bytes: Host memory that programs may still take, None when unknown.
        environment: Those of :data:`SETTINGS` that are set.
        devices: jax's devices in rank order; empty when jax did not answer.
        processes: ``jax.process_count()``.
        x64: Whether 64-bit types are on; None when jax did not answer.
        cache_dir: jax's compilation cache, empty when off.
        cache_writable: Whether that folder can be written.
        jax_error: Why jax did not answer: the last lines it printed, or the time limit.
        gpus: NVIDIA GPUs seen by the driver.
        missing: Modules of :data:`EXTRA_MODULES` that are not installed.
        installs: Folders that hold a ``oneflax`` package this interpreter could import, the running one first.
        source_tree: The folder with ``pyproject.toml`` that the running code stands in, empty for an installed copy.
    """

    python: tuple[int, int, int]
    system: str
    cores: int
    versions: Mapping[str, str | None]
    free_memory_bytes: int | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    devices: tuple[Device, ...] = ()
    processes: int = 1
    x64: bool | None = None
    cache_dir: str = ""
    cache_writable: bool = True
    jax_error: str = ""
    gpus: tuple[Gpu, ...] = ()
    missing: frozenset[str] = frozenset()
    installs: tuple[str, ...] = ()
    source_tree: str = ""

    @property
    def devices_timed_out(self) -> bool:
        """Whether jax was still looking for devices at the time limit."""
        return self.jax_error.startswith(TIMED_OUT)


def gather(timeout_s: float) -> Machine:
    """Looks at this machine. `timeout_s` bounds how long jax may take to import and to find its devices."""
    answer, error = probe_jax([sys.executable, "-c", PROBE], timeout_s)
    cache_dir = str(answer.get("cache_dir") or os.environ.get("JAX_COMPILATION_CACHE_DIR", ""))
    return Machine(
        python=(sys.version_info.major, sys.version_info.minor, sys.version_info.micro),
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        cores=usable_cores(),
        versions={name: version(name) for name in PACKAGES},
        free_memory_bytes=free_memory_bytes(),
        environment={name: os.environ[name] for name in SETTINGS if name in os.environ},
        devices=tuple(Device(*device) for device in answer.get("devices", ())),
        processes=answer.get("processes", 1),
        x64=answer.get("x64"),
        cache_dir=cache_dir,
        cache_writable=writable(cache_dir),
        jax_error=error,
        gpus=nvidia_gpus(),
        missing=frozenset(m for modules in EXTRA_MODULES.values() for m in modules if not importable(m)),
        installs=oneflax_installs(),
        source_tree=source_tree(),
    )


def probe_jax(command: list[str], timeout_s: float) -> tuple[dict[str, Any], str]:
    """Asks jax in a process of its own. Gives (answer, "") or ({}, what went wrong)."""
    # Only looking: on a GPU, do not take most of its memory from whoever is using it.
    environment = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        env=environment,
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        _kill(process)
        return {}, f"{TIMED_OUT} within {timeout_s:g} s"
    for line in out.splitlines():
        if line.startswith(PROBE_MARK):
            return json.loads(line.removeprefix(PROBE_MARK)), ""
    return {}, _last_words(err) or f"the process that imports jax ended with status {process.returncode} and no message"


def _kill(process: subprocess.Popen[str]) -> None:
    if hasattr(os, "killpg"):
        os.killpg(process.pid, signal.SIGKILL)
    else:
        process.kill()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.communicate(timeout=2)  # a process stuck inside a driver may outlive its kill: do not wait for it


def _last_words(text: str, lines: int = 3) -> str:
    """The error's own line of a traceback, or XLA's fatal line, or else the last lines."""
    said = [line.strip() for line in text.splitlines() if line.strip(" ^~")]
    fatal = [line for line in said if line[:1] == "F" and line[1:5].isdigit()]
    return fatal[-1].split("] ", 1)[-1] if fatal else "\n".join(said[-lines:])


def version(name: str) -> str | None:
    """Version of an installed distribution; for oneflax, of the running code."""
    if name == "oneflax":
        from ._version import VERSION

        return VERSION
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def importable(module: str) -> bool:
    """Whether a top-level module is installed; it is not loaded."""
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def usable_cores() -> int:
    """CPU cores this process may run on, as XLA counts them."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def free_memory_bytes() -> int | None:
    """Memory that can be had without swapping: Linux's MemAvailable, or less if a container's limit is nearer."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        available = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration, ValueError):
        return None
    try:
        group = Path("/sys/fs/cgroup")
        left = int((group / "memory.max").read_text()) - int((group / "memory.current").read_text())
    except (OSError, ValueError):  # no limit reads "max"
        return available
    return min(available, max(left, 0))


def writable(folder: str) -> bool:
    """Whether `folder`, or the nearest parent that exists, can be written. Remote folders (``gs://``) pass."""
    if not folder or "://" in folder:
        return True
    path = Path(folder).absolute()
    while not path.exists() and path != path.parent:
        path = path.parent
    return path.is_dir() and os.access(path, os.W_OK)


def nvidia_gpus() -> tuple[Gpu, ...]:
    """GPUs by nvidia-smi, else by the device file alone."""
    unnamed = (Gpu("NVIDIA GPU"),) if Path("/dev/nvidia0").exists() else ()
    if shutil.which("nvidia-smi") is None:
        return unnamed
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        out = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return unnamed
    rows = [[cell.strip() for cell in line.split(",")] for line in out.splitlines() if line.count(",") == 1]
    return tuple(Gpu(name, driver) for name, driver in rows)


def source_tree() -> str:
    """The tree that the running code stands in, if it is one."""
    root = Path(__file__).resolve().parents[1]
    return str(root) if (root / "pyproject.toml").is_file() else ""


def oneflax_installs() -> tuple[str, ...]:
    """Folders of every ``oneflax`` package on the import path, editable installs included, the running one first."""
    running = Path(__file__).parent
    found = [running, *(Path(entry or ".") / "oneflax" for entry in sys.path)]
    for distribution in importlib.metadata.distributions(name="oneflax"):
        url = json.loads(distribution.read_text("direct_url.json") or "{}")
        if url.get("dir_info", {}).get("editable"):
            found.append(Path(unquote(urlparse(url["url"]).path)) / "oneflax")
    folders = [str(folder.resolve()) for folder in found if (folder / "__init__.py").is_file()]
    return tuple(dict.fromkeys(folders))
