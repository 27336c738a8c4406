"""Validate each durable checkpoint of a run once, oldest first, and report the metrics to the run.

`eventloop evaluate` and the child process of an `AsyncValidationHook` run it.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from eventloop.ownership.acquiring import owning
from eventloop.ownership.owner import read_owner
from eventloop.sidecar.building import build_trainer
from eventloop.sidecar.outstanding import ALL, BEST, NEWEST, Candidate, Outstanding
from eventloop.sidecar.reports import FOLDER, Reports, id_of
from eventloop.steering.protocols import CheckpointSaver
from eventloop.util.errors import CheckpointError

POLL_SECONDS = 0.5
"""Seconds between two searches for a new checkpoint."""
NICENESS = 19
"""The number added to the niceness of the process, so that a training on the same machine comes first."""
ANOTHER = "one evaluator at a time validates the checkpoints of a run: wait until it has ended, or end it"


class Evaluator:
    """Validate the checkpoints of a run with a trainer in this process.

    Args:
        run: the directory of the run.
        build: the function that builds the trainer, as "module:function".
        device: the device of the trainer; None for the device that the function chooses.
        choice: which checkpoints to validate: "all", "newest", "best", or names of checkpoints.
        show: called with a line of text for each checkpoint that is validated. If `choice` is not "all", it
            is also called for a checkpoint that was validated before.

    Raises:
        TypeError, ValueError: the function does not return a trainer with a `val_loader`.
        Exception: the errors of `build_trainer`.
    """

    def __init__(
        self,
        run: Path,
        build: str,
        *,
        device: str | None = None,
        choice: Sequence[str] = (ALL,),
        show: Callable[[str], object],
    ) -> None:
        self._run, self._show = run.absolute(), show
        self._trainer = build_trainer(build, device)
        hooks = [hook for hook in self._trainer.hooks if isinstance(hook, CheckpointSaver)]
        directories = dict.fromkeys([self._run, *(hook.directory_for(self._run) for hook in hooks)])
        self._outstanding = Outstanding([*directories], choice)
        self._reports = Reports(self._run, f"evaluate {os.getpid()}@{socket.gethostname()}")
        self._chosen_by_name = not {ALL, NEWEST, BEST}.intersection(choice)
        self._shows_known = ALL not in choice  # all of a run may be very many
        self._done: set[str] = set()  # the ids of the reports on checkpoints that need no validation any more
        self.failed = 0
        """The number of checkpoints that could not be read."""
        self.known: list[str] = []
        """The names of the checkpoints that were validated before."""
        self.stopped = False
        """True once a signal has stopped a validation. Its metrics are not reported."""

    def run(self, *, follow: bool = False) -> None:
        """Validate the run's checkpoints; with `follow`, also validate new ones until the run has ended.

        Raises:
            CheckpointError: there is no checkpoint of a given name.
            OSError: a report cannot be written.
            Exception: the validation has raised it.
        """
        while True:
            # read before the search, so that the search finds the last checkpoint of a run that has ended
            lives = self._run_lives()
            while (candidate := self._next()) is not None and not self.stopped:
                self._validate(*candidate)
            if self.stopped or not (follow and lives):
                return
            time.sleep(POLL_SECONDS)

    def _run_lives(self) -> bool:
        """Return whether a process owns the run's directory, and is alive as far as this machine knows."""
        owner = read_owner(self._run)
        return owner is not None and owner.lives is not False

    def _next(self) -> tuple[str, Candidate] | None:
        """Return the id of the report and the oldest checkpoint still to be validated; None if there is none.

        A checkpoint that was chosen by name is validated even if it was validated before.
        """
        for candidate in self._outstanding.candidates():
            if (name := id_of(candidate)) in self._done:
                continue
            if self._chosen_by_name or not self._reports.known(name, candidate.iter):
                return name, candidate
            self._done.add(name)
            self.known.append(candidate.path.name)
            if self._shows_known:
                self._show_known(name, candidate)
        return None

    def _show_known(self, name: str, candidate: Candidate) -> None:
        """Show the metrics of a checkpoint that was validated before."""
        metrics = self._reports.metrics(name, candidate.iter)
        text = "its metrics are no longer known" if metrics is None else _text(metrics)
        self._show(f"{_title(candidate)}, validated before: {text}")

    def _validate(self, name: str, candidate: Candidate) -> None:
        """Validate one checkpoint, and report its metrics under the id `name` unless they are known."""
        trainer, path = self._trainer, candidate.path
        self._done.add(name)
        try:
            trainer.load_checkpoint(path)
        except (CheckpointError, FileNotFoundError) as error:
            self.failed += 1
            self._show(f"{_title(candidate)} was not validated: {error}")
            return
        trainer.iter = trainer.metrics.iter = candidate.iter
        trainer.epoch = trainer.metrics.epoch = candidate.epoch
        metrics = trainer.val()
        if self._trainer.stop_reason is not None:
            self.stopped = True
            return
        if not self._reports.known(name, candidate.iter):
            self._reports.send(name, candidate, metrics)
        self._show(f"{_title(candidate)}: {_text(metrics)}")


def _title(candidate: Candidate) -> str:
    return f"{candidate.path.name} (iteration {candidate.iter})"


def _text(metrics: Mapping[str, float]) -> str:
    return ", ".join(f"{metric} {value:.6g}" for metric, value in metrics.items()) or "no metric"


def owning_evaluations(run: Path) -> AbstractContextManager[None]:
    """Return a context manager that makes this process the only evaluator of a run until its block ends.

    Raises:
        WorkDirInUseError: another evaluator of the run is alive.
        OSError: the directory cannot be written.
    """
    return owning(run.absolute() / FOLDER, "evaluating", ANOTHER)


def lower_priority() -> None:
    """Lower this process's priority, so that others on its machine, such as the training, come first."""
    os.nice(NICENESS)
