"""The program of the process that writes checkpoints in a longer run.

`saver_client` starts it. It runs at the lowest priority, and finishes its save even if the parent ends.
"""

from __future__ import annotations

import os
import select
import signal
import sys
from contextlib import suppress
from io import FileIO
from time import perf_counter
from typing import IO, Any

import torch

from eventloop.checkpoint.cleanup import remove_replaced
from eventloop.checkpoint.saving.saver_client import LOOK_SECONDS, Job, Written, receive, send, wait_for
from eventloop.checkpoint.saving.snapshot import Layout, Packed
from eventloop.checkpoint.store import Serialized, save_checkpoint
from eventloop.processes.launch import ASK_TO_END
from eventloop.state.tensors import bytes_of, tensors_of

_IN_MEMORY = 32 << 20


def main() -> None:
    """Save the states that standard input asks for; answer each with the result or the error.

    The answers go to the descriptor given on the command line, not to standard output, where a sitecustomize
    or a plug-in of torch may print.
    """
    # Ctrl-C and a scheduler's SIGTERM reach the whole process group; the parent decides, this save goes on
    for signum in ASK_TO_END:
        signal.signal(signum, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ASK_TO_END)
    _give_way()
    torch.set_num_threads(1)
    torch.serialization.set_crc32_options(False)  # the manifest has SHA-256
    with suppress(OSError):  # a program may have closed its standard error
        os.dup2(2, 1)  # prints of this process do not belong to the training's output
    with os.fdopen(int(sys.argv[1]), "wb") as answers, FileIO(0, closefd=False) as asked:
        _answer(asked, answers)


def _answer(asked: FileIO, answers: IO[bytes]) -> None:
    layout, parent = Layout([], []), os.getppid()
    send(answers, "ready")
    while _is_asked(asked, parent) and (message := receive(asked)) is not None:
        structure, changed, job = message
        layout = changed or layout
        try:
            answer: Written | Exception = _save(Packed(structure, layout).unpack(), job)
        except Exception as error:
            answer = error
        send(answers, answer)


def _is_asked(asked: FileIO, parent: int) -> bool:
    """Wait until the input can be read or has ended; return False once the parent has ended.

    A forked child of the parent may outlive it and hold the pipe open, so the pipe's end is not enough.
    """
    while not wait_for(asked.fileno(), select.POLLIN, LOOK_SECONDS):
        if os.getppid() != parent:
            return False
    return True


def _give_way() -> None:
    """Lower the priority of this process, so that it runs only on idle CPUs.

    If the training's threads use every CPU, a save at normal priority costs more than a synchronous one,
    because all threads wait for the one that lost its CPU. When the training waits for a save, the CPUs are
    idle.
    """
    os.nice(19)
    if hasattr(os, "SCHED_IDLE"):
        with suppress(OSError):  # a container may forbid it
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))


def _save(state: dict[str, Any], job: Job) -> Written:
    size = save_checkpoint(_cheapest(state), job.path, job.label)
    written = Written(size, perf_counter())
    remove_replaced(job.replaces)
    return written


def _cheapest(state: dict[str, Any]) -> dict[str, Any] | Serialized:
    """Serialise a small state in memory, because torch writes it to a file in hundreds of pieces."""
    return Serialized(state) if bytes_of(tensors_of(state)) <= _IN_MEMORY else state


if __name__ == "__main__":
    main()
    os._exit(0)  # everything is durable; unloading torch takes 0.25 s, for which the parent would wait
