"""Create bridges for the trainers of a script, and keep the summaries of its runs."""

from __future__ import annotations

import os
import sys
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eventloop.autoattach.child_runs import pass_on, passed_on
from eventloop.autoattach.options import RunOptions

if TYPE_CHECKING:  # these import torch, and the script is to be the first
    from eventloop.bridges.attachment import Attachment
    from eventloop.bridges.driven import DrivenTrainer


class Attacher:
    """Create a bridge for each trainer of a script, with its own bus and directory.

    A bridge is created where the engine (host) takes it, on the thread that creates the trainer.

    Args:
        options: the options of the command.
    """

    def __init__(self, options: RunOptions) -> None:
        self.options = options
        self.hosts: set[str] = set()
        """The names of the engines for which a bridge was created."""
        self.bridged: set[str] = set()
        """The names of the engines with a trainer to which the script has attached a bridge itself."""
        self.imports_bridges = False
        """Whether a bridge, and with it our trainer, was imported here rather than by the script."""
        self.summaries: dict[Path, str] = {}
        """The summary of each trainer's last run, by its directory; only the first rank has summaries."""
        self.problems: dict[str, str] = {}
        """The reason why an engine has no bridge, by the engine's name."""
        self._used: set[Path] = set()

    def bridge(self, host: str, module: str) -> Any:
        """Import the bridge for an engine, and return its module.

        If the bridge does not support the installed engine, return None and note the reason in `problems`.

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
        """Give the trainer of a bridge its own directory, and keep the summary of each of its runs."""
        self.hosts.add(attachment.host)
        attachment.place, attachment.ended = self.free_directory, self._store_summary

    def free_directory(self, wanted: Path | None) -> Path | None:
        """Return the wanted directory for another trainer; None lets that trainer create one.

        If an earlier trainer has the wanted directory, return a new one within it: `trainer-2` and so on. All
        ranks that the script starts together get the same one, because none of them has ended a run yet.
        """
        if wanted is None:
            return None  # the trainer creates one, named by the time
        self._used.update(path.absolute() for path in self._child_runs())
        path, number = wanted, 1
        while path.absolute() in self._used:
            number += 1
            path = wanted / f"trainer-{number}"
        self._used.add(path.absolute())
        return path

    def add_child_runs(self) -> None:
        """Add the summaries of runs that ended in processes of the script, such as ranks that were forked."""
        self.summaries.update(self._child_runs())

    def _child_runs(self) -> dict[Path, str]:
        return {} if self.options.summaries is None else passed_on(Path(self.options.summaries))

    def _store_summary(self, trainer: DrivenTrainer) -> None:
        if trainer.rank != 0:
            return
        from eventloop.reporting.summary import summarize

        # the script has no trainer.costs(); `eventloop run` names the command that shows every callback
        summary = summarize(trainer, everything="")
        self.summaries[trainer.work_dir] = summary
        if self.options.summaries is not None and os.getpid() != self.options.pid:
            pass_on(Path(self.options.summaries), trainer.work_dir, summary)
