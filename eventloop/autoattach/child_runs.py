"""Pass the summaries of runs from the processes that a script starts to the command, as files."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import msgspec

logger = logging.getLogger("eventloop")


class ChildRun(msgspec.Struct, frozen=True):
    """The summary of a run that ended in a process of the script other than the command's own."""

    directory: str
    summary: str


def pass_on(folder: Path, directory: Path, summary: str) -> None:
    """Write the summary of a run to the command's folder; without room for it, log a warning.

    Args:
        folder: the folder from which the command reads.
        directory: the run's directory.
        summary: the summary's text.
    """
    try:
        path = folder / f"{len([*folder.iterdir()]):06}-{os.getpid()}.json"
        path.write_bytes(msgspec.json.encode(ChildRun(str(directory), summary)))
    except OSError as error:
        logger.warning("the summary is not shown: %s; see `eventloop report %s`", error, directory)


def passed_on(folder: Path) -> dict[Path, str]:
    """Return the summaries that `pass_on` has written, by the directory of each run, the oldest first."""
    runs: dict[Path, str] = {}
    for path in sorted(folder.glob("*.json")):  # none if the command has ended
        try:
            run = msgspec.json.decode(path.read_bytes(), type=ChildRun)
        except msgspec.DecodeError:
            continue  # the process was killed while it wrote
        runs[Path(run.directory)] = run.summary
    return runs
