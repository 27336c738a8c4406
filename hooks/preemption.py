"""Ends a run cleanly when a signal asks for it: of a scheduler of jobs, of a terminal."""

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
"""What schedulers, service managers and terminals send to have a program end."""


HINT = "Ctrl-C: the run stops after this iteration, and delivers what is due. Ctrl-C again ends at once."


class PreemptionHook(Hook):
    """While a run lasts, SIGTERM, SIGUSR1 and SIGINT (Ctrl-C) end it at its next boundary: the end of the iteration,
    of the batch of an evaluation, of the batch of PreciseBN's pass.

        default_hooks=dict(preemption=dict(signals=("SIGTERM", "SIGUSR2")))    # Ctrl-C and SIGUSR1 as without it
        default_hooks=dict(preemption=None)                                    # all of them

    The handler takes a note and returns. At the boundary `preemption_requested` (not for Ctrl-C) and
    `stop_requested` are emitted, then all closing events; the checkpoint of the end is saved and durable, the writers
    have everything. An evaluation that was cut short is repeated by the run that resumes. With several ranks all of
    them end alike, whichever got the signal.

    Then the program ends as the signal would have ended it, with the exit code a scheduler expects: `train` raises
    SystemExit(143) for SIGTERM, SystemExit(138) for SIGUSR1, which is 128 + its number, and KeyboardInterrupt for
    SIGINT. A run that was complete when the signal came does so too. In a loop of one's own it is raised where the
    loop ends; one that is left by `break` is sent the signal again. Where a Python handler was installed before,
    that one is called when the signal comes, and `train` returns: it decides. Those of `asyncio.run` and of a Jupyter
    kernel do not count: within them, too, Ctrl-C ends what called `train`. An error that ended the run goes on as
    it is.

    The first Ctrl-C says on standard error what goes on, and the KeyboardInterrupt in a note where to resume; of another
    signal the log says that ("eventloop", level INFO). A second Ctrl-C raises KeyboardInterrupt at once, and nobody is
    waited for. A second SIGTERM changes nothing.

    Handlers are those of the main thread, from `before_run` until everything is delivered, and are put back then. Python
    gives signals to no other thread: a training there, as in `asyncio.to_thread(trainer.train)`, is stopped by
    `trainer.stop(reason)`, and the log says so when it begins.
    Left alone are signals that the process ignores (nohup), SIGINT within `graceful_interrupt`, and signals that the
    platform lacks. One that `faulthandler.register` uses must be left out here: nobody could put it back.

    Args:
        signals: their names.

    Raises:
        TypeError: `signals` is no sequence of names.
        ValueError: one of them is unknown, or there is none.
    """

    priority = Priority.HIGHEST

    def __init__(self, signals: Sequence[str] = ("SIGTERM", "SIGUSR1", "SIGINT")) -> None:
        if isinstance(signals, str) or not isinstance(signals, Sequence):
            raise TypeError(f"signals must be a sequence of names such as ('SIGTERM',), got {signals!r}")
        if not signals:
            raise ValueError(
                "signals names no signal: to go without the hook, default_hooks=dict(preemption=None)"
            )
        for name in signals:
            if not isinstance(name, str):
                raise TypeError(f"signals must be names such as 'SIGTERM', got {name!r}")
            if name not in KNOWN:
                raise ValueError(f"no signal {name!r} asks a run to end{suggest(name, [*KNOWN])}")
        self._signals = tuple(signals)

    def before_run(self, trainer: Trainer, event: BeforeRun) -> None:
        """Install the handlers, until the run has delivered everything."""
        if threading.current_thread() is not threading.main_thread():
            logger.info(
                "this training is not on the main thread, and Python gives signals to no other: SIGTERM and Ctrl-C do not "
                "stop it. Call trainer.stop(reason), as where the task that awaits it is cancelled"
            )
        here = [getattr(signal, name) for name in self._signals if hasattr(signal, name)]
        hint = HINT if trainer.rank == 0 else ""
        trainer.during_run.enter_context(StopSignals(trainer, here, hint=hint, exits=True))
