"""Ctrl-C: the first asks the run to stop at the next iteration boundary, the second ends it at once."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from eventloop.stops.signals import INTERRUPTED, StopSignals
from eventloop.training.scopes import AT_ONCE_SECONDS

if TYPE_CHECKING:
    from eventloop.training.trainer import Trainer

__all__ = ["INTERRUPTED", "graceful_interrupt"]


@contextmanager
def graceful_interrupt(trainer: Trainer, *, hint: str = "") -> Iterator[None]:
    """While the block runs, the first SIGINT stops the trainer cleanly, and the second ends it at once.

        with graceful_interrupt(trainer):
            trainer.train()

    The first is a `trainer.stop`: checkpoint, closing events, all that is due to the writers; `train` then returns,
    and the block goes on. (Without the block the PreemptionHook does the same, and then raises KeyboardInterrupt.)
    The second raises KeyboardInterrupt wherever the program is; the closing events are emitted, and nobody is waited
    for: writers get a fraction of a second, and what they have not taken then is named. A save under way is finished
    by its process; a thread gives it up. Older checkpoints are intact.

    Does nothing off the main thread, where Python delivers no signals. A handler that was there before is called as
    well, unless it is Python's own, and put back.

    Args:
        hint: written to standard error at the first.

    Raises:
        KeyboardInterrupt: at the second, and at each one after it.
    """
    try:
        with StopSignals(trainer, [signal.SIGINT], hint=hint):
            yield
    except KeyboardInterrupt:
        # it came where no scope of the run saw it, or ended the close of one; else this does nothing
        with suppress(Exception):  # what a subscriber failed of, which was logged when it did
            trainer.bus.close(AT_ONCE_SECONDS)
        raise
