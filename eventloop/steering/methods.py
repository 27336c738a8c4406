"""The methods of a trainer by which its own program steers it; `Trainer` inherits them."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from eventloop.migration.names import knowing_calls
from eventloop.ownership.run_ownership import RunOwnership
from eventloop.steering.commands import Commands
from eventloop.steering.rollback import Skip
from eventloop.stops.stopping import Stopping
from eventloop.util.checks import at_least

F = TypeVar("F", bound=Callable[..., Any])


class Steered:
    """Add commands to a run, and give some from its own handlers."""

    commands: Commands
    stops: Stopping
    ownership: RunOwnership

    def stop(self, reason: str) -> None:
        """End the run at the next iteration boundary, and emit all closing events.

        Several ranks end at the same boundary: the next one if all of them call `stop`, else the one after
        it.

        Raises:
            ValueError: `reason` is empty.
        """
        self.stops.request(reason)
        self.stops.poll()

    def request_stop(self, reason: str, *, signum: int | None = None) -> None:
        """Request a stop from a signal handler; the events are emitted at the iteration boundary.

        Args:
            signum: the number of the signal. Any signal except SIGINT also emits `preemption_requested`.

        Raises:
            ValueError: `reason` is empty.
        """
        self.stops.request(reason, signum)
        if signum is not None:  # a job that is queued again may begin before this one has ended
            self.ownership.ending()

    @property
    def stopping(self) -> bool:
        """True at an iteration boundary after a request to stop; loops read it to end."""
        return self.stops.poll()

    def command(self, function: F) -> F:
        """Make a function `(trainer, **parameters)` a command of this run; use it as a decorator.

            @trainer.command
            def prune(trainer, amount: float):
                "Set the smallest weights to zero."

        `eventloop tell RUN prune 0.3` then applies it at the end of an iteration, on all ranks. Each
        parameter needs a type that JSON can hold. What the function returns is the answer; an error it raises
        refuses the command, and the training goes on, with what the function has changed until then. A
        repetition of the run calls the function again: what it draws must come from the global random
        generators, and what it does from its arguments and the trainer.

        Raises:
            TypeError: a parameter has no type, or a type that JSON cannot hold.
            ValueError: there is a command of that name.
        """
        self.commands.known.add(function.__name__, function)
        return function

    @knowing_calls
    def save_checkpoint(self) -> None:
        """Save a checkpoint at this iteration boundary, on all ranks; call it in a handler or a loop's body.

        Within an iteration that is its end, and after an epoch or a scheduled validation the place before the
        next iteration, with the weights of now. In a loop of steps (`begin_run`) it is always the end of an
        iteration. The first `CheckpointHook` whose checkpoints can be resumed from saves it, as the one of an
        interval; without such a hook the log says that nothing is saved. Several calls at one boundary save
        once. `checkpoint_saved` says when it is durable. If only one rank calls this, several ranks save
        after the next iteration.

        Raises:
            RuntimeError: no training runs.
        """
        self.commands.request("checkpoint")

    def rollback(self, path: str | Path | None = None, skip: Skip = 0) -> None:
        """Go back to a checkpoint at this iteration boundary, on all ranks.

        Call it in a handler, or in the body of a loop over `epochs()`. Everything is as after `resume` of
        that checkpoint in a new process. The epoch and the training end with the reason "rollback",
        `rolled_back` is emitted, and the training begins again within the run; a hand-written loop over
        `epochs()` goes on with the epoch of the checkpoint. Where the run is now is saved at once, so that a
        resume from the newest checkpoint skips the same batches. If only one rank calls this, several ranks
        go back after the next iteration. A checkpoint that cannot be resumed from is refused by
        `command_refused` and a warning, and the training goes on.

        Args:
            path: a checkpoint as in `resume`; by default the newest one of this run that is older than the
                present iteration.
            skip: the number of batches from the checkpoint's position that are not trained on, as if a
                handler raised `SkipIteration` for each, on each rank; "seen" skips all batches since then.

        Raises:
            RuntimeError: no training runs.
            TypeError, ValueError: `path` is not a path, or `skip` is neither a number of batches nor "seen".
        """
        if path is not None and (not isinstance(path, str | os.PathLike) or not str(path)):
            raise TypeError(f"expected the path or the name of a checkpoint, or None, got path={path!r}")
        if skip != "seen":
            at_least("skip", skip, 0)
        self.commands.request("rollback", checkpoint="" if path is None else str(path), skip=skip)
