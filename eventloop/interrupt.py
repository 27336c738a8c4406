"""Ctrl-C: the first asks the run to stop at the next iteration boundary, the second ends it at once."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import TYPE_CHECKING

from eventloop.scopes import AT_ONCE_SECONDS

if TYPE_CHECKING:
    from eventloop.trainer import Trainer

INTERRUPTED = "interrupted by Ctrl-C"


@contextmanager
def graceful_interrupt(trainer: Trainer, *, hint: str = "") -> Iterator[None]:
    """While the block runs, the first SIGINT stops the trainer cleanly, and the second ends it at once.

        with graceful_interrupt(trainer):
            trainer.train()

    The first is a `trainer.stop`: checkpoint, closing events, all that is due to the writers. The second raises
    KeyboardInterrupt wherever the program is; the closing events are emitted, and nobody is waited for: writers get
    a fraction of a second, and what they have not taken then is named. A save under way is finished by its process;
    a thread gives it up. Older checkpoints are intact.

    Does nothing off the main thread, where Python delivers no signals. The handler before it is put back.

    Args:
        hint: written to standard error at the first.

    Raises:
        KeyboardInterrupt: at the second, and at each one after it.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    process = os.getpid()
    previous = signal.getsignal(signal.SIGINT)

    def first(signum: int, frame: FrameType | None) -> None:
        if os.getpid() != process:  # a forked loader worker inherits the handler, not the run
            return
        signal.signal(signal.SIGINT, second)
        trainer.request_stop(INTERRUPTED)
        if hint:
            with suppress(OSError):
                os.write(2, f"{hint}\n".encode())  # a print might be inside one that it interrupts

    def second(signum: int, frame: FrameType | None) -> None:
        if os.getpid() != process:
            return
        # told before it is raised: a loop of one's own, when it is left, does not learn why
        trainer.failure = interrupt = KeyboardInterrupt()
        raise interrupt

    signal.signal(signal.SIGINT, first)
    try:
        yield
    except KeyboardInterrupt:
        if not trainer.bus.closed:  # it came where no scope of the run saw it
            with suppress(Exception):  # what a subscriber failed of, which was logged when it did
                trainer.bus.close(AT_ONCE_SECONDS)
        raise
    finally:
        signal.signal(signal.SIGINT, previous if previous is not None else signal.SIG_DFL)
