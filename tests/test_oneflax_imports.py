"""Imports point one way, pure modules stay pure, and the packages' listings are true: read from source, then run."""

import ast
import importlib
import subprocess
import sys
import tomllib
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from oneflax.sbp._lazy import exports

ROOT = Path(__file__).parents[1]
PACKAGES = {"oneflax.sbp": ROOT / "sbp", "oneflax.pipeline": ROOT / "pipeline", "oneflax": ROOT / "oneflax"}
"""Package → folder, the innermost first."""

LAYERS = ("oneflax.sbp", "oneflax.pipeline", "oneflax", "examples")
"""From the bottom up: a module imports from its own layer and those before it."""

PURE = {
    "sbp": (
        "__init__",
        "_lazy",
        "boxing_plan",
        "cost",
        "errors",
        "extent",
        "grid",
        "infer",
        "notation",
        "param_rules",
        "prove",
        "prove_ops",
        "ranks",
        "rules",
        "signature",
    ),
    "pipeline": (
        "__init__",
        "actions",
        "actors",
        "blocked",
        "picture",
        "registers",
        "schedules",
        "simulate",
        "step_registers",
        "table",
        "text_grid",
        "trace",
        "validation",
    ),
    "oneflax": (
        "__init__",
        "__main__",
        "_demo_grid",
        "_demo_report",
        "_machine",
        "_patterns",
        "_stage_paths",
        "_version",
        "doctor",
        "flax/__init__",
        "flax/rules",
    ),
}
"""Every module, or folder of modules, that loads neither jax nor numpy when imported. None of them names jax at all."""

HEAVY = ("jax", "jaxlib", "flax", "optax", "orbax", "numpy")


@dataclass(frozen=True, slots=True)
class Import:
    """One imported module, as a full name, and how: `lazy` inside a function, `typing` for type checkers only."""

    file: Path
    line: int
    module: str
    relative: bool
    lazy: bool
    typing: bool

    def __str__(self) -> str:
        return f"{self.file.relative_to(ROOT)}:{self.line} imports {self.module}"


def sources(folder: Path) -> list[Path]:
    """The Python files below a folder; links to other packages are not followed."""
    return sorted(path for path in folder.rglob("*.py") if not any(p.is_symlink() for p in path.parents if p != ROOT))


def module_name(file: Path) -> str:
    """Full name of the module in `file`: ``sbp/rules/matmul.py`` → ``oneflax.sbp.rules.matmul``."""
    for package, folder in PACKAGES.items():
        if file.is_relative_to(folder):
            parts = file.relative_to(folder).with_suffix("").parts
            return ".".join([package, *(part for part in parts if part != "__init__")])
    return ".".join(file.relative_to(ROOT).with_suffix("").parts)


def imports(file: Path) -> Iterator[Import]:
    """Every import of a file. ``from a import b`` counts as ``a.b``, since b may be a module."""
    name = module_name(file)
    package = name.split(".") if file.name == "__init__.py" else name.split(".")[:-1]

    def walk(node: ast.AST, lazy: bool, typing: bool) -> Iterator[Import]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                for alias in child.names:
                    yield Import(file, child.lineno, alias.name, False, lazy, typing)
            elif isinstance(child, ast.ImportFrom):
                base = package[: len(package) - child.level + 1] if child.level else []
                origin = ".".join([*base, *([child.module] if child.module else [])])
                for alias in child.names:
                    yield Import(file, child.lineno, f"{origin}.{alias.name}", child.level > 0, lazy, typing)
            else:
                function = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
                checker = isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)
                yield from walk(child, lazy or function, typing or checker)

    yield from walk(ast.parse(file.read_text(encoding="utf-8")), False, False)


def layer(module: str) -> str | None:
    """The layer a module belongs to, None for other people's."""
    inside = [name for name in LAYERS if module == name or module.startswith(name + ".")]
    return max(inside, key=len, default=None)


def pure_files() -> list[Path]:
    """The files of :data:`PURE` that exist."""
    paths = [ROOT / folder / name for folder, names in PURE.items() for name in names]
    files = [path.with_suffix(".py") for path in paths if path.with_suffix(".py").is_file()]
    return files + [file for path in paths if path.is_dir() for file in sources(path)]


OURS = [file for folder in (*PACKAGES.values(), ROOT / "examples") for file in sources(folder)]
ALL_IMPORTS = [found for file in OURS for found in imports(file)]


def test_the_scan_sees_each_package() -> None:
    names = {module_name(file) for file in OURS}
    assert {"oneflax", "oneflax.sbp", "oneflax.pipeline", "oneflax.sbp.errors", "oneflax.__main__"} <= names
    assert len(names) == len(OURS)


def test_imports_point_one_way() -> None:
    wrong: list[str] = []
    for found in ALL_IMPORTS:
        importer, imported = layer(module_name(found.file)), layer(found.module)
        assert importer is not None
        if imported is not None and LAYERS.index(imported) > LAYERS.index(importer):
            wrong.append(str(found))
    assert wrong == []


def test_nothing_imports_the_folders_as_top_level_packages() -> None:
    tests = [found for folder in ("tests", "benchmarks") for file in sources(ROOT / folder) for found in imports(file)]
    tops = {"sbp", "pipeline", "tests", "benchmarks"}
    wrong = [str(found) for found in ALL_IMPORTS + tests if found.module.split(".")[0] in tops - {"benchmarks"}]
    wrong += [str(found) for found in ALL_IMPORTS if found.module.split(".")[0] == "benchmarks"]
    assert wrong == []


def test_inside_a_package_imports_are_relative() -> None:
    # The demo's files are programs, so they may write `import oneflax as flow`, as their reader would.
    wrong = [
        str(found)
        for found in ALL_IMPORTS
        if not found.relative
        and layer(found.module) == layer(module_name(found.file)) != "examples"
        and not found.file.name.startswith(("demo", "_demo_"))
    ]
    assert wrong == []


def test_pure_modules_name_no_jax() -> None:
    roots = set(HEAVY) - {"numpy"}
    found = [i for file in pure_files() for i in imports(file) if not i.typing]
    wrong = [str(i) for i in found if i.module.split(".")[0] in roots]
    wrong += [str(i) for i in found if i.module.split(".")[0] == "numpy" and not i.lazy]
    assert wrong == []


def loaded_by(statement: str) -> list[str]:
    """Which heavy packages a statement loads in a fresh interpreter."""
    code = f"import sys\n{statement}\nprint(*sorted({set(HEAVY)} & set(sys.modules)))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert run.returncode == 0, run.stderr
    return run.stdout.split()


@pytest.mark.newest
@pytest.mark.parametrize("module", ["oneflax", "oneflax.sbp", "oneflax.pipeline", "oneflax.pipeline.schedules"])
def test_packages_load_no_jax(module: str) -> None:
    assert loaded_by(f"import {module}") == []


def test_the_list_of_pure_modules_is_complete() -> None:
    """A module that could be pure is: it loads nothing heavy, nor does what it loads."""
    loads = {
        module_name(file): {found.module for found in imports(file) if not found.lazy and not found.typing}
        for file in OURS
        if layer(module_name(file)) != "examples"
    }
    heavy = {name for name, modules in loads.items() if any(module.split(".")[0] in HEAVY for module in modules)}
    while more := {
        name for name in loads.keys() - heavy if any(origin(module, loads.keys()) in heavy for module in loads[name])
    }:
        heavy |= more
    assert sorted(loads.keys() - heavy) == sorted(module_name(file) for file in pure_files())


def origin(name: str, modules: Collection[str]) -> str:
    """The module of ours that an imported name is, or is in: ``oneflax.sbp.grid.Placement`` → ``oneflax.sbp.grid``."""
    while name and name not in modules:
        name = name.rpartition(".")[0]
    return name


def test_pure_modules_load_no_jax() -> None:
    modules = sorted(module_name(file) for file in pure_files())
    assert loaded_by("\n".join(f"import {module}" for module in modules)) == []


def test_the_planted_fault_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The scanner itself: relative, lazy, typing-only and aliased imports of a made-up file."""
    file = tmp_path / "pipeline" / "schedules" / "x.py"
    file.parent.mkdir(parents=True)
    file.write_text(
        "import numpy as np\nfrom ..table import ScheduleTable\nfrom typing import TYPE_CHECKING\n"
        "if TYPE_CHECKING:\n    import jax\n"
        "def f():\n    from oneflax import placement\n    import jax.numpy\n"
    )
    monkeypatch.setitem(PACKAGES, "oneflax.pipeline", tmp_path / "pipeline")
    assert [(found.module, found.relative, found.lazy, found.typing) for found in imports(file)] == [
        ("numpy", False, False, False),
        ("oneflax.pipeline.table.ScheduleTable", True, False, False),
        ("typing.TYPE_CHECKING", False, False, False),
        ("jax", False, False, True),
        ("oneflax.placement", False, True, False),
        ("jax.numpy", False, True, False),
    ]
    assert layer("oneflax.placement") == "oneflax"
    assert layer("oneflax.sbp.grid") == "oneflax.sbp"
    assert layer("oneflax_other.x") is None


def test_every_package_folder_is_in_pyproject() -> None:
    config = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    folders = {module_name(file.parent / "__init__.py") for file in OURS if layer(module_name(file)) != "examples"}
    assert sorted(config["packages"]) == sorted(folders)


def test_the_links_point_to_the_packages() -> None:
    for name in ("sbp", "pipeline"):
        link = ROOT / "oneflax" / name
        assert link.is_symlink()
        assert link.readlink() == Path("..") / name
        assert (ROOT / name / "py.typed").is_file()


STUBS = {package: folder / "__init__.pyi" for package, folder in PACKAGES.items()}


@pytest.mark.newest
@pytest.mark.parametrize("package", STUBS)
def test_every_listed_name_resolves(package: str) -> None:
    module = importlib.import_module(package)
    names = exports(STUBS[package])
    unresolved = {name for name in names if not hasattr(module, name)}
    assert unresolved == set()
    assert set(dir(module)) >= set(names)
    with pytest.raises(AttributeError, match="has no attribute 'no_such_name'"):
        _ = module.no_such_name


def test_a_name_is_looked_up_once(monkeypatch: pytest.MonkeyPatch) -> None:
    import oneflax

    found = oneflax.placement
    monkeypatch.setattr(importlib, "import_module", None)  # nothing may ask for it again
    assert oneflax.placement is found
    assert vars(oneflax)["placement"] is found


def test_a_reloaded_package_reads_its_modules_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A made-up package with a value, and a module of the package as a public name."""
    folder = tmp_path / "made_up"
    folder.mkdir()
    (folder / "__init__.py").write_text(
        "from oneflax.sbp._lazy import attach\n__getattr__, __dir__, __all__ = attach(__name__, __file__)\n"
    )
    (folder / "__init__.pyi").write_text("from . import part as part\nfrom .part import VALUE as VALUE\n")
    (folder / "part.py").write_text("VALUE = object()\n")
    monkeypatch.syspath_prepend(tmp_path)
    package = importlib.import_module("made_up")
    first = package.VALUE
    assert (package.part, package.part.VALUE) == (sys.modules["made_up.part"], first)
    importlib.reload(package.part)
    assert package.VALUE is first
    importlib.reload(package)
    assert package.VALUE is package.part.VALUE is not first
    for name in ("made_up", "made_up.part"):
        monkeypatch.delitem(sys.modules, name)
    other = importlib.import_module("made_up")
    assert other.VALUE is other.part.VALUE is not package.VALUE
    for name in ("made_up", "made_up.part"):
        del sys.modules[name]


@pytest.mark.parametrize("package", STUBS)
def test_no_module_hides_a_public_name(package: str) -> None:
    """``package.name`` would turn from the function into the module once the module loads."""
    folder = PACKAGES[package]
    values = [name for name, (_, attribute) in exports(STUBS[package]).items() if attribute is not None]
    assert [name for name in values if (folder / f"{name}.py").exists() or (folder / name).is_dir()] == []


def test_every_module_says_what_it_is() -> None:
    assert [str(file) for file in OURS if not ast.get_docstring(ast.parse(file.read_text(encoding="utf-8")))] == []
