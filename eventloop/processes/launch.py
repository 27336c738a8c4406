"""Run a module of eventloop in a new interpreter, as `python -m` would.

Worker processes and the process that saves checkpoints are started with it; this file is also the script that
the new interpreter runs:

    home = Home.here()
    subprocess.Popen(command("eventloop.background.workers.worker", home, "5"), cwd=home.cwd)

The module imports this very `eventloop`. The program's other module folders follow behind those of the new
interpreter, because a package installed next to `eventloop` may have the name of a module of the standard
library. The path comes by the command line: PYTHONPATH would put it first, also in processes that a handler
starts. As a script, this file runs before `eventloop` can be imported, and imports nothing of it.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import module_from_spec, spec_from_file_location
from types import ModuleType
from typing import NamedTuple

ASK_TO_END = frozenset(
    getattr(signal, name)
    for name in ("SIGINT", "SIGTERM", "SIGUSR1", "SIGUSR2", "SIGHUP", "SIGQUIT", "SIGXCPU")
    if hasattr(signal, name)
)
"""Signals that a terminal or a scheduler sends to all processes of a program.

Children ignore them: the program decides when its children end.
"""

_THIS = os.path.realpath(__file__)
_END = "--"  # ends the path: no absolute entry is equal to it


class Home(NamedTuple):
    """The `sys.path` and the working directory of this process at one moment.

    Relative entries keep their meaning after a change of directory.

    Attributes:
        path: the folders in which modules are looked up, each absolute.
        folder: the working directory; None if it had been removed.
    """

    path: list[str]
    folder: str | None

    @classmethod
    def here(cls) -> Home:
        """Return the `sys.path` and the working directory that this process has now."""
        entries = [entry for entry in sys.path if isinstance(entry, str)]  # an import ignores others
        try:
            folder = os.getcwd()
        except OSError:
            return cls([entry for entry in entries if os.path.isabs(entry)], None)
        return cls([os.path.join(folder, entry) if entry else folder for entry in entries], folder)

    @property
    def cwd(self) -> str | None:
        """Return the working directory for a new process.

        None, which means this process's own, if the folder does not exist any more.
        """
        return self.folder if self.folder is not None and os.path.isdir(self.folder) else None


def command(module: str, home: Home, *arguments: str) -> list[str]:
    """Return the command line that runs a module of eventloop as `__main__`.

    `arguments` become its `sys.argv[1:]`.
    """
    return [sys.executable, "-P", _THIS, module, *home.path, _END, *arguments]


def bare_command(module: str, *arguments: str) -> list[str]:
    """Return the command line that runs a module which imports only the standard library and its like.

    It starts in a tenth of the time: nothing that is installed is found, and the packages of eventloop are
    not executed, only their modules.
    """
    return [sys.executable, "-I", "-S", _THIS, module, _END, *arguments]


def runs_python() -> bool:
    """Return whether this program knows a Python interpreter, which a frozen program does not."""
    return bool(sys.executable) and not getattr(sys, "frozen", False)


@contextmanager
def signals_held() -> Iterator[None]:
    """Block `ASK_TO_END` on this thread; a child started in the block inherits the blocked signals.

    These signals reach the whole process group: a child would die of them while it imports, of Ctrl-C with a
    traceback on the terminal. The child unblocks them once it ignores them.
    """
    held = signal.pthread_sigmask(signal.SIG_BLOCK, ASK_TO_END)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, held)


def main() -> None:
    """Run the module that the command line names; called in the new interpreter."""
    from runpy import run_module

    module, *rest = sys.argv[1:]
    end = rest.index(_END)
    sys.path += [entry for entry in rest[:end] if entry not in sys.path]
    sys.argv[1:] = rest[end + 1 :]
    if sys.flags.no_site:
        _find_modules_only(module)
    elif "eventloop" not in sys.modules:  # a sitecustomize may have imported it
        _import_this_package()
    run_module(module, run_name="__main__", alter_sys=True)


def _import_this_package() -> None:
    """Import `eventloop` from this file's folder: another one may come before it on the path."""
    spec = spec_from_file_location(
        "eventloop", os.path.join(os.path.dirname(os.path.dirname(_THIS)), "__init__.py")
    )
    assert spec is not None
    assert spec.loader is not None
    package = sys.modules["eventloop"] = module_from_spec(spec)
    spec.loader.exec_module(package)


def _find_modules_only(module: str) -> None:
    """Let the packages above a module be found without executing them: they import more than it needs."""
    folder, package = os.path.dirname(os.path.dirname(os.path.dirname(_THIS))), ""
    for name in module.split(".")[:-1]:
        package, folder = f"{package}.{name}".lstrip("."), os.path.join(folder, name)
        sys.modules[package] = ModuleType(package)
        sys.modules[package].__path__ = [folder]


if __name__ == "__main__":
    main()
