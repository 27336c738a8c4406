"""Frame the records of TensorBoard's event files.

A record is length, checksum of the length, data, checksum of the data; `tensorboard_records` uses it. The
checksum is CRC-32C from a C library. TensorBoard's own is a Python loop over bytes that holds the
interpreter: 45 us for the 244 bytes of ten scalars and 209 ms for an image of 512 x 512; the library takes
less than 1 us and 0.1 ms.
"""

from __future__ import annotations

import struct
from functools import lru_cache

from google_crc32c import value

_MASK = 0xFFFFFFFF


def frame(data: bytes) -> bytes:
    """Return `data` as one record, with all numbers little-endian."""
    return b"".join((_header(len(data)), data, _checksum(data)))


@lru_cache(maxsize=256)  # events of one kind have one length
def _header(length: int) -> bytes:
    packed = struct.pack("<Q", length)
    return packed + _checksum(packed)


def _checksum(data: bytes) -> bytes:
    """Return the CRC-32C of `data`, masked as in TensorFlow's `record_writer.cc`.

    Without the mask, a checksum of data that contains checksums would be weak.
    """
    crc = value(data)
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & _MASK)
