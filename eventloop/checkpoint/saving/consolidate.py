"""Write a checkpoint as one file, for programs that read a whole state or weights, in one process.

The command `eventloop checkpoints RUN --consolidate` uses it. Tensors that several ranks have written are
read one after the other, while the file is written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.storage import UntypedStorage

from eventloop.checkpoint.archive import write_archive
from eventloop.checkpoint.disk import Sink
from eventloop.checkpoint.manifest import read_identified, verify_published
from eventloop.checkpoint.saving.publish import PublishedFormat, origin_of, write_beside
from eventloop.checkpoint.saving.safetensors_file import check_flat, encode, require_safetensors
from eventloop.checkpoint.serialize import bytes_of_storage, pickled
from eventloop.checkpoint.store import Loaded, read_small_part
from eventloop.util.errors import CheckpointError


def consolidate(path: Path, file_format: PublishedFormat = "pth") -> Path:
    """Write the contents of a checkpoint as one file next to it, and return the file's path.

    The file is named `<checkpoint>-<first digits of its SHA-256>.<format>`. A checkpoint of several ranks
    needs host memory for three of its largest tensors; any other checkpoint is read as a whole.

    Args:
        path: the checkpoint, which is verified first.
        file_format: "pth" for the whole state, which `torch.load(weights_only=True)` reads, or "safetensors"
            for the tensors of `state_dict`.

    Raises:
        FileNotFoundError: the checkpoint does not exist.
        CheckpointError: the checkpoint is damaged, its `state_dict` does not fit the format, or a run has
            replaced it meanwhile.
        ImportError: the format is safetensors, which is not installed.
        OSError: the file cannot be written.
    """
    if file_format == "safetensors":
        require_safetensors("--format safetensors")
    if path.is_file():
        verify_published(path)
    loaded = read_small_part(path)
    loaded, read = _with_reader(loaded)
    if file_format == "pth":
        write = partial(_write_state, loaded, read)
    else:
        check_flat(loaded.state["state_dict"], f"{loaded.path}, its state_dict,", "--format pth")
        write = partial(_write_weights, loaded, read)
    return write_beside(loaded.path, file_format, partial(_unless_replaced, loaded, write))


Read = Callable[[Any], torch.Tensor | None]
"""The type of a function that reads the values of an empty tensor or storage from the shards.

It returns None for a tensor or storage that is not empty.
"""


def _with_reader(loaded: Loaded) -> tuple[Loaded, Read]:
    """Return a checkpoint with an empty tensor for each one in its shards, and the function that reads them.

    Nothing is ever written to the empty tensors, so the system gives them no memory.

    Raises:
        CheckpointError: a file of the checkpoint is damaged.
    """
    shards = loaded.shards
    if shards is None:
        return loaded, lambda _: None
    if damage := shards.damage():
        raise CheckpointError(damage)
    state, targets = shards.with_empty(loaded.state)
    key_at = {tensor.data_ptr(): key for key, tensor in targets.items() if tensor.numel()}

    def read(empty: torch.Tensor | UntypedStorage) -> torch.Tensor | None:
        """Return the values for a placeholder, read from the shards now; None for any other tensor."""
        if (key := key_at.get(empty.data_ptr())) is None:
            return None
        tensor = torch.empty_like(targets[key])
        shards.read({key: tensor})
        return tensor

    return loaded._replace(state=state), read


def _write_state(loaded: Loaded, read: Read, sink: Sink) -> None:
    """Write the state as `torch.save` does, with one tensor of the shards in memory at a time."""
    pickle_bytes, storages = pickled(loaded.state)

    def records() -> Iterator[tuple[str, bytes | memoryview]]:
        """Yield the pickle and the bytes of each storage, read only when `write_archive` needs them."""
        yield "data.pkl", pickle_bytes
        for key, storage in storages.items():
            tensor = read(storage)
            yield f"data/{key}", bytes_of_storage(storage if tensor is None else tensor.untyped_storage())

    write_archive(records(), sink)


def _write_weights(loaded: Loaded, read: Read, sink: Sink) -> None:
    """Write the model's weights as safetensors, with one tensor of the shards in memory at a time."""

    def values(tensor: torch.Tensor) -> torch.Tensor:
        from_shards = read(tensor)
        return tensor if from_shards is None else from_shards

    for piece in encode(loaded.state["state_dict"], {}, origin_of(loaded.state), values):
        sink.write(piece)


def _unless_replaced(loaded: Loaded, write: Callable[[Sink], None], sink: Sink) -> None:
    """Write the file; raise CheckpointError if a run has replaced the checkpoint while it was read."""
    write(sink)
    if loaded.shards is not None and read_identified(loaded.path)[1] != loaded.sha256:
        raise CheckpointError(f"{loaded.path} was replaced while it was read: consolidate it again")
