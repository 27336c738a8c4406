"""What the manifests say of the checkpoints that a hook saves: their order, what they are the best of, and scores."""

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
    """Makes the labels, and knows the last validation, whose scores every checkpoint after it has.

    Args:
        keep_best: what the labels of the best ones say of how many stay.
    """

    def __init__(self, keep_best: int = 1) -> None:
        self._keep_best = keep_best
        self.sequence = -1
        """Of the last label in the directory; -1 while nobody has looked into it."""
        self._metrics: dict[str, float] = {}
        self._validated_at: int | None = None

    @property
    def last(self) -> tuple[dict[str, float], int] | None:
        """The scores of the last validation, and its iteration."""
        return None if self._validated_at is None else (self._metrics, self._validated_at)

    def look_around(self, directory: Path) -> Found:
        """Read what is in the directory, so that what is saved from now on comes after it."""
        found = scan(directory)
        self.sequence = found.last
        return found

    def validated(self, metrics: Mapping[str, float], iteration: int) -> None:
        """A validation was completed."""
        self._metrics, self._validated_at = dict(metrics), iteration

    def make(self, beside: Iterable[int], best: Mapping[str, Rule]) -> Label:
        """The label of the next one; `beside` are the sequences of all hooks of the run, whose checkpoints have one
        order, wherever they lie."""
        self.sequence = 1 + max(beside)
        metrics = {metric: score(float(value)) for metric, value in self._metrics.items()}
        return Label(
            sequence=self.sequence, best=dict(best), keep_best=self._keep_best, metrics=metrics,
            validated_at=self._validated_at,
        )  # fmt: skip

    def state_dict(self) -> dict[str, Any]:
        """The last validation."""
        return {"metrics": dict(self._metrics), "validated_at": self._validated_at}

    def load(self, metrics: Mapping[str, float], validated_at: int | None) -> None:
        """Go on with it."""
        self._metrics, self._validated_at = dict(metrics), validated_at


def note_where_it_went_back(directories: Sequence[Path], resumed: Path) -> None:
    """Training begins after a resume from a checkpoint that was chosen: if it is one of the run's directories, and not
    the newest, note that durably, so that `resume("auto")` goes on from there until the run has saved. Where that cannot
    be written the run goes on, and the log says so."""
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
            '%s could not note that the run goes on from %s: until it has saved, resume("auto") would take %s: %s',
            path.parent, path.name, found.name_of(newest), error,
        )  # fmt: skip


def warn_of_another_run(found: Found, directory: Path) -> None:
    """A run begins anew: say so when its files will lie among another's."""
    if found.paths:
        logger.warning(
            "%s holds checkpoints of another run, %s the newest: this one begins anew and will overwrite those "
            "of the same names; trainer.resume() would go on with it, another work_dir keeps them apart",
            directory, found.paths[-1].name,
        )  # fmt: skip
