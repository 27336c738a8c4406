"""Find the checkpoints of a directory, their order, and the best ones.

Loading, resuming, retention and `eventloop checkpoints` use it. The order comes from the sequence numbers in
the manifests, never from a clock or a pointer file. This module imports no torch.

The lineage of a run is the sequence of checkpoints that led to its present state. A run that resumes from a
checkpoint other than the newest starts a new lineage there, and so does a new run in a directory with
checkpoints. `line.json` records that at once, before the run saves for the first time. It has one entry
(`StepBack`) for each such start, and is replaced as a whole, durably. Without this file, all checkpoints are
on the lineage.
"""

from __future__ import annotations

import errno
import itertools
import math
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import msgspec

from eventloop.checkpoint.commit import MANIFEST, PAYLOAD, sealed
from eventloop.checkpoint.disk import DISK, Disk, write_file
from eventloop.checkpoint.manifest import UNREADABLE, Manifest, read_manifest, unseal
from eventloop.temporary.names import temporary_path
from eventloop.util.errors import CheckpointError

SUFFIXES = (".pth", ".pt", ".ckpt")
"""The suffixes of single files that are read as checkpoints."""
LINE = "line.json"
"""The name of the file that records where lineages start."""
_LINE_SCHEMA = 1
NOTHING = -1
"""A number below all sequence numbers, in place of one where a new run began from no checkpoint."""
MOST_SCANS = 10
"""The largest number of scans of a directory while a run removes checkpoints; two are usually enough."""


class Found(NamedTuple):
    """The result of scanning one or more directories of checkpoints.

    Attributes:
        paths: all checkpoints, oldest first: single files, then abandoned checkpoints, then those on the
            lineage.
        manifests: the manifest of each path that has one.
        damaged: a sentence for each path that looks like a checkpoint and cannot be used.
        abandoned: checkpoints off the lineage, because a run went back to an earlier one, or a new run began.
        foreign: the abandoned checkpoints of other runs than the newest one.
        last: the largest sequence number that is known to be given, perhaps to a checkpoint that is removed.
    """

    paths: list[Path]
    manifests: dict[Path, Manifest]
    damaged: list[str]
    abandoned: frozenset[Path] = frozenset()
    foreign: frozenset[Path] = frozenset()
    last: int = 0

    def newest_first(self) -> list[Path]:
        """Return the paths that have a manifest, newest first."""
        return [path for path in reversed(self.paths) if path in self.manifests]

    def abandoned_after(self, path: Path) -> list[str]:
        """Return the names of the abandoned checkpoints that were saved after `path`."""
        if path not in self.manifests or path in self.abandoned:
            return []
        sequence = self.manifests[path].sequence
        abandoned = [other for other in self.paths if other in self.abandoned]
        return [self.name_of(other) for other in abandoned if self.manifests[other].sequence > sequence]

    def was_replaced(self, path: Path) -> bool:
        """Return whether a checkpoint was removed since the scan, or was replaced by another of its name."""
        if path not in self.manifests:
            return not path.exists()
        try:
            return read_manifest(path) != self.manifests[path]
        except CheckpointError:
            return not path.exists()

    def name_of(self, path: Path) -> str:
        """Return the name of a checkpoint for messages; its path if several directories were scanned."""
        return path.name if len({each.parent for each in self.paths}) == 1 else str(path)

    def watched(self) -> list[str]:
        """Return the metrics that have a best checkpoint, beginning with those of the newest checkpoint."""
        best = (self.manifests[path].best for path in self.newest_first())
        return list(dict.fromkeys(metric for metrics in best for metric in metrics))

    def ranking(self, metric: str) -> list[Path]:
        """Return the best checkpoints of a metric, best first; among equal scores the newest first.

        Best checkpoints of other runs than the newest one come last.
        """

        def merit(path: Path) -> tuple[bool, float]:
            score = float(self.manifests[path].metrics[metric])
            is_greater = self.manifests[path].best[metric] == "greater"
            return path not in self.foreign, score if is_greater else -score

        saved = [path for path in self.newest_first() if metric in self.manifests[path].best]
        return sorted(saved, key=merit, reverse=True)

    def best_kept(self, metric: str) -> int:
        """Return how many of a metric's best checkpoints the run keeps, by `keep_best` of the newest one.

        It is at most the number of best checkpoints that exist.
        """
        saved = [path for path in self.newest_first() if metric in self.manifests[path].best]
        count = self.manifests[saved[0]].keep_best
        return len(saved) if count < 0 else min(count, len(saved))


def scan(*directories: str | Path) -> Found:
    """Read the manifests in the directories of a run, and order the checkpoints, oldest first.

    The hooks of a run may save in several directories, and share one sequence of numbers. Single files come
    first, by modification time, then abandoned checkpoints, then those on the lineage, both in the order of
    `in_order`. Incomplete saves are skipped.
    """
    manifests: dict[Path, Manifest] = {}
    files: list[tuple[int, str, Path]] = []
    damaged: list[str] = []
    abandoned: set[Path] = set()
    foreign: set[Path] = set()
    last = 0
    for directory in map(Path, directories):
        here, single_files = _scan_directory(directory, damaged)
        if steps := _steps_back_of(directory, damaged):
            is_on_line, is_same_run = lineage_filter(steps), same_run_filter(steps)
            abandoned.update(path for path, manifest in here.items() if not is_on_line(manifest.sequence))
            foreign.update(path for path, manifest in here.items() if not is_same_run(manifest.sequence))
        last = max([last, *[each.sequence for each in here.values()], *[step.newest for step in steps]])
        manifests.update(here)
        files += single_files

    single = [path for _, _, path in sorted(files)]
    off_line = in_order({path: manifest for path, manifest in manifests.items() if path in abandoned})
    on_line = in_order({path: manifest for path, manifest in manifests.items() if path not in abandoned})
    paths = [*single, *off_line, *on_line]
    return Found(paths, manifests, damaged, frozenset(abandoned), frozenset(foreign), last)


def in_order(manifests: Mapping[Path, Manifest]) -> list[Path]:
    """Sort checkpoints by their sequence number, oldest first.

    Checkpoints of one iteration hold the same weights. Among them the regular checkpoint comes last, so that
    it counts as the newest, and a best checkpoint is the fallback if the regular one is damaged.
    """
    by_sequence = sorted(manifests, key=lambda path: (manifests[path].sequence, manifests[path].iter))
    groups = itertools.groupby(by_sequence, key=lambda path: manifests[path].iter)
    return [path for _, group in groups for path in sorted(group, key=lambda path: not manifests[path].best)]


Seen = tuple[dict[Path, Manifest], list[tuple[int, str, Path]]]
"""Checkpoints with their manifests, and single files as (modification time in ns, name, path)."""


def _scan_directory(directory: Path, damaged: list[str]) -> Seen:
    """Return the checkpoints and single files of a directory.

    The scan is repeated if a run removes a checkpoint meanwhile, because it may have missed the checkpoint
    that the run had saved before the removal.

    Args:
        damaged: a sentence for each path that cannot be used is added here.
    """
    for scan_number in range(1, MOST_SCANS + 1):
        reasons: list[str] = []
        gone, seen = _checkpoints_in(directory, reasons)
        if not gone or scan_number == MOST_SCANS:
            break
    damaged += reasons
    return seen


def _checkpoints_in(directory: Path, damaged: list[str]) -> tuple[bool, Seen]:
    """Scan a directory once; return whether a path was removed meanwhile, and what was found.

    Args:
        damaged: a sentence for each path that cannot be used is added here.
    """
    manifests: dict[Path, Manifest] = {}
    files: list[tuple[int, str, Path]] = []
    gone = False
    for path in _paths_in(directory, damaged):
        try:
            if path.is_file():
                if path.suffix in SUFFIXES:
                    files.append((path.stat().st_mtime_ns, path.name, path))
            elif _is_there(path / MANIFEST) or _is_there(path / PAYLOAD):
                manifests[path] = read_manifest(path)
        except CheckpointError as error:
            if os.path.lexists(path):
                damaged.append(str(error))
        except FileNotFoundError:  # a single file was removed before its `stat`
            pass
        except OSError as error:
            damaged.append(f"{path} may be a checkpoint, and cannot be read: {error}")
        gone = gone or not os.path.lexists(path)
    return gone, (manifests, files)


def _paths_in(directory: Path, damaged: list[str]) -> list[Path]:
    """Return the paths in a directory that are not hidden; add the reason to `damaged` if that fails."""
    try:
        return [directory / name for name in sorted(os.listdir(directory)) if not name.startswith(".")]
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        damaged.append(f"{directory} cannot be listed: {error}")
        return []


def _is_there(path: Path) -> bool:
    """Return whether a path exists.

    Raises:
        OSError: the system does not say, for example because a folder may not be read.
    """
    try:
        os.stat(path)
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
            raise
        return False
    return True


def _steps_back_of(directory: Path, damaged: list[str]) -> tuple[StepBack, ...]:
    """Return the `StepBack` records of a directory; for a damaged file add a sentence, and return ()."""
    try:
        return read_steps_back(directory)
    except CheckpointError as error:
        damaged.append(str(error))
        return ()


def go_back(found: Found, path: Path, disk: Disk = DISK) -> bool:
    """Record durably that a run continues from the checkpoint `path`, unless it is the newest.

    Checkpoints that were saved after it become abandoned, in each directory of the scan. Nothing is removed.

    Returns:
        False if the checkpoint is the newest, so that nothing was recorded.

    Raises:
        OSError: the record cannot be written in a directory, which is unchanged.
    """
    is_newest = not found.paths or path == found.paths[-1] or found.manifests[path].sequence == found.last
    if is_newest and path not in found.abandoned:
        return False
    _add_step(found, StepBack(found.manifests[path].sequence, found.last), disk)
    return True


def begin_new_run(found: Found, disk: Disk = DISK) -> None:
    """Record durably that a new run begins: the checkpoints of the scan become abandoned. None is removed.

    Raises:
        OSError: the record cannot be written in a directory, which is unchanged.
    """
    _add_step(found, StepBack(NOTHING, found.last), disk)


def _add_step(found: Found, step: StepBack, disk: Disk) -> None:
    """Add a record to `line.json` of each directory that has checkpoints of the scan."""
    for directory in dict.fromkeys(each.parent for each in found.manifests):
        steps = _steps_back_of(directory, [])  # a damaged file has lost the earlier steps anyway
        write_steps_back(directory, [*steps, step], temporary_path(directory / LINE, "tmp"), disk)


def find_checkpoints(directory: str | Path) -> list[Path]:
    """Return the paths of all checkpoints in a directory, oldest first, in the order of `scan`."""
    return scan(directory).paths


# --- lineage -----------------------------------------------------------------------------------------------


class StepBack(msgspec.Struct, frozen=True):
    """A record that a run resumed from a checkpoint other than the newest, or that a new run began.

    The checkpoints from `back_to` (exclusive) to `newest` were abandoned then; if a new run began, these are
    all.

    If the hooks of a run save in several directories, each directory gets the record, which may name
    checkpoints of another directory.

    Attributes:
        back_to: the sequence number of the checkpoint that the run resumed from; `NOTHING` for a new run.
        newest: the largest sequence number at that time.
    """

    back_to: int
    newest: int


class _Line(msgspec.Struct, frozen=True):
    """The contents of `line.json`: its version and its records, oldest first."""

    schema: int = _LINE_SCHEMA
    turns: tuple[StepBack, ...] = ()


def read_steps_back(directory: Path) -> tuple[StepBack, ...]:
    """Return the `StepBack` records of a directory, oldest first; () without any."""
    path = directory / LINE
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        return ()
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    body = unseal(raw, path, "line", _LINE_SCHEMA)
    try:
        return msgspec.json.decode(body, type=_Line).turns
    except UNREADABLE as error:
        raise CheckpointError(f"{path} is damaged: {error}") from error


def write_steps_back(directory: Path, turns: Sequence[StepBack], work: Path, disk: Disk = DISK) -> None:
    """Replace `line.json` of a directory durably and atomically.

    Args:
        directory: the directory.
        turns: all records, oldest first.
        work: an unused path in the directory, for the temporary file.
        disk: the file operations, which tests replace.

    Raises:
        OSError: the disk is full, the directory cannot be written, or another error of the file system.
    """
    raw = sealed("line", msgspec.json.encode(_Line(turns=tuple(turns))))
    try:
        write_file(work, lambda sink: sink.write(raw), disk=disk)
        disk.rename(work, directory / LINE)
        disk.sync_directory(directory)
    except BaseException:
        with suppress(OSError):
            disk.remove(work)
        raise


def same_run_filter(turns: Sequence[StepBack]) -> Callable[[int], bool]:
    """Return a function that decides from a sequence number whether a checkpoint is of the newest run.

    A run that goes back to a checkpoint continues the run that saved it. A new run begins where a record has
    `NOTHING` to go back to.
    """
    ends: list[tuple[int, int]] = []  # before each record: the largest sequence number, and the run's number
    run = runs = 0  # the numbers of the present run and of the newest one

    def run_of(sequence: int) -> int:
        return next((number for last, number in ends if sequence <= last), run)

    for turn in turns:
        ends.append((turn.newest, run))
        if turn.back_to == NOTHING:
            runs += 1
        run = runs if turn.back_to == NOTHING else run_of(turn.back_to)
    return lambda sequence: run_of(sequence) == run


def lineage_filter(turns: Sequence[StepBack]) -> Callable[[int], bool]:
    """Return a function that decides from a sequence number whether a checkpoint is on the current lineage.

    On it are the checkpoints that were saved after the last step back. Before them, it continues with the
    checkpoint to which that step went back, and so on. A run may go back to an abandoned checkpoint.
    """
    spans: list[tuple[float, float]] = []  # ranges of sequence numbers on it, without their first numbers
    last = math.inf  # the last sequence number on it before these ranges
    for turn in reversed(turns):
        if turn.newest < last:
            spans.append((turn.newest, last))
            last = turn.back_to
    spans.append((-math.inf, last))
    return lambda sequence: any(after < sequence <= upto for after, upto in spans)
