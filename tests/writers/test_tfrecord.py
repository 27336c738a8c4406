"""The record format, against TensorBoard's own implementation of it."""

from __future__ import annotations

import io
import random
import struct

import google_crc32c
import pytest
from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import masked_crc32c
from tensorboard.summary.writer.record_writer import RecordWriter

from eventloop.writers.tfrecord import frame


def test_the_checksum_is_the_one_in_c() -> None:
    """The library has its C part here: its fallback in Python would hold the interpreter as TensorBoard's does."""
    assert google_crc32c.implementation == "c"


@pytest.mark.parametrize("size", [0, 1, 2, 3, 4, 5, 100, 1023, 1024, 1025, 3079])
def test_records_are_those_of_tensorboard(size: int) -> None:
    """A framed record is byte for byte what tensorboard's RecordWriter writes."""
    data, file = random.Random(size).randbytes(size), io.BytesIO()

    RecordWriter(file).write(data)

    assert frame(data) == file.getvalue()
    assert struct.unpack("<I", frame(data)[-4:]) == (masked_crc32c(data),)
