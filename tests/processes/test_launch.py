"""Processes of ours: what they find when they start, whatever is installed beside eventloop."""

from __future__ import annotations

import pathlib
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import anyio
import blinker
import msgspec
import pytest
import torch

import eventloop
from eventloop.bus import Bus
from eventloop.processes.launch import Home
from tests.conftest import DEADLINE
from tests.support import process_handlers as handlers
from tests.support.process_support import Lines, Start, emit

pytest_plugins = ("tests.support.process_fixtures",)

PACKAGE = Path(eventloop.__file__).parent
LIBRARIES = sorted({str(Path(str(m.__file__)).parents[1]) for m in (anyio, blinker, msgspec, torch)})
STDLIB_PATHLIB = str(pathlib.__file__)
"""A file, or since Python 3.13 a package."""

HANDLERS = """
import os, pathlib, eventloop
def note(event):
    with open("log.txt", "a") as file:
        print(eventloop.__file__, pathlib.__file__, os.environ.get("PYTHONPATH"), file=file)
"""

WORKER = """
import my_handlers
from eventloop.bus import Bus
from eventloop.events import AfterTrainIter
bus = Bus()
bus.subscribe(my_handlers.note, "after_train_iter", offload="process")
bus.emit(AfterTrainIter())
assert bus.close(60)
"""

SAVER = """
from eventloop.checkpoint.saving.saver_client import SaverProcess
process = SaverProcess()
print(process.commit([]) == [])
process.end()
"""

Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder like site-packages: it has an eventloop, and a backport that was of use to another Python."""
    folder = tmp_path_factory.mktemp("installed")
    shutil.copytree(
        PACKAGE, folder / "eventloop", ignore=shutil.ignore_patterns("__pycache__", "hooks", "writers")
    )
    (folder / "pathlib.py").write_text("from collections import Sequence\n", encoding="utf-8")
    return folder


@pytest.fixture
def program(installed: Path, tmp_path: Path) -> Run:
    """Run a program for which eventloop is installed there and nowhere else."""
    (tmp_path / "my_handlers.py").write_text(HANDLERS, encoding="utf-8")

    def run(source: str, **environment: str) -> subprocess.CompletedProcess[str]:
        path = [str(installed), *LIBRARIES]
        return subprocess.run(
            [sys.executable, "-S", "-c", f"import sys; sys.path += {path!r}\n{source}"],
            env={"PATH": "", **environment},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )

    return run


@pytest.mark.slow
@pytest.mark.parametrize("environment", [{}, {"PYTHONPATH": "/my/own:/and/mine"}], ids=["none", "own"])
def test_worker_starts_beside_a_backport(
    program: Run, installed: Path, tmp_path: Path, environment: dict[str, str]
) -> None:
    """It has the program's eventloop and the standard library; PYTHONPATH is the user's, for the processes of
    handlers too."""
    ran = program(WORKER, **environment)
    logged = (tmp_path / "log.txt").read_text(encoding="utf-8").split()

    assert (ran.stderr, ran.returncode) == ("", 0)
    assert logged == [
        str(installed / "eventloop" / "__init__.py"),
        STDLIB_PATHLIB,
        environment.get("PYTHONPATH", "None"),
    ]


@pytest.mark.slow
def test_saver_starts_beside_a_backport(program: Run) -> None:
    """The process that writes checkpoints, too."""
    ran = program(SAVER)

    assert (ran.stdout, ran.stderr) == ("True\n", "")


def test_another_eventloop_on_the_path_is_not_taken(
    bus: Bus, start: Start, lines: Lines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker and its program speak one language only if they are of one version."""
    (tmp_path / "eventloop").mkdir()
    (tmp_path / "eventloop" / "__init__.py").write_text("raise ImportError('an older one')", encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    far = start(handlers.record)
    emit(bus, 1)

    assert bus.flush(DEADLINE)
    assert (far.stats.error, lines()) == ("", ["0"])


def test_home_is_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A change of directory changes nothing of it; what no import looks at is left out. If the directory is removed, a
    process starts where this one is, and looks where there is something."""
    folder = tmp_path / "gone"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", ["", "here", Path("a path"), "/there"])

    home = Home.here()
    monkeypatch.chdir("/")
    assert tuple(home) == ([str(folder), str(folder / "here"), "/there"], str(folder))
    monkeypatch.chdir(folder)
    folder.rmdir()

    assert home.cwd is None
    assert Home.here() == (["/there"], None)
