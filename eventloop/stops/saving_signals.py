"""Save a checkpoint after a signal, without ending the run; `PreemptionHook` uses it."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterable
from contextlib import ExitStack
from types import FrameType
from typing import Any

from eventloop.commands.messages import Command
from eventloop.stops.stopping import StoppableTrainer

SAVE = Command(id="", command="checkpoint")
"""The command that a signal requests; it is equal on all ranks, so a signal to each of them saves once."""


class SavingSignals:
    """Signal handlers that request a checkpoint at the next boundary of the training.

    If the program had a Python handler for the signal, that is called as well. No handlers are installed
    outside the main thread, where Python delivers no signals.

    Args:
        trainer: the trainer, whose boundaries apply the request.
        signals: the numbers of the signals.
    """

    def __init__(self, trainer: StoppableTrainer, signals: Iterable[int]) -> None:
        self._trainer, self._signals, self._process = trainer, [*signals], os.getpid()
        self._earlier: dict[int, Any] = {}  # the handlers that are restored, by the signal's number

    def install_until(self, stack: ExitStack) -> None:
        """Install the handlers; when `stack` is closed, the earlier handlers are restored."""
        if threading.current_thread() is not threading.main_thread():
            return
        stack.callback(self._restore)
        for signum in self._signals:
            earlier = signal.getsignal(signum)
            if earlier is None:  # not installed by Python, so Python could not restore it
                continue
            self._earlier[signum] = earlier  # before the next line, because `_handle` reads it
            signal.signal(signum, self._handle)

    def _restore(self) -> None:
        """Restore the earlier handlers, except where the program has installed another one since."""
        for signum, earlier in self._earlier.items():
            if signal.getsignal(signum) == self._handle:
                signal.signal(signum, earlier)

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        """Append the command, which needs no lock; do nothing in a forked child such as a loader's worker."""
        if os.getpid() != self._process:
            return
        if SAVE not in list(self._trainer.stops.commands):
            self._trainer.stops.commands.append(SAVE)
        if callable(earlier := self._earlier[signum]):
            earlier(signum, frame)
