"""What a run's directory holds of checkpoints. Imports no torch."""

from __future__ import annotations

import os
from contextlib import suppress
from datetime import datetime
from pathlib import Path

import msgspec

from eventloop.manifest import CheckpointError, read_manifest
from eventloop.shelf import NEEDED, leftovers, scan, writer_of
from eventloop.verify import verify_checkpoint


class Item(msgspec.Struct, kw_only=True):
    """A checkpoint; or a single file that could be read as one, which has no manifest: what follows `time` is empty.

    Attributes:
        name: within the directory.
        bytes: of its files.
        time: when it was saved, ISO 8601.
        epoch, iter, batch_idx: where the run was: completed epochs and iterations, batches of the next epoch.
        best: the metrics of which it was the best so far, with its scores; "nan", "inf" and "-inf" are texts.
        best_now: those of which it still is.
        metrics: all scores of the last validation before it was saved.
        validated_at: the iteration that validation was made at.
        newest: nothing was saved after it on the line of the run: `resume("auto")` goes on from it, unless another hook
            of the run has saved a newer one elsewhere.
        abandoned: a run went back to an earlier one, and left it behind.
        missing: what it lacks to be resumed from.
        eventloop, torch: the versions that wrote it.
        whole: its files are those that were saved; None where they were not read.
    """

    name: str
    bytes: int
    time: str
    epoch: int | None = None
    iter: int | None = None
    batch_idx: int | None = None
    best: dict[str, float | str] = {}
    best_now: list[str] = []
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
    """The checkpoints of a directory as they are when it is read; their files are read when they are asked for, once.
    One that the run itself removes or replaces meanwhile is not damaged: it is forgotten.

    Raises:
        OSError: the directory cannot be read.
    """

    def __init__(self, directory: Path) -> None:
        os.scandir(directory).close()  # a glob is silent about a directory that it may not read
        self.directory = directory
        self.found = scan(directory)
        self._damage: dict[Path, str | None] = {}

    def damage_of(self, path: Path) -> str | None:
        """Read every file of a checkpoint, and say why it is not whole; None if it is."""
        if path not in self.found.manifests:
            return f"{path} is gone"
        if path not in self._damage:
            try:
                verify_checkpoint(path)
                self._damage[path] = None
            except CheckpointError as error:
                if self.found.was_replaced(path):
                    del self.found.manifests[path]
                    self.found.paths.remove(path)
                    return f"{path} is gone"
                self._damage[path] = str(error)
        return self._damage[path]

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
        """Read them all."""
        for path in [*self.found.manifests]:
            self.damage_of(path)

    def damaged(self) -> list[str]:
        """A sentence for each that is known to be damaged, or has no readable manifest."""
        return [*self.found.damaged, *(reason for reason in self._damage.values() if reason is not None)]

    def missing(self, path: Path) -> list[str]:
        """What a checkpoint lacks to be resumed from."""
        return [key for key in NEEDED if key not in self.found.manifests[path].keys]

    def inventory(self) -> Inventory:
        """Describe what there is, and what is known of it."""
        best = {metric: self.found.ranking(metric)[0] for metric in self.found.watched()}
        items = [self._item(path, best) for path in self.found.paths]
        return Inventory(str(self.directory), items, self.damaged(), list_leftovers(self.directory))

    def _item(self, path: Path, best: dict[str, Path]) -> Item:
        manifest = self.found.manifests.get(path)
        if manifest is None:
            stat = path.stat()
            saved = datetime.fromtimestamp(stat.st_mtime).astimezone().isoformat(timespec="seconds")
            return Item(name=path.name, bytes=stat.st_size, time=saved)
        return Item(
            name=path.name,
            bytes=sum(entry.bytes for entry in manifest.files.values()),
            time=manifest.time,
            epoch=manifest.epoch,
            iter=manifest.iter,
            batch_idx=manifest.batch_idx,
            best={metric: manifest.metrics[metric] for metric in manifest.best},
            best_now=[metric for metric in manifest.best if best[metric] == path],
            metrics=manifest.metrics,
            validated_at=manifest.validated_at,
            newest=path == self.found.paths[-1],
            abandoned=path in self.found.abandoned,
            missing=self.missing(path),
            eventloop=manifest.eventloop,
            torch=manifest.torch,
            whole=None if path not in self._damage else self._damage[path] is None,
        )


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
