"""The process that writes checkpoints: `python -m eventloop.saver_process`, started by `eventloop.saver`."""

from __future__ import annotations

import os
import signal
import sys
from time import perf_counter
from typing import Any

import torch

from eventloop.checkpoint import Serialized, save_checkpoint
from eventloop.saver import receive, remove_files, send
from eventloop.snapshot import Layout, Packed, tensors_of

_IN_MEMORY = 32 << 20


def main() -> None:
    """Write what comes on standard input, until that ends; answer each with its size or its error."""
    # Ctrl-C and a scheduler's SIGTERM reach the whole group: the parent decides, and this save is finished
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    torch.set_num_threads(1)
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # a print of some library must not look like an answer
    layout = Layout([], [])
    send(answers, "ready")
    while (message := receive(sys.stdin.buffer)) is not None:
        structure, changed, path, replaces = message
        layout = changed or layout
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            written = save_checkpoint(_cheapest(Packed(structure, layout).unpack()), path), perf_counter()
        except Exception as error:
            send(answers, error)
        else:
            remove_files(replaces)
            send(answers, written)


def _cheapest(state: dict[str, Any]) -> dict[str, Any] | Serialized:
    """torch writes a small state in hundreds of pieces; made in memory, it is one."""
    return Serialized(state) if sum(t.nbytes for t in tensors_of(state)) <= _IN_MEMORY else state


if __name__ == "__main__":
    main()
