"""Copy images and histograms to the host without blocking the training thread, and create their events.

`EventStorage.put_image` and `put_histogram` add a `Medium` to the `PendingMedia` of the storage.
`EventStorage.collect_media` returns them as a `MediaPacket`, whose events the background creates.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from math import inf
from typing import Any, Literal

import msgspec
import numpy as np
import torch

from eventloop.events import Event, HistogramLogged, ImageLogged
from eventloop.metrics.rows import Position, RunLimits, UnreadableValue
from eventloop.metrics.scalar_value import unreadable_kind
from eventloop.state.sharded import refuse_sharded

logger = logging.getLogger("eventloop")

Kind = Literal["image", "histogram"]
"""The kinds of media, as errors name them."""

MEDIA_LIMIT = 256
"""The largest number of images and histograms that wait for `collect_media`."""
WARNED_LIMIT = 256
"""The largest number of names of images for which a warning about values outside of [0, 1] is logged."""


class Medium(msgspec.Struct, frozen=True):
    """One image or histogram; the copy from the device to its `tensor` may still be in progress."""

    kind: Kind
    name: str
    position: Position
    tensor: torch.Tensor

    def event(self, limits: RunLimits, warned: set[str]) -> Event:
        """Return the `image_logged` or `histogram_logged` event; the copy to the host must be complete.

        Args:
            limits: the limits of the run, which are fields of the event.
            warned: names of images for which a warning was logged; the name of this image may be added.
        """
        position = self.position
        event_type: type[ImageLogged | HistogramLogged]
        if self.kind == "image":
            height_first = np.moveaxis(self._pixels(warned), 0, -1)  # (height, width, channels)
            event_type, array = ImageLogged, np.ascontiguousarray(height_first)
        else:
            event_type, array = HistogramLogged, self.tensor.numpy()
        return event_type(
            mode=position.mode,
            iter=position.iteration,
            step=position.step,
            epoch=position.epoch,
            name=self.name,
            data=array.tobytes(),
            shape=array.shape,
            dtype=str(array.dtype),
            max_iters=limits.max_iters,
            max_epochs=limits.max_epochs,
        )

    def _pixels(self, warned: set[str]) -> Any:
        """Return the image as a uint8 array; warn once per name if the image has floats outside of [0, 1]."""
        if self.tensor.dtype == torch.uint8:
            return self.tensor.numpy()
        image = np.nan_to_num(self.tensor.float().numpy(), nan=0.0, posinf=inf, neginf=-inf)
        if self.name not in warned and _is_clipped(image) and len(warned) < WARNED_LIMIT:
            warned.add(self.name)
            logger.warning(
                "image %r of iteration %d has values from %.4g to %.4g: expected floats from 0 to 1, others "
                "are clipped, as SummaryWriter does. Put an image in 0..255 as uint8 or divided by 255, and "
                "scale any other to [0, 1]; this warning comes once for a name",
                self.name,
                self.position.iteration,
                image.min(),
                image.max(),
            )
        return (np.clip(image, 0.0, 1.0) * 255.0 + 0.5).astype(np.uint8)


class MediaPacket:
    """Create the events of the images and histograms of one logging interval, in the background.

    It is a `Deferred`, which is passed to `Bus.post`.

    Args:
        media: the images and histograms.
        copied: CUDA events recorded after the copies to the host.
        limits: the limits of the run, which are fields of the events.
        warned: names of images for which a warning was logged; `events` adds to this set.
        count_unreadable: called with the images and histograms that cannot be read.
    """

    def __init__(
        self,
        media: list[Medium],
        copied: list[torch.cuda.Event],
        limits: RunLimits,
        warned: set[str],
        count_unreadable: Callable[[list[UnreadableValue]], None],
    ) -> None:
        self._media = media
        self._copied = copied
        self._limits = limits
        self._warned = warned
        self._count_unreadable = count_unreadable

    def __repr__(self) -> str:
        return f"MediaPacket({', '.join(repr(medium.name) for medium in self._media[:5])})"

    def ready(self) -> bool:
        """Return whether all copies to the host are complete."""
        return all(event.query() for event in self._copied)

    def events(self) -> list[Event]:
        """Return the events in the order in which their tensors were put, after waiting for the device."""
        for event in self._copied:
            event.synchronize()
        events: list[Event] = []
        for medium in self._media:
            try:
                events.append(medium.event(self._limits, self._warned))
            except Exception as error:  # the other events are still returned
                self._count_unreadable([UnreadableValue(medium.name, medium.position.iteration, error)])
        return events


class PendingMedia:
    """Hold the images and histograms of a storage until they are collected."""

    def __init__(self) -> None:
        self._media: list[Medium] = []
        self._devices: set[torch.device] = set()  # the CUDA devices from which `_media` are copied
        self._warned: set[str] = set()  # names of images for which a warning was logged

    def __len__(self) -> int:
        return len(self._media)

    def add(self, medium: Medium, source: object) -> None:
        """Append an image or histogram; `source` is the tensor or array that is copied to `medium.tensor`."""
        self._media.append(medium)
        if isinstance(source, torch.Tensor) and source.is_cuda:
            self._devices.add(source.device)

    @property
    def crowded(self) -> bool:
        """Return whether more than `MEDIA_LIMIT` images and histograms wait."""
        return len(self._media) > MEDIA_LIMIT

    def drop_excess(self) -> None:
        """Drop the oldest images and histograms, with a warning, if more than `MEDIA_LIMIT` wait."""
        if self.crowded:
            half = MEDIA_LIMIT // 2
            logger.warning(
                "the %d oldest of %d images and histograms are dropped, as they are not collected: add a "
                "LoggerHook",
                half,
                len(self._media),
            )
            del self._media[:half]

    def pop_packet(
        self, limits: RunLimits, count_unreadable: Callable[[list[UnreadableValue]], None]
    ) -> MediaPacket:
        """Remove all waiting images and histograms, and return them as a packet.

        The packet is ready when the devices have completed all work that is queued now, including the copies.

        Args:
            limits: the limits of the run, which are fields of the events.
            count_unreadable: called with the images and histograms that cannot be read.
        """
        media, self._media = self._media, []
        devices, self._devices = self._devices, set()
        copied = []
        for device in devices:
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(device))
            copied.append(event)
        return MediaPacket(media, copied, limits, self._warned, count_unreadable)


def image_of(name: str, image: Any) -> torch.Tensor:
    """Check an image, start its copy to the host, and return the copy.

    Raises:
        TypeError: the image is not a tensor or array of uint8 or floating point.
        ValueError: its shape is not (1, 3 or 4 channels, height, width).
    """
    tensor = _tensor("image", name, image)
    if tensor.ndim != 3 or tensor.shape[0] not in (1, 3, 4):
        raise ValueError(
            f"image {name!r} must be of shape (channels, height, width) with 1, 3 or 4 channels, "
            f"got {tuple(tensor.shape)}"
        )
    if tensor.dtype != torch.uint8 and not tensor.is_floating_point():
        raise TypeError(
            f"image {name!r} must be uint8 in [0, 255] or floating point in [0, 1], got {tensor.dtype}"
        )
    return to_host(tensor)


def histogram_of(name: str, values: Any) -> torch.Tensor:
    """Check the values of a histogram, start their copy to the host, and return the copy.

    The copy is a float32 tensor of one dimension.

    Raises:
        TypeError: `values` is not a tensor or array of real numbers.
        ValueError: `values` is empty.
    """
    tensor = _tensor("histogram", name, values)
    if not tensor.numel():
        raise ValueError(f"histogram {name!r} has no values")
    return to_host(tensor.reshape(-1).float())


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy of a tensor on the host.

    From CUDA the copy is asynchronous: into pinned memory, on the current stream.
    """
    if not tensor.is_cuda:
        return tensor.detach().to("cpu", copy=True).contiguous()
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor.detach(), non_blocking=True)


def _tensor(kind: Kind, name: str, value: Any) -> torch.Tensor:
    """Return a tensor or array as a tensor; raise a TypeError unless its values can be read as numbers."""
    if isinstance(value, np.ndarray):
        value = _tensor_of_array(kind, name, value)
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{kind} {name!r} must be a tensor or an array, got {value!r}")
    refuse_sharded(f"{kind} {name!r}", value)
    if reason := unreadable_kind(value):
        raise TypeError(f"{kind} {name!r} must be of real numbers, got {reason}")
    return value


def _tensor_of_array(kind: Kind, name: str, array: Any) -> torch.Tensor:
    """Return an array as a tensor, which shares the array's memory if torch supports that.

    An array that is read-only, has negative strides (`image[::-1]`) or another byte order is copied.
    """
    try:
        if array.flags.writeable:  # torch logs a warning about a read-only array
            return torch.from_numpy(array)
    except (TypeError, ValueError):
        pass
    try:
        return torch.from_numpy(array.astype(array.dtype.newbyteorder("="), order="C"))
    except TypeError:
        raise TypeError(f"{kind} {name!r} must be of real numbers, got an array of {array.dtype}") from None


def _is_clipped(image: Any) -> bool:
    """Return whether clipping values to [0, 1] changes a pixel after rounding to uint8."""
    return bool(image.size and (image.min() * 255 < -0.5 or image.max() * 255 >= 255.5))
