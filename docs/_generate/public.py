"""List the public names of eventloop, as its modules export them."""

from __future__ import annotations

import ast
import importlib
import inspect
from typing import TypeVar

PUBLIC_MODULES = (
    "eventloop",
    "eventloop.bus",
    "eventloop.events",
    "eventloop.hooks",
    "eventloop.writers",
    "eventloop.metrics",
    "eventloop.checkpoint",
    "eventloop.ownership",
    "eventloop.commands",
    "eventloop.watching",
    "eventloop.optim",
    "eventloop.optim.schedulers",
    "eventloop.registry",
    "eventloop.interrupt",
)


def public_names(module: str) -> list[str]:
    """Return the names that a module exports: its `__all__`, else its imports `as` the same name, else its own."""
    found = importlib.import_module(module)
    if hasattr(found, "__all__"):
        return list(found.__all__)
    tree = ast.parse(inspect.getsource(found))
    if found.__file__ is not None and found.__file__.endswith("__init__.py"):
        return _exported(tree)
    own = (name for name in _defined(tree) if not name.startswith("_"))
    return [name for name in own if not isinstance(getattr(found, name), TypeVar)]


def _exported(tree: ast.Module) -> list[str]:
    """Return what a package imports as `from module import Name as Name`, also for type checkers only."""
    aliases = [alias for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for alias in node.names]
    return [alias.name for alias in aliases if alias.asname == alias.name and not alias.name.startswith("_")]


def _defined(tree: ast.Module) -> list[str]:
    names: list[str] = []
    for node in tree.body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            names.append(node.name)
        elif isinstance(node, ast.Assign):
            names += [target.id for target in node.targets if isinstance(target, ast.Name)]
    return names
