"""TensorBoardWriter on its thread with all kinds of events, and in a process where that is asked for."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from eventloop.background.workers.subscriber import ProcessLane
from eventloop.bus import Bus
from eventloop.events import BeforeTrain, Event, ImageLogged, ScalarsLogged
from eventloop.writers import TensorBoardWriter
from tests.conftest import DEADLINE

Attach = Callable[..., Bus]
PIXELS = np.arange(48, dtype=np.uint8).reshape(4, 4, 3).tobytes()


def scalars(*steps: int) -> list[Event]:
    return [ScalarsLogged(step=step, scalars={"loss": 0.5}) for step in steps]


def image(step: int) -> ImageLogged:
    return ImageLogged(name="cat", step=step, data=PIXELS, shape=(4, 4, 3))


def write(bus: Bus, *events: Event) -> None:
    for event in events:
        bus.emit(event)
    assert bus.close(DEADLINE)


def read(folder: Path) -> Any:
    reader = EventAccumulator(str(folder), size_guidance={"images": 0, "scalars": 0})
    reader.Reload()
    return reader


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
    write(bus, *scalars(1), image(2), *scalars(3))

    assert accounts(bus) == {"TensorBoardWriter": ("thread", 3, 0)}
    (path,) = folder.iterdir()
    assert path.name.endswith(f".{os.getpid()}")
    assert steps(read(folder).Scalars("train/loss")) == [1, 3]


@pytest.mark.slow
def test_process_can_be_asked_for(attach: Attach, folder: Path) -> None:
    """With `offload="process"` all events are written there."""
    bus = attach(TensorBoardWriter(offload="process"))
    write(bus, *scalars(1), image(2))

    assert accounts(bus) == {"TensorBoardWriter": ("process", 2, 0)}
    assert steps(read(folder).Images("train/cat")) == [2]


@pytest.mark.slow
def test_process_that_is_killed_is_replaced(attach: Attach, folder: Path) -> None:
    """Another one goes on at the first event that was not acknowledged, and every curve is whole."""
    bus = attach(TensorBoardWriter(offload="process"), start_iter=10)
    for event in (BeforeTrain(iter=10), *scalars(11), image(12), *scalars(*range(13, 20))):
        bus.emit(event)
    assert bus.flush(DEADLINE)
    (lane,) = (s.lane for s in bus._subscribers._subscriptions if isinstance(s.lane, ProcessLane))
    assert lane.worker is not None
    os.kill(lane.worker.pid, signal.SIGKILL)
    deadline = monotonic() + DEADLINE
    while lane.deaths == 0:
        assert monotonic() < deadline
        sleep(0.002)
    write(bus, *scalars(*range(20, 30)), image(30))

    reader = read(folder)
    assert steps(reader.Scalars("train/loss")) == [11, *range(13, 30)]
    assert steps(reader.Images("train/cat")) == [12, 30]


def test_place_that_there_is_not_is_refused() -> None:
    """At the line that wrote it."""
    with pytest.raises(ValueError, match="offload must be one of 'auto', 'thread', 'process', got 'gpu'"):
        TensorBoardWriter(offload="gpu")
