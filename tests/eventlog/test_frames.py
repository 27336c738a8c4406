"""A log of damaged and overlapping frames: every whole record is found, in linear time."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from pathlib import Path
from struct import Struct
from time import process_time
from zlib import crc32

import msgspec
import pytest

from eventloop import read_events
from eventloop.eventlog.format import HEADER, MARK
from eventloop.events.run import Run
from eventloop.writers import EventLogWriter

HEAD = Struct("<4sII")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "events.evl"


def record(sequence: int, text: bytes = b"") -> bytes:
    """The frame of an event, as the format describes it."""
    body = {"event": "image_logged", "name": str(sequence), "data": text, "shape": [len(text), 1, 1]}
    payload = msgspec.msgpack.encode(["image_logged", sequence, 1.5, 0, body])
    return HEAD.pack(MARK, len(payload), crc32(payload, len(payload))) + payload


def damaged(length: int) -> bytes:
    """The head of a frame with another checksum."""
    return HEAD.pack(MARK, length, 1)


def by_definition(log: bytes) -> list[int]:
    """The sequence numbers of the whole records, found by a checksum at every byte."""
    found, at = [], len(HEADER)
    while at + HEAD.size <= len(log):
        mark, length, checksum = HEAD.unpack_from(log, at)
        payload = log[at + HEAD.size : at + HEAD.size + length] if mark == MARK else b""
        whole = 0 < length == len(payload) and crc32(payload, length) == checksum
        if whole:
            found.append(msgspec.msgpack.decode(payload)[1])
        at += HEAD.size + length if whole else 1
    return found


def only_damaged(size: int) -> bytes:
    """A log in which each frame's length is the rest of the file, and each checksum is wrong."""
    count = size // HEAD.size
    return HEADER + b"".join(damaged(HEAD.size * left) for left in range(count - 1, -1, -1))


def between_whole_ones(size: int) -> bytes:
    """A log in which such a frame follows every whole record."""
    whole = record(0)
    count = size // (len(whole) + HEAD.size)
    rest = range(count - 1, -1, -1)
    return HEADER + b"".join(whole + damaged((len(whole) + HEAD.size) * left) for left in rest)


def random_log(seed: int) -> bytes:
    """A log with flipped bits, in which records of many sizes hold other records, whole, torn or damaged."""
    rng = random.Random(seed)
    parts = [HEADER]
    for number in range(60):
        inner = record(1000 + number, rng.randbytes(rng.choice([0, 40, 3000])))
        held = rng.choice([b"", inner, inner[: len(inner) // 2], damaged(5000), rng.randbytes(100_000)])
        parts.append(rng.choice([record(number, held)] * 3 + [damaged(rng.randrange(1, 200_000)), held]))
    log = bytearray(b"".join(parts))
    for _ in range(rng.choice([0, 3, 30])):
        log[rng.randrange(len(HEADER), len(log))] ^= 1 << rng.randrange(8)
    return bytes(log)


@pytest.mark.representative(4)
@pytest.mark.parametrize("seed", range(12))
def test_every_whole_record_behind_damage_is_found(path: Path, seed: int) -> None:
    """Records are those that a checksum at every byte finds, and the next run continues behind the last one."""
    log = random_log(seed)
    path.write_bytes(log)

    found = [each.sequence for each in read_events(path, on_torn="ignore")]
    writer = EventLogWriter()
    writer.open(Run(work_dir=str(path.parent)))
    writer.close()

    assert found == by_definition(log)
    assert by_definition(path.read_bytes())[: len(found)] == found
    assert by_definition(path.read_bytes())[-1] == found[-1] + 1


def read(path: Path) -> None:
    for _ in read_events(path, on_torn="ignore"):
        pass


def append(path: Path) -> None:
    writer = EventLogWriter()
    writer.open(Run(work_dir=str(path.parent)))
    writer.close()


@pytest.mark.parametrize("use", [read, append])
@pytest.mark.parametrize("log", [only_damaged, between_whole_ones])
def test_damage_costs_linear_time(
    path: Path, caplog: pytest.LogCaptureFixture, log: Callable[[int], bytes], use: Callable[[Path], None]
) -> None:
    """A log of frames that overlap costs about four times the CPU time if it is four times as large."""
    caplog.set_level(logging.CRITICAL)

    def seconds(size: int) -> float:
        path.write_bytes(log(size))
        began = process_time()
        use(path)
        return process_time() - began

    seconds(1000)
    small = min(seconds(60_000) for _ in range(3))
    assert seconds(240_000) < 9 * small  # the quadratic one takes sixteen times as long
