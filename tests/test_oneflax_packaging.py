"""What is installed: the wheel, the wheel built from the sdist, and an editable install, each used from elsewhere."""

import importlib.metadata
import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]
LEAVE = (".git", ".venv*", ".cache", ".*_cache", ".hypothesis", "__pycache__", "build", "dist", "out", "*.egg-info")

PACKAGES = """
import oneflax, oneflax.flax, oneflax.pipeline, oneflax.pipeline.schedules, oneflax.sbp, oneflax.sbp.errors
import sys
for name in ("sbp", "pipeline"):
    try:
        __import__(name)
    except ImportError:
        pass
    else:
        raise SystemExit(f"import {name} works")
print(*(sys.modules[name].__file__ for name in ("oneflax", "oneflax.sbp", "oneflax.pipeline")), sep="\\n")
"""
"""Imports every package, checks that the folders' own names are not importable, prints where the packages came from."""

STEP = """
import jax, jax.numpy as jnp, numpy as np, optax
import oneflax as flow

def loss(params, batch):
    x = jnp.tanh(flow.stage(batch["x"], 0) @ params[0])
    return jnp.mean((flow.stage(x, 1) @ params[1] - batch["y"]) ** 2)

def plain(params, batch):
    return jnp.mean((jnp.tanh(batch["x"] @ params[0]) @ params[1] - batch["y"]) ** 2)

random = np.random.default_rng(0)
params = [random.normal(size=shape).astype(np.float32) for shape in ((6, 8), (8, 2))]
batch = {"x": random.normal(size=(8, 6)).astype(np.float32), "y": random.normal(size=(8, 2)).astype(np.float32)}
grid = flow.placement("auto", [[0], [1]], axes=("stage", "data"))
plan = flow.Plan(grid, batch={"data": flow.S(0)}, schedule=flow.pipeline.one_f_one_b(microbatches=2))
step = plan.train_step(loss, optax.sgd(0.1))
state = step.init(lambda key: [jnp.asarray(x) for x in params], batch, jax.random.key(0))
print(flow.__file__)
for _ in range(2):
    state, metrics = step(state, batch)
    value, gradients = jax.value_and_grad(plain)(params, batch)
    params = [p - 0.1 * g for p, g in zip(params, gradients)]
    print(float(metrics["loss"]), float(value))
"""
"""Two training steps on two stages: prints where oneflax is from, and each loss beside what plain jax makes it."""

TWO_DEVICES = {
    "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
    "NPROC": "32",
    "JAX_PLATFORMS": "cpu",
}


@dataclass(frozen=True, slots=True)
class Built:
    """The distributions of one copy of the tree."""

    tree: Path
    wheel: Path
    wheel_of_sdist: Path


def run(command: list[str], cwd: Path, **environment: str) -> str:
    """Runs a command, which must succeed, and gives what it printed."""
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    result = subprocess.run(command, cwd=cwd, env=inherited | environment, capture_output=True, text=True, timeout=280)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def assert_trained(printed: str, package: Path) -> None:
    """Checks what :data:`STEP` printed: the package it ran, and losses as those of plain jax."""
    place, *lines = printed.splitlines()
    assert Path(place).resolve() == package / "__init__.py"
    losses = np.array([line.split() for line in lines], float)
    assert losses.shape == (2, 2)
    assert np.isfinite(losses).all()
    np.testing.assert_allclose(losses[:, 0], losses[:, 1], rtol=1e-5)
    assert losses[1, 0] < losses[0, 0]


def has_build_backend() -> bool:
    """Whether this environment's setuptools can build us, so that nothing need be fetched."""
    try:
        return int(importlib.metadata.version("setuptools").split(".")[0]) >= 77
    except importlib.metadata.PackageNotFoundError:
        return False


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """Builds from a copy, so that neither old build folders leak in nor new ones stay behind."""
    folder = tmp_path_factory.mktemp("packaging")
    tree = folder / "tree"
    shutil.copytree(ROOT, tree, symlinks=True, ignore=shutil.ignore_patterns(*LEAVE))
    build = [sys.executable, "-m", "build", *(["--no-isolation"] if has_build_backend() else [])]
    run([*build, "--outdir", str(folder / "both"), str(tree)], folder)  # the sdist, then a wheel from it
    run([*build, "--wheel", "--outdir", str(folder / "direct"), str(tree)], folder)
    return Built(tree, next((folder / "direct").glob("*.whl")), next((folder / "both").glob("*.whl")))


@pytest.fixture(scope="module")
def installed(built: Built, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that holds the installed wheel and nothing else."""
    target = tmp_path_factory.mktemp("installed")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", str(target)]
    run([*pip, str(built.wheel)], target)
    return target


def expected_files(tree: Path) -> list[str]:
    """The package files of the tree by their installed names, from the folders alone."""
    tops = {"oneflax": tree / "oneflax", "oneflax/sbp": tree / "sbp", "oneflax/pipeline": tree / "pipeline"}
    files: list[str] = []
    for name, top in tops.items():
        for folder, folders, names in os.walk(top):  # does not follow oneflax/sbp and oneflax/pipeline
            folders.sort()
            place = Path(name, Path(folder).relative_to(top))
            files += [(place / file).as_posix() for file in names if Path(file).suffix in (".py", ".pyi", ".typed")]
    return sorted(files)


def packaged_files(wheel: Path) -> list[str]:
    """What a wheel holds, its metadata left out."""
    return sorted(name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name)


def test_the_wheel_holds_every_module_once(built: Built) -> None:
    files = packaged_files(built.wheel)
    assert files == expected_files(built.tree)
    assert [name for name, count in Counter(files).items() if count > 1] == []
    assert {f"oneflax{package}/py.typed" for package in ("", "/sbp", "/pipeline")} <= set(files)
    assert {f"oneflax{package}/__init__.pyi" for package in ("", "/sbp", "/pipeline")} <= set(files)


def test_the_sdist_gives_the_same_wheel(built: Built) -> None:
    direct, of_sdist = zipfile.ZipFile(built.wheel), zipfile.ZipFile(built.wheel_of_sdist)
    assert packaged_files(built.wheel_of_sdist) == packaged_files(built.wheel)
    for name in packaged_files(built.wheel):
        assert direct.read(name) == of_sdist.read(name), name


def test_the_metadata(built: Built) -> None:
    archive = zipfile.ZipFile(built.wheel)
    info = next(name for name in archive.namelist() if name.endswith("METADATA")).removesuffix("METADATA")
    metadata = archive.read(info + "METADATA").decode()
    assert "\nLicense-Expression: Apache-2.0\n" in metadata
    assert "\nRequires-Python: >=3.11\n" in metadata
    assert archive.read(info + "licenses/LICENSE") == (ROOT / "LICENSE").read_bytes()
    assert archive.read(info + "entry_points.txt").decode().split("\n")[:2] == [
        "[console_scripts]",
        "oneflax = oneflax.__main__:main",
    ]
    assert "\noneflax\n" in "\n" + archive.read(info + "top_level.txt").decode()


def test_the_installed_wheel_imports_from_anywhere(installed: Path, tmp_path: Path) -> None:
    # -S: no site-packages, so nothing but the installed folder and the standard library can answer.
    places = run([sys.executable, "-S", "-c", PACKAGES], tmp_path, PYTHONPATH=str(installed)).splitlines()
    homes = [installed / "oneflax", installed / "oneflax" / "sbp", installed / "oneflax" / "pipeline"]
    assert places == [str(home / "__init__.py") for home in homes]


@pytest.mark.newest
def test_the_installed_wheel_takes_a_step(installed: Path, tmp_path: Path) -> None:
    printed = run([sys.executable, "-c", STEP], tmp_path, PYTHONPATH=str(installed), **TWO_DEVICES)
    assert_trained(printed, installed / "oneflax")


def test_the_installed_command_line_runs(installed: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "oneflax", "--version"]
    assert run(command, tmp_path, PYTHONPATH=str(installed)) == "oneflax 0.1.0\n"


SMI = {
    "CUDA 12": "| NVIDIA-SMI 570.86.15    Driver Version: 570.86.15    CUDA Version: 12.8     |",
    "CUDA 13": "| NVIDIA-SMI 580.65.06    Driver Version: 580.65.06    CUDA Version: 13.0     |",
    "CUDA 13, other words": "| NVIDIA-SMI 595.45       KMD Version: 595.45    CUDA UMD Version: 13.2     |",
    "too old": "| NVIDIA-SMI 470.57.02    Driver Version: 470.57.02    CUDA Version: 11.4     |",
    "unknown": "| NVIDIA-SMI 570.86.15    Driver Version: 570.86.15    CUDA Version: N/A      |",
}
"""What nvidia-smi prints about its driver."""


@pytest.mark.parametrize(
    ("smi", "stamp", "words", "target", "said"),
    [
        (None, "ready", [], ".", ""),
        (None, "ready-test", [], ".[test]", ""),
        (None, "ready", ["EXTRAS=cuda12"], ".[cuda12]", ""),
        ("CUDA 12", "ready", [], ".[cuda12]", "CUDA 12: installing with cuda12 "),
        ("CUDA 12", "ready-test", [], ".[test,cuda12]", "CUDA 12: installing with cuda12 "),
        ("CUDA 13", "ready", [], ".[cuda13]", "CUDA 13: installing with cuda13 "),
        ("CUDA 13, other words", "ready", [], ".[cuda13]", "CUDA 13: installing with cuda13 "),
        ("CUDA 13", "ready-test", ["EXTRAS=cuda12"], ".[test,cuda12]", ""),
        ("CUDA 13", "ready", ["EXTRAS="], ".", ""),
        ("too old", "ready", [], ".", "CUDA 11: installing with no CUDA plugin "),
        ("unknown", "ready", [], ".", "CUDA of an unknown version: installing with no CUDA plugin "),
    ],
)
def test_make_installs_the_plugin_for_the_gpu(
    smi: str | None, stamp: str, words: list[str], target: str, said: str, tmp_path: Path
) -> None:
    for name in ("Makefile", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    python = tmp_path / "env" / "bin" / "python"
    for program, does in (
        (python, f'echo "$@" >>{tmp_path}/log'),
        (tmp_path / "bin" / "nvidia-smi", "exit 9" if smi is None else f"echo '{SMI[smi]}'"),
    ):
        program.parent.mkdir(parents=True)
        program.write_text(f"#!/bin/sh\n{does}\n")
        program.chmod(0o755)
    path = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
    make = ["make", "VENV_LOCKED=1", f"PYTHON={python}", "VENV=env", *words, f"env/.oneflax-{stamp}"]
    clean = dict.fromkeys(("MAKEFLAGS", "MAKELEVEL", "MFLAGS"), "")  # these tests may run below a make
    printed = run(make, tmp_path, PATH=path, **clean)
    assert (tmp_path / "log").read_text().splitlines()[-1] == f"-m pip install --quiet --editable {target}"
    assert said in printed
    assert ("GPU" in printed) == bool(said)
    assert (tmp_path / "env" / f".oneflax-{stamp}").exists()


def test_an_editable_install_imports_the_tree_from_anywhere(built: Built, tmp_path: Path) -> None:
    isolation = ["--no-build-isolation"] if has_build_backend() else []
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", *isolation, "--ignore-installed"]
    run([*pip, "--prefix", str(tmp_path), "--editable", str(built.tree)], tmp_path)
    site_packages = next(tmp_path.rglob("site-packages"))
    code = f"import site\nsite.addsitedir({str(site_packages)!r})\n{PACKAGES}"
    places = [Path(place).resolve() for place in run([sys.executable, "-S", "-c", code], tmp_path).splitlines()]
    assert places == [built.tree / name / "__init__.py" for name in ("oneflax", "sbp", "pipeline")]
    # jax comes from this environment, whose own editable oneflax, if any, must come second.
    folders = [str(site_packages), *dict.fromkeys(sysconfig.get_path(name) for name in ("purelib", "platlib"))]
    code = f"import site\nfor folder in {folders!r}: site.addsitedir(folder)\n{STEP}"
    assert_trained(run([sys.executable, "-S", "-c", code], tmp_path, **TWO_DEVICES), built.tree / "oneflax")
