"""Turn signals into requests to stop, which the loops poll: the run ends at its next boundary."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import threading
from collections.abc import Iterable
from contextlib import suppress
from types import FrameType, TracebackType
from typing import Any, Protocol, Self

from torch.utils.data import get_worker_info

from eventloop.stops.stopping import Stopping

logger = logging.getLogger("eventloop")

INTERRUPTED = "interrupted by Ctrl-C"


class SignalledTrainer(Protocol):
    """The parts of a trainer that signals read and set."""

    stops: Stopping
    failure: BaseException | None
    ends_program: bool
    stop_signal: int | None
    where_to_resume: str

    def request_stop(self, reason: str, *, signum: int | None = None) -> None:
        """Ask the run to end at its next boundary."""


class StopSignals:
    """Ask the trainer to stop at each of `signals`, within the block.

    A Python handler that was installed before is called as well. A second SIGINT raises KeyboardInterrupt at
    once, and so does a SIGINT while an error ends the run.

        with StopSignals(trainer, [signal.SIGTERM]):
            trainer.train()

    Outside the main thread, where Python delivers no signals, the block does nothing. Signals whose handler
    is not Python's, or which the same trainer handles already, keep their handler. At the end handlers are
    restored unless they were replaced meanwhile; code that still calls our handler then reaches the handler
    from before.

    Args:
        hint: written to standard error at the first Ctrl-C.
        exits: end the program after the block as the signal would have: by SystemExit(128 + number) or
            KeyboardInterrupt, after all ranks are there. A Python handler of the program's own decides that
            itself. Signals that the process ignores, as after nohup, stay ignored.
    """

    _asked_now = 0
    """Depth of handlers that call each other now; the main thread has one stack."""

    def __init__(
        self, trainer: SignalledTrainer, signals: Iterable[int], *, hint: str = "", exits: bool = False
    ) -> None:
        self._trainer, self._signals = trainer, [*signals]
        self._hint, self._exits = hint, exits
        self._process = os.getpid()
        self._before: dict[int, Any] = {}
        self._taken: int | None = None
        self._interrupts = 0
        self._children_before: Any = None
        self._over = False

    def __enter__(self) -> Self:
        if threading.current_thread() is not threading.main_thread():
            return self
        for signum in self._signals:
            before = signal.getsignal(signum)
            if before is None or (self._exits and before == signal.SIG_IGN) or self._is_ours(before):
                continue
            self._before[signum] = before  # first: the handler looks it up
            signal.signal(signum, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        decides = self._exits and os.getpid() == self._process
        try:
            if decides and not isinstance(error, KeyboardInterrupt):
                self._trainer.stops.meet()
        finally:
            self._put_back()
        if decides:
            self._tell(error)
            self._exit(error)

    def _put_back(self) -> None:
        self._over = True
        for signum, before in self._before.items():
            if signal.getsignal(signum) == self._handle:
                signal.signal(signum, before)
        if callable(self._children_before) and signal.getsignal(signal.SIGCHLD) == self._child_ended:
            signal.signal(signal.SIGCHLD, self._children_before)

    def _is_ours(self, handler: Any) -> bool:
        owner = getattr(handler, "__self__", None)
        return isinstance(owner, StopSignals) and owner._trainer is self._trainer

    # A signal comes between any two instructions, so the handlers below must not wait for a lock.

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process:
            self._handle_in_child(signum, frame)
            return
        if self._over:
            self._handle_afterwards(signum, frame)
            return
        if signum == signal.SIGINT:
            self._interrupts += 1
            if self._interrupts > 1:
                # set before it is raised: a hand-written loop that is left does not learn why
                self._trainer.failure = interrupt = KeyboardInterrupt()
                raise interrupt
            if self._trainer.failure is not None:  # no loop polls any more
                raise KeyboardInterrupt
        if self._taken is None and hasattr(signal, "SIGCHLD"):
            self._children_before = signal.getsignal(signal.SIGCHLD)
            if callable(self._children_before):
                signal.signal(signal.SIGCHLD, self._child_ended)
        self._taken = self._taken or signum
        self._trainer.request_stop(_reason(signum), signum=signum)
        if self._hint and signum == signal.SIGINT:
            with suppress(OSError):
                os.write(2, f"{self._hint}\n".encode())  # a print might be inside one that it interrupts
        if self._nobody_else(signum):
            self._trainer.ends_program |= self._exits
        elif callable(self._before[signum]):
            StopSignals._asked_now += 1
            try:
                self._before[signum](signum, frame)
            finally:
                StopSignals._asked_now -= 1

    def _handle_afterwards(self, signum: int, frame: FrameType | None) -> None:
        """Handle a signal after the block, from a handler that still calls ours.

        Nothing is left to stop, and the program goes on if a later run has just been asked to stop.
        """
        if not (self._asked_now and self._nobody_else(signum)):
            self._as_before(signum, frame)

    def _child_ended(self, signum: int, frame: FrameType | None) -> None:
        """Ignore the death of loader workers, which received the signal too.

        PyTorch would raise wherever the main thread is. The rest of the run needs no worker, and a loader
        raises by itself when it is asked for a batch.
        """
        with suppress(RuntimeError):
            self._children_before(signum, frame)

    def _handle_in_child(self, signum: int, frame: FrameType | None) -> None:
        """Handle a signal in a forked process, which has the handler and not the run.

        Loader workers live as long as the run needs them, although signals of a terminal or a scheduler reach
        all processes. The loader itself ends them, by SIGTERM.
        """
        if signum != signal.SIGTERM and get_worker_info() is not None:
            return
        self._as_before(signum, frame)

    def _as_before(self, signum: int, frame: FrameType | None) -> None:
        before = self._before.get(signum, signal.SIG_DFL)
        if callable(before):
            before(signum, frame)
        else:
            signal.signal(signum, before)
            os.kill(os.getpid(), signum)

    def _nobody_else(self, signum: int) -> bool:
        before = self._before[signum]
        return before in (signal.SIG_DFL, signal.default_int_handler) or _cancels_a_task(before)

    # --- when everything is delivered
    # ------------------------------------------------------------------------

    def _tell(self, error: BaseException | None) -> None:
        """Log where to resume after a signal other than Ctrl-C, if no error is raised that says it.

        The level is INFO, because a run that a scheduler's signal ended as planned needs no warning.
        """
        trainer = self._trainer
        signum = self._taken or trainer.stop_signal
        if signum in (None, signal.SIGINT) or error is not None or not trainer.where_to_resume:
            return
        logger.info("the run was %s: %s", _reason(signum), trainer.where_to_resume)

    def _exit(self, error: BaseException | None) -> None:
        """End the program, also for a signal that came too late or reached another rank.

        An error that ends the program is not replaced.
        """
        signum = self._taken or self._trainer.stop_signal
        if signum not in self._before or not self._nobody_else(signum) or self._trainer.failure is not None:
            return
        if isinstance(error, GeneratorExit):  # a loop that was left: an error raised here would be lost
            os.kill(os.getpid(), signum)
        elif error is None:
            raise self._interrupt() if signum == signal.SIGINT else SystemExit(128 + signum)

    def _interrupt(self) -> KeyboardInterrupt:
        interrupt = KeyboardInterrupt()
        if self._trainer.where_to_resume:
            interrupt.add_note(self._trainer.where_to_resume)
        return interrupt


def _cancels_a_task(handler: Any) -> bool:
    """Return whether a handler is the one of `asyncio.run`, or of a Jupyter kernel for a cell with `await`.

    It cancels a task, which would go on after the run up to its next `await`. A KeyboardInterrupt ends it
    there.
    """
    runner = getattr(getattr(handler, "func", None), "__self__", None)
    return isinstance(runner, asyncio.Runner) or getattr(handler, "__module__", None) == "ipykernel.ipkernel"


def _reason(signum: int) -> str:
    return INTERRUPTED if signum == signal.SIGINT else f"preempted by {signal.Signals(signum).name}"
