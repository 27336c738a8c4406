"""Images and histograms: put on the training thread, delivered as events."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from eventloop.events import HistogramLogged, ImageLogged
from eventloop.hooks import LoggerHook
from eventloop.metrics import MEDIA_LIMIT, EventStorage
from eventloop.packet import Place
from tests.trainer.conftest import MakeTrainer, batches


def events(storage: EventStorage) -> list[Any]:
    packet = storage.collect_media(Place(100, 10))
    assert packet.ready()
    return list(packet.events())


def array_of(event: ImageLogged | HistogramLogged) -> Any:
    return np.frombuffer(event.data, event.dtype).reshape(event.shape)


def test_an_image_is_delivered_height_first() -> None:
    """What is put as (channels, height, width) arrives as (height, width, channels), with its place in the run."""
    storage = EventStorage(start_iter=4)
    image = torch.arange(24, dtype=torch.uint8).reshape(3, 2, 4)
    with storage.name_scope("input"):
        storage.put_image("first", image)

    (event,) = events(storage)
    assert (event.name, event.iter, event.step, event.max_iters) == ("input/first", 4, 5, 100)
    assert (event.shape, event.dtype) == ((2, 4, 3), "uint8")
    assert np.array_equal(array_of(event), image.permute(1, 2, 0).numpy())


def test_a_floating_point_image_is_scaled_and_clipped() -> None:
    """Floats in [0, 1] become bytes; what lies outside is clipped, what is no number is black."""
    storage = EventStorage()
    storage.put_image("x", torch.tensor([[[0.0, 0.5, 1.0, 2.0, -1.0, float("nan")]]]))

    (event,) = events(storage)
    assert array_of(event).ravel().tolist() == [0, 128, 255, 255, 0, 0]


def test_values_of_a_histogram_are_delivered_as_they_were() -> None:
    """A tensor that is changed after it was put is delivered as it was, flat and in float32."""
    storage = EventStorage()
    weight = torch.ones(2, 3, dtype=torch.bfloat16, requires_grad=True)
    storage.put_histogram("weight", weight)
    with torch.no_grad():
        weight.zero_()

    (event,) = events(storage)
    assert (event.shape, event.dtype, array_of(event).tolist()) == ((6,), "float32", [1.0] * 6)


def test_numpy_arrays_are_taken() -> None:
    """An array is as good as a tensor, and is copied too."""
    storage, image = EventStorage(), np.zeros((1, 2, 2), np.uint8)
    storage.put_image("x", image)
    image += 1

    (event,) = events(storage)
    assert not array_of(event).any()


@pytest.mark.parametrize(
    ("image", "error", "message"),
    [
        ([[1]], TypeError, r"image 'x' must be a tensor or an array, got \[\[1\]\]"),
        (torch.zeros(2, 2), ValueError, r"must be of shape \(channels, height, width\).*got \(2, 2\)"),
        (torch.zeros(2, 2, 2), ValueError, r"with 1, 3 or 4 channels, got \(2, 2, 2\)"),
        (torch.zeros(1, 2, 2, dtype=torch.int64), TypeError, "must be uint8 in .* got torch.int64"),
    ],
)
def test_what_is_no_image(image: Any, error: type[Exception], message: str) -> None:
    """Something else is refused where it is put."""
    with pytest.raises(error, match=message):
        EventStorage().put_image("x", image)


@pytest.mark.parametrize(
    ("values", "error", "message"),
    [
        (1.0, TypeError, "histogram 'x' must be a tensor or an array, got 1.0"),
        (torch.zeros(0), ValueError, "histogram 'x' has no values"),
        (torch.zeros(1, dtype=torch.complex64), TypeError, "must be of real numbers, got torch.complex64"),
    ],
)
def test_what_is_no_histogram(values: Any, error: type[Exception], message: str) -> None:
    """Something else is refused where it is put."""
    with pytest.raises(error, match=message):
        EventStorage().put_histogram("x", values)


def test_bounded_when_nobody_collects(caplog: pytest.LogCaptureFixture) -> None:
    """Without a logger images do not pile up, and giving them up is said."""
    storage = EventStorage()
    for _ in range(MEDIA_LIMIT + 1):
        storage.put_image("x", torch.zeros(1, 1, 1))

    assert storage.pending_media <= MEDIA_LIMIT
    assert "oldest of 257 images and histograms are given up: nobody collects them" in caplog.text


def test_the_logger_sends_them(make_trainer: MakeTrainer) -> None:
    """What a step puts is delivered at the end of its interval, the rest at the end of the run."""

    def step(trainer: Any, batch: Any) -> Any:
        trainer.metrics.put_image("input", torch.zeros(1, 2, 2))
        trainer.metrics.put_histogram("weight", next(trainer.model.parameters()))
        return trainer.model(batch[0]).square().mean()

    trainer = make_trainer(train_step=step, train_loader=batches(5), hooks=[LoggerHook(interval=2)])
    with trainer.bus.capture("image_logged", "histogram_logged") as seen:
        trainer.train()

    steps = [(type(event).__name__, event.step) for event in seen]  # type: ignore[attr-defined]
    assert steps[:2] == [("ImageLogged", 1), ("HistogramLogged", 1)]
    assert len(steps) == 2 * trainer.iter
