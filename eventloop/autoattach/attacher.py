"""Make the bridges of a program that has none, and keep what its runs have cost."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eventloop.autoattach.options import RunOptions

if TYPE_CHECKING:  # these import torch, and the script is to be the first
    from eventloop.bridges.driven import DrivenTrainer
    from eventloop.bridges.ride import Ride


class Attacher:
    """Make a bridge for each trainer of a program, with a bus and a directory of its own.

    The bridges are made where the host takes them, on the thread that makes a trainer.

    Args:
        options: those of the command.
    """

    def __init__(self, options: RunOptions) -> None:
        self.options = options
        self.hosts: set[str] = set()
        """The engines for which a bridge was made."""
        self.summaries: dict[Path, str] = {}
        """The text of the last run of each trainer, by its directory; none of ranks other than the first."""
        self.problems: dict[str, str] = {}
        """Why an engine has no bridge, by the engine's name."""
        self._used: set[Path] = set()

    def bridge(self, host: str, module: str) -> Any:
        """Return the module of a host's bridge; None, with a problem, if it does not support the host."""
        try:
            return import_module(f"eventloop.bridges.{module}")
        except ImportError as error:
            self.problems[host] = str(error)
            return None

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of a new bridge."""
        options = self.options
        return {
            "writers": [{"type": name} for name in options.writers],
            "work_dir": options.work_dir, "measure": options.measure,
        }  # fmt: skip

    def follow(self, ride: Ride) -> None:
        """Give the trainer of a bridge a directory of its own, and keep the summary of each of its runs."""
        self.hosts.add(ride.host)
        ride.place, ride.ended = self.free_directory, self._keep

    def free_directory(self, wanted: Path | None) -> Path | None:
        """Return the directory for another trainer of this program.

        It is a new one within the wanted directory, `trainer-2` and so on, if an earlier trainer has that.
        """
        if wanted is None:
            return None  # the trainer makes one, named by the time
        path, number = wanted, 1
        while path.absolute() in self._used:
            number += 1
            path = wanted / f"trainer-{number}"
        self._used.add(path.absolute())
        return path

    def _keep(self, trainer: DrivenTrainer) -> None:
        if trainer.rank == 0:
            self.summaries[trainer.work_dir] = trainer.summary()
