"""Create bridges for the trainers of a script, and keep the summaries of its runs."""

from __future__ import annotations

import os
import sys
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eventloop.autoattach.child_runs import pass_on, passed_on
from eventloop.autoattach.options import RunOptions

if TYPE_CHECKING:  # these import torch, which the script is to import first
    from eventloop.bridges.attachment import Attachment
    from eventloop.bridges.driven import DrivenTrainer


class Attacher:
    """Create a bridge for each trainer of a script, with its own bus and directory.

    A bridge is created on the thread that creates the trainer. With ignite it is created on the thread that
    first runs the engine.

    Args:
        options: the options of the command.
    """

    def __init__(self, options: RunOptions) -> None:
        self.options = options
        self.hosts: set[str] = set()
        """The names of the engines to whose trainers this object has attached a bridge."""
        self.bridged: set[str] = set()
        """The names of the engines for which the script itself has attached a bridge to a trainer."""
        self.imports_bridges = False
        """Whether this object has imported a bridge, and so eventloop's trainer, before the script did."""
        self.summaries: dict[Path, str] = {}
        """The text of `summarize` for each trainer's last run, by the run's directory; of rank 0 only."""
        self.problems: dict[str, str] = {}
        """The reason why an engine has no bridge, by the engine's name."""
        self._used: set[Path] = set()  # the absolute directories of earlier trainers

    def bridge(self, host: str, module: str) -> Any:
        """Import the bridge for an engine, and return its module.

        If the bridge does not support the installed engine, return None and put the reason into `problems`.

        Args:
            host: the engine's name, for messages.
            module: the bridge's module in `eventloop.bridges`.
        """
        self.imports_bridges |= f"eventloop.bridges.{module}" not in sys.modules
        try:
            return import_module(f"eventloop.bridges.{module}")
        except ImportError as error:
            self.problems[host] = str(error)
            return None

    def arguments(self) -> dict[str, Any]:
        """Return the keyword arguments with which the next bridge is created."""
        options = self.options
        return {
            "writers": [{"type": name} for name in options.writers],
            "work_dir": options.work_dir,
            "measure": options.measure,
        }

    def follow(self, attachment: Attachment) -> None:
        """Make a bridge use a directory of its own, and store a summary after each of its runs."""
        self.hosts.add(attachment.host)
        attachment.choose_directory, attachment.after_run = self.free_directory, self._store_summary

    def free_directory(self, preferred: Path | None) -> Path | None:
        """Return the preferred directory for a new trainer; None lets that trainer create one.

        If an earlier trainer uses the preferred directory, return `trainer-2`, `trainer-3` and so on within
        it. All ranks that the script starts together get the same directory, because a directory of another
        process counts as used only once a run has ended there.
        """
        if preferred is None:
            return None  # the trainer creates one, named by the time
        self._used.update(path.absolute() for path in self._child_runs())
        path, number = preferred, 1
        while path.absolute() in self._used:
            number += 1
            path = preferred / f"trainer-{number}"
        self._used.add(path.absolute())
        return path

    def add_child_runs(self) -> None:
        """Add the summaries of runs that ended in processes of the script, such as ranks that were forked."""
        self.summaries.update(self._child_runs())

    def _child_runs(self) -> dict[Path, str]:
        """Return the summaries of runs in other processes, by the directory of the run."""
        return {} if self.options.summaries is None else passed_on(Path(self.options.summaries))

    def _store_summary(self, trainer: DrivenTrainer) -> None:
        """Store the summary of a run that has ended; in another process than the command's, pass it on."""
        if trainer.rank != 0:
            return
        from eventloop.reporting.summary import summarize

        # without the hint to call trainer.costs(), as the script has no trainer
        summary = summarize(trainer, everything="")
        self.summaries[trainer.work_dir] = summary
        if self.options.summaries is not None and os.getpid() != self.options.pid:
            pass_on(Path(self.options.summaries), trainer.work_dir, summary)
