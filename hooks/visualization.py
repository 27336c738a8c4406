"""A hook that sends images of a model's inputs or outputs to the writers."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from eventloop.data.loader_info import of_loader
from eventloop.events import (
    AfterTestEpoch,
    AfterTestIter,
    AfterValEpoch,
    AfterValIter,
    HistogramLogged,
    ImageLogged,
)
from eventloop.hooks.hook import Hook
from eventloop.state.sharded import refuse_sharded
from eventloop.util.checks import positive

if TYPE_CHECKING:
    from eventloop.training.trainer import Trainer

EvalIter = AfterValIter | AfterTestIter
Draw = Callable[["Trainer", EvalIter], Mapping[str, Any]]

CHANNELS = (1, 3, 4)
PADDING = 2
"""Pixels between the images of a grid, as in torchvision's `make_grid`."""


class VisualizationHook(Hook):
    """Draw images in validations and tests, and send them to the writers as `image_logged`.

        def draw(trainer, event):
            images, _ = trainer.batch
            return {"input": images[0], "mask": trainer.outputs["preds"][0].argmax(0).to(torch.uint8) * 80}

        VisualizationHook(interval=50, draw=draw)

    An image is named `<name>/<batch_idx>`, so a writer can show it over several validations, and
    `<loader>/<name>/<batch_idx>` if there are several loaders. Nothing is drawn if no writer takes images.
    Images are copied from a GPU without waiting, and encoded in the background.

    Args:
        interval: draw the first batch of each pass, and then every `interval`-th.
        draw: a function `(trainer, event) -> {name: image}`. An image is a tensor or array, uint8 or bool, or
            floating point in [0, 1]. Its shape is (height, width), (channels, height, width), (height, width,
            channels) with 1, 3 or 4 channels, or a batch (samples, ...) of one of the last two, which becomes
            a grid. If both layouts fit, a tensor has its channels first and an array last. By default the
            inputs of the batch are drawn, their values stretched to [0, 1].
        max_images: the most samples of a batch to draw.

    Raises:
        TypeError, ValueError: `interval` or `max_images` is not a positive int, or `draw` is not a function.
    """

    def __init__(self, interval: int = 50, draw: Draw | None = None, max_images: int = 16) -> None:
        positive("interval", interval)
        positive("max_images", max_images)
        if draw is not None and not callable(draw):
            raise TypeError(f"draw must be a function (trainer, event) -> {{name: image}}, got {draw!r}")
        self._interval, self._max_images = interval, max_images
        self._draw: Draw = draw if draw is not None else self._draw_inputs

    def after_val_iter(self, trainer: Trainer, event: AfterValIter) -> None:
        """Draw images of a validation batch, at the interval.

        Raises:
            TypeError, ValueError: `draw` did not return a mapping of images.
        """
        self._put(trainer, event)

    def after_test_iter(self, trainer: Trainer, event: AfterTestIter) -> None:
        """Draw images of a test batch, at the interval.

        Raises:
            TypeError, ValueError: `draw` did not return a mapping of images.
        """
        self._put(trainer, event)

    def after_val_epoch(self, trainer: Trainer, event: AfterValEpoch) -> None:
        """Send the images of the validation to the background, without waiting for the logger."""
        _post(trainer)

    def after_test_epoch(self, trainer: Trainer, event: AfterTestEpoch) -> None:
        """Send the images of the test to the background, without waiting for the logger."""
        _post(trainer)

    def _put(self, trainer: Trainer, event: EvalIter) -> None:
        if event.batch_idx % self._interval or not trainer.bus.wants(ImageLogged):
            return
        with torch.no_grad():
            drawn = self._draw(trainer, event)
            if not isinstance(drawn, Mapping):
                raise TypeError(f"draw must return a mapping {{name: image}}, got {type(drawn).__name__}")
            for name, image in drawn.items():
                pixels = as_pixels(name, image, self._max_images)
                trainer.metrics.put_image(of_loader(event.loader, f"{name}/{event.batch_idx}"), pixels)

    def _draw_inputs(self, trainer: Trainer, event: EvalIter) -> dict[str, torch.Tensor]:
        images = _find_images(trainer.batch)
        if images is None:
            raise ValueError(
                "VisualizationHook draws the inputs, and found no tensor (samples, channels, height, width) "
                f"with 1, 3 or 4 channels in the batch of {event.mode}: pass draw=..."
            )
        return {"inputs": _stretched(images[: self._max_images])}


def as_pixels(name: str, image: Any, max_images: int = 16) -> torch.Tensor:
    """Convert an image, or a batch of images, from `draw` into one image on the same device.

    Args:
        name: the image's name, for the messages.
        image: a tensor or array of a shape that `VisualizationHook` explains.
        max_images: a batch becomes a grid of its first `max_images` images.

    Returns:
        A uint8 tensor (channels, height, width).

    Raises:
        TypeError: the image is not a tensor or array, or has complex numbers.
        ValueError: the image has another shape, or no pixel.
    """
    tensor, channels_first = _as_tensor(name, image)
    axis = _channel_axis(tensor.shape[-3:], channels_first=channels_first) if tensor.ndim in (3, 4) else None
    if tensor.ndim == 2:
        tensor = tensor.unsqueeze(0)
    elif axis is not None:
        tensor = tensor.movedim(axis, -3)
    else:
        raise ValueError(
            f"image {name!r} must be of shape (height, width), (channels, height, width) or (height, width, "
            f"channels) with 1, 3 or 4 channels, or a batch of these; got {tuple(tensor.shape)}"
        )
    if not tensor.numel():
        raise ValueError(f"image {name!r} has no pixels, its shape is {tuple(tensor.shape)}")
    tensor = _as_bytes(tensor[:max_images] if tensor.ndim == 4 else tensor)
    return _grid(tensor) if tensor.ndim == 4 else tensor


def _as_tensor(name: str, image: Any) -> tuple[torch.Tensor, bool]:
    """Convert an image to a tensor; also return whether its channels come first if the shape leaves it open.

    They do in a tensor, and not in a NumPy array.
    """
    if isinstance(image, np.ndarray) and image.dtype.kind in "biuf":
        # copied: torch takes no negative strides (image[..., ::-1]) and no read-only memory
        return torch.from_numpy(np.array(image, order="C")), False
    refuse_sharded(f"image {name!r}", image)
    if isinstance(image, torch.Tensor) and not image.is_complex():
        return image.detach(), True
    got = f"{image.dtype} of shape {tuple(image.shape)}" if hasattr(image, "dtype") else repr(image)
    raise TypeError(f"image {name!r} must be a tensor or an array of numbers, got {got}")


def _channel_axis(shape: torch.Size, *, channels_first: bool) -> int | None:
    """Return the axis of the channels, -3 or -1; None if neither has 1, 3 or 4 entries."""
    fits = [axis for axis in (-3, -1) if shape[axis] in CHANNELS]
    if not fits:
        return None
    return fits[0 if channels_first else -1]


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.dtype == torch.uint8:
        return tensor
    if tensor.dtype == torch.bool:
        return tensor.to(torch.uint8) * 255
    if tensor.is_floating_point():
        tensor = torch.nan_to_num(tensor.float()) * 255.0 + 0.5
    return tensor.clamp(0, 255).to(torch.uint8)


def _grid(images: torch.Tensor) -> torch.Tensor:
    """Tile (samples, channels, height, width) to a grid as square as possible, on black."""
    count, channels, height, width = images.shape
    columns = math.ceil(math.sqrt(count))
    rows = math.ceil(count / columns)
    cell_height, cell_width = height + PADDING, width + PADDING
    grid = images.new_zeros(channels, rows * cell_height - PADDING, columns * cell_width - PADDING)
    for i in range(count):
        top, left = i // columns * cell_height, i % columns * cell_width
        grid[:, top : top + height, left : left + width] = images[i]
    return grid


def _stretched(images: torch.Tensor) -> torch.Tensor:
    """Scale each image of a batch from its least and greatest value to [0, 1]; return uint8 unchanged."""
    if images.dtype == torch.uint8:
        return images
    images = images.float()
    least, most = images.amin((1, 2, 3), keepdim=True), images.amax((1, 2, 3), keepdim=True)
    return (images - least) / (most - least).clamp_min(1e-12)


def _find_images(batch: Any) -> torch.Tensor | None:
    if isinstance(batch, torch.Tensor):
        return batch if batch.ndim == 4 and batch.shape[1] in CHANNELS and batch.numel() else None
    items = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, list | tuple) else ()
    found = (_find_images(item) for item in items)
    return next((images for images in found if images is not None), None)


def _post(trainer: Trainer) -> None:
    """Send the images of a pass to the background, without waiting for the logger's next interval."""
    if trainer.metrics.pending_media:
        trainer.bus.post(trainer.metrics.collect_media(trainer.place), ImageLogged, HistogramLogged)
