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
MAY_NAME_THEM = {"cli", "bridges", "registry.py", "hooks", "writers"}
CORE = sorted(path for path in ROOT.rglob("*.py") if path.relative_to(ROOT).parts[0] not in MAY_NAME_THEM)

LOADED = """
import sys, {module}
print(*(m for m in sys.modules if m.startswith({banned})))
"""

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.mark.representative(2)
@pytest.mark.parametrize(
    ("module", "banned"),
    [
        ("eventloop", (*BANNED, "torch", "numpy")),
        ("eventloop.bus", (*BANNED, "torch", "numpy")),
        ("eventloop.training.trainer", BANNED),
    ],
)
def test_core_loads_no_hook_writer_or_plotting_library(
    python: Run, module: str, banned: tuple[str, ...]
) -> None:
    """Importing the engine loads nothing that it is merely used with; a bus serves any program: neither torch nor numpy."""
    ran = python(LOADED.format(module=module, banned=banned))

    assert (ran.stdout.split(), ran.stderr) == ([], "")


def test_no_core_file_names_a_hook_or_writer() -> None:
    """No import statement of a core file, at its top or inside a function, names what lies above it."""
    named = {path: [*imported(ast.parse(path.read_text(encoding="utf-8")))] for path in CORE}

    assert len(CORE) > 100
    assert [(path, name) for path, found in named.items() for name in found if name.startswith(BANNED)] == []


def imported(tree: ast.AST) -> Iterator[str]:
    """Every module an import statement names, with the names taken from it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
