"""Write files in the zip format of `torch.save`: uncompressed records in a row, each aligned in the file.

`commit` uses it, in the training process and in the saver's process, so it imports only the standard library.
`torch.load` reads the file, also with `mmap=True`, which needs the alignment.
"""

from __future__ import annotations

import itertools
import struct
import sys
import zlib
from collections.abc import Iterable
from typing import NamedTuple

from eventloop.checkpoint.disk import Sink

FOLDER = "archive"
"""The folder of all records in the zip file; `torch.load` accepts any name."""
ALIGNMENT = 64
"""The alignment in bytes of each record's data in the file, the same as `torch.save` uses."""
CHECKED = 1 << 20
"""The largest size in bytes of a record that gets a CRC-32.

Computing the CRC of a larger record takes longer than writing it. `torch.load` never checks it, and the
manifest has the SHA-256.
"""
GATHERED = 8 << 20
"""The size in bytes up to which small records are collected, to write them in one call."""
_LOCAL = struct.Struct("<4s5H3I2H")
_CENTRAL = struct.Struct("<4s6H3I5H2I")
_END = struct.Struct("<4s4H2IH")
_END_64 = struct.Struct("<4sQ2H2I4Q")
_LOCATOR_64 = struct.Struct("<4sIQI")
_MAX_16, _MAX_32 = 0xFFFF, 0xFFFFFFFF
_VERSION_64 = 45  # the first version of the zip format with sizes of 64 bits
_EPOCH = 33  # 1980-01-01 for every record, so that the same state gives the same bytes
_ZIP_64, _PADDING = 1, 0x4246  # the kinds of extra fields; the second is torch's


class _Entry(NamedTuple):
    """The description of a record in the central directory, the list of records at the end of the file.

    Attributes:
        name: the name with the folder.
        crc: the CRC-32 of the data; 0 if it is not computed.
        size: the size of the data in bytes.
        offset: the byte of the file at which the record's header begins.
    """

    name: bytes
    crc: int
    size: int
    offset: int


def write_archive(records: Iterable[tuple[str, bytes | memoryview]], sink: Sink) -> None:
    """Write records as a zip file, and add the records `byteorder` and `version`, as `torch.save` does.

    Args:
        records: the name and the bytes of each record; they are read one after the other, and only once.
        sink: the file to write to.

    Raises:
        OSError: the disk is full, or another error of the file system.
        SaveGivenUp: the sink was cancelled.
    """
    additional = [("byteorder", sys.byteorder.encode()), ("version", b"3\n")]
    entries: list[_Entry] = []
    collected: list[bytes | memoryview] = []  # headers and small records, to be written in one call
    position = written = 0  # the length of the file with and without what is collected
    for name, data in itertools.chain(records, additional):
        header, entry = _header(name, data, position)
        entries.append(entry)
        position += len(header) + len(data)
        collected.append(header)
        if len(data) <= CHECKED:
            collected.append(data)
        if len(data) > CHECKED or position - written > GATHERED:
            sink.write(b"".join(collected))
            if len(data) > CHECKED:
                sink.write(data)
            collected.clear()
            written = position
    central = b"".join(map(_central, entries))
    sink.write(b"".join([*collected, central, _end(len(entries), position, len(central))]))


def archive_length(records: Iterable[tuple[str, int]]) -> int:
    """Return the length of the file that `write_archive` makes of records, given their names and lengths."""
    entries: list[_Entry] = []
    position = 0
    for name, size in (*records, ("byteorder", len(sys.byteorder)), ("version", 2)):
        entry = _Entry(f"{FOLDER}/{name}".encode(), 0, size, position)
        entries.append(entry)
        position += len(_local_header(entry)) + size
    central = sum(len(_central(entry)) for entry in entries)
    return position + central + len(_end(len(entries), position, central))


def _header(name: str, data: bytes | memoryview, position: int) -> tuple[bytes, _Entry]:
    """Return the header of a record that begins at `position` in the zip file, and its directory entry."""
    size = len(data)
    crc = zlib.crc32(data) if size <= CHECKED else 0
    entry = _Entry(f"{FOLDER}/{name}".encode(), crc, size, position)
    return _local_header(entry), entry


def _local_header(entry: _Entry) -> bytes:
    """Return the header of a record, with an extra field that aligns the data after it."""
    size = entry.size
    extra = struct.pack("<2H2Q", _ZIP_64, 16, size, size) if size >= _MAX_32 else b""
    padding = -(entry.offset + _LOCAL.size + len(entry.name) + len(extra) + 4) % ALIGNMENT
    extra += struct.pack("<2H", _PADDING, padding) + bytes(padding)
    low, flags_and_time = min(size, _MAX_32), (0, 0, 0)  # a larger size is in the extra field
    lengths = len(entry.name), len(extra)
    fixed = _LOCAL.pack(b"PK\3\4", _VERSION_64, *flags_and_time, _EPOCH, entry.crc, low, low, *lengths)
    return fixed + entry.name + extra


def _central(entry: _Entry) -> bytes:
    """Return the entry of a record in the central directory; numbers above 32 bits go to an extra field."""
    large = [number for number in (entry.size, entry.size, entry.offset) if number >= _MAX_32]
    extra = struct.pack(f"<2H{len(large)}Q", _ZIP_64, 8 * len(large), *large) if large else b""
    size = min(entry.size, _MAX_32)
    versions, flags_and_time = (_VERSION_64, _VERSION_64), (0, 0, 0)
    lengths, attributes = (len(entry.name), len(extra)), (0, 0, 0, 0)
    begin = b"PK\1\2", *versions, *flags_and_time, _EPOCH, entry.crc, size, size
    fixed = _CENTRAL.pack(*begin, *lengths, *attributes, min(entry.offset, _MAX_32))
    return fixed + entry.name + extra


def _end(count: int, start: int, size: int) -> bytes:
    """Return the end of a zip file with `count` records, after its central directory of `size` bytes."""
    end = _END.pack(b"PK\5\6", 0, 0, min(count, _MAX_16), min(count, _MAX_16), size, min(start, _MAX_32), 0)
    if count < _MAX_16 and start < _MAX_32:
        return end
    wide = _END_64.pack(
        b"PK\6\6", _END_64.size - 12, _VERSION_64, _VERSION_64, 0, 0, count, count, size, start
    )
    return wide + _LOCATOR_64.pack(b"PK\6\7", 0, start + size, 1) + end
