"""Convert logged images and histograms to numpy arrays, and images to PNG.

This module imports numpy, so writers of images and histograms import it only when they are constructed.
"""

from __future__ import annotations

import struct
import zlib
from math import prod

import numpy as np
import numpy.typing as npt

from eventloop.events import HistogramLogged, ImageLogged

SIGNATURE = b"\x89PNG\r\n\x1a\n"
"""The first bytes of a PNG file."""
COLOUR_TYPES = {1: 0, 2: 4, 3: 2, 4: 6}
"""The PNG colour type of an image by its number of channels: grey, grey with alpha, RGB, RGB with alpha."""
UP = 2
"""The PNG filter type of a row of pixels that is stored as its difference from the row above."""


def values(event: ImageLogged | HistogramLogged) -> npt.NDArray[np.generic]:
    """Return the values of an image or histogram event as an array, a read-only view of the event's bytes.

    Raises:
        TypeError: the dtype is not one of numpy's real numbers.
        ValueError: the number of bytes does not match shape and dtype.
    """
    dtype = _dtype(event)
    byte_count = prod(event.shape) * dtype.itemsize
    if len(event.data) != byte_count or any(size < 0 for size in event.shape):
        raise ValueError(
            f"{event.name!r} has {len(event.data)} bytes, expected {byte_count} for shape {event.shape} and "
            f"dtype {dtype}"
        )
    return np.frombuffer(event.data, dtype).reshape(event.shape)


def _dtype(event: ImageLogged | HistogramLogged) -> np.dtype[np.generic]:
    """Return the dtype that an event names; raise TypeError if it is not one of real numbers."""
    try:
        dtype = np.dtype(event.dtype)
    except (TypeError, ValueError, SyntaxError):
        dtype = None
    if dtype is None or dtype.kind not in "biuf":
        raise TypeError(f"{event.name!r} must have a numpy dtype of real numbers, got {event.dtype!r}")
    return dtype


def pixels(event: ImageLogged) -> npt.NDArray[np.uint8]:
    """Return an image as a uint8 array of shape (height, width, channels).

    uint8 values are used unchanged. Floats are intensities from 0 to 1, as in PyTorch's `add_image`: values
    outside this range are clipped, NaN is black. In a bool image True is white.

    Raises:
        TypeError: the values are neither uint8, float nor bool.
        ValueError: the shape is not (height, width) or (height, width, 1 to 4 channels), or it is empty.
    """
    image = values(event)
    if image.ndim == 2:
        image = image[:, :, None]
    if image.ndim != 3 or image.shape[2] not in COLOUR_TYPES or not image.size:
        raise ValueError(
            f"image {event.name!r} must have the shape (height, width, channels) with 1 to 4 channels, "
            f"got {event.shape}"
        )
    if image.dtype == np.uint8:
        return image.astype(np.uint8, copy=False)
    if image.dtype == np.bool_:
        return image.astype(np.uint8) * np.uint8(255)
    if not np.issubdtype(image.dtype, np.floating):
        raise TypeError(
            f"image {event.name!r} must be uint8 (0 to 255), float (0 to 1) or bool, got {image.dtype}"
        )
    scaled = np.nan_to_num(image.astype(np.float32), nan=0.0, posinf=1.0, neginf=0.0).clip(0, 1) * 255
    return scaled.round().astype(np.uint8)


def png(image: npt.NDArray[np.uint8]) -> bytes:
    """Encode an image of shape (height, width, channels) as a PNG file.

    `zlib.compress` releases the interpreter lock, so the training thread continues meanwhile.
    """
    height, width, channels = image.shape
    rows = np.full((height, 1 + width * channels), UP, np.uint8)  # each row begins with its filter type
    rows[:, 1:] = np.diff(image.reshape(height, -1), axis=0, prepend=np.uint8(0))
    # 8 bits per channel; 0 for the only compression and filter methods, and for no interlacing
    header = struct.pack(">2I5B", width, height, 8, COLOUR_TYPES[channels], 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(rows.data)), (b"IEND", b""))
    return SIGNATURE + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in chunks
    )
