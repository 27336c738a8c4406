"""Decide which rank writes which chunk of which tensor, and where in its file.

Every rank computes the same plan alone, from what a DTensor knows of all ranks: its mesh and placements. So a
save needs no message. A plan depends on names, shapes, types and placements only, and is kept while these
stay the same. The files have the format of PyTorch's distributed checkpoint: each chunk is an archive of
`torch.save`, and `.metadata` lists the chunks for other programs. eventloop reads `index.json`, which lists
the same, because `.metadata` is a pickle.
"""

from __future__ import annotations

import dataclasses
import hashlib
import io
import itertools
import json
import pickle
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.tensor import DTensor

from eventloop.checkpoint.archive import archive_length
from eventloop.checkpoint.serialize import pickled
from eventloop.checkpoint.sharded.places import OPTIMIZER, Place
from eventloop.state.sharded import divided

Offsets = tuple[int, ...]
Form = tuple[Place, torch.Size, torch.dtype, tuple[Any, ...]]


class Chunk(NamedTuple):
    """A part of a tensor that one rank writes.

    Attributes:
        offsets, sizes: its place in the whole tensor, and its shape.
        rank: the rank that writes it.
        start, length: where its archive begins in that rank's file, and its size, in bytes.
    """

    offsets: Offsets
    sizes: Offsets
    rank: int
    start: int
    length: int


class Plan(NamedTuple):
    """The chunks of each tensor.

    Attributes:
        form: the names, shapes, types and placements of all tensors, as a hash; the same on all ranks.
        chunks: the chunks of each tensor, by place.
    """

    form: str
    chunks: Mapping[Place, Sequence[Chunk]]

    def of_rank(self, rank: int) -> list[Place]:
        """Return the tensors of which a rank writes a chunk, in the order of its file."""
        return [place for place, chunks in self.chunks.items() if any(chunk.rank == rank for chunk in chunks)]


def shard_name(rank: int) -> str:
    """Return the name of the file with a rank's chunks, which is that of PyTorch's distributed checkpoint."""
    return f"__{rank}_0.distcp"


def plan_of(tensors: Mapping[Place, torch.Tensor], rank: int, ranks: int) -> Plan:
    """Return the plan for tensors of which every rank knows the same names, shapes and placements.

    Of the ranks that hold a chunk, the tensor's number decides which one writes it. Plain weights are rank
    0's: running averages, which may differ on other ranks, would else be a mixture of several ranks'.

    Args:
        tensors: DTensors, and tensors that are the same on all ranks.
        rank, ranks: the number of this rank, and of all ranks.

    Raises:
        TypeError: a DTensor is the unfinished sum of its ranks' values, or its mesh has not rank 0.
    """
    ends = [0] * ranks  # of the ranks' files
    chunks: dict[Place, list[Chunk]] = {}
    for number, (place, tensor) in enumerate(tensors.items()):
        chunks[place] = []
        for (offsets, sizes), holders in _held(place, tensor, rank, ranks).items():
            writer, length = holders[number % len(holders)], _length(sizes, tensor.dtype)
            chunks[place].append(Chunk(offsets, sizes, writer, ends[writer], length))
            ends[writer] += length
    forms = [form_of(place, tensor) for place, tensor in tensors.items()]
    return Plan(hashlib.sha256(repr(forms).encode()).hexdigest(), chunks)


def form_of(place: Place, tensor: torch.Tensor) -> Form:
    """Return what of a tensor decides the plan: its name, shape, type and placements."""
    return place, tensor.shape, tensor.dtype, tensor.placements if isinstance(tensor, DTensor) else ()


def _held(
    place: Place, tensor: torch.Tensor, rank: int, ranks: int
) -> Mapping[tuple[Offsets, Offsets], Sequence[int]]:
    """Return the ranks that hold each chunk of a tensor, by the chunk's offsets and sizes."""
    if not isinstance(tensor, DTensor):
        holders = range(ranks if place.path[0] == OPTIMIZER else 1)
        return {((0,) * tensor.ndim, tuple(tensor.shape)): holders}
    if any(placement.is_partial() for placement in tensor.placements):
        raise TypeError(
            f"the checkpoint's {place.key}: expected a DTensor that is sharded or replicated, got one of "
            f"placements {tensor.placements}: call redistribute() first"
        )
    mesh = tensor.device_mesh.mesh
    mesh_ranks = mesh.flatten().tolist()
    if 0 not in mesh_ranks:
        if rank in mesh_ranks:  # the mesh that has rank 0 holds the same values, and its ranks write them
            return {}
        raise TypeError(
            f"the checkpoint's {place.key}: expected a DTensor on a mesh with rank 0, which describes all "
            f"chunks, got the ranks {mesh_ranks} on rank {rank}"
        )
    return _layout(tuple(tensor.shape), tuple(mesh.shape), tuple(tensor.placements), tuple(mesh_ranks))


@cache
def _layout(
    shape: Offsets, mesh_shape: Offsets, placements: tuple[Any, ...], known: tuple[int, ...]
) -> Mapping[tuple[Offsets, Offsets], Sequence[int]]:
    held: dict[tuple[Offsets, Offsets], list[int]] = {}
    for place, rank in zip(itertools.product(*map(range, mesh_shape)), known, strict=True):
        rows = rows_of(shape, placements, mesh_shape, place)
        if all(rows) or 0 in shape:  # a rank may hold nothing of a small tensor
            chunk = tuple(each.start for each in rows), tuple(map(len, rows))
            held.setdefault(chunk, []).append(rank)
    return held


def rows_of(
    shape: Sequence[int], placements: Sequence[Any], mesh_shape: Sequence[int], place: Sequence[int]
) -> list[range]:
    """Return which indices of each dimension of a DTensor the rank at `place` of its mesh holds.

    Raises:
        TypeError: the indices are not in one piece, so that the rank holds more than one chunk.
    """
    return [_rows(size, dim, placements, mesh_shape, place) for dim, size in enumerate(shape)]


def _rows(
    size: int, dim: int, placements: Sequence[Any], mesh_shape: Sequence[int], place: Sequence[int]
) -> range:
    own = [
        (p, n, i)
        for p, n, i in zip(placements, mesh_shape, place, strict=True)
        if getattr(p, "dim", None) == dim
    ]
    found = divided(
        torch.arange(size).reshape([-1 if each == dim else 1 for each in range(dim + 1)]),
        [p for p, _, _ in own],
        [n for _, n, _ in own],
        [i for _, _, i in own],
    ).flatten()
    rows = range(int(found[0]), int(found[-1]) + 1) if len(found) else range(0)
    if len(rows) != len(found):
        raise TypeError(
            f"a DTensor of the checkpoint: expected placements that give each rank one piece of dimension "
            f"{dim}, got {tuple(placements)}, which give it {found.tolist()}: call redistribute() first"
        )
    return rows


@cache
def description(sizes: Offsets, dtype: torch.dtype) -> bytes:
    """Return the pickle by which `torch.load` makes a tensor of the bytes of a record `data/0`."""
    return pickled(torch.empty(sizes, dtype=dtype))[0]  # large memory is never touched, and freed at once


@cache
def _length(sizes: Offsets, dtype: torch.dtype) -> int:
    bytes_of_data = torch.Size(sizes).numel() * torch.empty((), dtype=dtype).element_size()
    return archive_length([("data.pkl", len(description(sizes, dtype))), ("data/0", bytes_of_data)])


def index_of(plan: Plan, tensors: Mapping[Place, torch.Tensor]) -> bytes:
    """Return the contents of `index.json`: each tensor's type, shape and chunks."""
    index = {
        place.key: {
            "dtype": str(tensors[place].dtype).removeprefix("torch."),
            "shape": [*tensors[place].shape],
            "chunks": [[c.offsets, c.sizes, shard_name(c.rank), c.start, c.length] for c in chunks],
        }
        for place, chunks in plan.chunks.items()
    }
    return json.dumps(index).encode()


def metadata_of(plan: Plan, tensors: Mapping[Place, torch.Tensor]) -> bytes:
    """Return the contents of `.metadata`, for `torch.distributed.checkpoint.load` of other programs."""
    described: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {
        place.key: TensorStorageMetadata(
            TensorProperties(dtype=tensors[place].dtype),
            torch.Size(tensors[place].shape),
            [ChunkStorageMetadata(torch.Size(c.offsets), torch.Size(c.sizes)) for c in chunks],
        )
        for place, chunks in plan.chunks.items()
    }
    version = {"version": "1.0.0"} if any(f.name == "version" for f in dataclasses.fields(Metadata)) else {}
    stream = io.BytesIO()
    pickle.dump(
        Metadata(
            described,
            planner_data={place.key: place.names for place in plan.chunks},
            storage_data=dict(_stored(plan)),
            storage_meta=StorageMeta(),
            **version,
        ),
        stream,
    )
    return stream.getvalue()


def _stored(plan: Plan) -> Iterator[tuple[MetadataIndex, _StorageInfo]]:
    for place, chunks in plan.chunks.items():
        for number, chunk in enumerate(chunks):
            where = _StorageInfo(shard_name(chunk.rank), chunk.start, chunk.length)
            yield MetadataIndex(place.key, torch.Size(chunk.offsets), number), where
