"""Decide which rank writes which chunk of which tensor, and where in its file.

A chunk is the part of a tensor that a rank holds, and the plan assigns each chunk to one rank. Every rank
computes the same plan for itself, because each DTensor has the mesh and the placements of all ranks. So a
save needs no message. A plan depends on names, shapes, types and placements only, and is kept while these
stay the same. The files have the format of PyTorch's distributed checkpoint: each chunk is an archive of
`torch.save`, and `.metadata` lists the chunks for other programs. eventloop reads the same list from
`index.json`, because `.metadata` is a pickle, which may execute code.
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
"""A number for each dimension of a tensor: the offsets or the sizes of a chunk."""
Form = tuple[Place, torch.Size, torch.dtype, tuple[Any, ...]]
"""The place, shape, type and placements of a tensor."""


class Chunk(NamedTuple):
    """A part of a tensor that one rank writes.

    Attributes:
        offsets, sizes: the index of its first element in the whole tensor, and its shape.
        rank: the rank that writes it.
        start, length: the first byte of its archive in that rank's file, and the archive's size in bytes.
    """

    offsets: Offsets
    sizes: Offsets
    rank: int
    start: int
    length: int


class Plan(NamedTuple):
    """The chunks of all tensors.

    Attributes:
        form: a hash of the names, shapes, types and placements of all tensors; the same on all ranks.
        chunks: the chunks of each tensor, by the tensor's place.
    """

    form: str
    chunks: Mapping[Place, Sequence[Chunk]]

    def of_rank(self, rank: int) -> list[Place]:
        """Return the tensors of which a rank writes a chunk, in the order of its file."""
        return [place for place, chunks in self.chunks.items() if any(chunk.rank == rank for chunk in chunks)]


def shard_name(rank: int) -> str:
    """Return the name of the file with a rank's chunks, the same as PyTorch's distributed checkpoint uses."""
    return f"__{rank}_0.distcp"


def plan_of(tensors: Mapping[Place, torch.Tensor], rank: int, ranks: int) -> Plan:
    """Return the plan for tensors that have the same names, shapes and placements on every rank.

    If several ranks hold a chunk, they take turns from tensor to tensor, so that each writes about as much.
    Only rank 0 writes weights that are not DTensors: running averages in them may differ between ranks, and
    must all come from one rank.

    Args:
        tensors: DTensors, and tensors that are the same on all ranks.
        rank, ranks: the number of this rank, and of all ranks.

    Raises:
        TypeError: a DTensor has a placement `Partial`, so its value is the sum of the ranks' parts; or its
            mesh lacks rank 0.
    """
    file_sizes = [0] * ranks
    chunks: dict[Place, list[Chunk]] = {}
    for number, (place, tensor) in enumerate(tensors.items()):
        chunks[place] = []
        for (offsets, sizes), holders in _held(place, tensor, rank, ranks).items():
            writer, length = holders[number % len(holders)], _length(sizes, tensor.dtype)
            chunks[place].append(Chunk(offsets, sizes, writer, file_sizes[writer], length))
            file_sizes[writer] += length
    forms = [form_of(place, tensor) for place, tensor in tensors.items()]
    return Plan(hashlib.sha256(repr(forms).encode()).hexdigest(), chunks)


def form_of(place: Place, tensor: torch.Tensor) -> Form:
    """Return the properties of a tensor on which the plan depends."""
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
        if rank in mesh_ranks:  # another mesh has rank 0 and the same values, and its ranks write them
            return {}
        raise TypeError(
            f"the checkpoint's {place.key}: expected a DTensor on a mesh with rank 0, which describes all "
            f"chunks, got the ranks {mesh_ranks} on rank {rank}"
        )
    return _layout(tuple(tensor.shape), tuple(mesh.shape), tuple(tensor.placements), tuple(mesh_ranks))


@cache
def _layout(
    shape: Offsets, mesh_shape: Offsets, placements: tuple[Any, ...], mesh_ranks: tuple[int, ...]
) -> Mapping[tuple[Offsets, Offsets], Sequence[int]]:
    """Return the ranks that hold each chunk of a DTensor, by the chunk's offsets and sizes.

    Args:
        shape: the shape of the whole tensor.
        mesh_shape, placements: those of the DTensor.
        mesh_ranks: the ranks of the mesh, in the order of their coordinates.
    """
    holders: dict[tuple[Offsets, Offsets], list[int]] = {}
    for coordinate, rank in zip(itertools.product(*map(range, mesh_shape)), mesh_ranks, strict=True):
        ranges = rows_of(shape, placements, mesh_shape, coordinate)
        if all(ranges) or 0 in shape:  # a rank may hold nothing of a small tensor
            chunk = tuple(indices.start for indices in ranges), tuple(map(len, ranges))
            holders.setdefault(chunk, []).append(rank)
    return holders


def rows_of(
    shape: Sequence[int], placements: Sequence[Any], mesh_shape: Sequence[int], place: Sequence[int]
) -> list[range]:
    """Return the indices of each dimension of a DTensor that the rank at a coordinate of its mesh holds.

    Args:
        shape: the shape of the whole tensor.
        placements, mesh_shape: those of the DTensor.
        place: the rank's coordinate in the mesh.

    Raises:
        TypeError: the indices of a dimension have a gap, so that the rank holds more than one chunk.
    """
    return [_rows(size, dim, placements, mesh_shape, place) for dim, size in enumerate(shape)]


def _rows(
    size: int, dim: int, placements: Sequence[Any], mesh_shape: Sequence[int], place: Sequence[int]
) -> range:
    """Return the indices of the dimension `dim`, of this size, that a rank holds; see `rows_of`."""
    # the dimensions of the mesh that divide this dimension: the placement, the mesh's size, the coordinate
    dividing = [
        (placement, parts, index)
        for placement, parts, index in zip(placements, mesh_shape, place, strict=True)
        if getattr(placement, "dim", None) == dim
    ]
    # the indices are divided as the tensor is; `dim` is their last dimension, and those before have size 1
    held = divided(
        torch.arange(size).reshape([-1 if each == dim else 1 for each in range(dim + 1)]),
        [placement for placement, _, _ in dividing],
        [parts for _, parts, _ in dividing],
        [index for _, _, index in dividing],
    ).flatten()
    rows = range(int(held[0]), int(held[-1]) + 1) if len(held) else range(0)
    if len(rows) != len(held):
        raise TypeError(
            f"a DTensor of the checkpoint: expected placements that give each rank one piece of dimension "
            f"{dim}, got {tuple(placements)}, which give it {held.tolist()}: call redistribute() first"
        )
    return rows


@cache
def description(sizes: Offsets, dtype: torch.dtype) -> bytes:
    """Return the pickle of a chunk's archive, by which `torch.load` makes a tensor of the record `data/0`."""
    return pickled(torch.empty(sizes, dtype=dtype))[0]  # the memory is never written, so it takes no room


@cache
def _length(sizes: Offsets, dtype: torch.dtype) -> int:
    """Return the length in bytes of the archive of a chunk."""
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
    """Yield PyTorch's description of each chunk: its tensor, offsets and number, and its place in a file."""
    for place, chunks in plan.chunks.items():
        for number, chunk in enumerate(chunks):
            in_file = _StorageInfo(shard_name(chunk.rank), chunk.start, chunk.length)
            yield MetadataIndex(place.key, torch.Size(chunk.offsets), number), in_file
