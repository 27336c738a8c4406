"""A hook that ends a run cleanly after a signal of a job scheduler or a terminal."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from eventloop.bus import Bus
from eventloop.events import BeforeRun, CheckpointSaved
from eventloop.events.priority import Priority
from eventloop.hooks.hook import Hook
from eventloop.stops.requeue import requeue, warn_if_impossible
from eventloop.stops.saving_signals import SavingSignals
from eventloop.stops.signals import StopSignals
from eventloop.util.checks import check_bools, number
from eventloop.util.suggest import suggest

if TYPE_CHECKING:
    from eventloop.training.trainer import Trainer

logger = logging.getLogger("eventloop")

KNOWN = ("SIGTERM", "SIGINT", "SIGUSR1", "SIGUSR2", "SIGHUP", "SIGQUIT", "SIGXCPU")
"""Signals with which job schedulers, service managers and terminals end a program."""

HINT = "Ctrl-C: the run stops after this iteration, and delivers what is due. Ctrl-C again ends at once."
"""The text on standard error after the first Ctrl-C."""

SLOW_SAVE = (
    "saving %s took %.3g s, longer than the %g s of grace=: after a signal the scheduler may kill the run "
    "before its last checkpoint is durable. Have the signal sent earlier (Slurm: --signal=TERM@120) or raise "
    "the scheduler's grace (Slurm's KillWait is 30 s by default; torchrun kills after 30 s), and grace= with "
    "it; or save less, or to a faster disk"
)


class PreemptionHook(Hook):
    """End a run at its next boundary on SIGTERM, SIGUSR1 and SIGINT (Ctrl-C).

        default_hooks=dict(preemption=dict(signals=("SIGTERM", "SIGUSR2")))    # only these two
        default_hooks=dict(preemption=dict(requeue=True, grace=120))           # Slurm, --signal=TERM@120
        default_hooks=dict(preemption=dict(checkpoint_signals=("SIGUSR1",)))   # saves, and goes on
        default_hooks=dict(preemption=None)                                    # no signal

    A boundary is the end of an iteration, of a batch of an evaluation, or of a batch of PreciseBN's pass. The
    signal handler only sets a flag. At the boundary `preemption_requested` (not for Ctrl-C) and
    `stop_requested` are emitted, then all closing events. The last checkpoint is saved and synced to the
    disk, and the writers deliver their events. An interrupted evaluation is repeated when the run is resumed.
    With several ranks all ranks end in this way, whichever rank received the signal.

    Then the program ends as the signal would have ended it, with the exit code that a scheduler expects.
    `train` raises SystemExit(143) for SIGTERM, SystemExit(138) for SIGUSR1 (128 + the signal's number), and
    KeyboardInterrupt for SIGINT, also if the run was complete when the signal came. In a hand-written loop
    the exception is raised where the loop ends; after a `break` the process sends itself the signal again. An
    error that ended the run is raised unchanged. If the program had installed a Python handler of its own for
    the signal, that handler is called when the signal comes, and `train` returns, so the handler decides
    whether the program ends. This does not hold for the handlers of `asyncio.run` and of a Jupyter kernel:
    there Ctrl-C ends the code that called `train`.

    After the first Ctrl-C a text on standard error says that the run is stopping, or that it has ended and
    waits for slow writers. After a signal the writers have a fifth of the bus's `drain_timeout`, 2 s by
    default, and events that are left are kept for `eventloop replay`; `Trainer(bus=Bus(drain_timeout=60))`
    gives 12 s. A note of the KeyboardInterrupt names the checkpoint to resume from. For other signals the log
    names the checkpoint ("eventloop", level INFO). A second Ctrl-C raises KeyboardInterrupt at once, and the
    run waits for no subscriber. A second SIGTERM changes nothing.

    The handlers are installed in the main thread from `before_run` until everything is delivered; then the
    earlier handlers are restored. Python delivers signals only to the main thread. A training on another
    thread, as in `asyncio.to_thread(trainer.train)`, is stopped with `trainer.stop(reason)`, and the log says
    so at its start.

    With `requeue=True` the hook puts the job back into Slurm's queue, before any rank exits: one process runs
    `scontrol requeue` for the job, or for the task of its array, and logs the exit code and the output. The
    program needs `trainer.resume("auto")`, and the job `#SBATCH --requeue` unless that is the cluster's
    default. The job is not requeued after Ctrl-C or an error, nor if there is no checkpoint to resume from,
    which is logged. It is requeued even if a handler of the program's own lets `train` return. `scancel`
    sends SIGTERM too: cancel such a job by `scancel --full --signal=KILL`, or name other signals, as in
    `signals=("SIGUSR1", "SIGINT")` with `--signal=USR1@120`.

    A signal of `checkpoint_signals` saves a checkpoint at the next boundary of the training, as
    `trainer.save_checkpoint()` does, and the run goes on: `kill -USR1 PID`, or `scancel --signal=USR1 JOB`,
    which reaches all ranks. If the signal reaches only one of several ranks, all ranks save after the next
    iteration.

    The hook installs no handler for signals that the process ignores (nohup) or that the platform lacks, nor
    for SIGINT within `graceful_interrupt`. Leave a signal that `faulthandler.register` uses out of `signals`,
    because its handler cannot be restored.

    Args:
        signals: the names of the signals that end the run.
        requeue: whether to put the Slurm job back into the queue after a signal other than Ctrl-C. Outside
            Slurm this has no effect, which is logged.
        grace: the seconds that the scheduler leaves between the signal and the kill. The first save that
            takes longer is logged as a warning. None checks nothing.
        checkpoint_signals: the names of signals after which a checkpoint is saved. They do not end the run,
            even if they are among `signals`.

    Raises:
        TypeError: `signals` or `checkpoint_signals` is not a sequence of names, `requeue` is not a bool, or
            `grace` is not a number.
        ValueError: a name is unknown, no signal is left that ends the run, or `grace` is not above 0.
    """

    priority = Priority.HIGHEST
    owns = "the handlers of signals"

    def __init__(
        self,
        signals: Sequence[str] = ("SIGTERM", "SIGUSR1", "SIGINT"),
        requeue: bool = False,
        grace: float | None = None,
        checkpoint_signals: Sequence[str] = (),
    ) -> None:
        _check_names("signals", signals)
        _check_names("checkpoint_signals", checkpoint_signals)
        check_bools(requeue=requeue)
        self._signals = tuple(name for name in signals if name not in checkpoint_signals)
        if not self._signals:
            kind = "signal that saves no checkpoint" if signals else "signal"
            got = tuple(signals) if signals else "none"
            raise ValueError(
                f"signals must name at least one {kind}, got {got}: use default_hooks=dict(preemption=None) "
                "to remove the hook"
            )
        self._checkpoint_signals, self._requeue = tuple(checkpoint_signals), requeue
        self._grace = None if grace is None else number("grace", grace, above=0)
        self._slow_save_logged = False

    def attach(self, bus: Bus) -> None:
        """Subscribe the hook's event methods, and a check of the time of each save if `grace` is set."""
        super().attach(bus)
        if self._grace is not None:
            bus.subscribe(self._check_save_time, CheckpointSaved, priority=self.priority)

    def before_run(self, trainer: Trainer, event: BeforeRun) -> None:
        """Install the signal handlers; the end of the run restores the earlier handlers."""
        if threading.current_thread() is not threading.main_thread():
            logger.info(
                "this training is not on the main thread, and Python delivers signals to no other thread: "
                "SIGTERM and Ctrl-C do not stop it. Call trainer.stop(reason), for example where the "
                "awaiting task is cancelled"
            )
        if self._requeue and trainer.rank == 0:
            warn_if_impossible()
        saving_signals = SavingSignals(trainer, _numbers(self._checkpoint_signals))
        saving_signals.install_until(trainer.during_run)
        numbers = _numbers(self._signals)
        hint = HINT if trainer.rank == 0 else ""
        afterwards = partial(_requeue, trainer) if self._requeue else None
        stop_signals = StopSignals(trainer, numbers, hint=hint, exits=True, afterwards=afterwards)
        stop_signals.install_until(trainer.during_run)

    def _check_save_time(self, trainer: Trainer, event: CheckpointSaved) -> None:
        """Log a warning for the first save that took longer than `grace`."""
        if self._slow_save_logged or self._grace is None or event.seconds <= self._grace:
            return
        self._slow_save_logged = True
        logger.warning(SLOW_SAVE, event.path, event.seconds, self._grace)


def _check_names(option: str, names: Sequence[str]) -> None:
    """Refuse an option that is not a sequence of names in `KNOWN`."""
    if isinstance(names, str) or not isinstance(names, Sequence):
        raise TypeError(f"{option} must be a sequence of names such as ('SIGTERM',), got {names!r}")
    for name in names:
        if not isinstance(name, str):
            raise TypeError(f"{option} must be names such as 'SIGTERM', got {name!r}")
        if name not in KNOWN:
            raise ValueError(
                f"{option} must be signals that end a run, got {name!r}{suggest(name, [*KNOWN])}"
            )


def _numbers(names: Sequence[str]) -> list[int]:
    """Return the numbers of the named signals; skip signals that this platform lacks."""
    return [getattr(signal, name) for name in names if hasattr(signal, name)]


def _requeue(trainer: Trainer) -> None:
    """Put the Slurm job back into the queue, if there is a checkpoint for the requeued run."""
    # if this run has saved none, that is the checkpoint from which this run itself was resumed
    can_resume = bool(trainer.where_to_resume) or trainer.state.resumed_from is not None
    requeue(trainer.rank, trainer.world_size, can_resume=can_resume)
