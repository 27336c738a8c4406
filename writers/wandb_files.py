"""Read W&B's files `run-ID.wandb`, which contain everything that was logged in a run.

A file has the log format of LevelDB, blocks of 32 KB, with protobuf messages as records. wandb 0.31 has no
public reader of it. `WandbWriter` reads it to find which steps survived a kill: wandb writes whole blocks, so
the last 32 KB may be missing.
"""

from __future__ import annotations

import json  # reads NaN, which msgspec refuses
import struct
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

BLOCK = 32 * 1024
"""The number of bytes of a block."""
_PREFIX = 7
"""The number of bytes of the file's header, and of each record's header: checksum, length and type."""
_FULL, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4
"""The types of records: a full one, or the first, a middle or the last fragment of one."""


def read_history(folder: Path, run_id: str) -> Iterator[dict[str, Any]]:
    """Yield the rows in the files of a run, in the order of the calls of `run.log`.

    Args:
        folder: the folder that was passed to W&B as `dir`.
        run_id: the id of the run, which has one file for each start or resume.
    """
    for record in read_records(folder, run_id):
        if record.WhichOneof("record_type") == "history":
            yield {_name(item): json.loads(item.value_json) for item in record.history.item}


def read_records(folder: Path, run_id: str) -> Iterator[Any]:
    """Yield the records in the files of a run, wandb's protobuf messages `Record`."""
    for path in _files(folder, run_id):
        yield from _messages(path.read_bytes()[_PREFIX:], _PREFIX)


def has_files(folder: Path, run_id: str) -> bool:
    """Return whether the run has a file, even an empty one; `wandb sync --clean` removes the files."""
    return bool(_files(folder, run_id))


def is_whole(folder: Path, run_id: str) -> bool:
    """Return whether the newest file of a run contains the record of the run's end, or there is no file.

    wandb writes the last block shortly after `run.finish` has returned.
    """
    if not (files := _files(folder, run_id)):  # for example with WANDB_MODE=disabled
        return True
    with open(files[-1], "rb") as file:
        size = file.seek(0, 2)
        last_block = max(0, size - 1) // BLOCK * BLOCK
        offset = last_block or _PREFIX
        file.seek(offset)
        messages = _messages(file.read(), offset)
        return any(message.WhichOneof("record_type") == "exit" for message in messages)


def _files(folder: Path, run_id: str) -> list[Path]:
    """Return the files of a run, the oldest first."""
    return sorted(folder.glob(f"wandb/*run-*-{run_id}/run-{run_id}.wandb"))


def _messages(data: bytes, offset: int) -> Iterator[Any]:
    """Yield the protobuf messages in the part of a file that begins at `offset`."""
    protobuf: Any = import_module("wandb.proto.wandb_internal_pb2")
    for record in _records(data, offset):
        yield protobuf.Record.FromString(record)


def _name(item: Any) -> str:
    """Return the name of a logged value; the fields of an image or a histogram have nested keys."""
    name: str = item.key or item.nested_key[0]
    return name


def _records(data: bytes, offset: int) -> Iterator[bytes]:
    """Yield the complete records in the part of a file that begins at `offset`.

    It stops at a record that a kill has cut short, or that is no valid record.
    """
    position, record = 0, b""
    while position + _PREFIX <= len(data):
        block_rest = BLOCK - (offset + position) % BLOCK
        if block_rest < _PREFIX:  # no record's header begins in the last 6 bytes of a block
            position += block_rest
            continue
        _, size, record_type = struct.unpack_from("<IHB", data, position)
        position += _PREFIX
        if record_type not in (_FULL, _FIRST, _MIDDLE, _LAST) or position + size > len(data):
            return
        fragment = data[position : position + size]
        position += size
        record = fragment if record_type in (_FULL, _FIRST) else record + fragment
        # False if the first fragment is before `offset`
        has_begin = record_type == _FULL or len(record) > size
        if record_type in (_FULL, _LAST) and has_begin:
            yield record
