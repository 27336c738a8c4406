"""Checkpoints for the tests of the command: real ones, and what can befall them."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from io import FileIO
from pathlib import Path
from typing import Any

from eventloop import cli
from eventloop.checkpoint.commit import PAYLOAD
from eventloop.checkpoint.disk import Disk
from eventloop.checkpoint.manifest import Label
from eventloop.temporary.leftovers import leftovers
from eventloop.temporary.names import temporary_path
from tests.checkpoints import with_pid
from tests.cli.conftest import ENVIRONMENT
from tests.forked import Forked


def checkpoints(*arguments: object) -> int:
    """The command, in this process."""
    return cli.main(["checkpoints", *map(str, arguments)])


def names(directory: Path) -> set[str]:
    """The directories there are, hidden ones too."""
    folders = {path.name for path in directory.iterdir() if path.is_dir() and not path.is_symlink()}
    return folders - {"traces"}


def flip(path: Path) -> None:
    """Change one bit in the middle of a file."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


ALL = {"epoch_1", "epoch_2", "best_acc_epoch_2", "epoch_3", "epoch_4"}


def label_of(of: Label, **changes: Any) -> Label:
    """What a checkpoint is labelled with, and what shall be otherwise."""
    return Label(**{"sequence": of.sequence, "best": of.best, "metrics": of.metrics, **changes})


KILLED = """
import os, signal, sys
from pathlib import Path
from eventloop.checkpoint import save_checkpoint
from eventloop.checkpoint.disk import Disk

class Killed(Disk):
    def sync_directory(self, path):
        if path.name.startswith("."):
            os.kill(os.getpid(), signal.SIGKILL)

save_checkpoint({"state_dict": {}}, Path(sys.argv[1], "epoch_5"), disk=Killed())
"""


def kill_a_save(directory: Path) -> str:
    """Kill a process in the middle of a save, and return the name of what it left."""
    killed = Forked(["-c", KILLED, str(directory)], env=ENVIRONMENT)
    assert killed.wait(60) == -9
    (left,) = leftovers(directory, killed.pid)
    return left.name


def write_half_a_save(directory: Path) -> str:
    """Leave what a killed save leaves, in the name of a process that has ended; return the name."""
    ended = subprocess.Popen(["true"])
    ended.wait()
    name = temporary_path(directory / "epoch_5", "tmp").name
    left = with_pid(directory / name, ended.pid)
    left.mkdir()
    (left / PAYLOAD).write_bytes(b"half")
    return left.name


class During(Disk):
    """Calls something in the middle of a save."""

    def __init__(self, call: Callable[[], object]) -> None:
        self._call = call

    def sync(self, file: FileIO) -> None:
        if str(file.name).endswith(PAYLOAD):  # once: the files of a checkpoint are synced at the same time
            self._call()
