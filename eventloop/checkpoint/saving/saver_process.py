"""The process that writes checkpoints in a longer run, started by `eventloop.checkpoint.saving.saver_client`."""

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
    """Write what comes on standard input, until that ends; answer each with what was written or the error, to the
    descriptor of the command line: what a sitecustomize or a plug-in of torch's prints must not look like an answer."""
    # Ctrl-C and a scheduler's SIGTERM reach the whole group: the parent decides, and this save is finished
    for signum in ASK_TO_END:
        signal.signal(signum, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ASK_TO_END)
    _give_way()
    torch.set_num_threads(1)
    torch.serialization.set_crc32_options(False)  # the manifest has SHA-256
    with suppress(OSError):  # a program may have closed its standard error
        os.dup2(2, 1)  # what is printed here is no output of the training's
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
    """Wait until there is something to read, or the end of it; False once the parent is gone, of which a fork that
    outlives it may hold the pipe open."""
    while not wait_for(asked.fileno(), select.POLLIN, LOOK_SECONDS):
        if os.getppid() != parent:
            return False
    return True


def _give_way() -> None:
    """Take only time that nobody else wants. Beside a training whose threads have every CPU, the same save as an
    ordinary process costs it more than a synchronous one: each thread waits for the one that was put aside. When a
    save is waited for, the training stands still, and this has its time."""
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
    """torch writes a small state in hundreds of pieces; made in memory, it is one."""
    return Serialized(state) if bytes_of(tensors_of(state)) <= _IN_MEMORY else state


if __name__ == "__main__":
    main()
    os._exit(
        0
    )  # all is on the disk, and to take torch apart takes a quarter of a second, which the parent waits for
