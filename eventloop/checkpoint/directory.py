"""The directory that checkpoints lie in: what is there, in which order, and which are the best. Imports no torch."""

from __future__ import annotations

import errno
import itertools
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from eventloop.checkpoint.disk import DISK, Disk
from eventloop.checkpoint.lineage import LINE, Turn, line_of, read_turns, write_turns
from eventloop.checkpoint.manifest import MANIFEST, Manifest, read_manifest
from eventloop.util.errors import CheckpointError

PAYLOAD = "state.pth"
SUFFIXES = (".pth", ".pt", ".ckpt")
"""What the name of a single file must end in to be read as a checkpoint: a published one, or another program's."""
LOOKS = 10
"""How often a directory is looked at in which a run removes what was just found; of a few that are kept, twice is enough."""
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
    """What a directory holds, or several: checkpoints, oldest first, and why others are none. Those that a run has left
    behind, by going back to an earlier one, come before all that is on its line."""

    paths: list[Path]
    manifests: dict[Path, Manifest]
    damaged: list[str]
    abandoned: frozenset[Path] = frozenset()
    last: int = 0
    """The greatest sequence that was given, perhaps to one that is there no more."""

    def newest_first(self) -> list[Path]:
        """Those that have a manifest."""
        return [path for path in reversed(self.paths) if path in self.manifests]

    def left_behind(self, path: Path) -> list[str]:
        """The names of those saved after `path` that are not on its line."""
        if path not in self.manifests or path in self.abandoned:
            return []
        after = self.manifests[path].sequence
        later = [each for each in self.paths if each in self.abandoned]
        return [self.name_of(each) for each in later if self.manifests[each].sequence > after]

    def was_replaced(self, path: Path) -> bool:
        """It is not there any more, or another one has its name: a run does either at once, once it has saved."""
        if path not in self.manifests:
            return not path.exists()
        try:
            return read_manifest(path) != self.manifests[path]
        except CheckpointError:
            return not path.exists()

    def name_of(self, path: Path) -> str:
        """A checkpoint for people: its name, or its path where there are several directories."""
        return path.name if len({each.parent for each in self.paths}) == 1 else str(path)

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

    def best_kept(self, metric: str) -> int:
        """How many of the best of a metric stay, as the newest of them says; at most as many as there are."""
        saved = [path for path in self.newest_first() if metric in self.manifests[path].best]
        count = self.manifests[saved[0]].keep_best
        return len(saved) if count < 0 else min(count, len(saved))


def scan(*directories: str | Path) -> Found:
    """Read the manifests in a directory, or in all that the hooks of a run save in, which count on together. Checkpoints
    are ordered as `in_order` says; files that other programs wrote come before them, by time, and so do those that a run
    has left behind. A directory that is being written, or whose save was killed, is not looked at."""
    manifests: dict[Path, Manifest] = {}
    files: list[tuple[int, str, Path]] = []
    damaged: list[str] = []
    abandoned: set[Path] = set()
    last = 0
    for directory in map(Path, directories):
        here, beside = _look_into(directory, damaged)
        turns = _turns_of(directory, damaged)
        on_line = line_of(turns)
        abandoned.update(path for path, manifest in here.items() if not on_line(manifest.sequence))
        last = max([last, *(each.sequence for each in here.values()), *(turn.newest for turn in turns)])
        manifests.update(here)
        files += beside

    single = [path for _, _, path in sorted(files)]
    left = in_order({path: manifest for path, manifest in manifests.items() if path in abandoned})
    on = in_order({path: manifest for path, manifest in manifests.items() if path not in abandoned})
    return Found([*single, *left, *on], manifests, damaged, frozenset(abandoned), last)


def in_order(manifests: Mapping[Path, Manifest]) -> list[Path]:
    """Sort checkpoints by their sequence, oldest first; at one iteration the regular one comes after the best ones.

    They hold the same weights, so the regular one is the newest and a best one replaces it where it is damaged.
    """
    by_sequence = sorted(manifests, key=lambda path: (manifests[path].sequence, manifests[path].iter))
    groups = itertools.groupby(by_sequence, key=lambda path: manifests[path].iter)
    return [path for _, group in groups for path in sorted(group, key=lambda path: not manifests[path].best)]


Seen = tuple[dict[Path, Manifest], list[tuple[int, str, Path]]]
"""Checkpoints with their manifests, and single files with what they are ordered by."""


def _look_into(directory: Path, damaged: list[str]) -> Seen:
    """What is there, and what is damaged of it. Where a run has meanwhile removed something, what it saved for it may
    have come too late to be seen: it is looked again."""
    for look in range(1, LOOKS + 1):
        reasons: list[str] = []
        gone, seen = _checkpoints_in(directory, reasons)
        if not gone or look == LOOKS:
            break
    damaged += reasons
    return seen


def _checkpoints_in(directory: Path, damaged: list[str]) -> tuple[bool, Seen]:
    """Whether something was removed meanwhile, and what was there."""
    manifests: dict[Path, Manifest] = {}
    files: list[tuple[int, str, Path]] = []
    gone = False
    if (reason := _why_not_listed(directory)) is not None:
        damaged.append(reason)
        return False, ({}, [])
    for path in sorted(directory.glob("[!.]*")):
        try:
            if path.is_file():
                if path.suffix in SUFFIXES:
                    files.append((path.stat().st_mtime_ns, path.name, path))
            elif _is_there(path / MANIFEST) or _is_there(path / PAYLOAD):
                manifests[path] = read_manifest(path)
        except CheckpointError as error:
            if os.path.lexists(path):
                damaged.append(str(error))
        except FileNotFoundError:  # of the last look at a single file
            pass
        except OSError as error:
            damaged.append(f"{path} may be a checkpoint, and cannot be looked into: {error}")
        gone = gone or not os.path.lexists(path)
    return gone, (manifests, files)


def _why_not_listed(directory: Path) -> str | None:
    """A glob is silent about a directory that it may not read."""
    try:
        os.scandir(directory).close()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        return f"{directory} cannot be listed: {error}"
    return None


def _is_there(path: Path) -> bool:
    """Whether there is something of that name.

    Raises:
        OSError: that cannot be found out.
    """
    try:
        os.stat(path)
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
            raise
        return False
    return True


def _turns_of(directory: Path, damaged: list[str]) -> tuple[Turn, ...]:
    try:
        return read_turns(directory)
    except CheckpointError as error:
        damaged.append(str(error))
        return ()


def go_back(found: Found, path: Path, disk: Disk = DISK) -> bool:
    """A run goes on from one of the checkpoints that were found: unless it is the newest, note durably that those
    after it are left behind, in each of their directories. Nothing is removed.

    Raises:
        OSError: that cannot be written; in that directory all is as it was.
    """
    if not found.paths or path == found.paths[-1]:
        return False
    turn = Turn(found.manifests[path].sequence, found.last)
    if turn.back_to == turn.newest:
        return False
    for directory in dict.fromkeys(each.parent for each in found.manifests):
        turns = _turns_of(directory, [])  # of a damaged file what was known of the line is lost already
        write_turns(directory, [*turns, turn], aside(directory / LINE, "tmp"), disk)
    return True


def find_checkpoints(directory: str | Path) -> list[Path]:
    """The checkpoints of a directory, oldest first; see `scan`."""
    return scan(directory).paths
