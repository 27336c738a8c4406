"""The log files of a run, copied elsewhere."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from eventloop.checkpoint.manifest import MANIFEST

logger = logging.getLogger("eventloop")


def copy_logs(work_dir: Path, target: Path, suffixes: tuple[str, ...]) -> None:
    """Copy the files of `work_dir` that end in one of `suffixes`, and those of its folders, to the same places in
    `target`. What cannot be copied is named and left where it is."""
    failed: list[str] = []
    for path in [*_logs(work_dir, target, suffixes)]:
        place = target / path.relative_to(work_dir)
        try:
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(path, place)
        except OSError as error:
            failed.append(f"{path} ({error})")
    if failed:
        logger.warning("logs that were not copied to %s: %s", target, ", ".join(failed))


def _logs(work_dir: Path, target: Path, suffixes: tuple[str, ...]) -> Iterator[Path]:
    """Neither those of checkpoints, nor of hidden folders, nor the copies themselves, should they be in there."""
    for folder, folders, names in os.walk(work_dir):
        here = Path(folder)
        if MANIFEST in names or here.resolve() == target.resolve():
            folders.clear()
            continue
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        yield from (here / name for name in sorted(names) if name.endswith(suffixes))
