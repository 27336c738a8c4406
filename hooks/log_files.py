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

    Files in subfolders are copied too. The heartbeat file, which says that the run is alive, is not copied.
    Files that cannot be copied are skipped, and named in one warning.
    """
    failures: list[str] = []
    for path in [*_log_files(work_dir, target, suffixes)]:
        copy = target / path.relative_to(work_dir)
        try:
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(path, copy)
        except OSError as error:
            failures.append(f"{path} ({error})")
    if failures:
        logger.warning("log files could not be copied to %s: %s", target, ", ".join(failures))


def _log_files(work_dir: Path, target: Path, suffixes: tuple[str, ...]) -> Iterator[Path]:
    """Yield the log files in `work_dir`, except in checkpoints, in hidden folders and in `target`."""
    for folder, subfolders, names in os.walk(work_dir):
        directory = Path(folder)
        is_checkpoint = MANIFEST in names  # every checkpoint has this file
        if is_checkpoint or directory.resolve() == target.resolve():
            subfolders.clear()  # os.walk then does not enter them
            continue
        subfolders[:] = sorted(name for name in subfolders if not name.startswith("."))
        logs = [name for name in sorted(names) if name.endswith(suffixes) and name != HEARTBEAT]
        yield from (directory / name for name in logs)
