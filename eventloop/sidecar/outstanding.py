"""Find the checkpoints of a run that are to be validated, one of each iteration, oldest first."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from eventloop.checkpoint.directory import Found, scan
from eventloop.checkpoint.manifest import read_identified
from eventloop.util.errors import CheckpointError

ALL, NEWEST, BEST = "all", "newest", "best"
"""The choices that are no names of checkpoints."""


class Candidate(NamedTuple):
    """A durable checkpoint: its path, its counters, and the SHA-256 of its manifest, which identifies it."""

    path: Path
    iter: int
    epoch: int
    sha256: str


class Outstanding:
    """The durable checkpoints in the directories of a run.

    Args:
        directories: the directories.
        choice: "all", "newest", "best", or names of checkpoints.
    """

    def __init__(self, directories: Sequence[Path], choice: Sequence[str] = (ALL,)) -> None:
        self._directories, self._choice = directories, choice
        self._seen: list[int] | None = None
        self._unchanged = False
        self._candidates: list[Candidate] = []

    def candidates(self) -> list[Candidate]:
        """Return the chosen checkpoints, oldest first.

        The directories are read again only if names in them have changed since the look before the last one.

        Raises:
            CheckpointError: there is no checkpoint of a name.
        """
        times = []
        for directory in self._directories:
            with suppress(OSError):
                times.append(os.stat(directory).st_mtime_ns)
        if self._seen != times or not self._unchanged:
            self._unchanged = self._seen == times  # a clock is coarse: look once more after a change
            self._seen = times
            self._candidates = self._chosen(scan(*self._directories))
        return self._candidates

    def _chosen(self, found: Found) -> list[Candidate]:
        """Return the chosen ones among the checkpoints that no run has left behind."""
        paths = [path for path in found.paths if path in found.manifests and path not in found.abandoned]
        names = [name for name in self._choice if name not in (ALL, NEWEST, BEST)]
        if missing := [name for name in names if name not in {path.name for path in paths}]:
            raise CheckpointError(
                f"expected a checkpoint {missing[0]!r} in {self._directories[0]}, got "
                f"{', '.join(path.name for path in paths) or 'no checkpoint'}"
            )
        if names:
            paths = [path for path in paths if path.name in names]
        elif BEST in self._choice:
            paths = [found.ranking(metric)[0] for metric in found.watched()[:1]]
        of_iteration: dict[int, Path] = {}
        for path in paths:  # the regular one of an iteration comes last
            of_iteration[found.manifests[path].iter] = path
        chosen = []
        for _, path in sorted(of_iteration.items()):
            with suppress(CheckpointError):  # removed since the scan
                manifest, sha256 = read_identified(path)
                chosen.append(Candidate(path, manifest.iter, manifest.epoch, sha256))
        return chosen[-1:] if NEWEST in self._choice else chosen
