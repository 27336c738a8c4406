"""Ctrl-C: the first asks the run to stop at the next iteration boundary, the second ends it at once."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from eventloop.trainer import Trainer

INTERRUPTED = "interrupted by Ctrl-C"


@contextmanager
def graceful_interrupt(trainer: Trainer) -> Iterator[None]:
    """While the block runs, SIGINT stops the trainer cleanly; a second one raises KeyboardInterrupt.

    Does nothing off the main thread, where Python delivers no signals. The handler before it is put back.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    process = os.getpid()
    previous = signal.getsignal(signal.SIGINT)

    def on_interrupt(signum: int, frame: FrameType | None) -> None:
        if os.getpid() != process:  # a forked loader worker inherits the handler, not the run
            return
        signal.signal(signal.SIGINT, signal.default_int_handler)
        trainer.request_stop(INTERRUPTED)

    signal.signal(signal.SIGINT, on_interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous if previous is not None else signal.SIG_DFL)
