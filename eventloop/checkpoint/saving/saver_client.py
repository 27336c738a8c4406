"""Send saves to a process that writes them, and wait for its answers.

The saver uses it, on the thread that writes.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from eventloop.checkpoint.commit import AnySave, Outcome
from eventloop.checkpoint.manifest import Label
from eventloop.checkpoint.sharded.job import PartJob
from eventloop.processes.channel import Kind, frame
from eventloop.processes.child import ChildProcess
from eventloop.processes.cpu_time import computes, of_process
from eventloop.processes.launch import bare_command, runs_python

_PROGRAM = "eventloop.checkpoint.saving.saver_process"
POLL_SECONDS = 0.25
"""Seconds of one wait for an answer; after each the client checks how long the process has been silent."""
SILENT_SECONDS = 10.0
"""Seconds without a sign of life from a writing process, after which it is killed and a thread writes.

The process sends a sign four times a second while it writes, however slow its disk is. The use of CPU time is
also a sign, as while the process starts on a busy machine. So only a process that stands still is killed.
"""
URGENT_SECONDS = 1.0
"""Seconds of silence that are allowed once a signal has asked the program to end; it may be killed soon."""
EXIT_SECONDS = 2.0
"""Seconds that an idle process may take to end; it normally takes milliseconds."""


class Job(NamedTuple):
    """The description of a save without its state: the path, the label and the checkpoints it replaces.

    Attributes:
        path: the checkpoint's path.
        label: the fields of the manifest that cannot be read from the state, such as its sequence number.
        replaces: checkpoints to remove once this one is durable, oldest first.
        spares: the number of checkpoints in `replaces` that are kept, the newest existing ones.
        must: whether it may not be dropped in favour of a newer state; True for a best checkpoint.
        last: whether the training has ended, and waits for this save. Then a thread of the training process
            writes it: no computation competes with the thread, and a process might have to be started first.
        part: how this rank's part of it is written, if several ranks write it together.
    """

    path: Path
    label: Label = Label()
    replaces: tuple[Path, ...] = ()
    spares: int = 0
    must: bool = False
    last: bool = False
    part: PartJob | None = None


class Written(NamedTuple):
    """The result of a save.

    Attributes:
        bytes: the size of `state.pth`, or of all that this rank has written of a sharded model.
        at: the `perf_counter` when the checkpoint became durable.
    """

    bytes: int
    at: float


class ProcessGoneError(RuntimeError):
    """The process that writes checkpoints died, or does not run, so that a thread has to write."""


def process_possible() -> bool:
    """Return whether a process can be started that can map memory of this process."""
    return hasattr(os, "memfd_create") and runs_python()


class SaverProcess:
    """A process that writes checkpoints; only `disable_kill` may be called on another thread.

    Args:
        urgent: returns whether a signal has asked the program to end. Then the process is killed after
            `URGENT_SECONDS` of silence.

    Raises:
        OSError: the process could not be started.
    """

    def __init__(self, urgent: Callable[[], bool] = lambda: False) -> None:
        self._child = ChildProcess(lambda answers: bare_command(_PROGRAM, str(answers)))
        self._urgent = urgent
        self._kill_disabled = self._ready = False

    @property
    def pid(self) -> int:
        """The process id."""
        return self._child.pid

    def ready(self, timeout: float = 0.0) -> bool:
        """Return whether the process has started, and can write at once; wait for it for some seconds.

        Raises:
            ProcessGoneError: the process has ended.
        """
        while not self._ready:
            if self._child.gone:
                raise ProcessGoneError(f"it ended: {self.end(0.0)}")
            answers = self._child.exchange(min(timeout, POLL_SECONDS))
            self._ready = any(answer.kind == Kind.READY for answer in answers)
            if (timeout := timeout - POLL_SECONDS) <= 0.0:
                break
        return self._ready

    def disable_kill(self) -> None:
        """Never kill the process for its silence again, because no thread waits for it any more."""
        self._kill_disabled = True

    def commit(self, saves: Sequence[AnySave]) -> list[Outcome]:
        """Let the process make checkpoints durable; wait for the outcomes, and return them.

        Raises:
            ProcessGoneError: the process died, or was killed because it gave no sign of life.
        """
        body = pickle.dumps(saves, protocol=pickle.HIGHEST_PROTOCOL)
        outcomes: list[Outcome] = pickle.loads(self._answer(frame(Kind.BATCH, len(saves), body)))
        return outcomes

    def finish_removals(self) -> list[str]:
        """Let the process remove the checkpoints that were replaced; return a sentence for each error.

        Raises:
            ProcessGoneError: as `commit`.
        """
        warnings: list[str] = pickle.loads(self._answer(frame(Kind.FLUSH)))
        return warnings

    def _answer(self, message: bytes) -> bytes:
        """Send a message, and return the body of its answer.

        Raises:
            ProcessGoneError: the process has ended, or was killed after too long a silence.
        """
        self._child.push(message)
        # seconds, summed over the waits: a clock would also count the time in which this process was stopped
        silent = 0.0
        cpu_seconds = of_process(self._child.pid)
        while not self._child.gone:
            unsent = self._child.backlog
            answers = self._child.exchange(POLL_SECONDS)
            for answer in answers:
                self._ready = True
                if answer.kind == Kind.DONE:
                    return answer.body
            before, cpu_seconds = cpu_seconds, of_process(self._child.pid)
            # on a busy machine the process may use CPU time for long before it answers
            lives = answers or self._child.backlog < unsent or computes(before, cpu_seconds, POLL_SECONDS)
            silent = 0.0 if lives else silent + POLL_SECONDS
            limit = URGENT_SECONDS if self._urgent() else SILENT_SECONDS
            if silent >= limit and not self._kill_disabled:
                self.end(0.0)
                raise ProcessGoneError(f"it gave no sign of life for {silent:g} s, and was killed")
        raise ProcessGoneError(f"it ended: {self.end(0.0)}")

    def end(self, patience: float = EXIT_SECONDS) -> str:
        """End the process, and return how it ended, such as "exit code 0" or "killed by SIGKILL".

        It may complete its work for `patience` seconds, after a signal for at most a quarter of a second, and
        is killed then. A process that is still starting has no work, and is killed at once.
        """
        longest = URGENT_SECONDS / 4 if self._urgent() else patience
        return self._child.end(min(patience, longest) if self._ready else 0.0)
