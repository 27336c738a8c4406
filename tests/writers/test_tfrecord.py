"""The record format, against TensorBoard's own implementation of it."""

from __future__ import annotations

import io
import random

import pytest
from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import crc32c as tensorboards_crc32c
from tensorboard.summary.writer.record_writer import RecordWriter

from eventloop.writers.tfrecord import BLOCK, crc32c, frame


def test_the_check_value_of_the_standard() -> None:
    """CRC-32C of "123456789" is e3069283 (RFC 3720)."""
    assert crc32c(b"123456789") == 0xE3069283


@pytest.mark.parametrize(
    "size", [0, 1, 2, 3, 4, 5, 100, BLOCK - 1, BLOCK, BLOCK + 1, BLOCK + 3, 3 * BLOCK + 7]
)
def test_checksums_are_those_of_tensorboard(size: int) -> None:
    """Also around the borders of a block, where one partial result enters the next."""
    data = random.Random(size).randbytes(size)

    assert crc32c(data) == tensorboards_crc32c(data)


def test_records_are_those_of_tensorboard() -> None:
    """A framed record is byte for byte what tensorboard's RecordWriter writes."""
    file = io.BytesIO()

    RecordWriter(file).write(b"some data")

    assert frame(b"some data") == file.getvalue()
