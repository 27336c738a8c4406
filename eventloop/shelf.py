"""The directory that checkpoints lie in: what is there, in which order, and which are the best. Imports no torch."""

from __future__ import annotations

import itertools
import os
import re
from pathlib import Path
from typing import NamedTuple

from eventloop.disk import DISK, Disk
from eventloop.manifest import MANIFEST, CheckpointError, Manifest, read_manifest

PAYLOAD = "state.pth"
SUFFIXES = (".pth", ".pt", ".ckpt")
"""What the name of a single file must end in to be read as a checkpoint: a published one, or another program's."""
NEEDED = ("meta", "optimizer", "param_schedulers", "hooks", "rng")
"""What a checkpoint must have besides the weights to be resumed from."""
_ASIDE = re.compile(r"^\..+\.(?P<process>\d+)-\d+\.(tmp|old)$")
_numbers = itertools.count(1)


def aside(path: Path, why: str) -> Path:
    """A name beside `path` that is not looked for; a new one every time. In a container every run is process 1, and
    its names may be those of one that was killed."""
    names = (path.with_name(f".{path.name}.{os.getpid()}-{number}.{why}") for number in _numbers)
    return next(name for name in names if not name.exists())


def remove_checkpoint(path: Path, disk: Disk = DISK) -> None:
    """Remove a checkpoint: it loses its name first, durably, so that no half of it is ever found.

    Raises:
        OSError: it cannot be removed.
    """
    if not path.is_dir():
        disk.remove(path)
        return
    nameless = aside(path, "old")
    disk.rename(path, nameless)
    disk.sync_directory(path.parent)
    disk.remove(nameless)


def leftovers(directory: Path, process: int | None = None) -> list[Path]:
    """What saves that were killed, or are under way, have left in a directory: of one process, or of all."""
    found = [(p, writer_of(p)) for p in directory.glob(".*")]
    return [p for p, writer in found if writer is not None and process in (None, writer)]


def writer_of(path: Path) -> int | None:
    """The process that writes, or wrote, what has a name of `aside`; None if it is no such name."""
    match = _ASIDE.match(path.name)
    return int(match["process"]) if match else None


class Found(NamedTuple):
    """What a directory holds: checkpoints, oldest first, and why others are none."""

    paths: list[Path]
    manifests: dict[Path, Manifest]
    damaged: list[str]

    def newest_first(self) -> list[Path]:
        """Those that have a manifest."""
        return [path for path in reversed(self.paths) if path in self.manifests]

    def watched(self) -> list[str]:
        """The metrics of which there is a best one: first those of the newest."""
        best = (self.manifests[path].best for path in self.newest_first())
        return list(dict.fromkeys(metric for metrics in best for metric in metrics))

    def ranking(self, metric: str) -> list[Path]:
        """Those that were saved as the best of a metric, the best first, of equal ones the newest."""

        def merit(path: Path) -> float:
            value = float(self.manifests[path].metrics[metric])
            return value if self.manifests[path].best[metric] == "greater" else -value

        saved = [path for path in self.newest_first() if metric in self.manifests[path].best]
        return sorted(saved, key=merit, reverse=True)


def scan(directory: str | Path) -> Found:
    """Read the manifests in a directory. Checkpoints are ordered by their sequence; files that other programs wrote
    come before them, by time. A directory that is being written, or whose save was killed, is not looked at."""
    manifests: dict[Path, Manifest] = {}
    files: list[tuple[int, str, Path]] = []
    damaged: list[str] = []
    for path in sorted(Path(directory).glob("[!.]*")):
        if path.is_file():
            if path.suffix in SUFFIXES:
                files.append((path.stat().st_mtime_ns, path.name, path))
        elif (path / MANIFEST).exists() or (path / PAYLOAD).exists():
            try:
                manifests[path] = read_manifest(path)
            except CheckpointError as error:
                damaged.append(str(error))
    ordered = sorted(manifests, key=lambda path: (manifests[path].sequence, manifests[path].iter))
    return Found([*(path for _, _, path in sorted(files)), *ordered], manifests, damaged)


def find_checkpoints(directory: str | Path) -> list[Path]:
    """The checkpoints of a directory, oldest first; see `scan`."""
    return scan(directory).paths
