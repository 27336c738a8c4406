"""Pass summaries of runs, as files, from processes that a script starts to the process of `eventloop run`."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import msgspec

logger = logging.getLogger("eventloop")


class ChildRun(msgspec.Struct, frozen=True):
    """Hold the directory and the summary of a run that ended in a process that the script has started."""

    directory: str
    summary: str


def pass_on(folder: Path, directory: Path, summary: str) -> None:
    """Write the summary of a run to a file that `eventloop run` reads; log a warning if it cannot be written.

    Args:
        folder: the folder in which `eventloop run` looks for such files.
        directory: the run's directory.
        summary: the summary's text.
    """
    try:
        # the number sorts the files by age; two processes may write at one moment, so the id is in the name
        path = folder / f"{len([*folder.iterdir()]):06}-{os.getpid()}.json"
        path.write_bytes(msgspec.json.encode(ChildRun(str(directory), summary)))
    except OSError as error:
        logger.warning("the summary is not shown: %s; see `eventloop report %s`", error, directory)


def passed_on(folder: Path) -> dict[Path, str]:
    """Return the summaries that `pass_on` has written, by the directory of each run, the oldest first."""
    runs: dict[Path, str] = {}
    for path in sorted(folder.glob("*.json")):  # empty if `eventloop run` has ended and removed the folder
        try:
            run = msgspec.json.decode(path.read_bytes(), type=ChildRun)
        except msgspec.DecodeError:
            continue  # the process was killed while it wrote the file
        runs[Path(run.directory)] = run.summary
    return runs
