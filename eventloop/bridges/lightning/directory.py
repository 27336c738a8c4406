"""Choose the directory for eventloop's files in a run of Lightning."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def directory_of(trainer: Any) -> Path | None:
    """Return `eventloop` in the trainer's `log_dir`, or None if that is the current directory.

    None means a new directory under runs/. With `logger=False` and no `default_root_dir`, all runs of a
    script share the current directory, and later runs would append to the files of the first.
    """
    directory = Path(trainer.log_dir or trainer.default_root_dir)
    return None if directory.absolute() == Path.cwd() else directory / "eventloop"
