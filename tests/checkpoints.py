"""Checkpoints that somebody has changed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from eventloop.checkpoint import load_checkpoint, save_checkpoint
from eventloop.checkpoint.manifest import Label, read_manifest


def rewrite(path: Path, edit: Callable[[dict[str, Any]], object]) -> Path:
    """Save a checkpoint once more with something changed in its state, as old as it was."""
    manifest, state = read_manifest(path), load_checkpoint(path)
    edit(state)
    label = Label(sequence=manifest.sequence, best=manifest.best, metrics=manifest.metrics)
    save_checkpoint(state, path, label)
    return path
