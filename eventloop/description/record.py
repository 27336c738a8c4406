"""Read and write `run.json`: with which options a run was begun, on which machine, and when.

`assembly.description` collects a trainer's record, `training.run_file` writes it once a training begins, and
`eventloop report` and `eventloop watch` show it. This module imports no torch.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from eventloop.util.append_file import replacing

FILE = "run.json"
VERSION = 1
MOST_BEGINS = 1000
"""The largest number of begins in the file; the first one and the newest ones are kept."""


class Begin(msgspec.Struct, frozen=True, kw_only=True):
    """One call of `train()`, of a new process or not."""

    time: float
    """When it began, as a Unix time in seconds by the clock of the run's machine."""
    iter: int
    """Completed training iterations at that time; above 0 after a resume."""
    host: str
    """The name of the machine."""
    commit: str = ""
    """The git commit of the program that was checked out; "" if it is not in a repository.

    Changes that are not committed are not seen.
    """


class RunRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The contents of `run.json`: what the newest training was begun with, and all its begins.

    A run that is resumed with other options replaces those of its earlier part, and adds a begin.
    """

    version: int = VERSION
    begins: list[Begin]
    """The begins of the run, oldest first. All other fields are of the last one."""
    model: str = ""
    """The class of the model."""
    parameters: int = 0
    """The number of the model's parameters, without those whose shape is not known yet."""
    trainable: int = 0
    """The number of those that are trained."""
    device: str = ""
    ranks: int = 1
    python: str = ""
    torch: str = ""
    eventloop: str = ""
    config: dict[str, Any] = {}
    """The settings that the program gave as `Trainer(config=...)`."""
    options: dict[str, Any] = {}
    """The settings of the trainer, its optimizers, schedulers and hooks."""


def write_record(directory: Path, record: RunRecord) -> None:
    """Write `run.json` into the directory of a run, and keep the begins that an older file there lists.

    Those of `record` follow them. A reader finds either the old file or the new one. A file that cannot be
    read is replaced.

    Raises:
        OSError: the file cannot be written.
    """
    try:
        before = read_record(directory)
    except ValueError:
        before = None
    begins = [*(before.begins if before is not None else ()), *record.begins]
    if len(begins) > MOST_BEGINS:
        begins = [begins[0], *begins[1 - MOST_BEGINS :]]
    whole = msgspec.structs.replace(record, begins=begins)
    with replacing(directory / FILE, durable=False) as file:
        file.write(msgspec.json.format(msgspec.json.encode(whole), indent=1) + b"\n")


def read_record(directory: Path) -> RunRecord | None:
    """Read the record of a run; None if its directory has no `run.json`.

    Raises:
        OSError: the file cannot be read.
        ValueError: the file is truncated, not the record of a run, or of a later version.
    """
    path = directory / FILE
    try:
        record = msgspec.json.decode(path.read_bytes(), type=RunRecord)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} is truncated or not the record of a run: {error}") from error
    if record.version > VERSION or not record.begins:
        raise ValueError(
            f"{path} must be of version {VERSION} or older, with one begin or more, got version "
            f"{record.version} with {len(record.begins)} begins"
        )
    return record
