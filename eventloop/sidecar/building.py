"""Find a function that the user names as "module:function", and build an evaluator's trainer with it."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from eventloop.assembly.evaluator_run import building_evaluator
from eventloop.training.trainer import Trainer


class FunctionName(NamedTuple):
    """Name a function: the name of its module or the path of its file, and its own name."""

    module: str
    function: str

    @property
    def is_file(self) -> bool:
        """True if `module` is the path of a file."""
        return self.module.endswith(".py")


def parse_function(text: object) -> FunctionName:
    """Return the parts of "module:function", or of "path/to/file.py:function".

    Raises:
        TypeError: the text is not a str.
        ValueError: it has neither form, or the module is `__main__`.
    """
    if not isinstance(text, str):
        raise TypeError(f"build: expected 'module:function', got {text!r}")
    module, _, function = text.rpartition(":")
    is_name = all(part.isidentifier() for part in module.split("."))
    if not function.isidentifier() or not (is_name or module.endswith(".py")):
        raise ValueError(f"build: expected 'module:function' or 'path/to/file.py:function', got {text!r}")
    if module == "__main__":
        raise ValueError(
            f"build: expected a module that another process can import, got {text!r}: give the name of its "
            "file, such as 'train:build', whose script part is below `if __name__ == \"__main__\"`"
        )
    return FunctionName(module, function)


def find_function(text: str) -> Callable[[], Any]:
    """Import the module of "module:function", and return the function.

    A module is searched first in the current directory, and a file's imports first in the file's folder.

    Raises:
        FileNotFoundError: there is no such file.
        ImportError: there is no such module.
        TypeError, ValueError: the text has another form, or the module has no such function.
        Exception: the module has raised it.
    """
    name = parse_function(text)
    module = _import_file(Path(name.module)) if name.is_file else _import_module(name.module)
    function: Callable[[], Any] | None = getattr(module, name.function, None)
    if function is None or not callable(function):
        functions = [key for key, value in vars(module).items() if callable(value) and key[0] != "_"]
        raise ValueError(
            f"expected a function {name.function!r} in {name.module}, which has "
            f"{', '.join(functions) or 'no function'}"
        )
    return function


def build_trainer(text: str, device: str | None = None) -> Trainer:
    """Build the trainer of an evaluator: it validates, and writes into no run's directory.

    Args:
        text: the function that builds a trainer, as "module:function".
        device: the device of the trainer; None for the device that the function chooses.

    Raises:
        TypeError: the function returns something other than a trainer.
        ValueError: the trainer has no `val_loader`.
        Exception: as `find_function`, or raised by the function.
    """
    function = find_function(text)
    with building_evaluator(device):
        trainer = function()
    if not isinstance(trainer, Trainer):
        raise TypeError(f"expected {text} to return a Trainer, got {type(trainer).__name__}")
    if trainer.val_loader is None:
        raise ValueError(f"expected {text} to return a Trainer with a val_loader, got one without")
    return trainer


def _import_module(name: str) -> ModuleType:
    """Import a module by its name, which is searched first in the current directory."""
    _search_first(os.getcwd())
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise  # the module exists, and imports another one that does not
        raise ModuleNotFoundError(
            f"expected a module {name!r} in {os.getcwd()} or among the installed packages, got none",
            name=error.name,
        ) from error


def _import_file(path: Path) -> ModuleType:
    """Import a file as a module; the modules that it imports are searched first in its folder."""
    if not path.is_file():
        raise FileNotFoundError(f"expected a Python file at {path}, got none")
    _search_first(str(path.resolve().parent))
    spec = spec_from_file_location(path.stem, path.resolve())
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[path.stem] = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _search_first(folder: str) -> None:
    if folder not in sys.path:
        sys.path.insert(0, folder)
