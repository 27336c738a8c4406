"""The program of the process that writes checkpoints.

`saver_client` starts it. It imports only the standard library, so it starts in 50 ms and takes 20 MB. It
finishes its saves even if the training process ends.
"""

from __future__ import annotations

import os
import pickle
import signal
import sys
from contextlib import suppress

from eventloop.checkpoint.commit import Mapped, Record, Save, commit
from eventloop.processes.channel import Inbox, Kind, frame
from eventloop.processes.launch import ASK_TO_END


def main() -> None:
    """Read groups of saves from standard input, and make their checkpoints durable.

    The outcomes of each group are written to the file descriptor given on the command line.
    """
    # Ctrl-C and a job scheduler's SIGTERM reach the whole process group; the training process handles them
    for signum in ASK_TO_END:
        signal.signal(signum, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ASK_TO_END)
    _give_way()
    answers, inbox = int(sys.argv[1]), Inbox(0)
    memory: dict[Mapped, memoryview] = {}
    while inbox.read():
        for asked in inbox.frames():
            outcomes = commit(_opened(pickle.loads(asked.body), memory))
            answer = memoryview(frame(Kind.DONE, 0, pickle.dumps(outcomes)))
            with suppress(BrokenPipeError):  # the parent has ended
                while answer:
                    answer = answer[os.write(answers, answer) :]


def _opened(saves: list[Save], memory: dict[Mapped, memoryview]) -> list[Save]:
    """Return the saves with the bytes of the shared memory that their records name.

    The memory is mapped at once, so that the saves can be finished even if the training process ends. It
    stays mapped for later saves.

    Args:
        saves: a group of saves.
        memory: the mapped memory; new memory is added, and memory that no save names any more is removed.
    """
    named = {data for save in saves for _, data in save.records if isinstance(data, Mapped)}
    if named:
        for former in memory.keys() - named:
            del memory[former]
    for new in named - memory.keys():
        with suppress(OSError):  # `commit` tries again, and reports the error
            memory[new] = new.open()
    return [save._replace(records=tuple(_seen(record, memory) for record in save.records)) for save in saves]


def _seen(record: Record, memory: dict[Mapped, memoryview]) -> Record:
    name, data = record
    return (name, memory.get(data, data)) if isinstance(data, Mapped) else record


def _give_way() -> None:
    """Lower the priority of this process, so that it runs only on idle CPUs.

    If the training's threads use every CPU, a save at normal priority costs more than a synchronous one: it
    takes the CPU of one thread, and the other threads wait for that thread.
    """
    os.nice(19)
    if hasattr(os, "SCHED_IDLE"):
        with suppress(OSError):  # a container may forbid it
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))


if __name__ == "__main__":
    main()
    os._exit(0)
