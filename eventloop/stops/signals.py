"""Turn signals into requests to stop, which end the run at its next boundary."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import threading
from collections.abc import Callable, Iterable
from contextlib import ExitStack, suppress
from types import FrameType, TracebackType
from typing import Any, Self

from torch.utils.data import get_worker_info

from eventloop.stops.stopping import StoppableTrainer

logger = logging.getLogger("eventloop")

INTERRUPTED = "interrupted by Ctrl-C"
"""The `stop_reason` of a run that the first Ctrl-C has ended."""

ENDED = (
    "Ctrl-C: the run has ended, and waits at most {:g} s more for slow writers. Ctrl-C again ends at once."
)
"""The text on standard error after the first Ctrl-C, if only events are left to deliver."""


class StopSignals:
    """Request a stop of the trainer when one of `signals` arrives within the block.

        with StopSignals(trainer, [signal.SIGTERM]):
            trainer.train()

    If the program had a Python handler for the signal, that is called as well. A second SIGINT raises
    KeyboardInterrupt at once, and so does a SIGINT while an error ends the run.

    Outside the main thread, where Python delivers no signals, the block installs no handler; nor does it for
    a signal whose handler was not installed by Python, or is that of another StopSignals of the same trainer.
    The end of the block restores the earlier handlers, except for signals for which the program has installed
    a handler within the block. If that handler later calls the handler of this class, the earlier handler is
    called.

    Args:
        hint: a text for standard error at the first Ctrl-C; `ENDED` replaces it when the run has ended.
        exits: True ends the program after the block as the signal would have ended it: by SystemExit(128 +
            number) or KeyboardInterrupt, when all ranks have delivered their events. If the program has a
            Python handler for the signal, that handler decides. Signals that the process ignores, as after
            nohup, stay ignored.
        afterwards: a function to call on each rank after a run that a signal other than Ctrl-C has ended,
            when all ranks have delivered their events. No rank exits before the function has returned on all
            ranks. It needs `exits`, and is not called after an error, or within another trainer's run.
    """

    _running_handlers = 0
    """The number of StopSignals handlers that are running now; a handler may call that of another trainer."""

    def __init__(
        self,
        trainer: StoppableTrainer,
        signals: Iterable[int],
        *,
        hint: str = "",
        exits: bool = False,
        afterwards: Callable[[], None] | None = None,
    ) -> None:
        self._trainer, self._signals = trainer, [*signals]
        self._hint, self._exits, self._afterwards = hint, exits, afterwards
        self._process = os.getpid()
        self._earlier: dict[int, Any] = {}  # the handlers that are restored, by the signal's number
        self._signum: int | None = None  # the first signal that has arrived
        self._interrupts = 0  # the number of times that Ctrl-C was pressed
        self._earlier_of_sigchld: Any = None  # the handler of SIGCHLD before the first signal
        self._over = False  # whether the block has ended

    def __enter__(self) -> Self:
        """Install the handlers."""
        if threading.current_thread() is not threading.main_thread():
            return self
        for signum in self._signals:
            earlier = signal.getsignal(signum)
            is_ignored = self._exits and earlier == signal.SIG_IGN
            if earlier is None or is_ignored or self._is_of_same_trainer(earlier):
                continue
            self._earlier[signum] = earlier  # before the next line, because `_handle` reads it
            signal.signal(signum, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        """Restore the earlier handlers; with `exits` call `afterwards` before, and end the program after."""
        ends_run = self._exits and os.getpid() == self._process
        try:
            if ends_run and not isinstance(error, KeyboardInterrupt):
                self._trainer.stops.wait_for_all_ranks()
                self._log_where_to_resume(error)
                if self._afterwards is not None:
                    self._call_afterwards(self._afterwards, error)
                    self._trainer.stops.wait_for_all_ranks()
        finally:
            self._restore()
        if ends_run:
            self._exit(error)

    def install_until(self, stack: ExitStack) -> None:
        """Enter this context until `stack` is closed, which restores the handlers even if `__exit__` fails.

        A Ctrl-C may interrupt `__exit__` before it has restored them.
        """
        stack.callback(self._restore)
        stack.enter_context(self)

    def _restore(self) -> None:
        """Restore the earlier handlers, except where the program has installed another one since."""
        self._over = True
        for signum, earlier in self._earlier.items():
            if signal.getsignal(signum) == self._handle:
                signal.signal(signum, earlier)
        has_sigchld = callable(self._earlier_of_sigchld)
        if has_sigchld and signal.getsignal(signal.SIGCHLD) == self._handle_ended_child:
            signal.signal(signal.SIGCHLD, self._earlier_of_sigchld)

    def _is_of_same_trainer(self, handler: Any) -> bool:
        """Return whether a handler is that of a StopSignals of the same trainer."""
        owner = getattr(handler, "__self__", None)
        return isinstance(owner, StopSignals) and owner._trainer is self._trainer

    # A signal may interrupt the main thread while it holds a lock, so no handler below may wait for a lock.

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        """Handle one of the signals: request a stop, show the hint, and call the program's own handler."""
        if os.getpid() != self._process:
            self._handle_in_child(signum, frame)
            return
        if self._over:
            self._handle_after_block(signum, frame)
            return
        if signum == signal.SIGINT:
            self._count_interrupt()
        if self._signum is None and hasattr(signal, "SIGCHLD"):
            self._earlier_of_sigchld = signal.getsignal(signal.SIGCHLD)
            if callable(self._earlier_of_sigchld):
                signal.signal(signal.SIGCHLD, self._handle_ended_child)
        self._signum = self._signum or signum
        self._trainer.request_stop(_reason(signum), signum=signum)
        if self._hint and signum == signal.SIGINT:
            self._show_hint(self._hint)
        if self._ends_program(signum):
            self._trainer.ends_program |= self._exits
        elif callable(self._earlier[signum]):
            StopSignals._running_handlers += 1
            try:
                self._earlier[signum](signum, frame)
            finally:
                StopSignals._running_handlers -= 1

    def _count_interrupt(self) -> None:
        """Count a Ctrl-C; raise KeyboardInterrupt at the second one, or while an error ends the run."""
        self._interrupts += 1
        if self._interrupts > 1:
            # the trainer of a hand-written loop does not see the exception, so it is stored here
            self._trainer.failure = interrupt = KeyboardInterrupt()
            raise interrupt
        if self._trainer.failure is not None:
            raise KeyboardInterrupt

    def _show_hint(self, hint: str) -> None:
        """Write the text about the first Ctrl-C to standard error, without `print`, which uses a lock."""
        if self._trainer.delivering:
            hint = ENDED.format(round(self._trainer.bus.patience, 3))
        with suppress(OSError):
            os.write(2, f"{hint}\n".encode())

    def _handle_after_block(self, signum: int, frame: FrameType | None) -> None:
        """Call the earlier handler after the block, where a handler that was installed later calls this one.

        If the later handler is a StopSignals, it has just requested a stop. Then an earlier handler that
        would end the program is not called.
        """
        if not (self._running_handlers and self._ends_program(signum)):
            self._call_earlier(signum, frame)

    def _handle_ended_child(self, signum: int, frame: FrameType | None) -> None:
        """Suppress PyTorch's error about ended loader workers, which received the signal as well.

        PyTorch would raise it at any line of the main thread. The rest of the run needs no worker; if it
        requests another batch, the loader raises an error.
        """
        with suppress(RuntimeError):
            self._earlier_of_sigchld(signum, frame)

    def _handle_in_child(self, signum: int, frame: FrameType | None) -> None:
        """Handle a signal in a child process that has inherited this handler by a fork.

        A loader's worker ignores all signals except SIGTERM: signals of a terminal or a scheduler reach all
        processes, and the run needs its workers until it ends. The loader itself ends them by SIGTERM.
        """
        if signum != signal.SIGTERM and get_worker_info() is not None:
            return
        self._call_earlier(signum, frame)

    def _call_earlier(self, signum: int, frame: FrameType | None) -> None:
        """Handle a signal as the earlier handler does, also if that is the system's default."""
        earlier = self._earlier.get(signum, signal.SIG_DFL)
        if callable(earlier):
            earlier(signum, frame)
        else:
            signal.signal(signum, earlier)
            os.kill(os.getpid(), signum)

    def _ends_program(self, signum: int) -> bool:
        """Return whether the signal would end the program, because the program has no handler of its own."""
        earlier = self._earlier[signum]
        return earlier in (signal.SIG_DFL, signal.default_int_handler) or _cancels_a_task(earlier)

    # --- after the events are delivered --------------------------------------------------------------------

    def _log_where_to_resume(self, error: BaseException | None) -> None:
        """Log the checkpoint to resume from, if a signal other than Ctrl-C has ended the run.

        An error has this text as a note, so it is not logged then. The level is INFO, because a run that a
        scheduler's signal has ended as planned needs no warning.
        """
        trainer = self._trainer
        signum = self._signum or trainer.stop_signal
        if signum in (None, signal.SIGINT) or error is not None or not trainer.where_to_resume:
            return
        logger.info("the run was %s: %s", _reason(signum), trainer.where_to_resume)

    def _call_afterwards(self, afterwards: Callable[[], None], error: BaseException | None) -> None:
        """Call a function if a signal other than Ctrl-C, and no error, has ended the run.

        Within the run of another trainer it is not called, because that trainer has not saved yet; it calls
        its own function later.
        """
        signum = self._signum or self._trainer.stop_signal
        if signum not in self._earlier or signum == signal.SIGINT:
            return
        within_other_run = isinstance(getattr(self._earlier[signum], "__self__", None), StopSignals)
        failed = self._trainer.failure is not None or not isinstance(error, GeneratorExit | None)
        if not within_other_run and not failed:
            afterwards()

    def _exit(self, error: BaseException | None) -> None:
        """End the program as the signal would have ended it, unless an error ended the run."""
        # `stop_signal` has no signal that came after the last iteration, and `_signum` none of another rank
        signum = self._signum or self._trainer.stop_signal
        if signum not in self._earlier or not self._ends_program(signum):
            return
        if self._trainer.failure is not None:
            return
        if isinstance(error, GeneratorExit):  # a loop was left by `break`: Python drops errors raised here
            os.kill(os.getpid(), signum)
        elif error is None:
            raise self._interrupt() if signum == signal.SIGINT else SystemExit(128 + signum)

    def _interrupt(self) -> KeyboardInterrupt:
        """Return a KeyboardInterrupt with a note of the checkpoint to resume from."""
        interrupt = KeyboardInterrupt()
        if self._trainer.where_to_resume:
            interrupt.add_note(self._trainer.where_to_resume)
        return interrupt


def _cancels_a_task(handler: Any) -> bool:
    """Return whether a handler is that of `asyncio.run`, or of a Jupyter kernel for a cell with `await`.

    These handlers cancel a task, which then runs on to its next `await`. A KeyboardInterrupt at the end of
    the run ends the task at once.
    """
    runner = getattr(getattr(handler, "func", None), "__self__", None)
    return isinstance(runner, asyncio.Runner) or getattr(handler, "__module__", None) == "ipykernel.ipkernel"


def _reason(signum: int) -> str:
    """Return the `stop_reason` of a run that a signal has ended."""
    return INTERRUPTED if signum == signal.SIGINT else f"preempted by {signal.Signals(signum).name}"
