"""Lazy package exports: an ``__init__.pyi`` lists the public names, and a name's module loads at its first use.

One listing serves both readers: type checkers and editors read the stub, and :func:`attach` reads the same stub to
build the package's ``__getattr__``. So ``import oneflax`` costs no jax, and pure parts never load it. A value that was
found stays in the package's namespace, where Python sees it first.
"""

import ast
import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any


def exports(stub: Path) -> dict[str, tuple[str, str | None]]:
    """Public name → (module below the package, attribute there, or None for the module itself) of one stub."""
    names: dict[str, tuple[str, str | None]] = {}
    for node in ast.parse(stub.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ImportFrom) and node.level == 1:
            for alias in node.names:
                public = alias.asname or alias.name
                names[public] = (node.module, alias.name) if node.module else (alias.name, None)
    return names


def attach(package: str, init_file: str) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Gives ``__getattr__``, ``__dir__`` and ``__all__`` for the package whose ``__init__.py`` is `init_file`."""
    names = exports(Path(init_file).with_suffix(".pyi"))
    namespace = vars(sys.modules[package])
    for name, (_, attribute) in names.items():
        if attribute is not None:
            namespace.pop(name, None)  # the package is reloaded, and perhaps its modules were

    def __getattr__(name: str) -> Any:
        if name not in names:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module_name, attribute = names[name]
        module = importlib.import_module(f"{package}.{module_name}")
        namespace[name] = module if attribute is None else getattr(module, attribute)
        return namespace[name]

    return __getattr__, lambda: sorted(names), sorted(names)
