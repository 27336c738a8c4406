"""Find the checkpoints of a run that an evaluator is to validate: one for each iteration, oldest first."""

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
"""The choices of checkpoints other than by name."""


class Candidate(NamedTuple):
    """Describe a durable checkpoint: its path, its counters, and, as its identity, its manifest's SHA-256."""

    path: Path
    iter: int
    epoch: int
    sha256: str


class Outstanding:
    """List the durable checkpoints in the directories of a run.

    Args:
        directories: the directories; those that do not exist have no checkpoints.
        choice: "all", "newest", "best", or names of checkpoints.
    """

    def __init__(self, directories: Sequence[Path], choice: Sequence[str] = (ALL,)) -> None:
        self._directories, self._choice = directories, choice
        self._times: list[int] | None = None  # modification times of the directories at the last call
        self._unchanged = False  # whether the times were the same at the last two calls
        self._candidates: list[Candidate] = []

    def candidates(self) -> list[Candidate]:
        """Return the chosen checkpoints, oldest first.

        The directories are read again only if their modification times changed at this or the last call.

        Raises:
            CheckpointError: there is no checkpoint of a name that was chosen.
        """
        times = []
        for directory in self._directories:
            with suppress(OSError):
                times.append(os.stat(directory).st_mtime_ns)
        if self._times != times or not self._unchanged:
            # another change within the clock's resolution would leave the times the same, so read once more
            self._unchanged = self._times == times
            self._times = times
            self._candidates = self._chosen(scan(*self._directories))
        return self._candidates

    def _chosen(self, found: Found) -> list[Candidate]:
        """Return the chosen checkpoints without abandoned ones, which were saved before the run went back."""
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
            paths = [found.ranking(metric)[0] for metric in found.watched()[:1]]  # of the first metric only
        by_iteration: dict[int, Path] = {}
        for path in paths:  # of several checkpoints of one iteration, the regular one comes last and is taken
            by_iteration[found.manifests[path].iter] = path
        chosen = []
        for _, path in sorted(by_iteration.items()):
            with suppress(CheckpointError):  # the checkpoint was removed since the scan
                manifest, sha256 = read_identified(path)
                chosen.append(Candidate(path, manifest.iter, manifest.epoch, sha256))
        return chosen[-1:] if NEWEST in self._choice else chosen
