"""VisualizationHook: images of validations and tests on their way to the writers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from eventloop import Trainer
from eventloop.events import ImageLogged
from eventloop.hooks import VisualizationHook
from eventloop.hooks.visualization import PADDING, as_pixels
from tests.hooks.conftest import Make

Images = Callable[..., list[ImageLogged]]


def val_step(trainer: Trainer, batch: Any) -> dict[str, float]:
    """Whatever the batch."""
    return {"acc": 0.5}


@pytest.fixture
def images(make_trainer: Make) -> Images:
    """Validate each epoch on these batches, and collect what is drawn."""

    def run(hook: VisualizationHook, loader: list[Any], **options: Any) -> list[ImageLogged]:
        trainer = make_trainer(batches=2, hooks=[hook], val_loader=loader, val_step=val_step, **options)
        with trainer.bus.capture(ImageLogged) as seen:
            trainer.train()
        return [event for event in seen if isinstance(event, ImageLogged)]

    return run


def pixels(event: ImageLogged) -> Any:
    """The image of an event, as an array."""
    return np.frombuffer(event.data, event.dtype).reshape(event.shape)


def test_inputs_are_drawn_by_default(images: Images) -> None:
    """The samples of the batch as one grid, each stretched from black to white."""
    batch = torch.arange(2 * 12.0).reshape(2, 1, 3, 4) - 5.0

    seen = images(VisualizationHook(), [(batch, torch.zeros(2))])

    assert [(e.name, e.mode, e.step, e.epoch, e.shape, e.dtype) for e in seen] == [
        ("inputs/0", "val", 2, 1, (3, 8 + PADDING, 1), "uint8")
    ]
    image = pixels(seen[0])[:, :, 0]
    assert (image[:, :4] == image[:, 4 + PADDING :]).all()
    assert (image[:, 4 : 4 + PADDING] == 0).all()
    assert (image.min(), image.max(), image[0, 1]) == (0, 255, round(255 / 11))


def test_inputs_are_found_in_a_mapping(images: Images) -> None:
    """The first tensor of the batch that looks like images; bytes are drawn as they are."""
    batch = torch.randint(10, 90, (1, 3, 4, 5), dtype=torch.uint8)

    (event,) = images(VisualizationHook(), [{"id": torch.zeros(1), "data": {"image": batch}}])

    assert (pixels(event) == batch[0].permute(1, 2, 0).numpy()).all()


def test_few_of_many_samples_are_drawn(images: Images) -> None:
    """`max_images` of them, as square as it gets."""
    (event,) = images(VisualizationHook(max_images=5), [torch.rand(9, 3, 4, 4)])

    assert event.shape == (2 * 4 + PADDING, 3 * 4 + 2 * PADDING, 3)


def test_batch_without_images_is_an_error(images: Images) -> None:
    """The default says that it needs a `draw`."""
    with pytest.raises(ValueError, match=r"found no tensor .* in the batch of val: pass draw="):
        images(VisualizationHook(), [(torch.zeros(3, 2), torch.zeros(3))])


@pytest.mark.representative(1)
@pytest.mark.parametrize(("interval", "expected"), [(1, [0, 1, 2, 3, 4]), (2, [0, 2, 4]), (50, [0])])
def test_interval_counts_the_batches_of_a_pass(images: Images, interval: int, expected: list[int]) -> None:
    """The first batch is always drawn, however short the validation."""
    hook = VisualizationHook(interval, draw=lambda trainer, event: {"a": torch.zeros(2, 2)})

    seen = images(hook, [torch.zeros(1)] * 5, max_epochs=2)

    once = [f"a/{i}" for i in expected]
    assert [(e.name, e.step) for e in seen] == [(name, step) for step in (2, 4) for name in once]


def test_draw_sees_batch_and_outputs(images: Images) -> None:
    """It is called on the training thread, with the trainer as it is in that iteration."""

    def draw(trainer: Trainer, event: Any) -> dict[str, torch.Tensor]:
        assert trainer.outputs == {"acc": 0.5}
        return {"whole": torch.full((2, 2), float(trainer.batch[0])), "part": trainer.batch.reshape(1, 1)}

    seen = images(VisualizationHook(1, draw), [torch.ones(1), torch.zeros(1)])

    assert [(e.name, int(pixels(e)[0, 0, 0])) for e in seen] == [
        ("whole/0", 255),
        ("part/0", 255),
        ("whole/1", 0),
        ("part/1", 0),
    ]


def test_image_is_that_of_its_moment(images: Images) -> None:
    """What becomes of the tensor afterwards does not show."""
    buffer = torch.zeros(2, 2, dtype=torch.uint8)

    def draw(trainer: Trainer, event: Any) -> dict[str, torch.Tensor]:
        return {"a": buffer.fill_(10 + event.batch_idx)}

    seen = images(VisualizationHook(1, draw), [torch.zeros(1)] * 3)

    assert [int(pixels(e).max()) for e in seen] == [10, 11, 12]


def test_tests_are_drawn_too(make_trainer: Make) -> None:
    """Under their own mode; the hook sends its images off itself, without a logger."""
    trainer = make_trainer(
        hooks=[VisualizationHook()],
        test_loader=[torch.rand(1, 3, 2, 2)],
        val_step=val_step,
        default_hooks={"logger": None},
    )

    with trainer.bus.capture(ImageLogged) as seen:
        trainer.test()

    assert [(e.name, e.mode) for e in seen if isinstance(e, ImageLogged)] == [("inputs/0", "test")]


def test_nothing_is_drawn_where_nobody_takes_images(make_trainer: Make) -> None:
    """A run without an image writer does not pay for it."""
    hook = VisualizationHook(draw=lambda trainer, event: pytest.fail("no subscriber asked for this"))

    make_trainer(hooks=[hook], val_loader=[torch.zeros(1)], val_step=val_step).train()


def first(image: Any) -> list[int]:
    """The channels of the first pixel."""
    return [int(value) for value in as_pixels("a", image)[:, 0, 0]]


RGB = [10, 20, 30]
CHW = torch.tensor(RGB, dtype=torch.uint8).reshape(3, 1, 1).expand(3, 5, 6)
HWC = CHW.permute(1, 2, 0)


@pytest.mark.parametrize(
    ("image", "shape", "pixel"),
    [
        (CHW, (3, 5, 6), RGB),
        (HWC, (3, 5, 6), RGB),
        (CHW.numpy(), (3, 5, 6), RGB),
        (HWC.numpy()[..., ::-1], (3, 5, 6), RGB[::-1]),  # BGR to RGB, as with OpenCV
        (CHW[:, :, :3], (3, 5, 3), RGB),  # both layouts fit: a tensor's channels come first,
        (HWC[:3].numpy(), (3, 3, 6), RGB),  # an array's last
        (CHW[None], (3, 5, 6), RGB),
        (np.stack([HWC.numpy()] * 2), (3, 5, 12 + PADDING), RGB),
        (CHW[0], (1, 5, 6), [10]),
        (CHW[:1], (1, 5, 6), [10]),
        (torch.cat([CHW, CHW[:1]]), (4, 5, 6), [*RGB, 10]),
        (torch.ones(2, 2, dtype=torch.bool), (1, 2, 2), [255]),
        (torch.full((2, 2), 0.5), (1, 2, 2), [128]),
        (torch.full((2, 2), 0.5, dtype=torch.bfloat16), (1, 2, 2), [128]),
        (np.full((2, 2), 1.0), (1, 2, 2), [255]),
        (torch.full((2, 2), 7.0), (1, 2, 2), [255]),
        (torch.full((2, 2), -1.0), (1, 2, 2), [0]),
        (torch.full((2, 2), float("nan")), (1, 2, 2), [0]),
        (torch.full((2, 2), 300), (1, 2, 2), [255]),
        (torch.full((2, 2), 0.5, requires_grad=True), (1, 2, 2), [128]),
    ],
)
def test_forms_of_an_image(image: Any, shape: tuple[int, ...], pixel: list[int]) -> None:
    """Every form a `draw` may return becomes (channels, height, width) of bytes."""
    made = as_pixels("a", image)

    assert (tuple(made.shape), made.dtype, first(image)) == (shape, torch.uint8, pixel)


@pytest.mark.representative(2)
@pytest.mark.parametrize(
    ("drawn", "error", "message"),
    [
        (None, TypeError, r"draw must return a mapping \{name: image\}, got NoneType"),
        ({"a": 3}, TypeError, "image 'a' must be a tensor or an array of numbers, got 3"),
        (
            {"a": torch.zeros(2, 2, dtype=torch.complex64)},
            TypeError,
            r"got torch.complex64 of shape \(2, 2\)",
        ),
        ({"a": np.array(["b"])}, TypeError, r"got <U1 of shape \(1,\)"),
        ({"a": torch.zeros(5, 7, 9)}, ValueError, r"image 'a' must be of shape .* got \(5, 7, 9\)"),
        ({"a": torch.zeros(4)}, ValueError, r"image 'a' must be of shape .* got \(4,\)"),
        ({"a": torch.zeros(0, 3, 2, 2)}, ValueError, r"has no pixels, its shape is \(0, 3, 2, 2\)"),
    ],
)
def test_what_is_no_image_is_an_error(
    images: Images, drawn: Any, error: type[Exception], message: str
) -> None:
    """It is named, on the training thread, in the iteration that drew it."""
    with pytest.raises(error, match=message):
        images(VisualizationHook(draw=lambda trainer, event: drawn), [torch.zeros(1)])
