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

from eventloop.checkpoint.commit import Save, commit
from eventloop.processes.channel import Inbox, Kind, frame
from eventloop.processes.launch import ASK_TO_END


def main() -> None:
    """Read groups of saves from standard input, and make their checkpoints durable.

    The outcomes of each group are written to the descriptor that is given on the command line.
    """
    # Ctrl-C and a scheduler's SIGTERM reach the whole process group; the training process decides what to do
    for signum in ASK_TO_END:
        signal.signal(signum, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ASK_TO_END)
    _give_way()
    answers, inbox = int(sys.argv[1]), Inbox(0)
    while inbox.read():
        for asked in inbox.frames():
            saves: list[Save] = pickle.loads(asked.body)
            with suppress(OSError):  # `commit` reports memory that is gone with the training process
                # all is mapped now, so that the training process may end
                saves = [save._replace(records=save.open_records()) for save in saves]
            outcomes = commit(saves)
            answer = memoryview(frame(Kind.DONE, 0, pickle.dumps(outcomes)))
            with suppress(BrokenPipeError):  # the parent has ended
                while answer:
                    answer = answer[os.write(answers, answer) :]


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
