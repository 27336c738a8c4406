"""Copy images and histograms to the host without blocking the training thread, and create their events.

`EventStorage` puts each as a `Medium`; `collect_media` posts a `MediaPacket`, and the background calls its
`events`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from typing import Any, Literal

import numpy as np
import torch

from eventloop.events import Event, HistogramLogged, ImageLogged
from eventloop.metrics.rows import Moment, Place, Unread
from eventloop.metrics.scalar_value import unreadable_kind
from eventloop.state.sharded import refuse_sharded

logger = logging.getLogger("eventloop")

Kind = Literal["image", "histogram"]

MEDIA_LIMIT = 256
"""The largest number of images and histograms that wait for `collect_media`."""
WARNED_LIMIT = 256
"""The largest number of images, by name, for which a warning about their range of values is logged."""


@dataclass(frozen=True, slots=True)
class Medium:
    """One image or histogram, with its tensor on the host; the copy to the host may still be in progress."""

    kind: Kind
    name: str
    moment: Moment
    tensor: torch.Tensor

    def event(self, place: Place, warned: set[str]) -> Event:
        """Return the event for writers; the copy to the host must be complete."""
        moment = self.moment
        kind: type[ImageLogged | HistogramLogged]
        if self.kind == "image":
            kind, array = ImageLogged, np.ascontiguousarray(np.moveaxis(self._pixels(warned), 0, -1))
        else:
            kind, array = HistogramLogged, self.tensor.numpy()
        return kind(
            mode=moment.mode,
            iter=moment.iteration,
            step=moment.step,
            epoch=moment.epoch,
            name=self.name,
            data=array.tobytes(),
            shape=array.shape,
            dtype=str(array.dtype),
            max_iters=place.max_iters,
            max_epochs=place.max_epochs,
        )

    def _pixels(self, warned: set[str]) -> Any:
        """Return the image as a uint8 array; warn once per name about floats outside of [0, 1]."""
        if self.tensor.dtype == torch.uint8:
            return self.tensor.numpy()
        image = np.nan_to_num(self.tensor.float().numpy(), nan=0.0, posinf=inf, neginf=-inf)
        if self.name not in warned and _is_cut(image) and len(warned) < WARNED_LIMIT:
            warned.add(self.name)
            logger.warning(
                "image %r of iteration %d has values from %.4g to %.4g: expected floats from 0 to 1, others "
                "are clipped, as SummaryWriter does. Put an image in 0..255 as uint8 or divided by 255, and "
                "scale any other to [0, 1]; this warning comes once for a name",
                self.name,
                self.moment.iteration,
                image.min(),
                image.max(),
            )
        return (np.clip(image, 0.0, 1.0) * 255.0 + 0.5).astype(np.uint8)


class MediaPacket:
    """The images and histograms of one interval; a `Deferred`, handled in the background.

    Args:
        media: the images and histograms.
        copied: CUDA events recorded after the copies to the host.
        place: the limits of the run, for the events.
        warned: names of images for which a warning was logged; the set is shared and grows.
        count_unreadable: called with the values that cannot be read.
    """

    def __init__(
        self,
        media: list[Medium],
        copied: list[torch.cuda.Event],
        place: Place,
        warned: set[str],
        count_unreadable: Callable[[list[Unread]], None],
    ) -> None:
        self._media = media
        self._copied = copied
        self._place = place
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
                events.append(medium.event(self._place, self._warned))
            except Exception as error:  # the other events are still returned
                self._count_unreadable([Unread(medium.name, medium.moment.iteration, error)])
        return events


class PendingMedia:
    """The images and histograms that wait to be collected, in the order in which they were put."""

    def __init__(self) -> None:
        self._media: list[Medium] = []
        self._devices: set[torch.device] = set()
        self._warned: set[str] = set()  # names of images that were out of range

    def __len__(self) -> int:
        return len(self._media)

    def add(self, medium: Medium, source: object) -> None:
        """Append an image or histogram whose tensor is copied from `source`."""
        self._media.append(medium)
        if isinstance(source, torch.Tensor) and source.is_cuda:
            self._devices.add(source.device)

    @property
    def crowded(self) -> bool:
        """Return whether more than `MEDIA_LIMIT` images and histograms wait."""
        return len(self._media) > MEDIA_LIMIT

    def make_room(self) -> None:
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

    def pop_packet(self, place: Place, count_unreadable: Callable[[list[Unread]], None]) -> MediaPacket:
        """Remove all waiting images and histograms, and return them as a packet.

        The packet is ready when the devices have done all work that is queued on them now, including the
        copies.
        """
        media, self._media = self._media, []
        devices, self._devices = self._devices, set()
        copied = []
        for device in devices:
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(device))
            copied.append(event)
        return MediaPacket(media, copied, place, self._warned, count_unreadable)


def image_of(name: str, image: Any) -> torch.Tensor:
    """Check an image and start its copy to the host."""
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
    """Check the values of a histogram and start their copy to the host, as a flat float32 tensor.

    Raises:
        TypeError: `values` is not a tensor or array of real numbers.
        ValueError: `values` is empty.
    """
    tensor = _tensor("histogram", name, values)
    if not tensor.numel():
        raise ValueError(f"histogram {name!r} has no values")
    return to_host(tensor.reshape(-1).float())


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy on the host; from CUDA it is asynchronous, into pinned memory, on the current stream."""
    if not tensor.is_cuda:
        return tensor.detach().to("cpu", copy=True).contiguous()
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor.detach(), non_blocking=True)


def _tensor(what: str, name: str, value: Any) -> torch.Tensor:
    if isinstance(value, np.ndarray):
        value = _of_array(what, name, value)
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{what} {name!r} must be a tensor or an array, got {value!r}")
    refuse_sharded(f"{what} {name!r}", value)
    if kind := unreadable_kind(value):
        raise TypeError(f"{what} {name!r} must be of real numbers, got {kind}")
    return value


def _of_array(what: str, name: str, array: Any) -> torch.Tensor:
    """Return an array as a tensor, which shares the array's memory if torch supports that.

    An array that is read-only, has negative strides (`image[::-1]`) or another byte order is copied.
    """
    try:
        if array.flags.writeable:  # else torch warns
            return torch.from_numpy(array)
    except (TypeError, ValueError):
        pass
    try:
        return torch.from_numpy(array.astype(array.dtype.newbyteorder("="), order="C"))
    except TypeError:
        raise TypeError(f"{what} {name!r} must be of real numbers, got an array of {array.dtype}") from None


def _is_cut(image: Any) -> bool:
    """Return whether values are outside of [0, 1] by more than rounding to bytes would hide."""
    return bool(image.size and (image.min() * 255 < -0.5 or image.max() * 255 >= 255.5))
