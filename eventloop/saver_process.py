"""The process that writes checkpoints in a longer run, started by `eventloop.saver_client`."""

from __future__ import annotations

import os
import signal
import sys
from contextlib import suppress
from time import perf_counter
from typing import Any

import torch

from eventloop.checkpoint import Serialized, save_checkpoint
from eventloop.saver_client import Job, Written, receive, send
from eventloop.snapshot import Layout, Packed, bytes_of, tensors_of
from eventloop.unfinished import remove_replaced

_IN_MEMORY = 32 << 20


def main() -> None:
    """Write what comes on standard input, until that ends; answer each with what was written or the error."""
    # Ctrl-C and a scheduler's SIGTERM reach the whole group: the parent decides, and this save is finished
    for name in ("SIGINT", "SIGTERM", "SIGUSR1"):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_IGN)
    _give_way()
    torch.set_num_threads(1)
    torch.serialization.set_crc32_options(False)  # the manifest has SHA-256
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # a print of some library must not look like an answer
    layout = Layout([], [])
    send(answers, "ready")
    while (message := receive(sys.stdin.buffer)) is not None:
        structure, changed, job = message
        layout = changed or layout
        try:
            answer: Written | Exception = _save(Packed(structure, layout).unpack(), job)
        except Exception as error:
            answer = error
        send(answers, answer)


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
