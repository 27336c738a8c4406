"""Run a module of eventloop in a new interpreter, as `python -m` would.

Worker processes and the process that saves checkpoints are started in this way. This file is also the script
that the new interpreter runs:

    home = Home.here()
    subprocess.Popen(command("eventloop.background.workers.worker", home, "5"), cwd=home.cwd)

The new interpreter imports the `eventloop` package that contains this file. It searches modules first in its
own folders and then in those of the program's `sys.path`, because a package next to `eventloop` may have the
name of a module of the standard library. These folders are passed on the command line: PYTHONPATH would put
them first, and would also affect processes that a handler starts. As a script, this file runs before
`eventloop` can be imported, so it imports nothing of it.
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

END_SIGNALS = frozenset(
    getattr(signal, name)
    for name in ("SIGINT", "SIGTERM", "SIGUSR1", "SIGUSR2", "SIGHUP", "SIGQUIT", "SIGXCPU")
    if hasattr(signal, name)
)
"""Signals that a terminal or a scheduler sends to all processes of a program.

Children ignore them, because the program ends its children itself.
"""

_THIS = os.path.realpath(__file__)
_END = "--"  # marks the end of the folders on the command line; it is no folder, because those are absolute


class Home(NamedTuple):
    """Hold the `sys.path` and the working directory of this process, for a child to be started later.

    The paths are absolute, so they stay valid if the program changes its directory.

    Attributes:
        path: the folders in which modules are looked up.
        folder: the working directory; None if it had been removed.
    """

    path: list[str]
    folder: str | None

    @classmethod
    def here(cls) -> Home:
        """Return the present `sys.path` and working directory of this process."""
        entries = [entry for entry in sys.path if isinstance(entry, str)]  # `import` ignores other types
        try:
            folder = os.getcwd()
        except OSError:
            return cls([entry for entry in entries if os.path.isabs(entry)], None)
        return cls([os.path.join(folder, entry) if entry else folder for entry in entries], folder)

    @property
    def cwd(self) -> str | None:
        """The working directory for a new process; None if the folder no longer exists.

        With None, the new process has the present working directory of this process.
        """
        return self.folder if self.folder is not None and os.path.isdir(self.folder) else None


def command(module: str, home: Home, *arguments: str) -> list[str]:
    """Return the command line that runs a module of eventloop as `__main__`.

    Args:
        module: the full name of the module.
        home: has the folders in which the new process looks up modules.
        arguments: the module's `sys.argv[1:]`.
    """
    return [sys.executable, "-P", _THIS, module, *home.path, _END, *arguments]


def bare_command(module: str, *arguments: str) -> list[str]:
    """Return the command line for a module that imports only the standard library and other such modules.

    The process starts in a tenth of the time: it does not look for installed packages, and does not execute
    the `__init__` files of eventloop's packages.
    """
    return [sys.executable, "-I", "-S", _THIS, module, _END, *arguments]


def runs_python() -> bool:
    """Return whether this program can start a Python interpreter; a frozen program has none."""
    return bool(sys.executable) and not getattr(sys, "frozen", False)


@contextmanager
def signals_blocked() -> Iterator[None]:
    """Block the signals `END_SIGNALS` on this thread, so that a child started in the block has them blocked.

    These signals reach the whole process group. A child would die of them while it imports modules, and print
    a traceback on Ctrl-C. The child unblocks them once it has set them to be ignored.
    """
    former_mask = signal.pthread_sigmask(signal.SIG_BLOCK, END_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, former_mask)


def main() -> None:
    """Run the module named on the command line, in the new interpreter."""
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
    """Import `eventloop` from the folder of this file: `sys.path` may have another version first."""
    spec = spec_from_file_location(
        "eventloop", os.path.join(os.path.dirname(os.path.dirname(_THIS)), "__init__.py")
    )
    assert spec is not None
    assert spec.loader is not None
    package = sys.modules["eventloop"] = module_from_spec(spec)
    spec.loader.exec_module(package)


def _find_modules_only(module: str) -> None:
    """Register the packages of a module without executing their `__init__` files, which import too much."""
    folder, package = os.path.dirname(os.path.dirname(os.path.dirname(_THIS))), ""
    for name in module.split(".")[:-1]:
        package, folder = f"{package}.{name}".lstrip("."), os.path.join(folder, name)
        sys.modules[package] = ModuleType(package)
        sys.modules[package].__path__ = [folder]


if __name__ == "__main__":
    main()
