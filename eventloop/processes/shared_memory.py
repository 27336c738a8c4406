"""Name bytes in memory that a process of one's own maps, so that they need not be sent to it.

The saver's process reads the copies of a training's tensors in this way. It runs this module, which imports
only the standard library.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple


class Mapped(NamedTuple):
    """Describes shared memory, for the saver's process to map tensors of the training.

    Attributes:
        path: the path under `/proc`, which exists while the training process lives.
        size: the number of bytes.
        number: the inode number, which differs from that of any other shared memory.
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
    """Describes `size` bytes of shared memory, from the byte `start` on."""

    memory: Mapped
    start: int
    size: int


Record = tuple[str, bytes | memoryview | Mapped | Piece]
"""The name of a record of an archive, and its bytes."""


def mapped_records(
    records: Sequence[Record], memory: Mapping[Mapped, memoryview]
) -> tuple[tuple[str, bytes | memoryview], ...]:
    """Return records with views of shared memory, which stays mapped while the views exist.

    Args:
        records: the records.
        memory: memory that is mapped already; other memory is mapped now.

    Raises:
        OSError: the process that allocated the memory has ended.
    """
    known = dict(memory)

    def view(data: bytes | memoryview | Mapped | Piece) -> bytes | memoryview:
        if isinstance(data, Piece):
            return view(data.memory)[data.start : data.start + data.size]
        if not isinstance(data, Mapped):
            return data
        if data not in known:
            known[data] = data.open()
        return known[data]

    return tuple((name, view(data)) for name, data in records)


def memory_of(records: Iterable[Record]) -> set[Mapped]:
    """Return the shared memory that records name."""
    found = (data.memory if isinstance(data, Piece) else data for _, data in records)
    return {data for data in found if isinstance(data, Mapped)}


def with_own_bytes(records: Iterable[Record]) -> tuple[Record, ...]:
    """Return records with copies of the bytes that belong to tensors, so that the tensors may change."""
    return tuple((name, bytes(data) if isinstance(data, memoryview) else data) for name, data in records)
