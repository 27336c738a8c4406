"""Encode a state as the records of a file of `torch.save`, and describe it in a manifest.

The saver and `save_checkpoint` use it. `commit` writes the result, in a process that does not import torch.
"""

from __future__ import annotations

import ctypes
import io
import pickle
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch.storage import TypedStorage, UntypedStorage

from eventloop._version import __version__
from eventloop.checkpoint.commit import Save
from eventloop.checkpoint.manifest import Label, Manifest, encode_body, tensor_table
from eventloop.processes.shared_memory import Mapped, Record
from eventloop.state.sharded import NO_SHARDS_THERE, refuse_sharded
from eventloop.state.tensors import tensors_of

_PROTOCOL = 2  # the version of pickle that `torch.load(weights_only=True)` reads
_STORAGES = frozenset({TypedStorage, UntypedStorage})
_NO_LABEL = Label()
_NOTHING: Mapping[int, Any] = {}

Rebuilt = Mapping[int, tuple[Any, ...]]
"""The results of tensors' `__reduce_ex__`, by the tensors' `id`.

Each call takes ten times as long as pickling its result.
"""


def serialize(state: Mapping[str, Any], path: Path, label: Label = _NO_LABEL) -> Save:
    """Return a state in the form in which `commit` writes it.

    Args:
        state: the state; its tensors are not copied, and must not change until the result is written.
        path: the checkpoint's path.
        label: the fields of the manifest that cannot be read from the state, such as its sequence number.

    Raises:
        TypeError: a tensor of the state is sharded over ranks.
        CheckpointError: the manifest could not be read again.
    """
    manifest = manifest_of(state, label)
    for entry, tensor in zip(manifest.tensors, tensors_of(state), strict=False):
        refuse_sharded(f"the checkpoint's {entry.name}", tensor, NO_SHARDS_THERE)
    return Save(path, records_of(dict(state)), encode_body(manifest))


def records_of(
    value: Any, rebuilt: Rebuilt = _NOTHING, memory: Mapping[int, Mapped] = _NOTHING
) -> tuple[Record, ...]:
    """Return a value as the records of a file of `torch.save`: its pickle, then the bytes of each storage.

    Args:
        value: the value.
        rebuilt: known results of `__reduce_ex__` of tensors in the value.
        memory: by the `data_ptr` of a storage, the description of its shared memory, which the result has in
            place of the bytes.
    """
    pickle_bytes, storages = pickled(value, rebuilt)
    records: list[Record] = [("data.pkl", pickle_bytes)]
    for key, storage in storages.items():
        records.append((f"data/{key}", memory.get(storage.data_ptr()) or bytes_of_storage(storage)))
    return tuple(records)


def pickled(value: Any, rebuilt: Rebuilt = _NOTHING) -> tuple[bytes, dict[str, UntypedStorage]]:
    """Pickle a value as `torch.save` does, without the bytes of its tensors.

    Args:
        value, rebuilt: as in `records_of`.

    Returns:
        The record `data.pkl`, and by key the storages whose bytes the records `data/<key>` have.
    """
    stream = io.BytesIO()
    pickler = _Pickler(stream, rebuilt)
    pickler.dump(value)
    return stream.getvalue(), pickler.storages


class _Pickler(pickle.Pickler):
    """Pickle a state with references in place of the bytes of its tensors, as `torch.save` does."""

    def __init__(self, stream: io.BytesIO, rebuilt: Rebuilt) -> None:
        super().__init__(stream, protocol=_PROTOCOL)
        self.storages: dict[str, UntypedStorage] = {}
        """The tensors' storages, by the key of the record that holds their bytes."""
        self._keys: dict[int, str] = {}  # of the storages, by the address of their C++ object
        self._rebuilt = rebuilt

    def reducer_override(self, value: Any) -> Any:
        """Return the known result of a tensor's `__reduce_ex__`, so that pickle does not call it."""
        return self._rebuilt.get(id(value), NotImplemented)

    def persistent_id(self, value: Any) -> tuple[Any, ...] | None:
        """Return the reference that is pickled in place of a tensor's storage; None for any other value."""
        if type(value) not in _STORAGES:
            return None
        if isinstance(value, TypedStorage):
            kind: Any = getattr(torch, value._pickle_storage_type())  # such as torch.FloatStorage
            storage, count = value._untyped_storage, value._size()
        else:
            storage, kind, count = value, torch.UntypedStorage, value.nbytes()
        key = self._keys.setdefault(storage._cdata, str(len(self._keys)))
        self.storages[key] = storage
        return "storage", kind, key, torch.serialization.location_tag(storage), count


def bytes_of_storage(storage: UntypedStorage) -> bytes | memoryview:
    """Return the bytes of a storage as a view, which keeps the storage alive; a device's are copied first."""
    if storage.device.type != "cpu":
        storage = storage.cpu()
    return bytes_at(storage.data_ptr(), storage.nbytes(), storage)


def bytes_at(address: int, size: int, owner: object) -> bytes | memoryview:
    """Return a view of host memory, which keeps the owner of the memory alive.

    Args:
        address: the address of the first byte.
        size: the number of bytes.
        owner: an object whose end would free the memory.
    """
    if not size:
        return b""
    array = (ctypes.c_ubyte * size).from_address(address)
    array.owner = owner  # type: ignore[attr-defined]
    return memoryview(array)


def manifest_of(state: Mapping[str, Any], label: Label) -> Manifest:
    """Return the manifest of a state; its `files` are empty, because nothing is written yet."""
    meta = state.get("meta", {})
    position = meta.get("position", {})
    return Manifest(
        **msgspec.structs.asdict(label),
        iter=meta.get("iter", 0),
        epoch=meta.get("epoch", 0),
        batch_idx=position.get("batch_idx", 0),
        max_iters=meta.get("max_iters"),
        max_epochs=meta.get("max_epochs"),
        time=time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        eventloop=__version__,
        torch=str(torch.__version__),
        keys=tuple(map(str, state)),
        tensors=tuple(tensor_table(state)),
    )
