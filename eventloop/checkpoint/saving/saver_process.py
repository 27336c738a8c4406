"""The program of the process that writes checkpoints.

`saver_client` starts it. It imports only the standard library, so it starts in 50 ms and takes 20 MB. It has
the priority of the training, which waits for it at the end of a run. It finishes its saves even if the
training process ends.
"""

from __future__ import annotations

import os
import pickle
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from time import sleep

from eventloop.checkpoint.commit import AnySave, Removals, commit
from eventloop.processes.channel import Inbox, Kind, frame
from eventloop.processes.launch import END_SIGNALS
from eventloop.processes.shared_memory import Mapped

ALIVE_SECONDS = 0.25
"""The interval in seconds at which the process reports that it is running, while it writes."""


def main() -> None:
    """Read groups of saves from standard input, and make their checkpoints durable.

    The outcomes of each group are written to the file descriptor given on the command line. Replaced
    checkpoints are removed by the commit of the next group, or at a `FLUSH` frame.
    """
    # Ctrl-C and a job scheduler's SIGTERM reach the whole process group; the training process handles them
    for signum in END_SIGNALS:
        signal.signal(signum, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, END_SIGNALS)
    answers, inbox, removals = _Answers(int(sys.argv[1])), Inbox(0), Removals()
    memory: dict[Mapped, memoryview] = {}
    answers.write(frame(Kind.READY))
    while inbox.read():
        for request in inbox.frames():
            with answers.reports_life():
                if request.kind == Kind.FLUSH:
                    answer: object = removals.finish()
                else:
                    answer = commit(_opened(pickle.loads(request.body), memory), removals=removals)
            answers.send(answer)
    removals.finish()


class _Answers:
    """The pipe to the training process; a thread of its own reports on it that this process is running."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._lock = threading.Lock()
        self._works = threading.Event()
        threading.Thread(target=self._report, name="eventloop alive", daemon=True).start()

    @contextmanager
    def reports_life(self) -> Iterator[None]:
        """Send an `ALIVE` frame at an interval while the block runs; a stopped process sends none."""
        self._works.set()
        try:
            yield
        finally:
            self._works.clear()

    def send(self, answer: object) -> None:
        """Send the outcomes of a group, or the warnings of removals."""
        self.write(frame(Kind.DONE, 0, pickle.dumps(answer)))

    def _report(self) -> None:
        while self._works.wait():
            self.write(frame(Kind.ALIVE))
            sleep(ALIVE_SECONDS)

    def write(self, data: bytes) -> None:
        """Write a whole frame, while the other thread waits."""
        rest = memoryview(data)
        with self._lock, suppress(BrokenPipeError):  # the parent has ended
            while rest:
                rest = rest[os.write(self._descriptor, rest) :]


def _opened(saves: list[AnySave], memory: dict[Mapped, memoryview]) -> list[AnySave]:
    """Return the saves with the bytes of the shared memory that their records name.

    The memory is mapped at once, so that the saves can be finished even if the training process ends. It
    stays mapped for later saves.

    Args:
        saves: a group of saves.
        memory: the mapped memory; new memory is added, and memory that no save names any more is removed.
    """
    named = {data for save in saves for data in save.memory()}
    if named:
        for former in memory.keys() - named:
            del memory[former]
    for new in named - memory.keys():
        with suppress(OSError):  # `commit` tries again, and reports the error
            memory[new] = new.open()
    return [_mapped(save, memory) for save in saves]


def _mapped(save: AnySave, memory: dict[Mapped, memoryview]) -> AnySave:
    try:
        return save.mapped(memory)
    except OSError:
        return save


if __name__ == "__main__":
    main()
    os._exit(0)
