"""Refer to bytes in shared memory, which a child process maps, so that they are not sent through a pipe.

The process that saves checkpoints (the saver) reads the copies of a training's tensors in this way. It also
imports this module, so the module imports only the standard library.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple


class Mapped(NamedTuple):
    """Describe shared memory that has tensors of the training, so that the saver's process can map it.

    Attributes:
        path: its path under `/proc`, which exists while the training process is alive.
        size: the number of bytes.
        number: its inode number, which no other shared memory has.
    """

    path: str
    size: int
    number: int

    def open(self) -> memoryview:
        """Map the memory and return its bytes; it stays mapped while the returned view exists."""
        descriptor = os.open(self.path, os.O_RDONLY)
        try:
            return memoryview(mmap.mmap(descriptor, self.size, access=mmap.ACCESS_READ))
        finally:
            os.close(descriptor)


class Piece(NamedTuple):
    """Describe `size` bytes of shared memory, from the byte `start` on."""

    memory: Mapped
    start: int
    size: int


Record = tuple[str, bytes | memoryview | Mapped | Piece]
"""The name of a record in the archive that `torch.save` makes, and its bytes or their place in memory."""


def mapped_records(
    records: Sequence[Record], memory: Mapping[Mapped, memoryview]
) -> tuple[tuple[str, bytes | memoryview], ...]:
    """Return the records with views of their bytes in place of descriptions of shared memory.

    The memory stays mapped while the views exist.

    Args:
        records: the records.
        memory: the views of memory that is mapped already; other memory is mapped now.

    Raises:
        OSError: the process that allocated the memory has ended.
    """
    mapped = dict(memory)

    def view(data: bytes | memoryview | Mapped | Piece) -> bytes | memoryview:
        """Return the bytes of a record's data, and map the memory if no earlier record has."""
        if isinstance(data, Piece):
            return view(data.memory)[data.start : data.start + data.size]
        if not isinstance(data, Mapped):
            return data
        if data not in mapped:
            mapped[data] = data.open()
        return mapped[data]

    return tuple((name, view(data)) for name, data in records)


def memory_of(records: Iterable[Record]) -> set[Mapped]:
    """Return the shared memory in which bytes of the records are."""
    memories = (data.memory if isinstance(data, Piece) else data for _, data in records)
    return {memory for memory in memories if isinstance(memory, Mapped)}


def with_own_bytes(records: Iterable[Record]) -> tuple[Record, ...]:
    """Return the records with copies of bytes that tensors own, so that the tensors may then change."""
    return tuple((name, bytes(data) if isinstance(data, memoryview) else data) for name, data in records)
