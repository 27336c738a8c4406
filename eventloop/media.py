"""Images and histograms on their way from the training thread to the writers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch

from eventloop.events import Event, HistogramLogged, ImageLogged
from eventloop.packet import Moment, Place

Kind = Literal["image", "histogram"]


@dataclass(frozen=True, slots=True)
class Medium:
    """One image or one histogram, its tensor on the host or on its way there."""

    kind: Kind
    name: str
    moment: Moment
    tensor: torch.Tensor

    def event(self, place: Place) -> Event:
        """What writers are told. The copy must have ended."""
        moment = self.moment
        array = self.tensor.numpy()
        if self.kind == "image":
            array = np.ascontiguousarray(np.moveaxis(_as_bytes(array), 0, -1))
            return ImageLogged(
                mode=moment.mode, iter=moment.iteration, step=moment.step, epoch=moment.epoch, name=self.name,
                data=array.tobytes(), shape=array.shape, dtype="uint8",
                max_iters=place.max_iters, max_epochs=place.max_epochs,
            )  # fmt: skip
        return HistogramLogged(
            mode=moment.mode, iter=moment.iteration, step=moment.step, epoch=moment.epoch, name=self.name,
            data=array.tobytes(), shape=array.shape, dtype=str(array.dtype),
            max_iters=place.max_iters, max_epochs=place.max_epochs,
        )  # fmt: skip


class MediaPacket:
    """Images and histograms of an interval; a `Deferred` of the background loop.

    Args:
        copied: CUDA events behind the copies that are under way.
    """

    def __init__(self, media: list[Medium], copied: list[torch.cuda.Event], place: Place) -> None:
        self._media = media
        self._copied = copied
        self._place = place

    def ready(self) -> bool:
        """True when everything is on the host."""
        return all(event.query() for event in self._copied)

    def events(self) -> list[Event]:
        """The events, in the order their tensors were put; waits for the device if need be."""
        for event in self._copied:
            event.synchronize()
        return [medium.event(self._place) for medium in self._media]


def image_of(name: str, image: Any) -> torch.Tensor:
    """Check an image and start its way to the host.

    Raises:
        TypeError: it is no tensor or array, or its values are neither uint8 nor floating point.
        ValueError: it is not (1 or 3 or 4, height, width).
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
    """Check the values of a histogram and start their way to the host, as float32 in one dimension.

    Raises:
        TypeError: it is no tensor or array of numbers.
        ValueError: it is empty.
    """
    tensor = _tensor("histogram", name, values)
    if tensor.is_complex():
        raise TypeError(f"histogram {name!r} must be of real numbers, got {tensor.dtype}")
    if not tensor.numel():
        raise ValueError(f"histogram {name!r} has no values")
    return to_host(tensor.reshape(-1).float())


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """A copy on the host. From CUDA it goes to pinned memory on the current stream, and is not waited for."""
    if not tensor.is_cuda:
        return tensor.detach().to("cpu", copy=True).contiguous()
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor.detach(), non_blocking=True)


def _tensor(what: str, name: str, value: Any) -> torch.Tensor:
    if isinstance(value, np.ndarray):
        value = torch.from_numpy(value)
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{what} {name!r} must be a tensor or an array, got {value!r}")
    return value


def _as_bytes(array: Any) -> Any:
    if array.dtype == np.uint8:
        return array
    return (np.clip(np.nan_to_num(array.astype(np.float32)), 0.0, 1.0) * 255.0 + 0.5).astype(np.uint8)
