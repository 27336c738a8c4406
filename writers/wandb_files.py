"""Read the files that W&B writes into a run's folder: `run-ID.wandb`, its log of everything it was given.

The file is LevelDB's log format in blocks of 32 KB with protobuf records. wandb 0.31 has no reader of it.
`WandbWriter` reads it to know which steps survived a kill: wandb writes whole blocks, so the last 32 KB may
be missing.
"""

from __future__ import annotations

import json  # reads NaN, which msgspec refuses
import struct
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

BLOCK = 32 * 1024
_PREFIX = 7
"""Bytes of the file's header, and also of the header of each record: checksum, length and type."""
_FULL, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4


def read_history(folder: Path, run_id: str) -> Iterator[dict[str, Any]]:
    """Yield the rows that `run.log` was given and that are in the files, in order.

    Args:
        folder: the folder that was given to W&B as `dir`.
        run_id: the id of the run, which has one file for each time that it was begun or resumed.
    """
    for record in read_records(folder, run_id):
        if record.WhichOneof("record_type") == "history":
            yield {_name(item): json.loads(item.value_json) for item in record.history.item}


def read_records(folder: Path, run_id: str) -> Iterator[Any]:
    """Yield the records of the files, protobuf messages of the type `Record`."""
    for path in _files(folder, run_id):
        yield from _parsed(path.read_bytes()[_PREFIX:], _PREFIX)


def has_files(folder: Path, run_id: str) -> bool:
    """Return whether a file of the run is there, even an empty one; `wandb sync --clean` removes them."""
    return bool(_files(folder, run_id))


def is_whole(folder: Path, run_id: str) -> bool:
    """Return whether the newest file ends with the record of the run's end.

    wandb writes the last block shortly after `run.finish` has returned.
    """
    if not (files := _files(folder, run_id)):  # as with WANDB_MODE=disabled
        return True
    with open(files[-1], "rb") as file:
        begin = max(0, file.seek(0, 2) - 1) // BLOCK * BLOCK
        file.seek(begin or _PREFIX)
        return any(r.WhichOneof("record_type") == "exit" for r in _parsed(file.read(), begin or _PREFIX))


def _files(folder: Path, run_id: str) -> list[Path]:
    return sorted(folder.glob(f"wandb/*run-*-{run_id}/run-{run_id}.wandb"))


def _parsed(data: bytes, offset: int) -> Iterator[Any]:
    messages: Any = import_module("wandb.proto.wandb_internal_pb2")
    for record in _records(data, offset):
        yield messages.Record.FromString(record)


def _name(item: Any) -> str:
    name: str = item.key or item.nested_key[0]  # the parts of an image or a histogram
    return name


def _records(data: bytes, offset: int) -> Iterator[bytes]:
    """Yield the whole records of a part of a file that begins at `offset`; the last may be cut short."""
    at, parts = 0, b""
    while at + _PREFIX <= len(data):
        if (left := BLOCK - (offset + at) % BLOCK) < _PREFIX:  # a block's last bytes are unused
            at += left
            continue
        _, size, kind = struct.unpack_from("<IHB", data, at)
        at += _PREFIX
        if kind not in (_FULL, _FIRST, _MIDDLE, _LAST) or at + size > len(data):
            return
        parts = data[at : at + size] if kind in (_FULL, _FIRST) else parts + data[at : at + size]
        at += size
        if kind == _FULL or (kind == _LAST and parts[size:]):
            yield parts
