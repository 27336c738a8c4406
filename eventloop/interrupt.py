"""Handle Ctrl-C: the first stops the run at the next iteration boundary, the second ends it at once."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from eventloop.stops.ending import AT_ONCE_SECONDS
from eventloop.stops.signals import INTERRUPTED, StopSignals

if TYPE_CHECKING:
    from eventloop.training.trainer import Trainer

__all__ = ["INTERRUPTED", "graceful_interrupt"]


@contextmanager
def graceful_interrupt(trainer: Trainer, *, hint: str = "") -> Iterator[None]:
    """Stop the trainer cleanly at the first SIGINT within the block, and end it at once at the second.

        with graceful_interrupt(trainer):
            trainer.train()

    The first SIGINT calls `trainer.stop`: checkpoint, closing events, delivery to the writers. `train` then
    returns, and the block goes on. (Without this block the PreemptionHook does the same, and then raises
    KeyboardInterrupt.) The second SIGINT raises KeyboardInterrupt wherever the program is. The closing events
    are emitted without waiting: writers get a fraction of a second, and the log names the events that are
    left then. A saver process finishes its save; a saver thread gives it up. Older checkpoints stay intact.

    Outside the main thread, where Python delivers no signals, this does nothing. An earlier handler is called
    as well, unless it is Python's own, and is restored at the end.

    Args:
        hint: written to standard error at the first SIGINT.

    Raises:
        KeyboardInterrupt: at the second SIGINT, and at each later one.
    """
    try:
        with StopSignals(trainer, [signal.SIGINT], hint=hint):
            yield
    except KeyboardInterrupt:
        # raised outside the run's scopes, or during a close; else this does nothing
        with suppress(Exception):  # errors of subscribers, which are logged already
            trainer.bus.close(AT_ONCE_SECONDS)
        raise
