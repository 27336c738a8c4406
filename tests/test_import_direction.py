"""The core knows no hook, no writer and none of their libraries."""

from __future__ import annotations

import ast
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import eventloop

BANNED = ("eventloop.hooks", "eventloop.writers", "tensorboard", "rich", "visdom", "sklearn")
ROOT = Path(eventloop.__file__).parent
MAY_NAME_THEM = {"cli", "registry.py", "hooks", "writers"}
CORE = sorted(path for path in ROOT.rglob("*.py") if path.relative_to(ROOT).parts[0] not in MAY_NAME_THEM)

LOADED = """
import sys, {module}
print(*(m for m in sys.modules if m.startswith({banned})))
"""

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.mark.parametrize("module", ["eventloop", "eventloop.bus", "eventloop.training.trainer"])
def test_core_loads_no_hook_writer_or_plotting_library(python: Run, module: str) -> None:
    """Importing the engine loads nothing that it is merely used with."""
    ran = python(LOADED.format(module=module, banned=BANNED))

    assert (ran.stdout.split(), ran.stderr) == ([], "")


@pytest.mark.parametrize("module", ["eventloop", "eventloop.bus"])
def test_bus_loads_no_torch(python: Run, module: str) -> None:
    """A bus serves any program: it loads neither torch nor numpy."""
    ran = python(LOADED.format(module=module, banned=("torch", "numpy")))

    assert (ran.stdout.split(), ran.stderr) == ([], "")


@pytest.mark.parametrize("path", CORE, ids=lambda path: str(path.relative_to(ROOT)))
def test_core_file_names_no_hook_or_writer(path: Path) -> None:
    """No import statement of a core file, at its top or inside a function, names what lies above it."""
    named = [
        name for name in imported(ast.parse(path.read_text(encoding="utf-8"))) if name.startswith(BANNED)
    ]

    assert named == []


def imported(tree: ast.AST) -> Iterator[str]:
    """Every module an import statement names, with the names taken from it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
