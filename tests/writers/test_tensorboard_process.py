"""TensorBoardWriter: scalars on a thread, and from the first image or histogram on everything in a process."""

from __future__ import annotations

import gc
import os
import signal
import weakref
from collections.abc import Callable
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
from tensorboard.plugins.hparams import metadata

from eventloop import Trainer
from eventloop.background.workers.subscriber import ProcessLane
from eventloop.bus import Bus
from eventloop.events import (
    AfterRun,
    BeforeTrain,
    Event,
    HistogramLogged,
    ImageLogged,
    RunInfo,
    ScalarsLogged,
)
from eventloop.events.run import Run
from eventloop.hooks import LoggerHook, VisualizationHook
from eventloop.writers import TensorBoardWriter
from tests.conftest import DEADLINE
from tests.support.trainers import batches, tiny_model

Attach = Callable[..., Bus]
PROCESS = "TensorBoardWriter, in a process"
PIXELS = np.arange(48, dtype=np.uint8).reshape(4, 4, 3).tobytes()


def scalars(*steps: int, loss: float = 0.5) -> list[Event]:
    return [ScalarsLogged(step=step, scalars={"loss": loss}) for step in steps]


def image(step: int) -> ImageLogged:
    return ImageLogged(name="cat", step=step, data=PIXELS, shape=(4, 4, 3))


def histogram(step: int) -> HistogramLogged:
    return HistogramLogged(name="w", step=step, data=np.ones(9, np.float32).tobytes(), shape=(9,))


def emit(bus: Bus, *events: Event) -> None:
    for event in events:
        bus.emit(event)


def write(bus: Bus, *events: Event) -> None:
    emit(bus, *events)
    assert bus.flush(DEADLINE)  # an image that comes with the close starts no process any more
    assert bus.close(DEADLINE)


def reader_of(folder: Path) -> Any:
    return EventAccumulator(str(folder), size_guidance={"images": 0, "histograms": 0, "scalars": 0})


def read(folder: Path) -> Any:
    reader = reader_of(folder)
    reader.Reload()
    return reader


def steps(entries: list[Any]) -> list[int]:
    return [entry.step for entry in entries]


def files(folder: Path) -> list[list[int]]:
    """The steps in each of a folder's files, in the order in which TensorBoard reads them."""
    return [
        [record.step for record in EventFileLoader(str(path)).Load() if record.HasField("summary")]
        for path in sorted(folder.iterdir())
    ]


def accounts(bus: Bus) -> dict[str, tuple[str, int, int]]:
    return {
        stats.name: (stats.runs_on, stats.delivered, stats.failed + stats.dropped) for stats in bus.stats()
    }


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "tensorboard"


def test_scalars_alone_start_no_process(attach: Attach, folder: Path) -> None:
    """One subscription, on a thread, and one file, which this process has written."""
    bus = attach(TensorBoardWriter())
    write(bus, BeforeTrain(), *scalars(1, 2), AfterRun())

    assert accounts(bus) == {"TensorBoardWriter": ("thread", 4, 0)}
    (path,) = folder.iterdir()
    assert path.name.endswith(f".{os.getpid()}")


@pytest.mark.slow
@pytest.mark.parametrize("media", [image, histogram])
def test_media_start_a_process(attach: Attach, folder: Path, media: Callable[[int], Event]) -> None:
    """It goes on where the thread ended, in the same folder: each event is in one account, and in one file, and
    TensorBoard's own reader finds all of them."""
    bus = attach(TensorBoardWriter())
    write(bus, *scalars(1, 2), media(3), *scalars(4), media(5), *scalars(6))

    assert accounts(bus) == {"TensorBoardWriter": ("thread", 2, 0), PROCESS: ("process", 4, 0)}
    assert files(folder) == [[1, 2], [3, 4, 5, 6]]
    reader = read(folder)
    found = reader.Images("train/cat") if media is image else reader.Histograms("train/w")
    assert (steps(reader.Scalars("train/loss")), steps(found)) == ([1, 2, 4, 6], [3, 5])
    assert len({path.name.rpartition(".")[2] for path in folder.iterdir()}) == 2


@pytest.mark.slow
def test_many_events_move_in_order(attach: Attach, folder: Path) -> None:
    """However many wait for the thread when the first image comes: none is lost, doubled or out of its turn."""
    bus = attach(TensorBoardWriter())
    write(bus, *scalars(*range(5000)), image(5000), *scalars(*range(5001, 10_000)))

    first, second = files(folder)
    assert (first, second) == ([*range(5000)], [*range(5000, 10_000)])


@pytest.mark.slow
def test_tensorboard_that_is_looking_sees_what_comes(attach: Attach, folder: Path) -> None:
    """It never goes back to a file once there is a later one, so no two of them grow at the same time."""
    bus = attach(TensorBoardWriter())
    reader = None
    for step in range(1, 9):
        emit(bus, *scalars(step), *([image(step)] if step % 3 == 0 else []))
        assert bus.flush(DEADLINE)
        reader = reader or reader_of(folder)
        reader.Reload()
        assert steps(reader.Scalars("train/loss")) == [*range(1, step + 1)]

    assert reader is not None
    assert steps(reader.Images("train/cat")) == [3, 6]


@pytest.mark.slow
def test_a_resumed_run_replaces_the_steps_it_runs_again(attach: Attach, folder: Path) -> None:
    """Curves and images alike, of the thread's file and of the process's, and none of its own."""
    write(attach(TensorBoardWriter()), BeforeTrain(), *scalars(10), image(10), *scalars(20, 30), image(30))
    write(
        attach(TensorBoardWriter(), start_iter=20),
        BeforeTrain(iter=20), *scalars(25, loss=2.0), image(25), *scalars(35, loss=2.0), image(35),
    )  # fmt: skip

    reader = read(folder)
    assert steps(reader.Scalars("train/loss")) == [10, 20, 25, 35]
    assert steps(reader.Images("train/cat")) == [10, 25, 35]


@pytest.mark.slow
def test_training_again_in_one_program(attach: Attach, folder: Path) -> None:
    """The process tells TensorBoard of a second beginning, too."""
    bus = attach(TensorBoardWriter())
    write(
        bus,
        BeforeTrain(),
        *scalars(1),
        image(2),
        *scalars(3),
        AfterRun(),
        BeforeTrain(iter=1),
        *scalars(2, 4),
    )

    reader = read(folder)
    assert steps(reader.Scalars("train/loss")) == [1, 2, 4]
    assert steps(reader.Images("train/cat")) == []


@pytest.mark.slow
@pytest.mark.parametrize("before", [[], [RunInfo(info={"model": "x"})]])
def test_settings_are_written_once(attach: Attach, folder: Path, before: list[Event]) -> None:
    """By whoever opens first, also if that is the process; it says how the run ended."""
    bus = attach(TensorBoardWriter(hparams={"lr": 0.5}))
    write(bus, *before, image(1), AfterRun(), AfterRun())

    tags = [
        value.tag
        for path in sorted(folder.iterdir())
        for record in EventFileLoader(str(path)).Load()
        for value in record.summary.value
        if value.tag.startswith("_hparams_")
    ]
    assert tags == [
        metadata.EXPERIMENT_TAG, metadata.SESSION_START_INFO_TAG, metadata.SESSION_END_INFO_TAG,
    ]  # fmt: skip


@pytest.mark.slow
def test_settings_of_a_thread_that_had_seen_the_end(attach: Attach, folder: Path) -> None:
    """HParams takes the end in once: a test with images after the training does not end it again."""
    bus = attach(TensorBoardWriter(hparams={"lr": 0.5}))
    write(bus, *scalars(1), AfterRun(), image(2), AfterRun(error="ValueError: no"))

    reader = read(folder)
    assert [tag for tag in reader.summary_metadata if tag == metadata.SESSION_END_INFO_TAG] == [
        metadata.SESSION_END_INFO_TAG
    ]
    assert len(files(folder)[1]) == 1


@pytest.mark.slow
def test_process_that_is_killed_is_replaced(attach: Attach, folder: Path) -> None:
    """Another one goes on at the first event that was not acknowledged, and every curve is whole."""
    bus = attach(TensorBoardWriter(), start_iter=10)
    emit(bus, BeforeTrain(iter=10), *scalars(11), image(12), *scalars(*range(13, 20)))
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


def test_thread_can_be_asked_for(attach: Attach, folder: Path) -> None:
    """With `offload="thread"` no image starts a process."""
    bus = attach(TensorBoardWriter(offload="thread"))
    write(bus, *scalars(1), image(2))

    assert accounts(bus) == {"TensorBoardWriter": ("thread", 2, 0)}


@pytest.mark.slow
def test_process_can_be_asked_for(attach: Attach, folder: Path) -> None:
    """With `offload="process"` the scalars are in one from the start."""
    bus = attach(TensorBoardWriter(offload="process"))
    write(bus, *scalars(1), image(2))

    assert accounts(bus) == {"TensorBoardWriter": ("process", 2, 0)}


def test_place_that_there_is_not_is_refused() -> None:
    """At the line that wrote it."""
    with pytest.raises(ValueError, match="offload must be one of 'auto', 'thread', 'process', got 'gpu'"):
        TensorBoardWriter(offload="gpu")


def test_class_that_no_process_can_import_stays_on_its_thread(attach: Attach, folder: Path) -> None:
    """It works as it would without processes."""

    class Mine(TensorBoardWriter):
        pass

    bus = attach(Mine())
    write(bus, *scalars(1), image(2))

    assert accounts(bus) == {"Mine": ("thread", 2, 0)}


def test_where_no_process_can_be_had_the_thread_goes_on(
    attach: Attach, folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """With a warning, and nothing lost."""

    def no_pipe() -> None:
        raise OSError(24, "Too many open files")

    bus = attach(TensorBoardWriter())
    with monkeypatch.context() as patched:
        patched.setattr("eventloop.background.workers.subscriber.os.pipe", no_pipe)
        emit(bus, *scalars(1), image(2))
        assert bus.flush(DEADLINE)
    write(bus, image(3))

    assert accounts(bus) == {"TensorBoardWriter": ("thread", 3, 0)}
    assert "a writer stays on its thread" in caplog.text


def test_image_that_comes_with_the_close_starts_no_process(attach: Attach, folder: Path) -> None:
    """What is left then is written where the writer is."""
    bus = attach(TensorBoardWriter())
    emit(bus, *scalars(1), image(2), *scalars(3))
    assert bus.close(DEADLINE)

    assert files(folder) == [[1, 2, 3]]


@pytest.mark.slow
def test_cancel_ends_both(folder: Path, tmp_path: Path) -> None:
    """Whoever cancels or pauses the writer means what has moved, too."""
    with Bus() as bus:
        run = Run(work_dir=str(tmp_path))
        subscription = TensorBoardWriter().attach(bus, lambda: run)
        emit(bus, *scalars(1), image(2))
        assert bus.flush(DEADLINE)
        subscription.pause()
        emit(bus, *scalars(3))
        subscription.resume()
        emit(bus, *scalars(4))
        assert bus.flush(DEADLINE)
        subscription.cancel()
        emit(bus, *scalars(5), image(6))

    assert files(folder) == [[1], [2, 4]]


def test_forgotten_bus_is_garbage(tmp_path: Path) -> None:
    """The writer does not hold the bus that it may have to subscribe to."""
    bus = Bus()
    TensorBoardWriter().attach(bus, lambda: Run(work_dir=str(tmp_path)))
    emit(bus, *scalars(1))
    alive = weakref.ref(bus)
    del bus
    gc.collect()

    assert alive() is None


def train(work_dir: Path, **options: Any) -> Trainer:
    torch.manual_seed(0)
    model = tiny_model()
    trainer = Trainer(
        model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), loss_fn=torch.nn.functional.cross_entropy,
        train_loader=batches(4), val_loader=batches(2), max_epochs=3, work_dir=work_dir,
        default_hooks={"checkpoint": None}, **options,
    )  # fmt: skip
    trainer.train()
    return trainer


@pytest.mark.slow
def test_training_with_images_is_the_same_training(tmp_path: Path, folder: Path) -> None:
    """A run with images has the weights of one without; the summary has the account of both halves of the writer."""
    draw = VisualizationHook(1, draw=lambda trainer, event: {"x": torch.zeros(3, 4, 4, dtype=torch.uint8)})
    without = train(tmp_path / "without")
    trainer = train(tmp_path, hooks=[draw, LoggerHook(interval=1)], writers=[TensorBoardWriter()])
    trainer.close()
    without.close()

    for key, value in without.model.state_dict().items():
        assert torch.equal(trainer.model.state_dict()[key], value)
    reader = read(folder)
    assert steps(reader.Scalars("train/loss")) == [*range(1, 13)]
    assert steps(reader.Images("val/x/0")) == [4, 8, 12]
    assert PROCESS in trainer.summary()
    assert "not everything was delivered" not in trainer.summary()
