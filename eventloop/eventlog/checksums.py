"""Checksum any parts of a file, however they overlap, after one pass over its bytes.

`eventloop.eventlog.frames` uses it. This module imports no torch.
"""

from __future__ import annotations

import os
from array import array
from functools import cache
from io import FileIO
from typing import BinaryIO
from zlib import crc32

_STRIDE = 1 << 10
"""The number of bytes between two stored checksums, which take 4 bytes each."""
_BLOCK = 1 << 16
_ZEROS = bytes(1 << 8)


class Checksums:
    """The CRC-32 of any part of a file from `begin` on.

    It stores the checksum of the bytes from `begin` to each multiple of a stride. CRC-32 is linear, so the
    checksum of a part follows from those of the bytes up to its start and up to its end, as in zlib's
    `crc32_combine`. So every byte is read once, and at most a stride again for each part.
    """

    def __init__(self, begin: int) -> None:
        self._begin = begin
        self._stored = array("I", [0])

    def of(self, file: BinaryIO | FileIO, start: int, end: int, initial: int) -> int:
        """Return `crc32(part, initial)` for the part from `start` to `end`, which the file has."""
        difference = self._up_to(file, start) ^ initial
        return self._up_to(file, end) ^ _behind(difference, end - start)

    def _up_to(self, file: BinaryIO | FileIO, position: int) -> int:
        """Return the checksum of the bytes from `begin` to `position`."""
        whole, rest = divmod(position - self._begin, _STRIDE)
        stored, descriptor = self._stored, file.fileno()
        while len(stored) <= whole:
            block = os.pread(descriptor, _BLOCK, self._begin + (len(stored) - 1) * _STRIDE)
            if len(block) < _STRIDE:  # another program has shortened the file
                block = block.ljust(_STRIDE, b"\0")
            for at in range(_STRIDE, len(block) + 1, _STRIDE):
                stored.append(crc32(block[at - _STRIDE : at], stored[-1]))
        return crc32(os.pread(descriptor, rest, self._begin + whole * _STRIDE), stored[whole])


def _behind(difference: int, length: int) -> int:
    """Return the difference of two checksums after the same `length` bytes have been added to both."""
    blocks, rest = divmod(length, len(_ZEROS))
    difference = crc32(_ZEROS[:rest], difference) ^ crc32(_ZEROS[:rest])
    power = 0
    while blocks:
        if blocks & 1:
            difference = _lookup(_tables(power), difference)
        blocks >>= 1
        power += 1
    return difference


@cache
def _tables(power: int) -> tuple[list[int], ...]:
    """Return what each value of each of a difference's four bytes becomes behind `2**power` blocks."""
    if power:
        half = _tables(power - 1)
        bits = [_lookup(half, _lookup(half, 1 << bit)) for bit in range(32)]
    else:
        bits = [crc32(_ZEROS, 1 << bit) ^ crc32(_ZEROS) for bit in range(32)]
    tables = []
    for first in range(0, 32, 8):
        table = [0]
        for bit in bits[first : first + 8]:
            table += [value ^ bit for value in table]
        tables.append(table)
    return tuple(tables)


def _lookup(tables: tuple[list[int], ...], difference: int) -> int:
    first, second, third, fourth = tables
    return (
        first[difference & 255]
        ^ second[difference >> 8 & 255]
        ^ third[difference >> 16 & 255]
        ^ fourth[difference >> 24]
    )
