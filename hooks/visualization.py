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
"""The numbers of channels that an image may have: gray, RGB, and RGB with alpha."""
PADDING = 2
"""Pixels between the images of a grid, as in torchvision's `make_grid`."""


class VisualizationHook(Hook):
    """Draw images in validations and tests, and send them to the writers as `image_logged`.

        def draw(trainer, event):
            images, _ = trainer.batch
            return {"input": images[0], "mask": trainer.outputs["preds"][0].argmax(0).to(torch.uint8) * 80}

        VisualizationHook(interval=50, draw=draw)

    An image is named `<name>/<batch_idx>`, or `<loader>/<name>/<batch_idx>` if there are several loaders, so
    a writer can show the same image over several validations. Nothing is drawn if no writer takes images.
    Images are copied from a GPU without waiting, and encoded in the background.

    Args:
        interval: the number of batches from one drawn batch to the next; the first batch of a pass is drawn.
        draw: a function `(trainer, event) -> {name: image}`. An image is a tensor or array of uint8, bool, or
            floats in [0, 1]. Its shape is (height, width), (channels, height, width) or (height, width,
            channels) with 1, 3 or 4 channels. A batch (samples, ...) of one of the last two is drawn as a
            grid. If a shape can be read in both orders, a tensor has its channels first and an array last. By
            default the inputs of the batch are drawn, with their values scaled to [0, 1].
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
        """Draw the images of a validation batch, at the interval.

        Raises:
            TypeError, ValueError: `draw` did not return a mapping of images.
        """
        self._draw_batch(trainer, event)

    def after_test_iter(self, trainer: Trainer, event: AfterTestIter) -> None:
        """Draw the images of a test batch, at the interval.

        Raises:
            TypeError, ValueError: `draw` did not return a mapping of images.
        """
        self._draw_batch(trainer, event)

    def after_val_epoch(self, trainer: Trainer, event: AfterValEpoch) -> None:
        """Send the images of the validation to the writers."""
        _send_images(trainer)

    def after_test_epoch(self, trainer: Trainer, event: AfterTestEpoch) -> None:
        """Send the images of the test to the writers."""
        _send_images(trainer)

    def _draw_batch(self, trainer: Trainer, event: EvalIter) -> None:
        """Store the images of a batch in the metrics, at the interval and if a writer takes images."""
        if event.batch_idx % self._interval or not trainer.bus.wants(ImageLogged):
            return
        with torch.no_grad():
            images = self._draw(trainer, event)
            if not isinstance(images, Mapping):
                raise TypeError(f"draw must return a mapping {{name: image}}, got {type(images).__name__}")
            for name, image in images.items():
                pixels = as_pixels(name, image, self._max_images)
                trainer.metrics.put_image(of_loader(event.loader, f"{name}/{event.batch_idx}"), pixels)

    def _draw_inputs(self, trainer: Trainer, event: EvalIter) -> dict[str, torch.Tensor]:
        """Return the images among the inputs of a batch as {"inputs": images}; the default of `draw`."""
        images = _find_images(trainer.batch)
        if images is None:
            raise ValueError(
                "VisualizationHook draws the inputs, and found no tensor (samples, channels, height, width) "
                f"with 1, 3 or 4 channels in the batch of {event.mode}: pass draw=..."
            )
        return {"inputs": _scaled(images[: self._max_images])}


def as_pixels(name: str, image: Any, max_images: int = 16) -> torch.Tensor:
    """Convert an image, or a batch of images, from `draw` into one image on the same device.

    Args:
        name: the image's name, for the error messages.
        image: a tensor or array of one of the shapes that `VisualizationHook` lists.
        max_images: the number of images of a batch, from the first on, that the grid shows.

    Returns:
        A uint8 tensor (channels, height, width).

    Raises:
        TypeError: the image is not a tensor or array, or has complex numbers.
        ValueError: the image has another shape, or no pixel.
    """
    tensor = _with_channels_first(name, image)
    if not tensor.numel():
        raise ValueError(f"image {name!r} has no pixels, its shape is {tuple(tensor.shape)}")
    if tensor.ndim == 4:
        return _grid(_as_bytes(tensor[:max_images]))
    return _as_bytes(tensor)


def _with_channels_first(name: str, image: Any) -> torch.Tensor:
    """Convert an image, or a batch of images, to a tensor ([samples,] channels, height, width)."""
    tensor = _as_tensor(name, image)
    if tensor.ndim == 2:
        return tensor.unsqueeze(0)
    if tensor.ndim in (3, 4):
        # a shape such as (3, 32, 3) can be read in both orders
        prefer_first = not isinstance(image, np.ndarray)
        axis = _channel_axis(tensor.shape[-3:], prefer_first=prefer_first)
        if axis is not None:
            return tensor.movedim(axis, -3)
    raise ValueError(
        f"image {name!r} must be of shape (height, width), (channels, height, width) or (height, width, "
        f"channels) with 1, 3 or 4 channels, or a batch of these; got {tuple(tensor.shape)}"
    )


def _as_tensor(name: str, image: Any) -> torch.Tensor:
    """Convert an image to a tensor without a graph; raise TypeError for other objects."""
    if isinstance(image, np.ndarray) and image.dtype.kind in "biuf":
        # torch.from_numpy refuses negative strides (image[..., ::-1]) and read-only memory
        return torch.from_numpy(np.array(image, order="C"))
    refuse_sharded(f"image {name!r}", image)
    if isinstance(image, torch.Tensor) and not image.is_complex():
        return image.detach()
    got = f"{image.dtype} of shape {tuple(image.shape)}" if hasattr(image, "dtype") else repr(image)
    raise TypeError(f"image {name!r} must be a tensor or an array of numbers, got {got}")


def _channel_axis(shape: torch.Size, *, prefer_first: bool) -> int | None:
    """Return the axis of the channels, -3 or -1; None if neither axis has 1, 3 or 4 entries.

    Args:
        prefer_first: whether to return -3 if both axes could be that of the channels.
    """
    axes = [axis for axis in (-3, -1) if shape[axis] in CHANNELS]
    if not axes:
        return None
    return axes[0] if prefer_first else axes[-1]


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Convert bools, and floats in [0, 1], to uint8 in 0 to 255, and clamp other integers to this range."""
    if tensor.dtype == torch.uint8:
        return tensor
    if tensor.dtype == torch.bool:
        return tensor.to(torch.uint8) * 255
    if tensor.is_floating_point():
        tensor = torch.nan_to_num(tensor.float()) * 255.0 + 0.5
    return tensor.clamp(0, 255).to(torch.uint8)


def _grid(images: torch.Tensor) -> torch.Tensor:
    """Return one image with the images of a batch in a grid that is as square as possible, on black.

    Args:
        images: a tensor (samples, channels, height, width).
    """
    count, channels, height, width = images.shape
    columns = math.ceil(math.sqrt(count))
    rows = math.ceil(count / columns)
    cell_height, cell_width = height + PADDING, width + PADDING
    grid = images.new_zeros(channels, rows * cell_height - PADDING, columns * cell_width - PADDING)
    for index, image in enumerate(images):
        top, left = index // columns * cell_height, index % columns * cell_width
        grid[:, top : top + height, left : left + width] = image
    return grid


def _scaled(images: torch.Tensor) -> torch.Tensor:
    """Scale each image of a batch so that its values reach from 0 to 1; return uint8 images unchanged."""
    if images.dtype == torch.uint8:
        return images
    images = images.float()
    least, greatest = images.amin((1, 2, 3), keepdim=True), images.amax((1, 2, 3), keepdim=True)
    return (images - least) / (greatest - least).clamp_min(1e-12)


def _find_images(batch: Any) -> torch.Tensor | None:
    """Return the first tensor (samples, channels, height, width) in a batch, also in nested containers."""
    if isinstance(batch, torch.Tensor):
        has_images = batch.ndim == 4 and batch.shape[1] in CHANNELS and batch.numel() > 0
        return batch if has_images else None
    if isinstance(batch, Mapping):
        batch = [*batch.values()]
    if not isinstance(batch, list | tuple):
        return None
    for item in batch:
        if (images := _find_images(item)) is not None:
            return images
    return None


def _send_images(trainer: Trainer) -> None:
    """Send the images of a validation or test to the writers now, not with the logger's next interval."""
    if trainer.metrics.pending_media:
        trainer.bus.post(trainer.metrics.collect_media(trainer.place), ImageLogged, HistogramLogged)
