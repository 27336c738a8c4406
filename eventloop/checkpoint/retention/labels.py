"""Make the labels of a hook's checkpoints: their order, their scores, and what they are the best of.

`CheckpointHook` uses it, also to record that a run went back to an earlier checkpoint.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from eventloop.checkpoint.directory import SUFFIXES, Found, go_back, scan
from eventloop.checkpoint.manifest import Label, score
from eventloop.checkpoint.retention.best import Rule

logger = logging.getLogger("eventloop")


class Labels:
    """The maker of a hook's labels, which remembers the scores of the last validation.

    Args:
        keep_best: how many best checkpoints of each metric are kept; the labels contain it.
    """

    def __init__(self, keep_best: int = 1) -> None:
        self._keep_best = keep_best
        self.sequence = -1
        """The sequence of the last label in the directory; -1 before the directory was scanned."""
        self._metrics: dict[str, float] = {}
        self._validated_at: int | None = None

    @property
    def last(self) -> tuple[dict[str, float], int] | None:
        """Return the scores of the last validation and its iteration; None before the first."""
        return None if self._validated_at is None else (self._metrics, self._validated_at)

    def look_around(self, directory: Path) -> Found:
        """Scan the directory, so that later labels have a greater sequence than all in it."""
        found = scan(directory)
        self.sequence = found.last
        return found

    def validated(self, metrics: Mapping[str, float], iteration: int) -> None:
        """Record the scores of a completed validation."""
        self._metrics, self._validated_at = dict(metrics), iteration

    def make(self, sequences: Iterable[int], best: Mapping[str, Rule]) -> Label:
        """Make the label of the next checkpoint.

        Args:
            sequences: the last sequences of all hooks of the run, whose checkpoints share one order.
            best: the metrics of which it is one of the best, with their rules.
        """
        self.sequence = 1 + max(sequences)
        metrics = {metric: score(float(value)) for metric, value in self._metrics.items()}
        return Label(
            sequence=self.sequence, best=dict(best), keep_best=self._keep_best, metrics=metrics,
            validated_at=self._validated_at,
        )  # fmt: skip

    def state_dict(self) -> dict[str, Any]:
        """Return the scores and the iteration of the last validation."""
        return {"metrics": dict(self._metrics), "validated_at": self._validated_at}

    def load(self, metrics: Mapping[str, float], validated_at: int | None) -> None:
        """Restore the scores and the iteration of the last validation."""
        self._metrics, self._validated_at = dict(metrics), validated_at


def note_where_it_went_back(directories: Sequence[Path], resumed: Path) -> None:
    """Record durably that the run resumed from an earlier checkpoint of its directories.

    `resume("auto")` then goes on from there until the run has saved. Called when training begins. Nothing is
    recorded for the newest checkpoint, or one of another directory. If the record cannot be written, a
    warning is logged.

    Args:
        directories: those that the hooks of the run save in.
        resumed: the path of the checkpoint.
    """
    name = resumed.stem if resumed.suffix in SUFFIXES and not resumed.is_file() else resumed.name
    found = scan(*directories)
    places = [place for place in directories if place.resolve() == resumed.resolve().parent]
    path = next((place / name for place in places if place / name in found.manifests), None)
    if path is None:
        return
    try:
        go_back(found, path)
    except OSError as error:
        newest = scan(*directories).paths[-1]
        logger.warning(
            'could not record in %s that the run goes on from %s; until it has saved, resume("auto") would '
            "take %s: %s",
            path.parent, path.name, found.name_of(newest), error,
        )  # fmt: skip


def warn_of_another_run(found: Found, directory: Path) -> None:
    """Warn that a new run starts in a directory with checkpoints of another run."""
    if found.paths:
        logger.warning(
            "%s holds checkpoints of another run, the newest is %s: this run starts from the beginning and "
            "will overwrite those of the same names; call trainer.resume() to go on with the other run, or "
            "use another work_dir",
            directory, found.paths[-1].name,
        )  # fmt: skip
