"""Handle Ctrl-C: the first one stops the run at the next iteration boundary, the second one at once."""

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
    """Stop the trainer cleanly at the first SIGINT within the block, and end the run at once at the second.

        with graceful_interrupt(trainer):
            trainer.train()

    The first SIGINT calls `trainer.stop`: the run saves a checkpoint, emits its closing events and delivers
    them to the writers. `train` then returns, and the block goes on. (Without this block the PreemptionHook
    does the same, and then raises KeyboardInterrupt.) The second SIGINT raises KeyboardInterrupt wherever the
    program is. The closing events are emitted without waiting: writers get a fraction of a second, and the
    log lists the events that are lost. A saver process finishes its save; a saver thread abandons its save.
    Older checkpoints stay intact.

    Outside the main thread, where Python delivers no signals, the block has no effect. An earlier handler is
    called as well, unless it is Python's own, and is restored at the end.

    Args:
        hint: a text written to standard error at the first SIGINT. If the run has ended by then, and waits
            for slow writers, a text that says so replaces it.

    Raises:
        KeyboardInterrupt: at the second SIGINT, and at each later one.
    """
    try:
        with StopSignals(trainer, [signal.SIGINT], hint=hint):
            yield
    except KeyboardInterrupt:
        # The run closes the bus itself, unless Ctrl-C came outside of its scopes or during the close.
        with suppress(Exception):  # errors of subscribers, which are logged already
            trainer.bus.close(AT_ONCE_SECONDS)
        raise
