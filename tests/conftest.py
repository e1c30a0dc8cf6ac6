"""Gives the tests 8 CPU devices, a compilation cache, and an end to every hang.

The environment is set when this file loads, before anything imports jax: later it has no effect.
"""

import contextlib
import faulthandler
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.database import DirectoryBasedExampleDatabase

DEVICES = 8
# pytest-timeout raises in Python code; a thread that hangs in native code gets this much longer before the exit.
WATCHDOG_GRACE_S = 30.0
_CACHE = Path(__file__).resolve().parent.parent / ".cache"


def _writable(folder: Path) -> bool:
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
    return folder.is_dir() and os.access(folder, os.W_OK)


def _prepare_environment() -> None:
    flags = [f for f in os.environ.get("XLA_FLAGS", "").split() if "host_platform_device_count" not in f]
    os.environ["XLA_FLAGS"] = " ".join([*flags, f"--xla_force_host_platform_device_count={DEVICES}"])
    # Fewer threads than queued collectives need makes them wait for each other for ever.
    os.environ["NPROC"] = "32"
    # A run on an accelerator asks for it, as in JAX_PLATFORMS=cuda,cpu.
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    if _writable(_CACHE / "jax"):
        os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(_CACHE / "jax"))
        os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
        os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"


_JAX_CAME_FIRST = "jax" in sys.modules
_prepare_environment()

# A shared machine makes single examples slow now and then: a deadline would fail tests at random.
settings.register_profile(
    "oneflax",
    deadline=None,
    database=DirectoryBasedExampleDatabase(_CACHE / "hypothesis") if _writable(_CACHE) else None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("oneflax")


def pytest_configure(config: pytest.Config) -> None:
    # Two runs that share the cache may meet a half-written entry; jax then compiles, and warns.
    for deed in ("reading", "writing"):
        config.addinivalue_line("filterwarnings", f"ignore:Error {deed} persistent compilation cache entry")
    # Output capture is off here, so this is the real stderr, which the watchdog writes to.
    config.stash[_STDERR] = os.dup(2)


def pytest_unconfigure(config: pytest.Config) -> None:
    faulthandler.cancel_dump_traceback_later()
    os.close(config.stash[_STDERR])


def pytest_sessionstart(session: pytest.Session) -> None:
    if _JAX_CAME_FIRST:
        pytest.exit("jax was imported before tests/conftest.py could set its environment", returncode=3)
    import jax

    found = len(jax.devices("cpu"))
    if found < DEVICES:
        pytest.exit(f"the tests need {DEVICES} CPU devices and jax has {found}", returncode=3)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[object]:
    """Ends the run, with every thread's stack, when a test outlives its timeout in native code."""
    limit_s = _timeout_s(item)
    if limit_s > 0:
        faulthandler.dump_traceback_later(limit_s + WATCHDOG_GRACE_S, exit=True, file=item.config.stash[_STDERR])
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()


def _timeout_s(item: pytest.Item) -> float:
    marker = item.get_closest_marker("timeout")
    if marker is not None:
        return float(marker.args[0] if marker.args else marker.kwargs["timeout"])
    given = item.config.getoption("timeout", None)
    return float(given if given is not None else item.config.getini("timeout") or 0)


_STDERR = pytest.StashKey[int]()
