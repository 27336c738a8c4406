"""A hook that ends a run cleanly when a signal of a job scheduler or a terminal asks for it."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING

from eventloop.events import BeforeRun
from eventloop.events.priority import Priority
from eventloop.hooks.hook import Hook
from eventloop.stops.signals import StopSignals
from eventloop.util.suggest import suggest

if TYPE_CHECKING:
    from eventloop.training.trainer import Trainer

logger = logging.getLogger("eventloop")

KNOWN = ("SIGTERM", "SIGINT", "SIGUSR1", "SIGUSR2", "SIGHUP", "SIGQUIT", "SIGXCPU")
"""Signals by which job schedulers, service managers and terminals end a program."""

HINT = "Ctrl-C: the run stops after this iteration, and delivers what is due. Ctrl-C again ends at once."


class PreemptionHook(Hook):
    """End a run at its next boundary on SIGTERM, SIGUSR1 and SIGINT (Ctrl-C).

        default_hooks=dict(preemption=dict(signals=("SIGTERM", "SIGUSR2")))    # only these two
        default_hooks=dict(preemption=None)                                    # no signal

    A boundary is the end of an iteration, of a batch of an evaluation, or of a batch of PreciseBN's pass. The
    signal handler only sets a flag. At the boundary `preemption_requested` (not for Ctrl-C) and
    `stop_requested` are emitted, then all closing events. The last checkpoint is saved and durable, and the
    writers have everything. The run that resumes repeats an evaluation that was cut short. With several ranks
    all of them end alike, whichever rank received the signal.

    Then the program ends as the signal would have ended it, with the exit code that a scheduler expects.
    `train` raises SystemExit(143) for SIGTERM, SystemExit(138) for SIGUSR1 (128 + the signal's number), and
    KeyboardInterrupt for SIGINT, also if the run was complete when the signal came. In a hand-written loop
    the exception is raised where the loop ends; after a `break` the process sends itself the signal again. If
    the program had installed a Python handler of its own, that handler is called when the signal comes, and
    `train` returns, so the handler decides whether the program ends. The handlers of `asyncio.run` and of a
    Jupyter kernel are an exception: there, too, Ctrl-C ends the code that called `train`. An error that ended
    the run is raised unchanged.

    After the first Ctrl-C a text on standard error says that the run is stopping, or that it has ended and
    waits for slow writers. A signal leaves these a fifth of the bus's `drain_timeout`, 2 s by default, and
    events that are left are kept for `eventloop replay`; `Trainer(bus=Bus(drain_timeout=60))` gives 12 s. A
    note of the KeyboardInterrupt names the checkpoint to resume from. For other signals the log names the
    checkpoint ("eventloop", level INFO). A second Ctrl-C raises KeyboardInterrupt at once, and the run waits
    for no subscriber. A second SIGTERM changes nothing.

    The handlers are installed in the main thread from `before_run` until everything is delivered, then the
    former ones are restored. Python delivers signals only to the main thread. A training on another thread,
    as in `asyncio.to_thread(trainer.train)`, is stopped with `trainer.stop(reason)`, and the log says so at
    its start.

    The hook leaves signals alone that the process ignores (nohup), SIGINT within `graceful_interrupt`, and
    signals that the platform lacks. Leave a signal that `faulthandler.register` uses out of `signals`,
    because its handler cannot be restored.

    Args:
        signals: the names of the signals.

    Raises:
        TypeError: `signals` is not a sequence of names.
        ValueError: a name is unknown, or there is no name.
    """

    priority = Priority.HIGHEST
    owns = "the handlers of signals"

    def __init__(self, signals: Sequence[str] = ("SIGTERM", "SIGUSR1", "SIGINT")) -> None:
        if isinstance(signals, str) or not isinstance(signals, Sequence):
            raise TypeError(f"signals must be a sequence of names such as ('SIGTERM',), got {signals!r}")
        if not signals:
            raise ValueError(
                "signals must name at least one signal, got none: use default_hooks=dict(preemption=None) "
                "to remove the hook"
            )
        for name in signals:
            if not isinstance(name, str):
                raise TypeError(f"signals must be names such as 'SIGTERM', got {name!r}")
            if name not in KNOWN:
                raise ValueError(
                    f"signals must be signals that end a run, got {name!r}{suggest(name, [*KNOWN])}"
                )
        self._signals = tuple(signals)

    def before_run(self, trainer: Trainer, event: BeforeRun) -> None:
        """Install the signal handlers; the end of the run restores the former handlers."""
        if threading.current_thread() is not threading.main_thread():
            logger.info(
                "this training is not on the main thread, and Python delivers signals to no other thread: "
                "SIGTERM and Ctrl-C do not stop it. Call trainer.stop(reason), for example where the "
                "awaiting task is cancelled"
            )
        here = [getattr(signal, name) for name in self._signals if hasattr(signal, name)]
        hint = HINT if trainer.rank == 0 else ""
        StopSignals(trainer, here, hint=hint, exits=True).install_until(trainer.during_run)
