"""Starts a module of ours in an interpreter of its own, as `python -m` would; this file is the script that is run there.

    home = Home.here()
    subprocess.Popen(command("eventloop.background.workers.worker", home, "5"), cwd=home.cwd)

The module finds this very `eventloop`, and what else this program finds, but behind all that the new interpreter has of
itself: beside `eventloop` lies whatever is installed, and some of it has the name of a module of the standard library.
So the path comes by the command line: PYTHONPATH would put it first, in the processes of the module's handlers too.
As a script it runs before there is an `eventloop`, and imports nothing of it.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import module_from_spec, spec_from_file_location
from typing import NamedTuple

ASK_TO_END = frozenset(
    getattr(signal, name)
    for name in ("SIGINT", "SIGTERM", "SIGUSR1", "SIGUSR2", "SIGHUP", "SIGQUIT", "SIGXCPU")
    if hasattr(signal, name)
)
"""What a terminal or a scheduler sends to all processes of a program: it decides what becomes of its own."""

_THIS = os.path.realpath(__file__)
_END = "--"  # of the path; no absolute entry reads so


class Home(NamedTuple):
    """Where this process was when it was asked: what is relative means the same after a change of directory.

    Attributes:
        path: where it looks for modules, each entry absolute.
        folder: its working directory; None where that had been removed.
    """

    path: list[str]
    folder: str | None

    @classmethod
    def here(cls) -> Home:
        """As it is now."""
        entries = [entry for entry in sys.path if isinstance(entry, str)]  # an import passes over others
        try:
            folder = os.getcwd()
        except OSError:
            return cls([entry for entry in entries if os.path.isabs(entry)], None)
        return cls([os.path.join(folder, entry) if entry else folder for entry in entries], folder)

    @property
    def cwd(self) -> str | None:
        """The folder for a new process; None, which is this process's, where it has been removed since."""
        return self.folder if self.folder is not None and os.path.isdir(self.folder) else None


def command(module: str, home: Home, *arguments: str) -> list[str]:
    """The command line that runs a module of ours as `__main__`, `arguments` being its `sys.argv[1:]`."""
    return [sys.executable, "-P", _THIS, module, *home.path, _END, *arguments]


@contextmanager
def signals_held() -> Iterator[None]:
    """What is started meanwhile is deaf to what asks the program to end, which reaches the whole group, from its first
    moment on: while it imports it would die of it, of Ctrl-C with a traceback on the terminal. Once it ignores them it
    unblocks them."""
    held = signal.pthread_sigmask(signal.SIG_BLOCK, ASK_TO_END)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, held)


def main() -> None:
    """Run the module, there."""
    from runpy import run_module

    module, *rest = sys.argv[1:]
    end = rest.index(_END)
    sys.path += [entry for entry in rest[:end] if entry not in sys.path]
    sys.argv[1:] = rest[end + 1 :]
    if "eventloop" not in sys.modules:  # a sitecustomize may have been before
        _import_this_package()
    run_module(module, run_name="__main__", alter_sys=True)


def _import_this_package() -> None:
    """`import eventloop`, of this file's folder: another one may be on the path before it."""
    spec = spec_from_file_location(
        "eventloop", os.path.join(os.path.dirname(os.path.dirname(_THIS)), "__init__.py")
    )
    assert spec is not None
    assert spec.loader is not None
    package = sys.modules["eventloop"] = module_from_spec(spec)
    spec.loader.exec_module(package)


if __name__ == "__main__":
    main()
