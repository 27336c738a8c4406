"""Checkpoints that somebody has changed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from eventloop.checkpoint import load_checkpoint, read_manifest, save_checkpoint
from eventloop.checkpoint.manifest import Label
from eventloop.temporary.leftovers import leftovers


def rewrite(path: Path, edit: Callable[[dict[str, Any]], object]) -> Path:
    """Save a checkpoint once more with something changed in its state, as old as it was."""
    manifest, state = read_manifest(path), load_checkpoint(path)
    edit(state)
    label = Label(sequence=manifest.sequence, best=manifest.best, metrics=manifest.metrics)
    save_checkpoint(state, path, label)
    return path


NOBODY = 2**22 + 1
"""A process id that Linux never gives."""


def orphan(directory: Path) -> list[Path]:
    """Give what this process has left in a directory the names that a process that has ended would have given."""
    return [path.rename(with_pid(path, NOBODY)) for path in leftovers(directory)]


def with_pid(path: Path, pid: int) -> Path:
    """Return a temporary name with another process id in it."""
    stem, process, why = path.name.rsplit(".", 2)
    return path.with_name(f"{stem}.{pid}{process[len(process.partition('-')[0]) :]}.{why}")
