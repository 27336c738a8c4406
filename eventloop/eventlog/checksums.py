"""Compute the CRC-32 of many, perhaps overlapping, parts of a file in one pass over its bytes.

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
"""The number of bytes that are read from the file at once."""
_ZEROS = bytes(1 << 8)
"""A block of zero bytes, with which `_after_bytes` counts lengths."""


class Checksums:
    """Compute the CRC-32 of any part of a file from the offset `begin` on.

    It stores the checksum of the bytes from `begin` to each multiple of a stride. CRC-32 is linear, so the
    checksum of a part follows from the checksums of the bytes before its start and before its end, as in
    zlib's `crc32_combine`. Every byte is read once, and for each part at most two strides are read again.
    """

    def __init__(self, begin: int) -> None:
        self._begin = begin
        self._stored = array("I", [0])

    def of(self, file: BinaryIO | FileIO, start: int, end: int, initial: int) -> int:
        """Return `crc32(part, initial)` for the part of the file from offset `start` to `end`."""
        difference = self._up_to(file, start) ^ initial
        return self._up_to(file, end) ^ _after_bytes(difference, end - start)

    def _up_to(self, file: BinaryIO | FileIO, position: int) -> int:
        """Return the checksum of the bytes from `begin` to `position`."""
        strides, rest_bytes = divmod(position - self._begin, _STRIDE)
        stored, descriptor = self._stored, file.fileno()
        while len(stored) <= strides:
            block = os.pread(descriptor, _BLOCK, self._begin + (len(stored) - 1) * _STRIDE)
            if len(block) < _STRIDE:  # another program has shortened the file
                block = block.ljust(_STRIDE, b"\0")
            for stride_end in range(_STRIDE, len(block) + 1, _STRIDE):
                stored.append(crc32(block[stride_end - _STRIDE : stride_end], stored[-1]))
        return crc32(os.pread(descriptor, rest_bytes, self._begin + strides * _STRIDE), stored[strides])


def _after_bytes(difference: int, length: int) -> int:
    """Return the xor of two checksums after the same `length` bytes are appended to both byte strings.

    The result is the same for any appended bytes, so it is computed for zero bytes: one block at a time would
    be slow, so tables apply 1, 2, 4, 8, ... blocks at once.

    Args:
        difference: the xor of the two checksums before the bytes are appended.
        length: the number of appended bytes.
    """
    blocks, rest_bytes = divmod(length, len(_ZEROS))
    difference = crc32(_ZEROS[:rest_bytes], difference) ^ crc32(_ZEROS[:rest_bytes])
    power = 0
    while blocks:
        if blocks & 1:
            difference = _lookup(_tables(power), difference)
        blocks >>= 1
        power += 1
    return difference


@cache
def _tables(power: int) -> tuple[list[int], ...]:
    """Return four tables for `_lookup`, which apply `_after_bytes` for `2**power` blocks of `_ZEROS`.

    The tables have the result for each value of the first, second, third and fourth byte of a difference.
    """
    if power:
        half = _tables(power - 1)  # applied twice, they double the number of blocks
        results_of_bits = [_lookup(half, _lookup(half, 1 << bit)) for bit in range(32)]
    else:
        results_of_bits = [crc32(_ZEROS, 1 << bit) ^ crc32(_ZEROS) for bit in range(32)]
    tables = []
    for lowest_bit in range(0, 32, 8):
        table = [0]  # the result for a byte is the xor of the results for its bits
        for result in results_of_bits[lowest_bit : lowest_bit + 8]:
            table += [lower_bits ^ result for lower_bits in table]
        tables.append(table)
    return tuple(tables)


def _lookup(tables: tuple[list[int], ...], difference: int) -> int:
    """Return the xor of the entries of four tables for the four bytes of a difference, the lowest first."""
    table_0, table_1, table_2, table_3 = tables
    return (
        table_0[difference & 255]
        ^ table_1[difference >> 8 & 255]
        ^ table_2[difference >> 16 & 255]
        ^ table_3[difference >> 24]
    )
