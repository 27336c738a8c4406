"""Run a script or a module as `__main__` in this process, as Python itself does."""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType

_OWN = ("<frozen runpy>", str(Path(__file__).parents[1]) + os.sep)
"""Beginnings of the files of frames that are above the script's."""


def check_script(script: str, *, module: bool) -> None:
    """Check that there is a script, or a module, of a name.

    Raises:
        FileNotFoundError: it does not exist.
        ValueError: the file is not of Python, or has a byte that no script has.
    """
    if module:
        _check_module(script)
        return
    path = Path(script)
    if path.is_dir():
        if not (path / "__main__.py").is_file():
            raise ValueError(f"{path} is a folder without a __main__.py: give a Python script")
    elif not path.is_file():
        raise FileNotFoundError(f"no file at {path}: give a Python script, or -m and a module")
    elif path.suffix not in (".py", ".pyw", ""):
        raise ValueError(f"expected a Python script, got {path}: give a file that ends in .py")


def _check_module(name: str) -> None:
    sys.path.insert(0, os.getcwd())
    try:
        found = find_spec(name) is not None
    except ModuleNotFoundError:
        found = False
    finally:
        del sys.path[0]
    if not found:
        raise FileNotFoundError(f"no module named {name!r} in {os.getcwd()} or among the installed packages")


def run_main(script: str, arguments: Sequence[str], *, module: bool) -> None:
    """Run a script, or a module, as `__main__`; its errors, and SystemExit, are raised.

    `sys.argv` and the first entry of `sys.path` are those that Python would give the script. The interpreter
    shows an error that ends the program without the frames above the script.
    """
    _begin_tracebacks_at_the_script()
    sys.argv[:] = [script, *arguments]
    if not sys.flags.safe_path:
        sys.path[0] = os.getcwd() if module else str(Path(script).resolve().parent)
    if module:
        runpy.run_module(script, run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(script, run_name="__main__")


def _begin_tracebacks_at_the_script() -> None:
    shown = sys.excepthook

    def show(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        while traceback is not None and traceback.tb_frame.f_code.co_filename.startswith(_OWN):
            traceback = traceback.tb_next
        shown(kind, error.with_traceback(traceback), traceback)

    sys.excepthook = show
