"""Encode one rank's part of a checkpoint, from the copy of the rank's state.

The saver calls it on its own thread, and `part` writes the result.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from msgspec import structs

from eventloop.checkpoint.commit import Save
from eventloop.checkpoint.manifest import SHARDED_SCHEMA, Label, encode_body
from eventloop.checkpoint.serialize import Rebuilt, bytes_at, manifest_of, records_of
from eventloop.checkpoint.sharded.job import OWN, REST, SHARD, PartJob
from eventloop.checkpoint.sharded.part import INDEX, METADATA, PartSave, RankFile
from eventloop.checkpoint.sharded.places import with_empty_tensors
from eventloop.checkpoint.sharded.plan import description, shard_name
from eventloop.processes.shared_memory import Mapped, Piece, Record

PATIENCE_SECONDS = 120.0
"""Seconds for which rank 0 waits while the other ranks' files do not grow, in addition to a sync's time."""
SLOWEST = 100e6
"""The bytes per second of a slow disk's sync. While it syncs, a rank's files do not grow."""


def rank_name(rank: int) -> str:
    """Return the name of the file with a rank's own state."""
    return f"rank_{rank}.pth"


def encode_part(
    state: Mapping[str, Any],
    job: PartJob,
    path: Path,
    label: Label,
    rebuilt: Rebuilt,
    memory: Mapping[int, Mapped],
) -> PartSave:
    """Return one rank's part of a checkpoint in the form in which `commit` writes it.

    Args:
        state: the copy of what this rank writes: under `REST` the state that rank 0 writes for all ranks,
            under `OWN` this rank's own state, under `SHARD` its chunks of tensors.
        job: the description of the save.
        path: the checkpoint's path.
        label: the fields of the manifest that cannot be read from the state, such as its sequence number.
        rebuilt: known results of `__reduce_ex__` of tensors in the state.
        memory: the shared memory that holds bytes of tensors, by the `data_ptr` of the storage.

    Raises:
        CheckpointError: the manifest could not be read again.
    """
    own_state = (records_of(state[OWN], rebuilt, memory),)
    files = [RankFile(rank_name(job.rank), own_state)]
    if state[SHARD]:
        files.append(RankFile(shard_name(job.rank), tuple(_archive(chunk, memory) for chunk in state[SHARD])))
    patience = PATIENCE_SECONDS + sum(chunk.nbytes for chunk in state[SHARD]) / SLOWEST
    whole, common = Save(path, (), b""), list[tuple[str, bytes]]()  # without contents on other ranks than 0
    if job.rank == 0:
        rest = with_empty_tensors(state[REST])
        manifest = manifest_of(rest, label)
        sharded = structs.replace(manifest, schema=SHARDED_SCHEMA, ranks=job.ranks, save=job.work.name)
        whole = Save(path, records_of(rest, rebuilt, memory), encode_body(sharded))
        common = [(INDEX, job.index_json), (METADATA, job.metadata)]
    return PartSave(whole, job.work, job.rank, job.ranks, job.form, tuple(files), tuple(common), patience)


def _archive(chunk: torch.Tensor, memory: Mapping[int, Mapped]) -> tuple[Record, ...]:
    """Return a chunk, which is contiguous and in host memory, as the records of `torch.save`'s format."""
    storage = chunk.untyped_storage()
    shared = memory.get(storage.data_ptr())
    data: bytes | memoryview | Piece
    if shared is None or not chunk.nbytes:
        data = bytes_at(chunk.data_ptr(), chunk.nbytes, storage)
    else:
        data = Piece(shared, chunk.data_ptr() - storage.data_ptr(), chunk.nbytes)
    return ("data.pkl", description(tuple(chunk.shape), chunk.dtype)), ("data/0", data)
