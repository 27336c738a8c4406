"""The process that writes checkpoints: `python -m eventloop.saver_process`, started by `eventloop.saver`."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from time import perf_counter

import torch

from eventloop.checkpoint import save_checkpoint
from eventloop.saver import receive, send


def main() -> None:
    """Write what comes on standard input, until that ends; answer each with its size or its error."""
    # Ctrl-C and a scheduler's SIGTERM reach the whole group: the parent decides, and this save is finished
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    torch.set_num_threads(1)
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # a print of some library must not look like an answer
    send(answers, "ready")
    while (message := receive(sys.stdin.buffer)) is not None:
        packed, path = message
        try:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            send(answers, (save_checkpoint(packed.unpack(), Path(path)), perf_counter()))
        except Exception as error:
            send(answers, error)


if __name__ == "__main__":
    main()
