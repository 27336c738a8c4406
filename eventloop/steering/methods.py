"""Define the methods of `Trainer` with which a program stops it, adds commands, saves and goes back."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from eventloop.migration.names import knowing_calls
from eventloop.ownership.run_ownership import RunOwnership
from eventloop.steering.commands import Commands
from eventloop.steering.protocols import Skip
from eventloop.stops.stopping import Stopping
from eventloop.util.checks import at_least

F = TypeVar("F", bound=Callable[..., Any])


class Steered:
    """Let the program of a training stop it, save, go back, and add commands of its own."""

    commands: Commands
    stops: Stopping
    ownership: RunOwnership

    def stop(self, reason: str) -> None:
        """End the run at the end of the iteration, and emit all closing events.

        Several ranks end after the same iteration: this one if all of them call `stop` in it, else the next
        one.

        Raises:
            ValueError: `reason` is empty.
        """
        self.stops.request(reason)
        self.stops.poll()

    def request_stop(self, reason: str, *, signum: int | None = None) -> None:
        """Request a stop from a signal handler; the run ends, and events are emitted, after the iteration.

        Args:
            reason: the reason why the run ends, for reports.
            signum: the number of the signal. For signals other than SIGINT `preemption_requested` is emitted.

        Raises:
            ValueError: `reason` is empty.
        """
        self.stops.request(reason, signum)
        if signum is not None:
            # a requeued job may start before this run has ended: it reads that this run is ending, and waits
            self.ownership.ending()

    @property
    def stopping(self) -> bool:
        """True at the end of an iteration if the run ends there; a hand-written loop then leaves its body."""
        return self.stops.poll()

    def command(self, function: F) -> F:
        """Add a function `(trainer, **parameters)` to the commands of this run; use it as a decorator.

            @trainer.command
            def prune(trainer, amount: float):
                "Set the smallest weights to zero."

        `eventloop tell RUN prune 0.3` then calls the function at the end of an iteration, on all ranks. Each
        parameter needs a type that JSON can hold. The return value is the answer. If the function raises an
        error, the command is refused and the training goes on; changes by the function are not undone. A
        repetition of the run calls the function again, so it must depend only on its arguments and the
        trainer, and draw random numbers from the global generators.

        Raises:
            TypeError: a parameter has no type, or a type that JSON cannot hold.
            ValueError: there is a command of that name.
        """
        self.commands.known.add(function.__name__, function)
        return function

    @knowing_calls
    def save_checkpoint(self) -> None:
        """Save a checkpoint after this iteration, on all ranks; call it in a handler or a loop's body.

        If it is called within an iteration, the checkpoint is saved at the end of the iteration; if it is
        called after an epoch or a scheduled validation, before the next iteration. In a loop of steps
        (`begin_run`) it is always saved at the end of an iteration. The first `CheckpointHook` whose
        checkpoints can be resumed from saves it like the checkpoint of an interval; without such a hook
        nothing is saved, which is logged. Several calls in one iteration save once. `checkpoint_saved` is
        emitted when the checkpoint is durable. If only one of several ranks calls this, all ranks save after
        the next iteration.

        Raises:
            RuntimeError: no training runs.
        """
        self.commands.request("checkpoint")

    def rollback(self, path: str | Path | None = None, skip: Skip = 0) -> None:
        """Go back to a checkpoint at the end of this iteration, on all ranks.

        Call it in a handler, or in the body of a loop over `epochs()`. The epoch and the training end with
        the reason "rollback", `rolled_back` is emitted, and the training begins again within the run, as a
        new process does that has resumed from the checkpoint. A hand-written loop over `epochs()` goes on
        with the epoch of the checkpoint. A new checkpoint is saved at once, so that a resume from the newest
        checkpoint skips the same batches. If only one of several ranks calls this, all ranks go back after
        the next iteration. If the checkpoint cannot be resumed from, `command_refused` is emitted, a warning
        is logged, and the training goes on.

        Args:
            path: a checkpoint as in `resume`; by default the newest one of this run that is older than the
                current iteration.
            skip: the number of batches from the checkpoint's position on that are not trained on, on each
                rank, as if a handler raised `SkipIteration` for each of them; "seen" skips all batches that
                were read since the checkpoint.

        Raises:
            RuntimeError: no training runs.
            TypeError, ValueError: `path` is not a path, or `skip` is neither a number of batches nor "seen".
        """
        if path is not None and (not isinstance(path, str | os.PathLike) or not str(path)):
            raise TypeError(f"expected the path or the name of a checkpoint, or None, got path={path!r}")
        if skip != "seen":
            at_least("skip", skip, 0)
        self.commands.request("rollback", checkpoint="" if path is None else str(path), skip=skip)
