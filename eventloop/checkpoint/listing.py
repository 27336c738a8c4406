"""What a run's directory holds of checkpoints. Imports no torch."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime
from functools import partial
from pathlib import Path

import msgspec

from eventloop.checkpoint.directory import Found, leftovers, scan, writer_of
from eventloop.checkpoint.manifest import read_manifest
from eventloop.checkpoint.verify import SAFETENSORS, check_sizes, verify_checkpoint, verify_published
from eventloop.state.keys import NEEDED
from eventloop.util.errors import CheckpointError


class Item(msgspec.Struct, kw_only=True):
    """A checkpoint; or a single file that could be read as one, which has no manifest: what follows `time` is empty.

    Attributes:
        name: within the directory.
        bytes: of its files.
        time: when it was saved, ISO 8601.
        epoch, iter, batch_idx: where the run was: completed epochs and iterations, batches of the next epoch.
        best: the metrics of which it was one of the best so far, with its scores; "nan", "inf" and "-inf" are texts.
        best_now: those of which it is the best.
        best_kept: those of which it is one of the best so many that the run keeps.
        metrics: all scores of the last validation before it was saved.
        validated_at: the iteration that validation was made at.
        newest: the newest on the line of the run, as `in_order` sorts: `resume("auto")` goes on from it, unless another
            hook of the run has saved a newer one elsewhere.
        abandoned: a run went back to an earlier one, and left it behind.
        missing: what it lacks to be resumed from.
        eventloop, torch: the versions that wrote it.
        whole: its files are those that were saved; None where they were not read, or there is nothing to compare them
            with. False also where they were not read, but one is missing or has another size.
    """

    name: str
    bytes: int
    time: str
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
    missing: list[str] = []
    eventloop: str | None = None
    torch: str | None = None
    whole: bool | None = None


class Leftover(msgspec.Struct):
    """What a save has left that was killed, or is under way; and whether the process still lives."""

    name: str
    bytes: int
    process: int
    alive: bool


class Inventory(msgspec.Struct):
    """All of it: checkpoints, oldest first, those that were left behind before the others; a sentence for each that is damaged or incomplete; leftovers."""

    directory: str
    checkpoints: list[Item]
    damaged: list[str]
    leftovers: list[Leftover]


class Stock:
    """The checkpoints of a directory as they are when it is read, with the sizes of their files, and single files; they
    are read when they are asked for, once. One that the run itself removes or replaces meanwhile is not damaged: it is
    forgotten.

    Raises:
        OSError: the directory cannot be read.
    """

    def __init__(self, directory: Path) -> None:
        os.scandir(directory).close()  # a glob is silent about a directory that it may not read
        self.directory = directory
        self.found = scan(directory)
        self.files = _single_files(directory, self.found)
        self._damage: dict[Path, str | None] = {}
        for path, manifest in [*self.found.manifests.items()]:
            self._judge(path, partial(check_sizes, manifest=manifest))

    def damage_of(self, path: Path) -> str | None:
        """Read every file of a checkpoint, and say why it is not whole; None if it is."""
        if path not in self.found.manifests:
            return f"{path} is gone"
        if path not in self._damage and self._judge(path, verify_checkpoint):
            self._damage[path] = None
        return self._damage[path] if path in self.found.manifests else f"{path} is gone"

    def _judge(self, path: Path, check: Callable[[Path], object]) -> bool:
        """Whether a check has nothing against a checkpoint; what it has is noted, unless the run has removed it."""
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
        """A checkpoint has still the manifest that it had."""
        try:
            return read_manifest(path) == self.found.manifests[path]
        except CheckpointError:
            return False

    def could_be_whole(self, path: Path) -> bool:
        """It is there, and nothing is known against it."""
        return path in self.found.manifests and self._damage.get(path) is None

    def verify(self) -> None:
        """Read them all, and the single files that have the beginning of their hash in their names."""
        for path in [*self.found.manifests]:
            self.damage_of(path)
        for path in [*self.files]:
            try:
                if verify_published(path):
                    self._damage[path] = None
            except FileNotFoundError:  # somebody has removed it
                self.files.remove(path)
            except CheckpointError as error:
                self._damage[path] = str(error)

    def damaged(self) -> list[str]:
        """A sentence for each that is known to be damaged, or has no readable manifest."""
        return [*self.found.damaged, *(reason for reason in self._damage.values() if reason is not None)]

    def missing(self, path: Path) -> list[str]:
        """What a checkpoint lacks to be resumed from."""
        return [key for key in NEEDED if key not in self.found.manifests[path].keys]

    def inventory(self) -> Inventory:
        """Describe what there is, and what is known of it."""
        found = self.found
        best = {metric: found.ranking(metric)[: found.best_kept(metric)] for metric in found.watched()}
        own = [path for path in self.found.paths if path in self.found.manifests]
        items = [self._item(path, best) for path in [*self.files, *own]]
        return Inventory(str(self.directory), items, self.damaged(), list_leftovers(self.directory))

    def _item(self, path: Path, best: dict[str, list[Path]]) -> Item:
        manifest = self.found.manifests.get(path)
        if manifest is None:
            stat = path.stat()
            saved = datetime.fromtimestamp(stat.st_mtime).astimezone().isoformat(timespec="seconds")
            return Item(name=path.name, bytes=stat.st_size, time=saved, whole=self._is_whole(path))
        return Item(
            name=path.name,
            bytes=sum(entry.bytes for entry in manifest.files.values()),
            time=manifest.time,
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
            missing=self.missing(path),
            eventloop=manifest.eventloop,
            torch=manifest.torch,
            whole=self._is_whole(path),
        )

    def _is_whole(self, path: Path) -> bool | None:
        return None if path not in self._damage else self._damage[path] is None


def _single_files(directory: Path, found: Found) -> list[Path]:
    """Files without a manifest, oldest first: also those of weights alone, that nobody looks for to resume from."""
    published = (path for path in directory.glob(f"[!.]*{SAFETENSORS}") if path.is_file())
    timed = []
    for path in itertools.chain((path for path in found.paths if path not in found.manifests), published):
        with suppress(FileNotFoundError):  # somebody has removed it meanwhile
            timed.append((path.stat().st_mtime_ns, path.name, path))
    return [path for _, _, path in sorted(timed)]


def list_leftovers(directory: Path) -> list[Leftover]:
    """What saves have left in a directory, by name."""
    found = [(path, writer_of(path)) for path in sorted(leftovers(directory))]
    return [
        Leftover(path.name, _bytes_of(path), process, is_alive(process))
        for path, process in found
        if process is not None
    ]


def is_alive(process: int) -> bool:
    """True unless no process of this machine has that number; that of another user counts as one."""
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass
    return True


def _bytes_of(path: Path) -> int:
    total = 0
    with suppress(OSError):  # it is being renamed, or removed
        for each in [path, *path.rglob("*")]:
            total += each.stat().st_size if each.is_file() else 0
    return total
