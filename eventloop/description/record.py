"""Read and write `run.json`, which has the options of a run, its machine, and the times at which it began.

`assembly.description` makes a trainer's record, `training.run_file` writes it when a training begins, and
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
"""The largest number of `Begin` entries in the file; the first and the newest ones are kept."""


class Begin(msgspec.Struct, frozen=True, kw_only=True):
    """Record one call of `train()`, in the same process as the call before it or in another."""

    time: float
    """The Unix time of the call in seconds, by the clock of the run's machine."""
    iter: int
    """The number of completed training iterations at that time; above 0 after a resume."""
    host: str
    """The name of the machine."""
    commit: str = ""
    """The git commit that was checked out in the program's repository; "" if there is none.

    Uncommitted changes are not recorded.
    """


class RunRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Hold the contents of `run.json`: the options of the newest training, and all begins of the run.

    When a run is resumed, its options replace the earlier ones, and its begin is added to the list.
    """

    version: int = VERSION
    begins: list[Begin]
    """The begins of the run, oldest first. All other fields describe the training of the last one."""
    model: str = ""
    """The class of the model."""
    parameters: int = 0
    """The number of elements of the model's parameters, without lazy ones, whose shape is not known yet."""
    trainable: int = 0
    """The number of these elements that are trained."""
    device: str = ""
    """The device of the model."""
    ranks: int = 1
    """The number of ranks that train together."""
    python: str = ""
    torch: str = ""
    eventloop: str = ""
    """The versions of Python, PyTorch and eventloop."""
    config: dict[str, Any] = {}
    """The settings that the program gave as `Trainer(config=...)`."""
    options: dict[str, Any] = {}
    """The settings of the trainer, its optimizers, schedulers and hooks."""


def write_record(directory: Path, record: RunRecord) -> None:
    """Write `run.json` into the directory of a run; the begins of an older file precede those of `record`.

    The file is replaced at once, so a reader finds either the old contents or the new. An older file that
    is damaged is replaced without keeping its begins.

    Raises:
        OSError: the file cannot be written.
    """
    try:
        older = read_record(directory)
    except ValueError:
        older = None
    begins = [*(older.begins if older is not None else ()), *record.begins]
    if len(begins) > MOST_BEGINS:
        begins = [begins[0], *begins[1 - MOST_BEGINS :]]
    merged = msgspec.structs.replace(record, begins=begins)
    with replacing(directory / FILE, durable=False) as file:
        file.write(msgspec.json.format(msgspec.json.encode(merged), indent=1) + b"\n")


def read_record(directory: Path) -> RunRecord | None:
    """Read the record of a run; return None if its directory has no `run.json`.

    Raises:
        OSError: the file cannot be read.
        ValueError: the file is truncated, is not the record of a run, or has a later version.
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
