"""Copy the log files of a run to another directory, for `LoggerHook(out_dir=...)`."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from eventloop.checkpoint.commit import MANIFEST
from eventloop.ownership.status import FILE as HEARTBEAT

logger = logging.getLogger("eventloop")


def copy_logs(work_dir: Path, target: Path, suffixes: tuple[str, ...]) -> None:
    """Copy the files of `work_dir` that end in one of `suffixes` to the same paths in `target`.

    Files in subfolders are copied too, and the heartbeat is not: it is the run's present state. Files that
    cannot be copied are skipped, and named in one warning.
    """
    failed: list[str] = []
    for path in [*_logs(work_dir, target, suffixes)]:
        place = target / path.relative_to(work_dir)
        try:
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(path, place)
        except OSError as error:
            failed.append(f"{path} ({error})")
    if failed:
        logger.warning("log files could not be copied to %s: %s", target, ", ".join(failed))


def _logs(work_dir: Path, target: Path, suffixes: tuple[str, ...]) -> Iterator[Path]:
    """Yield the log files in `work_dir`, except in checkpoints, in hidden folders and in `target`."""
    for folder, folders, names in os.walk(work_dir):
        here = Path(folder)
        if MANIFEST in names or here.resolve() == target.resolve():
            folders.clear()
            continue
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        yield from (here / name for name in sorted(names) if name.endswith(suffixes) and name != HEARTBEAT)
