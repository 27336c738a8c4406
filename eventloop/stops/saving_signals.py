"""Save a checkpoint when a signal arrives, and go on; `PreemptionHook` uses it."""

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
"""The command that a signal gives, equal on all ranks, so that one signal to each of them saves once."""


class SavingSignals:
    """Handlers that request a checkpoint at the next boundary of the training, and end nothing.

    A Python handler that was installed before is called as well. Outside the main thread, where Python
    delivers no signals, nothing is installed.

    Args:
        trainer: the trainer, whose boundaries apply the request.
        signals: the numbers of the signals.
    """

    def __init__(self, trainer: StoppableTrainer, signals: Iterable[int]) -> None:
        self._trainer, self._signals, self._process = trainer, [*signals], os.getpid()
        self._before: dict[int, Any] = {}

    def install_until(self, stack: ExitStack) -> None:
        """Install the handlers, and let the end of a stack restore the former ones."""
        if threading.current_thread() is not threading.main_thread():
            return
        stack.callback(self._put_back)
        for signum in self._signals:
            if (before := signal.getsignal(signum)) is not None:  # else it is not Python's
                self._before[signum] = before  # before the handler is installed, which reads it
                signal.signal(signum, self._handle)

    def _put_back(self) -> None:
        for signum, before in self._before.items():
            if signal.getsignal(signum) == self._handle:
                signal.signal(signum, before)

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        """Append the command, which needs no lock; forked children, such as a loader's workers, go on."""
        if os.getpid() != self._process:
            return
        if SAVE not in list(self._trainer.stops.commands):
            self._trainer.stops.commands.append(SAVE)
        if callable(before := self._before[signum]):
            before(signum, frame)
