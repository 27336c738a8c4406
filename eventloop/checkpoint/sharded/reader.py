"""Read a checkpoint that several ranks have written, on any number of ranks and any mesh.

First the small files are read, which are the same for every rank; tensors without memory stand in the places
of those in the shards. Once all ranks agree on the checkpoint, they compare its shards with the hashes, each
rank its share, and each rank fills in the tensors: those that are DTensors in its model as its own part of
them, all others whole. No step is a collective, and no code from a file is executed.
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
Live = Callable[[str], torch.Tensor | None]
"""A function that returns the tensor of this process that has a parameter's name, if it has one."""


class Entry(msgspec.Struct, frozen=True):
    """The description of one tensor in `index.json`.

    Attributes:
        dtype: PyTorch's name of its type, without "torch.".
        shape: its sizes.
        chunks: of each chunk the offsets, the sizes, the file, and the first byte and the length there.
    """

    dtype: str
    shape: Numbers
    chunks: tuple[tuple[Numbers, Numbers, str, int, int], ...]

    def __post_init__(self) -> None:
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
        held = {chunk[0]: prod(chunk[1]) for chunk in self.chunks}
        if sum(held.values()) != prod(self.shape):
            raise ValueError(f"chunks: expected parts that make up {self.shape}, got {held} by offsets")

    @property
    def type(self) -> torch.dtype:
        """The type of the tensor."""
        found: torch.dtype = getattr(torch, self.dtype)
        return found


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
        """Return the file with a rank's own state, if there is one; None returns those of all ranks."""
        assert isinstance(self.manifest.ranks, int)
        ranks = range(self.manifest.ranks)
        return {each: self.small_file(rank_name(each)) for each in ranks if rank in (None, each)}

    def damage(self, rank: int = 0, ranks: int = 1) -> str:
        """Describe the damage to those files that fall to a rank; return "" if they are intact.

        Files are divided by their sizes, so that all ranks read about as much.
        """
        files = self.manifest.files
        own = sorted(files, key=lambda name: (-files[name].bytes, name))[rank::ranks]
        return self.damage_in(own)

    def damage_in(self, names: Iterable[str]) -> str:
        """Compare files with their hashes; return a sentence for each that is damaged, or ""."""
        files, wrong = self.manifest.files, []
        for name in names:
            try:
                check_file(self.directory / name, files[name])
            except CheckpointError as error:
                wrong.append(str(error))
        return "; ".join(wrong)

    def fill(
        self, state: Mapping[str, Any], live: Live = lambda name: None, device: Any = "cpu"
    ) -> dict[str, Any]:
        """Return the state with the tensors of the shards.

        Args:
            state, live: as in `with_empty`.
            device: the device of the result.

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
        """Return the state with a new tensor, without values, for each one in the shards, and these by key.

        Args:
            state: the state that was read from the small files.
            live: returns this process's tensor of a parameter's name. Where it is a DTensor of the same
                shape, the new one has only this rank's part of it, and is divided alike.

        Raises:
            CheckpointError: the state and the index have other tensors.
        """
        targets: dict[str, torch.Tensor] = {}

        def target(place: Place, tensor: torch.Tensor) -> torch.Tensor:
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
        """Fill tensors with what the shards have under their keys; of a DTensor this rank's part.

        Raises:
            CheckpointError: the shards cannot be read.
        """
        entries = {key: self.entries[key] for key in targets}
        for key, tensor in targets.items():
            _check_offsets(key, tensor)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # that there is one process, as far as `load` knows
                _load(targets, _IndexReader(self.directory, entries))
        except CheckpointException as error:  # no Exception; it has those of all ranks, which is this one
            why = next(failure[0] for failure in error.failures.values())
            raise CheckpointError(f"the shards of {self.directory} cannot be read: {why}") from why
        except Exception as error:
            raise CheckpointError(f"the shards of {self.directory} cannot be read: {error}") from error


def _load(targets: dict[str, torch.Tensor], reader: FileSystemReader) -> None:
    """Fill tensors without a collective."""
    if "no_dist" in signature(load).parameters:
        load(targets, storage_reader=reader, no_dist=True)
    else:  # PyTorch 2.6
        load_state_dict(targets, reader, no_dist=True)


def _empty(entry: Entry, live: torch.Tensor | None) -> torch.Tensor:
    if isinstance(live, DTensor) and tuple(live.shape) == entry.shape:
        return torch.empty_like(live.detach(), dtype=entry.type, device="cpu")
    return torch.empty(entry.shape, dtype=entry.type)


def _check_offsets(key: str, tensor: torch.Tensor) -> None:
    """Refuse a DTensor of which this version of PyTorch would read other rows than this rank holds.

    Some versions give wrong offsets for uneven parts of a `_StridedShard`, as FSDP2 with tensor parallelism
    makes them.

    Raises:
        CheckpointError: it is one.
    """
    if not isinstance(tensor, DTensor) or (place := tensor.device_mesh.get_coordinate()) is None:
        return
    mesh, placements = tensor.device_mesh, tensor.placements
    rows = rows_of(tensor.shape, placements, mesh.shape, place)
    sizes, offsets = compute_local_shape_and_global_offset(tensor.shape, mesh, placements)
    if all(rows) and (tuple(map(len, rows)), tuple(each.start for each in rows)) != (sizes, offsets):
        raise CheckpointError(
            f"{key}: PyTorch {torch.__version__} would read a DTensor of placements {placements} from "
            f"{offsets} on, expected from {tuple(each.start for each in rows)} on, where this rank's part "
            "begins: update PyTorch, or choose sizes that the mesh divides evenly"
        )


class _IndexReader(FileSystemReader):
    """PyTorch's reader of shards, which finds them by `index.json` and never unpickles `.metadata`."""

    def __init__(self, directory: Path, index: Mapping[str, Entry]) -> None:
        super().__init__(str(directory))
        self._index = index

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return what the index says of the tensors and of the places of their chunks."""
        tensors: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
        places = {}
        for key, entry in self._index.items():
            chunks = [ChunkStorageMetadata(torch.Size(c[0]), torch.Size(c[1])) for c in entry.chunks]
            properties = TensorProperties(dtype=entry.type)
            tensors[key] = TensorStorageMetadata(properties, torch.Size(entry.shape), chunks)
            for number, (offsets, _, file, start, length) in enumerate(entry.chunks):
                places[MetadataIndex(key, torch.Size(offsets), number)] = _StorageInfo(file, start, length)
        return Metadata(tensors, {key: (key,) for key in tensors}, places, StorageMeta())
