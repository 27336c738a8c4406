"""TensorBoardWriter on its thread with all kinds of events, and in a process where that is asked for."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from eventloop.bus import Bus
from eventloop.events import BeforeTrain, ImageLogged
from eventloop.writers import TensorBoardWriter
from tests.writers.conftest import Attach, emit, tensorboard, train, worker_of, write

PIXELS = np.arange(48, dtype=np.uint8).reshape(4, 4, 3).tobytes()


def image(step: int) -> ImageLogged:
    return ImageLogged(name="cat", step=step, data=PIXELS, shape=(4, 4, 3))


def steps(entries: list[Any]) -> list[int]:
    return [entry.step for entry in entries]


def accounts(bus: Bus) -> dict[str, tuple[str, int, int]]:
    return {
        stats.name: (stats.runs_on, stats.delivered, stats.failed + stats.dropped) for stats in bus.stats()
    }


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "tensorboard"


def test_images_and_scalars_are_in_one_file_of_the_thread(attach: Attach, folder: Path) -> None:
    """No image starts a process."""
    bus = attach(TensorBoardWriter())
    write(bus, *train(1), image(2), *train(3))

    assert accounts(bus) == {"TensorBoardWriter": ("thread", 3, 0)}
    (path,) = folder.iterdir()
    assert path.name.endswith(f".{os.getpid()}")
    assert steps(tensorboard(folder).Scalars("train/loss")) == [1, 3]


@pytest.mark.slow
def test_process_that_is_killed_is_replaced(attach: Attach, folder: Path) -> None:
    """With `offload="process"` all events are written in a process; the next one goes on at the first event that was not
    acknowledged, and every curve is whole."""
    bus = attach(TensorBoardWriter(offload="process"), start_iter=10)
    emit(bus, BeforeTrain(iter=10), *train(11), image(12), *train(*range(13, 20)))
    os.kill(worker_of(bus), signal.SIGKILL)
    write(bus, *train(*range(20, 30)), image(30))

    reader = tensorboard(folder)
    assert steps(reader.Scalars("train/loss")) == [11, *range(13, 30)]
    assert steps(reader.Images("train/cat")) == [12, 30]
    ((runs_on, _, lost),) = accounts(bus).values()
    assert (runs_on, lost) == ("process", 0)
