"""ImageFileWriter: the PNG files, read back by Pillow."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from PIL import Image

from eventloop.events import ImageLogged
from eventloop.events.run import Run
from eventloop.writers import ImageFileWriter
from tests.writers.conftest import Account, Attach, write

Array = npt.NDArray[Any]


def logged(image: Array, name: str = "cat", step: int = 1, mode: str = "train") -> ImageLogged:
    return ImageLogged(
        name=name, step=step, mode=mode, data=image.tobytes(), shape=image.shape, dtype=str(image.dtype)
    )


def read(path: Path) -> Array:
    with Image.open(path) as image:
        assert image.format == "PNG"
        return np.asarray(image)


def files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def random_image(*shape: int) -> npt.NDArray[np.uint8]:
    return np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)


@pytest.mark.parametrize("channels", [(), (1,), (2,), (3,), (4,)])
def test_bytes_survive(attach: Attach, tmp_path: Path, channels: tuple[int, ...]) -> None:
    """Grey, with and without a dimension for it, grey with alpha, RGB and RGBA come back pixel for pixel."""
    image = random_image(5, 7, *channels)

    write(attach(ImageFileWriter()), logged(image, step=40))

    assert (read(tmp_path / "images/train/cat/40.png") == image.squeeze()).all()


FLOATS = [[[0.0], [0.5], [1.0], [7.0], [-1.0], [np.nan], [np.inf], [-np.inf]]]


@pytest.mark.parametrize(
    ("image", "written"),
    [
        (np.array(FLOATS, "float16"), [[0, 128, 255, 255, 0, 0, 255, 0]]),
        (np.array(FLOATS, "float32"), [[0, 128, 255, 255, 0, 0, 255, 0]]),
        (np.array(FLOATS, "float64"), [[0, 128, 255, 255, 0, 0, 255, 0]]),
        (np.array([[True, False]]), [[255, 0]]),
    ],
    ids=["float16", "float32", "float64", "bool"],
)
def test_floats_are_intensities(
    attach: Attach, tmp_path: Path, image: Array, written: list[list[int]]
) -> None:
    """0 to 1 is black to white; values beyond are clipped, and NaN is black. In a mask True is white."""
    write(attach(ImageFileWriter()), logged(image))

    assert read(tmp_path / "images/train/cat/1.png").tolist() == written


def test_each_mode_name_and_step_is_a_file(attach: Attach, tmp_path: Path) -> None:
    """A "/" in a name makes folders."""
    image = random_image(2, 2, 3)
    events = [logged(image, "a/b", 1), logged(image, "a/b", 2), logged(image, "a", 1, "val")]

    write(attach(ImageFileWriter()), *events)

    assert files(tmp_path / "images") == ["train/a/b/1.png", "train/a/b/2.png", "val/a/1.png"]


def test_a_second_image_of_a_step_is_kept(attach: Attach, tmp_path: Path) -> None:
    """Images of one name and step are numbered; none takes the place of another."""
    images = [random_image(2, 2, 1) + i for i in range(3)]

    write(attach(ImageFileWriter()), *(logged(image) for image in images))

    names = ["1.png", "1_1.png", "1_2.png"]
    assert files(tmp_path / "images/train/cat") == names
    for name, image in zip(names, images, strict=True):
        assert (read(tmp_path / "images/train/cat" / name) == image[:, :, 0]).all()


def test_a_resumed_run_writes_over_the_steps_it_runs_again(attach: Attach, tmp_path: Path) -> None:
    """A step has the images of the last run that did it."""
    for image in (random_image(2, 2), np.zeros((2, 2), np.uint8)):
        write(attach(ImageFileWriter()), logged(image))

    assert files(tmp_path / "images") == ["train/cat/1.png"]
    assert not read(tmp_path / "images/train/cat/1.png").any()


@pytest.mark.parametrize(
    ("name", "folder"),
    [
        ("../../out", "%2E%2E/%2E%2E/out"),
        ("/etc", "%/etc"),
        ("a:b?", "a%3Ab%3F"),
        ("50%", "50%25"),
        ("größe 1", "größe 1"),
        (".hidden", "%2Ehidden"),
        ("", "%"),
        ("nul\x00", "nul%00"),
    ],
)
def test_names_stay_inside_the_folder(attach: Attach, tmp_path: Path, name: str, folder: str) -> None:
    """Any name is a path below the mode's folder, and another one for another name."""
    write(attach(ImageFileWriter()), logged(random_image(1, 1), name))

    assert files(tmp_path) == [f"images/train/{folder}/1.png"]


@pytest.mark.parametrize(
    ("mode", "folder"), [("/out", "%2Fout"), ("a/../../../out", "a%2F..%2F..%2F..%2Fout"), ("..", "%2E%2E")]
)
def test_modes_stay_inside_the_folder(tmp_path: Path, mode: str, folder: str) -> None:
    """A mode is one folder, also where it is an absolute path."""
    writer = ImageFileWriter()
    writer.open(Run(work_dir=str(tmp_path / "run")))

    writer.write(logged(random_image(1, 1), mode=mode))

    assert files(tmp_path) == [f"run/images/{folder}/cat/1.png"]


def test_a_long_name_is_cut(attach: Attach, tmp_path: Path) -> None:
    """A file system takes 255 bytes; names that begin alike have different files."""
    image = random_image(1, 1)

    write(attach(ImageFileWriter()), logged(image, "ä" * 300), logged(image, "ä" * 301))

    assert len(files(tmp_path)) == 2


def test_the_folder_can_be_chosen(attach: Attach, tmp_path: Path) -> None:
    """Relative to the work_dir, or absolute."""
    write(attach(ImageFileWriter("vis/images")), logged(random_image(1, 1)))
    write(attach(ImageFileWriter(tmp_path / "there")), logged(random_image(1, 1)))

    assert files(tmp_path) == ["there/train/cat/1.png", "vis/images/train/cat/1.png"]


@pytest.mark.parametrize(
    ("event", "message"),
    [
        (
            logged(np.zeros((2, 2, 3), np.int64)),
            "must be uint8 (0 to 255), float (0 to 1) or bool, got int64",
        ),
        (
            logged(np.zeros((3, 8, 8), np.uint8)),
            "(height, width, channels) with 1 to 4 channels, got (3, 8, 8)",
        ),
        (
            logged(np.zeros((0, 2, 3), np.uint8)),
            "(height, width, channels) with 1 to 4 channels, got (0, 2, 3)",
        ),
        (
            ImageLogged(name="cat", data=b"12345", shape=(2, 2, 1)),
            "'cat' has 5 bytes, expected 4 for shape (2, 2, 1) and dtype uint8",
        ),
    ],
)
def test_what_is_no_image_is_named(
    attach: Attach, account: Account, event: ImageLogged, message: str
) -> None:
    """The account says which image, what was expected and what came."""
    bus = attach(ImageFileWriter())

    write(bus, event)

    assert message in account(bus).error


def test_a_failed_write_leaves_no_half_file(
    attach: Attach, account: Account, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under the name of an image there is a whole image, or none."""

    def full(*paths: str) -> None:
        raise OSError(28, "No space left on device")

    bus = attach(ImageFileWriter())
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", full)
        write(bus, logged(random_image(1, 1)))

    assert files(tmp_path) == []
    assert "No space left on device" in account(bus).error
