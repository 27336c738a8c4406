"""Describe the checkpoints of a directory, their damage, and leftovers of killed saves.

The command `eventloop checkpoints` and `prune` use it. This module imports no torch, so the command starts
quickly.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime
from functools import partial
from pathlib import Path

import msgspec

from eventloop.checkpoint.directory import Found, scan
from eventloop.checkpoint.manifest import (
    SAFETENSORS,
    check_sizes,
    read_manifest,
    verify_checkpoint,
    verify_published,
)
from eventloop.state.keys import NEEDED
from eventloop.temporary.leftovers import is_alive, leftovers
from eventloop.temporary.names import process_of
from eventloop.util.errors import CheckpointError


class Item(msgspec.Struct, kw_only=True):
    """The description of one checkpoint, or of a single file that can be read as one.

    A single file has no manifest: its fields after `time` have their default values, except `whole`.

    Attributes:
        name: the name in the directory.
        bytes: the size of all its files.
        time: the time of the save, ISO 8601.
        ranks: the number of ranks that have written it, if its model is sharded.
        epoch, iter, batch_idx: completed epochs, completed iterations, and completed batches of the current
            epoch.
        best: the metrics for which it was one of the best when it was saved, with its scores; scores that
            are not finite are the strings "nan", "inf" and "-inf".
        best_now: the metrics for which it is the best of the directory now.
        best_kept: the metrics for which it is among the best ones that the run keeps, as `keep_best` says.
        metrics: all scores of the last validation before it was saved.
        validated_at: the iteration of that validation.
        newest: True for the newest checkpoint of the lineage in this directory. `resume("auto")` uses
            it, unless another hook of the run has saved a newer one elsewhere.
        abandoned: True if a run went back to an earlier checkpoint, or a new run began after it.
        foreign: True if it is abandoned, and of another run than the newest one.
        missing: the keys that a resume needs and that it does not have.
        eventloop, torch: the versions that wrote it.
        whole: True if its files were read and match their hashes. False if a file is missing, or has another
            size or hash. None if the files were not read, or have no hash to compare with.
    """

    name: str
    bytes: int
    time: str
    ranks: int | None = None
    epoch: int | None = None
    iter: int | None = None
    batch_idx: int | None = None
    best: dict[str, float | str] = {}
    best_now: list[str] = []
    best_kept: list[str] = []
    metrics: dict[str, float | str] = {}
    validated_at: int | None = None
    newest: bool = False
    abandoned: bool = False
    foreign: bool = False
    missing: list[str] = []
    eventloop: str | None = None
    torch: str | None = None
    whole: bool | None = None


class Leftover(msgspec.Struct):
    """A temporary path of a save that was killed or is running.

    Attributes:
        name: the name in the directory.
        bytes: the size of all its files.
        process: the id of the process that writes it, which may run on another machine.
        alive: whether that process is alive, or may be alive on another machine.
    """

    name: str
    bytes: int
    process: int
    alive: bool


class Inventory(msgspec.Struct):
    """The description of a directory, as `eventloop checkpoints --json` prints it.

    Attributes:
        directory: its path.
        checkpoints: single files, abandoned checkpoints, then those of the lineage; each group oldest first.
        damaged: a sentence for each checkpoint that is damaged or incomplete.
        leftovers: temporary paths of saves.
    """

    directory: str
    checkpoints: list[Item]
    damaged: list[str]
    leftovers: list[Leftover]


class Stock:
    """Check the checkpoints that a directory has at one moment, and remember which are damaged.

    The constructor compares the sizes of files with the manifests. Contents are read and hashed on request,
    once. A checkpoint that a run removes or replaces in the meantime is dropped, and does not count as
    damaged.

    Args:
        directory: the directory.
        owned: whether this process owns the directory, so that no other run lives in it. Then temporary paths
            there are left by killed saves.

    Attributes:
        found: the scan of the directory, without the checkpoints that a check found to be removed.
        files: the single files of the directory, oldest first.

    Raises:
        OSError: the directory cannot be read.
    """

    def __init__(self, directory: Path, *, owned: bool = False) -> None:
        os.scandir(directory).close()  # raises the error of a directory that `glob` would silently skip
        self.directory, self.owned = directory, owned
        self.found = scan(directory)
        self.files = _single_files(directory, self.found)
        self._damage: dict[Path, str | None] = {}  # None for a path that was read, and is intact
        for path, manifest in [*self.found.manifests.items()]:
            self._judge(path, partial(check_sizes, manifest=manifest))

    def damage_of(self, path: Path) -> str | None:
        """Read every file of a checkpoint; return a sentence about its damage, or None if it is intact."""
        if path not in self.found.manifests:
            return f"{path} does not exist any more"
        if path not in self._damage and self._judge(path, verify_checkpoint):
            self._damage[path] = None
        return self._damage[path] if path in self.found.manifests else f"{path} does not exist any more"

    def _judge(self, path: Path, check: Callable[[Path], object]) -> bool:
        """Return whether a checkpoint passes a check; record its damage unless the run has removed it."""
        try:
            check(path)
        except CheckpointError as error:
            if self.found.was_replaced(path):
                del self.found.manifests[path]
                self.found.paths.remove(path)
            else:
                self._damage[path] = str(error)
            return False
        return True

    def is_same(self, path: Path) -> bool:
        """Return whether a checkpoint still has the manifest that it had at the scan."""
        try:
            return read_manifest(path) == self.found.manifests[path]
        except CheckpointError:
            return False

    def could_be_whole(self, path: Path) -> bool:
        """Return whether a checkpoint exists, as far as known, and has no known damage."""
        return path in self.found.manifests and self._damage.get(path) is None

    def verify(self) -> None:
        """Read and check all checkpoints, and those published files whose names contain a hash."""
        for path in [*self.found.manifests]:
            self.damage_of(path)
        for path in [*self.files]:
            try:
                if verify_published(path):
                    self._damage[path] = None
            except FileNotFoundError:  # removed meanwhile
                self.files.remove(path)
            except CheckpointError as error:
                self._damage[path] = str(error)

    def damaged(self) -> list[str]:
        """Return a sentence for each checkpoint that has known damage or no readable manifest."""
        return [*self.found.damaged, *(reason for reason in self._damage.values() if reason is not None)]

    def missing(self, path: Path) -> list[str]:
        """Return the keys that a resume needs and that a checkpoint lacks."""
        return [key for key in NEEDED if key not in self.found.manifests[path].keys]

    def inventory(self) -> Inventory:
        """Describe the directory with the damage known so far."""
        found = self.found
        best = {metric: found.ranking(metric)[: found.best_kept(metric)] for metric in found.watched()}
        with_manifest = [path for path in found.paths if path in found.manifests]
        items = [self._item(path, best) for path in [*self.files, *with_manifest]]
        temporary = list_leftovers(self.directory, owned=self.owned)
        return Inventory(str(self.directory), items, self.damaged(), temporary)

    def _item(self, path: Path, best: dict[str, list[Path]]) -> Item:
        """Describe a checkpoint or single file, given the best checkpoints that are kept, by the metric."""
        manifest = self.found.manifests.get(path)
        if manifest is None:
            stat = path.stat()
            saved = datetime.fromtimestamp(stat.st_mtime).astimezone().isoformat(timespec="seconds")
            return Item(name=path.name, bytes=stat.st_size, time=saved, whole=self._is_whole(path))
        return Item(
            name=path.name,
            bytes=sum(entry.bytes for entry in manifest.files.values()),
            time=manifest.time,
            ranks=None if isinstance(manifest.ranks, msgspec.UnsetType) else manifest.ranks,
            epoch=manifest.epoch,
            iter=manifest.iter,
            batch_idx=manifest.batch_idx,
            best={metric: manifest.metrics[metric] for metric in manifest.best},
            best_now=[metric for metric in manifest.best if best[metric][0] == path],
            best_kept=[metric for metric in manifest.best if path in best[metric]],
            metrics=manifest.metrics,
            validated_at=manifest.validated_at,
            newest=path == self.found.paths[-1],
            abandoned=path in self.found.abandoned,
            foreign=path in self.found.foreign,
            missing=self.missing(path),
            eventloop=manifest.eventloop,
            torch=manifest.torch,
            whole=self._is_whole(path),
        )

    def _is_whole(self, path: Path) -> bool | None:
        return None if path not in self._damage else self._damage[path] is None


def _single_files(directory: Path, found: Found) -> list[Path]:
    """Return the single files of a directory, which a scan has found or which are safetensors files.

    The oldest comes first.
    """
    published = (path for path in directory.glob(f"[!.]*{SAFETENSORS}") if path.is_file())
    timed = []
    for path in itertools.chain((path for path in found.paths if path not in found.manifests), published):
        with suppress(FileNotFoundError):  # removed meanwhile
            timed.append((path.stat().st_mtime_ns, path.name, path))
    return [path for _, _, path in sorted(timed)]


def list_leftovers(directory: Path, *, owned: bool = False) -> list[Leftover]:
    """Describe the temporary paths that killed or running saves have in a directory, sorted by name.

    Args:
        owned: whether this process owns the directory, so that no other run lives in it.
    """
    paths = [(path, process_of(path)) for path in sorted(leftovers(directory))]
    return [
        Leftover(path.name, _bytes_of(path), writer.pid, is_alive(path, owned=owned))
        for path, writer in paths
        if writer is not None
    ]


def _bytes_of(path: Path) -> int:
    """Return the size of a file or directory, as far as it can be read now."""
    total = 0
    with suppress(OSError):  # the path is being renamed or removed
        for file in [path, *path.rglob("*")]:
            total += file.stat().st_size if file.is_file() else 0
    return total
