"""Send saves to a process that writes them, and wait for its answers.

The saver uses it, on the thread that writes.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Sequence
from math import inf
from pathlib import Path
from time import monotonic
from typing import NamedTuple

from eventloop.checkpoint.commit import Outcome, Save
from eventloop.checkpoint.manifest import Label
from eventloop.processes.channel import Kind, frame
from eventloop.processes.child import ChildProcess
from eventloop.processes.launch import bare_command, runs_python

_PROGRAM = "eventloop.checkpoint.saving.saver_process"
LOOK_SECONDS = 1.0
"""The interval in seconds between checks whether `leave` was called."""
EXIT_SECONDS = 2.0
"""Seconds that an idle process may take to end; it normally takes milliseconds."""


class Job(NamedTuple):
    """The description of a save for the process: its path, its label and the checkpoints it replaces.

    Attributes:
        path: the checkpoint's path.
        label: the fields of the manifest that cannot be read from the state, such as its sequence number.
        replaces: checkpoints to remove once this one is durable, oldest first.
        spares: the number of checkpoints in `replaces` that are kept, the newest existing ones.
        awaited: whether the training waits until this one is durable.
    """

    path: Path
    label: Label = Label()
    replaces: tuple[Path, ...] = ()
    spares: int = 0
    awaited: bool = False


class Written(NamedTuple):
    """The result of a save.

    Attributes:
        bytes: the size of the payload.
        at: the `perf_counter` when the checkpoint became durable.
    """

    bytes: int
    at: float


class ProcessGoneError(RuntimeError):
    """The process that writes checkpoints died, or did not answer in time, so that a thread has to write."""


def process_possible() -> bool:
    """Return whether a process can be started that can map memory of this one."""
    return hasattr(os, "memfd_create") and runs_python()


class SaverProcess:
    """A process that writes checkpoints; only `leave` may be called on another thread.

    Raises:
        OSError: the process could not be started.
    """

    def __init__(self) -> None:
        self._child = ChildProcess(lambda answers: bare_command(_PROGRAM, str(answers)))
        self._left = False

    @property
    def pid(self) -> int:
        """The process id."""
        return self._child.pid

    def leave(self) -> None:
        """Remove the time limit of the process's saves, because no thread waits for them any more."""
        self._left = True

    def commit(self, saves: Sequence[Save], timeout: float) -> list[Outcome]:
        """Let the process make checkpoints durable; wait for the outcomes, and return them."""
        self._child.push(frame(Kind.BATCH, len(saves), pickle.dumps(saves, protocol=pickle.HIGHEST_PROTOCOL)))
        until = monotonic() + timeout
        while not self._child.gone:
            left = inf if self._left else until - monotonic()
            if left <= 0.0:
                self.end(0.0)
                raise ProcessGoneError(f"it had not answered after {timeout:.1f} s, and was killed")
            for answer in self._child.exchange(min(left, LOOK_SECONDS)):
                outcomes: list[Outcome] = pickle.loads(answer.body)
                return outcomes
        raise ProcessGoneError(f"it ended: {self.end(0.0)}")

    def end(self, patience: float = EXIT_SECONDS) -> str:
        """Ask the process to end, kill it after `patience` seconds, and describe how it ended."""
        return self._child.end(patience)
