"""Run a script or a module as `__main__` in this process, as Python itself does."""

from __future__ import annotations

import builtins
import os
import runpy
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from io import open_code
from pathlib import Path
from types import ModuleType, TracebackType

_RUNNERS = ("<frozen runpy>", __file__)
"""The files whose stack frames tracebacks leave out, between `run_main` and the script."""


def check_script(script: str, *, module: bool) -> None:
    """Check that a script, or a module, exists.

    Raises:
        FileNotFoundError: the script or module does not exist.
        ValueError: the file is not a Python file.
    """
    if module:
        _check_module(script)
        return
    path = Path(script)
    if not path.is_file():
        raise FileNotFoundError(f"no file at {path}: give a Python script, or -m and a module")
    if path.suffix not in (".py", ".pyw", ""):
        raise ValueError(f"expected a Python script, got {path}: give a file that ends in .py")


def _check_module(name: str) -> None:
    """Raise FileNotFoundError if `python -m name` would not find the module."""
    sys.path.insert(0, os.getcwd())  # `python -m` searches the current directory first, too
    try:
        exists = find_spec(name) is not None
    except ModuleNotFoundError:
        exists = False
    finally:
        del sys.path[0]
    if not exists:
        raise FileNotFoundError(f"no module named {name!r} in {os.getcwd()} or among the installed packages")


def run_main(script: str, arguments: Sequence[str], *, module: bool) -> None:
    """Run a script, or a module, as `__main__`; raise its errors and its SystemExit.

    `sys.argv` and the first entry of `sys.path` are as if Python had started the script. The traceback of an
    error that ends the program begins with the script's frames.
    """
    _begin_tracebacks_at_the_script()
    sys.argv[:] = [script, *arguments]
    if not sys.flags.safe_path:
        sys.path[0] = os.getcwd() if module else str(Path(script).resolve().parent)
    if module:
        runpy.run_module(script, run_name="__main__", alter_sys=True)
    else:
        _run_file(script)


def _run_file(script: str) -> None:
    """Run a file in a new module `__main__`, which stays in `sys.modules` for the script's exit functions."""
    path = os.path.abspath(script)
    main = ModuleType("__main__")
    vars(main).update(__file__=path, __builtins__=builtins)
    sys.modules["__main__"] = main
    with open_code(path) as file:
        code = compile(file.read(), path, "exec")
    exec(code, vars(main))


def _begin_tracebacks_at_the_script() -> None:
    """Let the interpreter show an error that ends the program with the script's stack frames only."""
    excepthook = sys.excepthook

    def show(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        below = _below_run_main(traceback)
        excepthook(kind, error.with_traceback(below), below)

    sys.excepthook = show


def _below_run_main(traceback: TracebackType | None) -> TracebackType | None:
    """Return the part of a traceback below `run_main`; the whole traceback if `run_main` is not in it."""
    entry = traceback
    while entry is not None and entry.tb_frame.f_code is not run_main.__code__:
        entry = entry.tb_next
    if entry is None:
        return traceback
    entry = entry.tb_next
    while entry is not None and entry.tb_frame.f_code.co_filename in _RUNNERS:
        entry = entry.tb_next
    return entry
