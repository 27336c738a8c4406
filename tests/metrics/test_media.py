"""Images and histograms: put on the training thread, delivered as events."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from eventloop.events import HistogramLogged, ImageLogged
from eventloop.hooks import LoggerHook
from eventloop.metrics import EventStorage
from eventloop.metrics.media import MEDIA_LIMIT
from eventloop.metrics.rows import RunLimits
from tests.support.trainers import MakeTrainer, batches


def events(storage: EventStorage) -> list[Any]:
    packet = storage.collect_media(RunLimits(100, 10))
    assert packet.ready()
    return list(packet.events())


def array_of(event: ImageLogged | HistogramLogged) -> Any:
    return np.frombuffer(event.data, event.dtype).reshape(event.shape)


def delivered_image(image: Any) -> Any:
    """The array that arrives of an image."""
    storage = EventStorage()
    storage.put_image("x", image)
    (event,) = events(storage)
    return array_of(event)


def delivered_values(values: Any) -> Any:
    """The list that arrives of a histogram's values."""
    storage = EventStorage()
    storage.put_histogram("x", values)
    (event,) = events(storage)
    return array_of(event).tolist()


# --- images ------------------------------------------------------------------------------------------------


def test_an_image_is_delivered_height_first() -> None:
    """An image put as (channels, height, width) arrives as (height, width, channels), with its place in the run."""
    storage = EventStorage(start_iter=4)
    image = torch.arange(24, dtype=torch.uint8).reshape(3, 2, 4)
    with storage.name_scope("input"):
        storage.put_image("first", image)

    (event,) = events(storage)
    assert (event.name, event.iter, event.step, event.max_iters) == ("input/first", 4, 5, 100)
    assert (event.shape, event.dtype) == ((2, 4, 3), "uint8")
    assert np.array_equal(array_of(event), image.permute(1, 2, 0).numpy())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_a_floating_point_image_is_scaled_and_clipped(dtype: torch.dtype) -> None:
    """Floats in [0, 1] become bytes; values outside are clipped, NaN is black."""
    image = torch.tensor([[[0.0, 0.5, 1.0, 2.0, -1.0, float("nan")]]], dtype=dtype)

    assert delivered_image(image).ravel().tolist() == [0, 128, 255, 255, 0, 0]


@pytest.mark.parametrize(
    ("image", "range_"),
    [
        (torch.full((1, 2, 2), 200.0), "from 200 to 200"),
        (torch.tensor([[[-0.5, 0.5]]]), "from -0.5 to 0.5"),
        (np.array([[[0.0, 1.5]]], np.float16), "from 0 to 1.5"),
        (torch.tensor([[[float("inf"), float("nan")]]]), "from 0 to inf"),
    ],
    ids=["bytes as floats", "negative", "half", "infinite"],
)
def test_an_image_out_of_range_is_told_once(
    image: Any, range_: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The background warns once per name, with the range; a put warns of nothing, as it would have to wait."""
    storage = EventStorage(start_iter=7)
    for name in ("x", "x", "y"):
        storage.put_image(name, image)
    before = caplog.text
    events(storage)
    storage.put_image("x", image)
    events(storage)

    assert before == ""
    assert [record.getMessage().partition(":")[0] for record in caplog.records] == [
        f"image {name!r} of iteration 7 has values {range_}" for name in ("x", "y")
    ]
    assert "expected floats from 0 to 1" in caplog.text


@pytest.mark.parametrize(
    "image",
    [
        torch.tensor([[[0.0, 1.0, float("nan")]]]),
        torch.tensor([[[-0.001, 1.001]]]),
        torch.full((1, 2, 2), 200, dtype=torch.uint8),
        torch.empty(3, 0, 0),
    ],
    ids=["in range", "rounded", "bytes", "empty"],
)
def test_an_image_in_range_is_not_told(image: Any, caplog: pytest.LogCaptureFixture) -> None:
    """No warning, also where resampling has exceeded the range by less than a rounding."""
    delivered_image(image)

    assert caplog.text == ""


def test_an_image_that_cannot_be_read_is_lost_alone(caplog: pytest.LogCaptureFixture) -> None:
    """Those put with it are delivered; it is counted, and logged with its name and iteration."""
    storage = EventStorage(start_iter=5)
    image = torch.zeros(1, 2, 2)
    for name, value in (("a", image), ("fake", FakeTensorMode().from_tensor(image)), ("b", image)):
        storage.put_image(name, value)
    packet = storage.collect_media()

    assert repr(packet) == "MediaPacket('a', 'fake', 'b')"
    assert [event.name for event in packet.events()] == ["a", "b"]  # type: ignore[attr-defined]
    assert storage.unreadable == {"fake": 1}
    assert "metric 'fake' of iteration 5 cannot be read and is left out (1 so far): " in caplog.text


def read_only(array: Any) -> Any:
    array.flags.writeable = False
    return array


COLOURS = np.arange(24, dtype=np.uint8).reshape(2, 4, 3)
RECORDS = np.array([(1, 0.25), (2, 0.5)], dtype=[("tag", "u1"), ("value", "f4")])


@pytest.mark.parametrize(
    ("image", "wanted"),
    [
        (COLOURS[:, :, ::-1].transpose(2, 0, 1), COLOURS[:, :, ::-1]),
        (COLOURS[::-1, ::-1].transpose(2, 0, 1), COLOURS[::-1, ::-1]),
        (read_only(COLOURS.copy()).transpose(2, 0, 1), COLOURS),
        (np.frombuffer(COLOURS.tobytes(), np.uint8).reshape(COLOURS.shape).transpose(2, 0, 1), COLOURS),
        ((COLOURS / 255).astype(">f4").transpose(2, 0, 1), COLOURS),
        (read_only((COLOURS / 255).astype(">f8"))[::-1].transpose(2, 0, 1), COLOURS[::-1]),
    ],
    ids=["BGR to RGB", "turned", "read-only", "of bytes", "big-endian", "all of it"],
)
def test_arrays_that_torch_does_not_take(image: Any, wanted: Any) -> None:
    """Negative strides, as from OpenCV, read-only memory and another byte order are accepted."""
    before = image.copy()

    assert np.array_equal(delivered_image(image), wanted)
    assert np.array_equal(image, before)


@pytest.mark.parametrize(
    ("image", "error", "message"),
    [
        (np.zeros((1, 2, 2), object), TypeError, "image 'x' must be of real numbers, got an array of object"),
        (np.zeros((1, 2, 2), ">U3")[::-1], TypeError, "must be of real numbers, got an array of >U3"),
        ([[1]], TypeError, r"image 'x' must be a tensor or an array, got \[\[1\]\]"),
        (torch.zeros(2, 2), ValueError, r"must be of shape \(channels, height, width\).*got \(2, 2\)"),
        (torch.zeros(2, 2, 2), ValueError, r"with 1, 3 or 4 channels, got \(2, 2, 2\)"),
        (torch.zeros(1, 2, 2, dtype=torch.int64), TypeError, "must be uint8 in .* got torch.int64"),
        (torch.zeros(1, 2, 2, device="meta"), TypeError, "must be of real numbers, got a tensor of the meta"),
    ],
)
def test_what_is_no_image(image: Any, error: type[Exception], message: str) -> None:
    """Another type, dtype or shape is refused where it is put."""
    with pytest.raises(error, match=message):
        EventStorage().put_image("x", image)


# --- histograms --------------------------------------------------------------------------------------------


def test_values_of_a_histogram_are_delivered_as_they_were() -> None:
    """A tensor or array that is changed after it was put is delivered as it was, flat and in a type of numpy."""
    storage = EventStorage()
    weight, image = torch.ones(2, 3, dtype=torch.bfloat16, requires_grad=True), np.zeros((1, 2, 2), np.uint8)
    storage.put_histogram("weight", weight)
    storage.put_image("image", image)
    image += 1
    with torch.no_grad():
        weight.zero_()

    values, picture = events(storage)
    assert (values.shape, values.dtype, array_of(values).tolist()) == ((6,), "float32", [1.0] * 6)
    assert not array_of(picture).any()


@pytest.mark.parametrize(
    ("values", "wanted"),
    [
        (np.arange(3.0)[::-1], [2.0, 1.0, 0.0]),
        (read_only(np.arange(2.0, -1, -1)), [2.0, 1.0, 0.0]),
        (np.arange(2.0, -1, -1).astype(">f4"), [2.0, 1.0, 0.0]),
        (np.arange(2, -1, -1).astype(">i8"), [2, 1, 0]),
        (RECORDS["value"], [0.25, 0.5]),
    ],
    ids=["reversed", "read-only", "big-endian", "big-endian ints", "field of records"],
)
def test_values_that_torch_does_not_take(values: Any, wanted: list[float]) -> None:
    """A histogram accepts the memory layouts that an image does, and a stride that is no multiple of the size."""
    assert delivered_values(values) == wanted


@pytest.mark.parametrize(
    ("values", "error", "message"),
    [
        (np.zeros(2, "M8[s]"), TypeError, r"must be of real numbers, got an array of datetime64\[s\]"),
        (RECORDS, TypeError, r"histogram 'x' must be of real numbers, got an array of \[\('tag', 'u1'\)"),
        (1.0, TypeError, "histogram 'x' must be a tensor or an array, got 1.0"),
        (torch.zeros(0), ValueError, "histogram 'x' has no values"),
        (torch.zeros(1, dtype=torch.complex64), TypeError, "must be of real numbers, got torch.complex64"),
        (torch.zeros(1).to_sparse(), TypeError, "must be of real numbers, got a tensor of layout"),
    ],
)
def test_what_is_no_histogram(values: Any, error: type[Exception], message: str) -> None:
    """Other values are refused where they are put."""
    with pytest.raises(error, match=message):
        EventStorage().put_histogram("x", values)


# --- of a run ----------------------------------------------------------------------------------------------


def test_bounded_when_nobody_collects(caplog: pytest.LogCaptureFixture) -> None:
    """Without a logger images do not pile up, and a warning reports the dropped ones."""
    storage = EventStorage()
    for _ in range(MEDIA_LIMIT + 1):
        storage.put_image("x", torch.zeros(1, 1, 1))

    assert storage.pending_media <= MEDIA_LIMIT
    assert "oldest of 257 images and histograms are dropped" in caplog.text


def test_the_logger_sends_them(make_trainer: MakeTrainer) -> None:
    """Images and histograms are delivered at the end of their interval, the rest at the end of the run."""

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
