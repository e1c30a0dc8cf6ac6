"""``oneflax doctor``: golden findings on made-up machines, and gathering that survives a broken or hanging jax."""

import dataclasses
import json
import os
import re
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from typing import Any

import pytest

import oneflax
from oneflax import _machine, doctor
from oneflax._machine import EXTRA_MODULES, Device, Gpu, Machine

ROOT = Path(__file__).parents[1]
GIB = 2**30
GOOD = Machine(
    python=(3, 11, 7),
    system="Linux 6.1 x86_64",
    cores=32,
    versions={
        "oneflax": "0.1.0",
        "jax": "0.10.2",
        "jaxlib": "0.10.2",
        "flax": "0.12.8",
        "optax": "0.2.8",
        "orbax-checkpoint": "0.12.8",
        "numpy": "2.4.6",
        "rich": "15.0.0",
    },
    free_memory_bytes=16 * GIB,
    environment={"JAX_ENABLE_X64": "1", "JAX_COMPILATION_CACHE_DIR": "/cache"},
    devices=(Device("cpu", "cpu"),),
    x64=True,
    cache_dir="/cache",
    installs=("/env/oneflax",),
)
CPU8 = (Device("cpu", "cpu"),) * 8
H100 = Gpu("NVIDIA H100", "570.86.15")
NO_CUDA = frozenset({"jax_cuda12_plugin", "jax_cuda13_plugin"})


def machine(
    versions: dict[str, str | None] | None = None, environment: dict[str, str] | None = None, **facts: Any
) -> Machine:
    """The good machine with some facts changed."""
    return dataclasses.replace(
        GOOD,
        versions={**GOOD.versions, **(versions or {})},
        environment={**GOOD.environment, **(environment or {})},
        **facts,
    )


CASES: dict[str, tuple[Machine, str]] = {
    "good": (GOOD, ""),
    "old python": (machine(python=(3, 10, 2)), "bites: Python 3.10.2 is too old; oneflax needs python>=3.11."),
    "jax missing": (
        machine(versions={"jax": None}, devices=(), x64=None, jax_error="ModuleNotFoundError: No module named 'jax'"),
        'bites: jax is not installed.\n  Mend: python -m pip install "jax>=0.10.2,<0.13"',
    ),
    "jax too old and too new": (
        machine(versions={"jax": "0.9.2", "jaxlib": "0.13.0"}),
        "bites: jax 0.9.2 is outside the supported range jax>=0.10.2,<0.13.\n"
        '  Mend: python -m pip install "jax>=0.10.2,<0.13"\n'
        "bites: jaxlib 0.13.0 is outside the supported range jaxlib>=0.10.2,<0.13.\n"
        '  Mend: python -m pip install "jaxlib>=0.10.2,<0.13"',
    ),
    "jax broken": (
        machine(
            devices=(), x64=None, jax_error="import jaxlib\nImportError: libfoo.so.1: cannot open shared object file"
        ),
        "bites: jax does not start. It said:\n"
        "    import jaxlib\n"
        "    ImportError: libfoo.so.1: cannot open shared object file\n"
        '  Mend: python -m pip install --force-reinstall "jax>=0.10.2,<0.13"',
    ),
    "jax hangs": (
        machine(devices=(), x64=None, jax_error="jax did not finish looking for devices within 60 s"),
        "bites: jax does not start. It said:\n"
        "    jax did not finish looking for devices within 60 s\n"
        "  Mend: export JAX_PLATFORMS=cpu works without the device; --timeout gives it longer.",
    ),
    "platform without plugin": (
        machine(environment={"JAX_PLATFORMS": "cuda"}, devices=(), x64=None, jax_error="AssertionError"),
        "bites: jax does not start with JAX_PLATFORMS=cuda. It said:\n    AssertionError\n  Mend: unset JAX_PLATFORMS",
    ),
    "unknown flag": (
        machine(
            environment={"XLA_FLAGS": "--xla_nope=1"}, devices=(), jax_error="Unknown flag in XLA_FLAGS: --xla_nope=1"
        ),
        "bites: jax does not start with XLA_FLAGS=--xla_nope=1. It said:\n"
        "    Unknown flag in XLA_FLAGS: --xla_nope=1\n"
        "  Mend: unset XLA_FLAGS",
    ),
    "flags without dashes": (
        machine(environment={"XLA_FLAGS": "xla_cpu_foo=8"}),
        "bites: XLA_FLAGS=xla_cpu_foo=8 does not start with --, so XLA takes it for a file's name and aborts.\n"
        "  Mend: export XLA_FLAGS=--xla_cpu_foo=8",
    ),
    "device count twice": (
        machine(environment={"XLA_FLAGS": f"{doctor.DEVICE_COUNT_FLAG}=4 {doctor.DEVICE_COUNT_FLAG}=8"}),
        "bites: XLA_FLAGS gives --xla_force_host_platform_device_count 2 times (4, 8): the last one counts.\n"
        "  Mend: keep one of them.",
    ),
    "device count twice, equal": (
        machine(environment={"XLA_FLAGS": f"{doctor.DEVICE_COUNT_FLAG}=8 {doctor.DEVICE_COUNT_FLAG}=8"}),
        "note: XLA_FLAGS gives --xla_force_host_platform_device_count 2 times (8, 8): the last one counts.\n"
        "  Mend: keep one of them.",
    ),
    "device counts differ": (
        machine(environment={"XLA_FLAGS": f"{doctor.DEVICE_COUNT_FLAG}=8", "JAX_NUM_CPU_DEVICES": "4"}),
        "bites: JAX_NUM_CPU_DEVICES=4 and --xla_force_host_platform_device_count=8 differ: the first one counts.\n"
        "  Mend: keep one of them.",
    ),
    "small thread pool": (
        machine(cores=2, devices=CPU8),
        "bites: 8 virtual CPU devices on 2 threads (2 CPU cores, NPROC unset): with several collectives in flight jax "
        "0.10.2 can wait for ever for its own threads, then aborts the process.\n"
        "  Mend: export NPROC=32",
    ),
    "middling thread pool": (
        machine(cores=2, devices=CPU8, environment={"NPROC": "16"}),
        "note: 8 virtual CPU devices on 16 threads (NPROC=16): with several collectives in flight jax "
        "0.10.2 can wait for ever for its own threads, then aborts the process.\n"
        "  Mend: export NPROC=32",
    ),
    "NPROC set": (machine(cores=2, devices=CPU8, environment={"NPROC": "32"}), ""),
    "NPROC not needed": (machine(cores=2, devices=CPU8, versions={"jax": "0.12.0.1", "jaxlib": "0.12.0.1"}), ""),
    "gpu unused, old driver": (
        machine(gpus=(H100,), missing=NO_CUDA),
        "bites: a GPU is here (NVIDIA H100, driver 570.86.15), but jax runs on the CPU.\n"
        '  Mend: python -m pip install "oneflax[cuda12]"',
    ),
    "gpu unused, new driver, source tree": (
        machine(gpus=(Gpu("NVIDIA H200", "580.1"),), missing=NO_CUDA, source_tree="/src/oneflax"),
        "bites: a GPU is here (NVIDIA H200, driver 580.1), but jax runs on the CPU.\n"
        '  Mend: python -m pip install --editable "/src/oneflax[cuda13]"',
    ),
    "gpu unused, plugin there": (
        machine(gpus=(Gpu("NVIDIA GPU"),), missing=frozenset({"jax_cuda13_plugin"})),
        "bites: a GPU is here (NVIDIA GPU), but jax runs on the CPU, although the plugin of cuda12 is installed.\n"
        "  Mend: python -c 'import jax; jax.devices(\"cuda\")' says why.",
    ),
    "gpu left out on purpose": (
        machine(gpus=(H100,), missing=NO_CUDA, environment={"JAX_PLATFORMS": "cpu"}),
        "note: JAX_PLATFORMS=cpu: jax uses nothing else, though a GPU is here.\n  Mend: unset JAX_PLATFORMS",
    ),
    "gpu hidden": (machine(gpus=(H100,), missing=NO_CUDA, environment={"CUDA_VISIBLE_DEVICES": ""}), ""),
    "gpu memory": (
        machine(gpus=(H100,), devices=(Device("gpu", "NVIDIA H100", 60 * GIB),)),
        "note: jax takes 75 % of each GPU's memory when it starts: a second process on the same GPU runs out of it.\n"
        "  Mend: to share a GPU: export XLA_PYTHON_CLIENT_PREALLOCATE=false, or XLA_CLIENT_MEM_FRACTION=0.4.",
    ),
    "gpu memory chosen": (
        machine(
            gpus=(H100,),
            devices=(Device("gpu", "NVIDIA H100"),),
            environment={"XLA_PYTHON_CLIENT_PREALLOCATE": "false"},
        ),
        "",
    ),
    "gpu memory unreadable and given twice": (
        machine(
            gpus=(H100,),
            devices=(Device("gpu", "NVIDIA H100"),),
            environment={"XLA_CLIENT_MEM_FRACTION": "40%", "XLA_PYTHON_CLIENT_MEM_FRACTION": ".4"},
        ),
        "bites: XLA_CLIENT_MEM_FRACTION and XLA_PYTHON_CLIENT_MEM_FRACTION are both set: jax refuses its GPUs.\n"
        "  Mend: unset XLA_PYTHON_CLIENT_MEM_FRACTION\n"
        "bites: XLA_CLIENT_MEM_FRACTION=40% is not a number: jax refuses its GPUs.\n"
        "  Mend: export XLA_CLIENT_MEM_FRACTION=0.75",
    ),
    "jit off": (
        machine(environment={"JAX_DISABLE_JIT": "True"}),
        "bites: JAX_DISABLE_JIT is on: nothing compiles, so every operation of a step is dispatched by itself.\n"
        "  Mend: unset JAX_DISABLE_JIT",
    ),
    "jit on": (machine(environment={"JAX_DISABLE_JIT": "0"}), ""),
    "two installs": (
        machine(installs=("/src/oneflax", "/env/oneflax")),
        "bites: several copies of oneflax can be imported, and the working folder decides which: "
        "/src/oneflax (running), /env/oneflax.\n"
        "  Mend: python -m pip uninstall oneflax, then install the one you want.",
    ),
    "low memory": (
        machine(free_memory_bytes=GIB // 2),
        "bites: only 0.5 GiB of host memory is free: compiling a model may be killed.\n"
        "  Mend: close other programs, or raise the container's memory limit.",
    ),
    "memory unknown": (machine(free_memory_bytes=None), ""),
    "cache unwritable": (
        machine(cache_writable=False),
        "bites: the compilation cache /cache cannot be written: every run compiles everything again.\n"
        "  Mend: export JAX_COMPILATION_CACHE_DIR=$HOME/.cache/jax",
    ),
    "jax's defaults": (
        machine(x64=False, cache_dir=""),
        "note: JAX_COMPILATION_CACHE_DIR is unset: every run compiles everything again.\n"
        "  Mend: export JAX_COMPILATION_CACHE_DIR=$HOME/.cache/jax\n"
        "note: 64-bit types are off: asking for int64 or float64 gives int32 or float32.\n"
        "  Mend: export JAX_ENABLE_X64=1",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_findings(case: str) -> None:
    facts, expected = CASES[case]
    findings = doctor.diagnose(facts)
    assert "\n".join(map(str, findings)) == expected
    assert doctor.status(findings) == int("bites: " in expected)


def test_every_check_has_a_machine_that_it_finds_fault_with() -> None:
    silent = {check.__name__ for check in doctor.CHECKS} - {
        check.__name__ for check in doctor.CHECKS for facts, _ in CASES.values() if list(check(facts))
    }
    assert silent == set()


def test_every_name_of_ours_in_a_mend_exists() -> None:
    mends = [finding.mend for facts, _ in CASES.values() for finding in doctor.diagnose(facts)]
    assert unresolved(mends) == []
    # The check itself, on what does not exist.
    assert unresolved(["oneflax.no_such_name(), or", "flow.placement(x), flow.pipeline.no_such"]) == [
        "oneflax.no_such_name",
        "flow.pipeline.no_such",
    ]


def unresolved(texts: list[str]) -> list[str]:
    """The dotted names after ``oneflax.`` or ``flow.`` in some texts that lead to nothing."""
    missing = []
    for name in re.findall(r"\b(?:oneflax|flow)(?:\.[A-Za-z_]\w*)+", "\n".join(texts)):
        value: Any = oneflax
        try:
            for attribute in name.split(".")[1:]:
                value = getattr(value, attribute)
        except AttributeError:
            missing.append(name)
    return missing


def test_what_bites_comes_first() -> None:
    levels = [finding.level for finding in doctor.diagnose(machine(x64=False, cache_dir="", free_memory_bytes=GIB))]
    assert levels == ["bites", "note", "note"]


def test_report_on_a_gpu_machine() -> None:
    facts = machine(
        versions={"optax": None},
        gpus=(H100,),
        devices=(Device("gpu", "NVIDIA H100 80GB HBM3", 60 * GIB),) * 2,
        missing=frozenset({"grain", "jax_cuda13_plugin", "matplotlib"}),
        environment={"XLA_CLIENT_MEM_FRACTION": "0.5"},
    )
    assert (
        doctor.report_text(facts, doctor.diagnose(facts))
        == """\
Versions
  python            3.11.7
  oneflax           0.1.0
  jax               0.10.2
  jaxlib            0.10.2
  flax              0.12.8
  optax             missing  needs optax>=0.2.8
  orbax-checkpoint  0.12.8
  numpy             2.4.6
  rich              15.0.0

Machine
  system       Linux 6.1 x86_64
  cores        32
  free memory  16.0 GiB
  processes    1
  GPU 0        NVIDIA H100 570.86.15

Devices
  gpu  x 2  NVIDIA H100 80GB HBM3  60.0 GiB

Settings
  JAX_ENABLE_X64             1
  JAX_COMPILATION_CACHE_DIR  /cache
  XLA_CLIENT_MEM_FRACTION    0.5

Extras
  cuda12    present
  cuda13    missing jax_cuda13_plugin  python -m pip install "oneflax[cuda13]"
  viz       missing matplotlib         python -m pip install "oneflax[viz]"
  data      missing grain              python -m pip install "oneflax[data]"
  examples  present
  test      present

bites: optax is not installed.
  Mend: python -m pip install "optax>=0.2.8\""""
    )


def test_report_where_jax_does_not_start() -> None:
    text = doctor.report_text(machine(devices=(), jax_error="no"), ())
    assert "Devices\n  none: jax does not start\n" in text
    assert text.endswith("Nothing to mend.")


def test_json_holds_facts_and_findings() -> None:
    facts = machine(missing=NO_CUDA, free_memory_bytes=GIB)
    report = json.loads(doctor.report_json(facts, doctor.diagnose(facts)))
    assert report["machine"]["python"] == [3, 11, 7]
    assert report["machine"]["missing"] == ["jax_cuda12_plugin", "jax_cuda13_plugin"]
    assert [finding["level"] for finding in report["findings"]] == ["bites"]


def _ranges(requirements: list[str]) -> dict[str, str]:
    return {re.split(r"[\[<>=]", text)[0]: re.sub(r"^[\w-]+(\[\w+\])?", "", text) for text in requirements}


def test_ranges_and_extras_are_those_of_pyproject() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    ours = {name: doctor.range_text(name).removeprefix(name) for name in doctor.SUPPORTED}
    assert ours["jaxlib"] == ours["jax"]
    wanted = {"python": project["requires-python"], "jaxlib": ours["jax"], **_ranges(project["dependencies"])}
    assert ours == wanted
    extras = project["optional-dependencies"]
    assert set(EXTRA_MODULES) == set(extras) - {"dev"}
    assert _ranges(extras["cuda12"])["jax"] == _ranges(extras["cuda13"])["jax"] == ours["jax"]


@pytest.mark.parametrize(
    ("version", "inside"),
    [("0.10.2", True), ("0.10.1", False), ("0.12.0.1", True), ("0.12.9", True), ("0.13", False), ("0.13.0rc1", False)],
)
def test_supported_range_of_jax(version: str, inside: bool) -> None:
    assert doctor.supported("jax", version) is inside


def test_probe_reports_a_crash() -> None:
    code = "import sys; print('chatter'); sys.exit('ImportError: no such library')"
    assert _machine.probe_jax([sys.executable, "-c", code], 30) == ({}, "ImportError: no such library")


def test_probe_reports_xla_s_fatal_line_without_its_stack() -> None:
    line = "F1201 18:22:37.8 46 parse_flags_from_env.cc:234] Unknown flag in XLA_FLAGS: --xla_nope=1"
    said = line + "\n*** Check failure stack trace: ***\n    @     0x7f1\n"
    code = f"import os, sys; sys.stderr.write({said!r}); sys.stderr.flush(); os.abort()"
    assert _machine.probe_jax([sys.executable, "-c", code], 30) == ({}, "Unknown flag in XLA_FLAGS: --xla_nope=1")


def test_probe_that_says_nothing() -> None:
    _, error = _machine.probe_jax([sys.executable, "-c", "raise SystemExit(3)"], 30)
    assert error == "the process that imports jax ended with status 3 and no message"


def test_probe_finds_the_answer_among_other_output() -> None:
    code = f"print('plugin loaded'); print({_machine.PROBE_MARK!r} + '{{\"processes\": 2}}'); print('bye')"
    assert _machine.probe_jax([sys.executable, "-c", code], 30) == ({"processes": 2}, "")


def test_probe_does_not_hang_with_a_hanging_driver() -> None:
    # A child that keeps the pipes open must not hold us up either.
    code = "import subprocess, time; subprocess.Popen(['sleep', '60']); time.sleep(60)"
    start = time.monotonic()
    answer, error = _machine.probe_jax([sys.executable, "-c", code], 0.5)
    assert time.monotonic() - start < 10
    assert (answer, error) == ({}, "jax did not finish looking for devices within 0.5 s")


def test_writable_looks_at_the_nearest_folder_that_exists(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert _machine.writable(str(tmp_path / "not" / "yet" / "made"))
    assert not _machine.writable(str(tmp_path / "file" / "below"))
    assert _machine.writable("gs://bucket/cache")


@pytest.mark.newest
def test_this_machine_with_jax_missing(tmp_path: Path) -> None:
    """A ``jax`` that does not import, ahead of the real one on the path: the doctor works and names it."""
    (tmp_path / "jax.py").write_text("raise ImportError('jax is broken on purpose')\n")
    run = subprocess.run(
        [sys.executable, "-m", "oneflax", "doctor", "--json"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**_environment(), "PYTHONPATH": str(tmp_path)},
        timeout=120,
    )
    assert run.returncode == 1, run.stderr
    machine_facts = json.loads(run.stdout)["machine"]
    assert machine_facts["devices"] == []
    assert "jax is broken on purpose" in machine_facts["jax_error"]


@pytest.mark.newest
def test_this_machine() -> None:
    """The real thing on 2 virtual devices with a sound environment."""
    environment = _environment() | {"NPROC": "32", "XLA_FLAGS": f"{doctor.DEVICE_COUNT_FLAG}=2", "JAX_PLATFORMS": "cpu"}
    run = subprocess.run(
        [sys.executable, "-m", "oneflax", "doctor", "--json"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=environment,
        timeout=120,
    )
    report = json.loads(run.stdout)
    assert [device["type"] for device in report["machine"]["devices"]] == ["cpu", "cpu"]
    assert report["machine"]["processes"] == 1
    assert report["machine"]["x64"] is False
    assert run.returncode == int(any(finding["level"] == "bites" for finding in report["findings"]))


def _environment() -> dict[str, str]:
    """This process's environment without the settings the doctor judges."""
    return {name: value for name, value in os.environ.items() if name not in _machine.SETTINGS}
