"""Payloads of logging events as arrays, and arrays as PNG. Imported by the writers that need numpy and Pillow."""

from __future__ import annotations

import io
from math import prod

import numpy as np
import numpy.typing as npt
from PIL import Image

from eventloop.events import HistogramLogged, ImageLogged

MODES = {1: "L", 2: "LA", 3: "RGB", 4: "RGBA"}
"""Pillow's name for an image of so many channels."""


def values(event: ImageLogged | HistogramLogged) -> npt.NDArray[np.generic]:
    """The array of an event.

    Raises:
        TypeError: numpy has no such dtype.
        ValueError: the bytes are not those of an array of that shape.
    """
    dtype = np.dtype(event.dtype)
    if len(event.data) != prod(event.shape) * dtype.itemsize:
        raise ValueError(
            f"{event.name!r} has {len(event.data)} bytes, which is no array of shape {event.shape} and dtype {dtype}"
        )
    return np.frombuffer(event.data, dtype).reshape(event.shape)


def pixels(event: ImageLogged) -> npt.NDArray[np.uint8]:
    """The image as bytes of shape (height, width, channels).

    uint8 is taken as it is. Floats are intensities from 0 to 1, as in PyTorch's `add_image`: what is beyond is cut,
    NaN is black. In a bool image True is white.

    Raises:
        TypeError: another dtype.
        ValueError: another shape, or no pixel.
    """
    image = values(event)
    if image.ndim == 2:
        image = image[:, :, None]
    if image.ndim != 3 or image.shape[2] not in MODES or not image.size:
        raise ValueError(
            f"image {event.name!r} must have the shape (height, width, channels) with 1 to 4 channels, got {event.shape}"
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
    """A PNG file of an image of shape (height, width, channels)."""
    height, width, channels = image.shape
    buffer = io.BytesIO()
    Image.frombytes(MODES[channels], (width, height), image.tobytes()).save(buffer, "PNG")
    return buffer.getvalue()
