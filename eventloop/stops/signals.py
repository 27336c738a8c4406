"""Turn signals into requests to stop, which the loops poll: the run ends at its next boundary."""

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
"""The reason of a run that the first Ctrl-C has ended; the second one raises KeyboardInterrupt."""

ENDED = (
    "Ctrl-C: the run has ended, and waits at most {:g} s more for slow writers. Ctrl-C again ends at once."
)
"""The text for standard error at a first Ctrl-C that comes when only events are left to deliver."""


class StopSignals:
    """Request a stop of the trainer at each of `signals` that arrives within the block.

    A Python handler that was installed before is called as well. A second SIGINT raises KeyboardInterrupt at
    once, and so does a SIGINT while an error ends the run.

        with StopSignals(trainer, [signal.SIGTERM]):
            trainer.train()

    Outside the main thread, where Python delivers no signals, the block does nothing. A signal keeps its
    handler if that was not installed by Python, or is a StopSignals of the same trainer. At the end the
    former handlers are restored, except where another one was installed within the block. If that one still
    calls the handler of this class, the call is passed on to the former handler.

    Args:
        hint: a text for standard error at the first Ctrl-C; `ENDED` replaces it when the run has ended.
        exits: end the program after the block as the signal would have ended it: by SystemExit(128 + number)
            or KeyboardInterrupt, after waiting for all ranks. If the program has a Python handler for the
            signal, that handler decides. Signals that the process ignores, as after nohup, stay ignored.
        afterwards: a function to call on each rank after a run that a signal other than Ctrl-C ended, when
            all ranks have delivered everything. No rank exits before it has returned on all ranks. It needs
            `exits`, and is not called after an error, or within another trainer's run.
    """

    _nested = 0
    """The number of StopSignals handlers that are running now, each called by the next; main thread only."""

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
        self._before: dict[int, Any] = {}
        self._signum: int | None = None
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
            self._before[signum] = before  # before the handler is installed, which reads it
            signal.signal(signum, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        decides = self._exits and os.getpid() == self._process
        try:
            if decides and not isinstance(error, KeyboardInterrupt):
                self._trainer.stops.wait_for_all_ranks()
                self._log_where_to_resume(error)
                if self._afterwards is not None:
                    self._call_afterwards(self._afterwards, error)
                    self._trainer.stops.wait_for_all_ranks()
        finally:
            self._put_back()
        if decides:
            self._exit(error)

    def install_until(self, stack: ExitStack) -> None:
        """Enter this context until a stack ends, by two entries, of which an interrupt can cut only one."""
        stack.callback(self._put_back)
        stack.enter_context(self)

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
                # set here, because a hand-written loop that is left does not see the exception
                self._trainer.failure = interrupt = KeyboardInterrupt()
                raise interrupt
            if self._trainer.failure is not None:  # no loop polls any more
                raise KeyboardInterrupt
        if self._signum is None and hasattr(signal, "SIGCHLD"):
            self._children_before = signal.getsignal(signal.SIGCHLD)
            if callable(self._children_before):
                signal.signal(signal.SIGCHLD, self._child_ended)
        self._signum = self._signum or signum
        self._trainer.request_stop(_reason(signum), signum=signum)
        if self._hint and signum == signal.SIGINT:
            delivering, bus = self._trainer.delivering, self._trainer.bus
            hint = ENDED.format(round(bus.patience, 3)) if delivering else self._hint
            with suppress(OSError):
                os.write(2, f"{hint}\n".encode())  # the signal may interrupt a print
        if self._nobody_else(signum):
            self._trainer.ends_program |= self._exits
        elif callable(self._before[signum]):
            StopSignals._nested += 1
            try:
                self._before[signum](signum, frame)
            finally:
                StopSignals._nested -= 1

    def _handle_afterwards(self, signum: int, frame: FrameType | None) -> None:
        """Handle a signal that arrives after the block, from another handler that still calls this one.

        The call is passed on to the former handler. If a later StopSignals has just requested a stop and the
        former handler would end the program, the call is ignored.
        """
        if not (self._nested and self._nobody_else(signum)):
            self._as_before(signum, frame)

    def _child_ended(self, signum: int, frame: FrameType | None) -> None:
        """Ignore the error about ended loader workers, which received the signal as well.

        PyTorch would raise it wherever the main thread is. The rest of the run needs no worker, and the
        loader itself raises an error if it is asked for another batch.
        """
        with suppress(RuntimeError):
            self._children_before(signum, frame)

    def _handle_in_child(self, signum: int, frame: FrameType | None) -> None:
        """Handle a signal in a child process that has inherited this handler by a fork.

        A loader's worker ignores all signals except SIGTERM: signals of a terminal or a scheduler reach all
        processes, and the run needs its workers up to its end. The loader itself ends them by SIGTERM.
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

    # --- after the events are delivered --------------------------------------------------------------------

    def _log_where_to_resume(self, error: BaseException | None) -> None:
        """Log where to resume after a signal other than Ctrl-C, unless an error that has this text is raised.

        The level is INFO, because a run that a scheduler's signal ended as planned needs no warning.
        """
        trainer = self._trainer
        signum = self._signum or trainer.stop_signal
        if signum in (None, signal.SIGINT) or error is not None or not trainer.where_to_resume:
            return
        logger.info("the run was %s: %s", _reason(signum), trainer.where_to_resume)

    def _call_afterwards(self, afterwards: Callable[[], None], error: BaseException | None) -> None:
        """Call a function if a signal other than Ctrl-C, and no error, ended the run.

        A trainer whose run contains this one still has to save, so its own function is the one to call.
        """
        signum = self._signum or self._trainer.stop_signal
        before = self._before.get(signum or 0)
        contained = isinstance(getattr(before, "__self__", None), StopSignals)
        failed = self._trainer.failure is not None or not isinstance(error, GeneratorExit | None)
        if signum in self._before and signum != signal.SIGINT and not contained and not failed:
            afterwards()

    def _exit(self, error: BaseException | None) -> None:
        """End the program as the signal would have, even if it came too late or reached another rank only.

        An error that already ends the program is not replaced.
        """
        signum = self._signum or self._trainer.stop_signal
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
    """Return whether a handler is that of `asyncio.run`, or of a Jupyter kernel for a cell with `await`.

    Such a handler cancels a task, which would go on after the run up to its next `await`. A KeyboardInterrupt
    at the end of the run ends the task there.
    """
    runner = getattr(getattr(handler, "func", None), "__self__", None)
    return isinstance(runner, asyncio.Runner) or getattr(handler, "__module__", None) == "ipykernel.ipkernel"


def _reason(signum: int) -> str:
    return INTERRUPTED if signum == signal.SIGINT else f"preempted by {signal.Signals(signum).name}"
