"""Write checkpoints, as the program of the saver's process.

`saver_client` starts the process. It imports only the standard library, so it starts in 50 ms and takes 20 MB
of memory. Its priority is that of the training, because the training waits for it at the end of a run. It
finishes its saves even if the training process ends.
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
    """Send answers to the training process through a pipe, and signs of life from a thread of its own."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._lock = threading.Lock()
        self._works = threading.Event()  # set while signs of life are to be sent
        threading.Thread(target=self._report, name="eventloop alive", daemon=True).start()

    @contextmanager
    def reports_life(self) -> Iterator[None]:
        """Send an `ALIVE` frame every `ALIVE_SECONDS` while the block runs; a stopped process sends none."""
        self._works.set()
        try:
            yield
        finally:
            self._works.clear()

    def send(self, answer: object) -> None:
        """Send the outcomes of a group, or the warnings of removals."""
        self.write(frame(Kind.DONE, 0, pickle.dumps(answer)))

    def _report(self) -> None:
        """Send signs of life while a group of saves is written; a thread of its own runs this."""
        while self._works.wait():
            self.write(frame(Kind.ALIVE))
            sleep(ALIVE_SECONDS)

    def write(self, data: bytes) -> None:
        """Write a whole frame, under a lock, so that frames of the two threads do not mix."""
        unsent = memoryview(data)
        with self._lock, suppress(BrokenPipeError):  # the training process has ended
            while unsent:
                unsent = unsent[os.write(self._descriptor, unsent) :]


def _opened(saves: list[AnySave], memory: dict[Mapped, memoryview]) -> list[AnySave]:
    """Return the saves with views of the shared memory in which the training has the tensors' copies.

    The memory is mapped now, before `commit`, so that the saves can be finished even if the training process
    ends. It stays mapped for later saves.

    Args:
        saves: a group of saves.
        memory: the views of the shared memory that is mapped. Memory of these saves is added; if there is
            any, other memory is removed.
    """
    needed = {data for save in saves for data in save.memory()}
    if needed:
        for unused in memory.keys() - needed:
            del memory[unused]
    for new in needed - memory.keys():
        with suppress(OSError):  # `_mapped` leaves the save as it is
            memory[new] = new.open()
    return [_mapped(save, memory) for save in saves]


def _mapped(save: AnySave, memory: dict[Mapped, memoryview]) -> AnySave:
    """Return a save with views of its tensors' bytes in place of descriptions of their shared memory.

    Return the save unchanged if memory cannot be mapped, as after the end of the training process. Then
    `commit` tries again, and reports the error as that of the save.
    """
    try:
        return save.mapped(memory)
    except OSError:
        return save


if __name__ == "__main__":
    main()
    os._exit(0)
