"""Read a checkpoint that several ranks have written, on any number of ranks and any mesh.

Shards are the files with the chunks of tensors, of which each rank has written one. A rank reads in two
steps. First it reads the small files, which are the same for every rank; in the state that they give, tensors
of the shards have no memory. Once all ranks agree on the checkpoint, each rank compares its share of the
files with their hashes, and fills in the tensors: those that are DTensors in its model with its own part,
and all others with the whole. No step is a collective, and no code from a file is executed.
"""

from __future__ import annotations

import hashlib
import io
import warnings
from collections.abc import Callable, Iterable, Mapping
from inspect import signature
from math import prod
from operator import gt
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.state_dict_loader import load, load_state_dict
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from eventloop.checkpoint.manifest import UNREADABLE, Manifest, check_file
from eventloop.checkpoint.sharded.encode import rank_name
from eventloop.checkpoint.sharded.part import INDEX
from eventloop.checkpoint.sharded.places import Place, replaced
from eventloop.checkpoint.sharded.plan import rows_of
from eventloop.state.schema import refusing
from eventloop.util.errors import CheckpointError
from eventloop.util.file_names import is_plain_name

Numbers = tuple[int, ...]
"""A number for each dimension of a tensor: the offsets or the sizes of a chunk."""
Live = Callable[[str], torch.Tensor | None]
"""The type of a function from a parameter's name to this process's tensor of that name, or None."""


class Entry(msgspec.Struct, frozen=True):
    """The description of one tensor in `index.json`.

    Attributes:
        dtype: PyTorch's name of its type, without "torch.".
        shape: its sizes.
        chunks: of each chunk its offsets in the tensor, its sizes, its file, and the first byte and the
            length of its archive there.
    """

    dtype: str
    shape: Numbers
    chunks: tuple[tuple[Numbers, Numbers, str, int, int], ...]

    def __post_init__(self) -> None:
        """Raise ValueError unless the chunks make up the tensor, so that a damaged index is refused."""
        if not isinstance(getattr(torch, self.dtype, None), torch.dtype):
            raise ValueError(f"dtype: expected a type of PyTorch, got {self.dtype!r}")  # noqa: TRY004
        for offsets, sizes, file, start, length in self.chunks:
            if not is_plain_name(file) or not file.endswith(".distcp") or start < 0:
                raise ValueError(f"chunks: expected a file of shards, got {file!r} from {start} on")
            ends = [offset + size for offset, size in zip(offsets, sizes, strict=True)]
            if (
                min(offsets + sizes, default=0) < 0
                or len(ends) != len(self.shape)
                or any(map(gt, ends, self.shape))
            ):
                raise ValueError(f"chunks: expected parts of {self.shape}, got {sizes} at {offsets}")
            if prod(sizes) * self.type.itemsize > length:
                raise ValueError(f"chunks: expected the bytes of {sizes} of {self.dtype}, got {length} bytes")
        elements = {offsets: prod(sizes) for offsets, sizes, _, _, _ in self.chunks}
        if sum(elements.values()) != prod(self.shape):
            raise ValueError(f"chunks: expected parts that make up {self.shape}, got {elements} by offsets")

    @property
    def type(self) -> torch.dtype:
        """The type of the tensor."""
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype


def _read_verified(directory: Path, name: str, manifest: Manifest) -> bytes:
    """Return the bytes of a file of a checkpoint after comparing them with the manifest.

    Raises:
        CheckpointError: the file is missing, or differs from what was saved.
    """
    if (entry := manifest.files.get(name)) is None:
        raise CheckpointError(f"{directory} has no {name}: its manifest does not list it")
    path = directory / name
    try:
        data = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{directory} is incomplete, {name} cannot be read: {error}") from error
    if hashlib.sha256(data).hexdigest() != entry.sha256:
        raise CheckpointError(f"{path} is damaged: its SHA-256 is not that of what was saved")
    return data


def _read_index(directory: Path, manifest: Manifest) -> dict[str, Entry]:
    """Return the description of all tensors in the shards, by key.

    Raises:
        CheckpointError: `index.json` is missing, is damaged, or names other files than the manifest.
    """
    raw = _read_verified(directory, INDEX, manifest)
    try:
        index = msgspec.json.decode(raw, type=dict[str, Entry])
    except UNREADABLE as error:
        raise CheckpointError(f"{directory / INDEX} is not an index of shards: {error}") from error
    for key, entry in index.items():
        for _, _, file, start, length in entry.chunks:
            if file not in manifest.files or start + length > manifest.files[file].bytes:
                raise CheckpointError(
                    f"{directory / INDEX} has {length} bytes of {key} from byte {start} of {file!r} on: "
                    "expected a place in a file that the manifest lists"
                )
    return index


class Shards(NamedTuple):
    """The shards of a checkpoint whose small files were read.

    Attributes:
        directory: the checkpoint.
        manifest: its manifest.
        entries: the descriptions of its tensors, by key.
    """

    directory: Path
    manifest: Manifest
    entries: Mapping[str, Entry]

    @classmethod
    def of(cls, directory: Path, manifest: Manifest) -> Shards:
        """Return the shards of a checkpoint.

        Raises:
            CheckpointError: `index.json` is missing, is damaged, or names other files than the manifest.
        """
        return cls(directory, manifest, _read_index(directory, manifest))

    def small_file(self, name: str) -> io.BytesIO:
        """Return one of the small files, which are hashed when they are read.

        Raises:
            CheckpointError: the file is missing, or is damaged.
        """
        return io.BytesIO(_read_verified(self.directory, name, self.manifest))

    def own_files(self, rank: int | None) -> dict[int, io.BytesIO]:
        """Return by rank the files with the ranks' own states, such as random states.

        Args:
            rank: the rank whose file is returned, if there is one; None returns the files of all ranks.

        Raises:
            CheckpointError: a file is missing, or is damaged.
        """
        assert isinstance(self.manifest.ranks, int)
        ranks = range(self.manifest.ranks)
        return {each: self.small_file(rank_name(each)) for each in ranks if rank in (None, each)}

    def damage(self, rank: int = 0, ranks: int = 1) -> str:
        """Describe the damage to a rank's share of the files; return "" if they are intact.

        The files are dealt out in the order of their sizes, so that all ranks read about as much.

        Args:
            rank: the number of this rank.
            ranks: the number of ranks that divide the files; by default one rank reads all.
        """
        files = self.manifest.files
        share = sorted(files, key=lambda name: (-files[name].bytes, name))[rank::ranks]
        return self.damage_in(share)

    def damage_in(self, names: Iterable[str]) -> str:
        """Compare files with their hashes; return a sentence for each that is damaged, or ""."""
        files, errors = self.manifest.files, []
        for name in names:
            try:
                check_file(self.directory / name, files[name])
            except CheckpointError as error:
                errors.append(str(error))
        return "; ".join(errors)

    def fill(
        self, state: Mapping[str, Any], live: Live = lambda name: None, device: Any = "cpu"
    ) -> dict[str, Any]:
        """Return the state with the tensors of the shards filled in.

        Args:
            state, live: as in `with_empty`.
            device: the device of the tensors in the result.

        Raises:
            CheckpointError: a tensor is missing, or cannot be read.
        """
        with refusing(f"the tensors of {self.directory} cannot be read"):
            filled, targets = self.with_empty(state, live)
            self.read(targets)
            return filled if device == "cpu" else replaced(filled, lambda _, tensor: tensor.to(device))

    def with_empty(
        self, state: Mapping[str, Any], live: Live = lambda name: None
    ) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        """Return the state with a new tensor for each one in the shards, and the new tensors by key.

        The new tensors have no values yet.

        Args:
            state: the state that was read from the small files.
            live: returns this process's tensor with the name of a parameter. If that is a DTensor of the same
                shape, the new tensor is a DTensor with the same mesh and placements.

        Raises:
            CheckpointError: the state and the index do not have the same tensors.
        """
        targets: dict[str, torch.Tensor] = {}

        def target(place: Place, tensor: torch.Tensor) -> torch.Tensor:
            """Return an empty tensor of this run for a placeholder, after a comparison with the index."""
            if not tensor.is_meta:
                return tensor
            if (entry := self.entries.get(place.key)) is None:
                raise CheckpointError(f"{self.directory / INDEX} has no {place.key}, which state.pth names")
            if tuple(tensor.shape) != entry.shape or tensor.dtype != entry.type:
                raise CheckpointError(
                    f"{self.directory} contradicts itself: {place.key} has the shape {tuple(tensor.shape)} "
                    f"and the type {tensor.dtype} in state.pth, {entry.shape} and {entry.type} in {INDEX}"
                )
            targets[place.key] = _empty(entry, live(place.parameter))
            return targets[place.key]

        filled = replaced(state, target)
        if missing := sorted(self.entries.keys() - targets):
            raise CheckpointError(f"{self.directory}: state.pth has no place for {missing[0]} of {INDEX}")
        return filled, targets

    def read(self, targets: dict[str, torch.Tensor]) -> None:
        """Fill tensors in place with the values that the shards have under their keys.

        A DTensor gets the values of this rank's part.

        Raises:
            CheckpointError: the shards cannot be read.
        """
        entries = {key: self.entries[key] for key in targets}
        for key, tensor in targets.items():
            _check_offsets(key, tensor)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # `load` warns that it runs in a single process
                _load(targets, _IndexReader(self.directory, entries))
        except CheckpointException as error:  # a BaseException with the errors of all ranks, here of this one
            cause = next(failure[0] for failure in error.failures.values())
            raise CheckpointError(f"the shards of {self.directory} cannot be read: {cause}") from cause
        except Exception as error:
            raise CheckpointError(f"the shards of {self.directory} cannot be read: {error}") from error


def _load(targets: dict[str, torch.Tensor], reader: FileSystemReader) -> None:
    """Fill tensors without a collective."""
    if "no_dist" in signature(load).parameters:
        load(targets, storage_reader=reader, no_dist=True)
    else:  # PyTorch 2.6
        load_state_dict(targets, reader, no_dist=True)


def _empty(entry: Entry, live: torch.Tensor | None) -> torch.Tensor:
    """Return a tensor without values for an entry, a DTensor if this process's tensor `live` is one."""
    if isinstance(live, DTensor) and tuple(live.shape) == entry.shape:
        return torch.empty_like(live.detach(), dtype=entry.type, device="cpu")
    return torch.empty(entry.shape, dtype=entry.type)


def _check_offsets(key: str, tensor: torch.Tensor) -> None:
    """Refuse a DTensor into which this version of PyTorch would read the values of another part.

    Some versions compute wrong offsets for uneven parts of a `_StridedShard`, a placement of FSDP2 with
    tensor parallelism.

    Raises:
        CheckpointError: PyTorch's offsets or sizes of this rank's part are wrong.
    """
    if not isinstance(tensor, DTensor) or (place := tensor.device_mesh.get_coordinate()) is None:
        return
    mesh, placements = tensor.device_mesh, tensor.placements
    rows = rows_of(tensor.shape, placements, mesh.shape, place)
    sizes, offsets = compute_local_shape_and_global_offset(tensor.shape, mesh, placements)
    own_sizes, own_offsets = tuple(map(len, rows)), tuple(indices.start for indices in rows)
    if all(rows) and (own_sizes, own_offsets) != (sizes, offsets):
        raise CheckpointError(
            f"{key}: PyTorch {torch.__version__} would read a DTensor of placements {placements} from "
            f"{offsets} on, expected from {own_offsets} on, where this rank's part "
            "begins: update PyTorch, or choose sizes that the mesh divides evenly"
        )


class _IndexReader(FileSystemReader):
    """PyTorch's reader of shards, which finds them by `index.json` and never unpickles `.metadata`."""

    def __init__(self, directory: Path, index: Mapping[str, Entry]) -> None:
        super().__init__(str(directory))
        self._index = index

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the index in the form of PyTorch's metadata: the tensors, and the places of their chunks."""
        tensors: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
        places = {}
        for key, entry in self._index.items():
            chunks = [
                ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
                for offsets, sizes, _, _, _ in entry.chunks
            ]
            properties = TensorProperties(dtype=entry.type)
            tensors[key] = TensorStorageMetadata(properties, torch.Size(entry.shape), chunks)
            for number, (offsets, _, file, start, length) in enumerate(entry.chunks):
                places[MetadataIndex(key, torch.Size(offsets), number)] = _StorageInfo(file, start, length)
        return Metadata(tensors, {key: (key,) for key in tensors}, places, StorageMeta())
