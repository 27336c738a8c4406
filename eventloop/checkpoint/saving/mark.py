"""Mark a checkpoint as one of the best once its metrics are known, without saving its state again.

The mark is a second checkpoint, called a best checkpoint: a new folder with hard links to the files of the
first, and a manifest of its own. It has the first one's sequence number, so that it does not count as newer.
The saver's process runs this module, so it imports only the standard library.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Mapping
from pathlib import Path
from time import perf_counter
from typing import Any, BinaryIO, NamedTuple

from eventloop.checkpoint.commit import MANIFEST, Save, Staged, sealed
from eventloop.checkpoint.disk import Disk, FileHash, Sink
from eventloop.processes.shared_memory import Mapped

COPY_BYTES = 1 << 20
"""Bytes that are copied at a time where the file system has no hard links."""


class Mark(NamedTuple):
    """The save of a best checkpoint whose files the disk already has, as those of another checkpoint.

    Attributes:
        path: the absolute path of the best checkpoint.
        source: the absolute path of the checkpoint whose files it links to.
        iteration: the iteration of both checkpoints.
        fields: the fields of the manifest that differ from the source's, as JSON.
        replaces: checkpoints to remove once it is durable, worst first.
        spares: the number of checkpoints in `replaces` that are kept, the last existing ones.
    """

    path: Path
    source: Path
    iteration: int
    fields: Mapping[str, Any]
    replaces: tuple[Path, ...] = ()
    spares: int = 0

    def memory(self) -> set[Mapped]:
        """Return no shared memory."""
        return set()

    def mapped(self, memory: Mapping[Mapped, memoryview]) -> Mark:
        """Return this save, which has no bytes in shared memory."""
        return self

    def staged(self, disk: Disk, given_up: threading.Event | None) -> Staged:
        """Return the steps that make the best checkpoint durable."""
        return _StagedMark(self, disk, given_up)


class _StagedMark(Staged):
    """The steps that make the best checkpoint of a mark durable."""

    def __init__(self, mark: Mark, disk: Disk, given_up: threading.Event | None) -> None:
        super().__init__(Save(mark.path, (), b"", mark.replaces, mark.spares), disk, given_up)
        self._mark = mark

    def write(self) -> None:
        """Link the files into a new directory, and write the manifest.

        Nothing is left to do if the source was removed after an earlier run had made the best checkpoint.
        """
        mark = self._mark
        try:
            manifest = _read(mark.source)
        except FileNotFoundError:
            if not _is_marked(mark):
                raise
            self.done, self._at = True, perf_counter()
            return
        if manifest["iter"] != mark.iteration:
            raise FileNotFoundError(
                f"expected the checkpoint of iteration {mark.iteration} at {mark.source}, got the one of "
                f"iteration {manifest['iter']}, which has replaced it"
            )
        work = self.make_work_directory()
        for name, entry in manifest["files"].items():
            self._link(mark.source / name, work / name, FileHash(**entry))
            self.size += entry["bytes"]
        body = json.dumps({**manifest, **mark.fields}, ensure_ascii=False, separators=(",", ":")).encode()
        self.write_file(MANIFEST, lambda sink: sink.write(sealed("manifest", body)))

    def _link(self, source: Path, target: Path, entry: FileHash) -> None:
        """Link a file; copy it where the file system cannot link."""
        try:
            os.link(source, target)
        except FileNotFoundError:
            raise
        except OSError:
            with open(source, "rb") as file:
                copied = self.write_file(target.name, lambda sink: _copy(file, sink))
            if copied != entry:
                raise OSError(f"{source} is damaged: it is not what was saved") from None


def _copy(file: BinaryIO, sink: Sink) -> None:
    while piece := file.read(COPY_BYTES):
        sink.write(piece)


def _read(checkpoint: Path) -> dict[str, Any]:
    manifest: dict[str, Any] = json.loads((checkpoint / MANIFEST).read_bytes())["manifest"]
    return manifest


def _is_marked(mark: Mark) -> bool:
    """Return whether the best checkpoint exists, because a resumed run repeats iterations of before."""
    try:
        manifest = _read(mark.path)
    except (OSError, ValueError, LookupError):
        return False
    return bool(manifest["iter"] == mark.iteration and set(mark.fields["best"]) <= set(manifest["best"]))
