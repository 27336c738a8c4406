"""Writers with `offload="process"`."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from eventloop.background.workers.importable import pack, unpack
from eventloop.background.workers.subscriber import ProcessLane
from eventloop.bus import Bus
from eventloop.events import AfterTrainIter, ImageLogged, ScalarsLogged
from eventloop.events.run import Run
from eventloop.writers import ImageFileWriter, JSONLWriter, TensorBoardWriter, Writer
from eventloop.writers.jsonl import read_jsonl
from tests.conftest import DEADLINE
from tests.writers.conftest import Account, Attach
from tests.writers.step_file import Longer, StepFile


def in_process(writer: Any) -> Any:
    writer.offload = "process"
    return writer


def emit(bus: Bus, times: int) -> None:
    for i in range(times):
        bus.emit(AfterTrainIter(iter=i))


def text(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").splitlines()


def test_jsonl_in_a_process_is_complete(attach: Attach, account: Account, tmp_path: Path) -> None:
    """Every event, once and in order."""
    bus = attach(in_process(JSONLWriter()))
    for step in range(500):
        bus.emit(ScalarsLogged(step=step, iter=step, scalars={"loss": 1 / (step + 1)}))

    assert bus.close(DEADLINE)
    rows = list(read_jsonl(tmp_path / "metrics.jsonl"))
    assert [row["step"] for row in rows] == [*range(500)]
    assert rows[3]["loss"] == 0.25
    assert (account(bus).delivered, account(bus).runs_on) == (500, "process")


def test_writer_is_made_from_its_arguments(attach: Attach, tmp_path: Path) -> None:
    """What it holds need not pickle; its methods are called in the worker, in the order of `Writer`."""
    bus = attach(in_process(StepFile("steps.txt", prefix="n")))
    emit(bus, 2)
    bus.flush(DEADLINE)
    flushed = text(tmp_path / "steps.txt")
    bus.close(DEADLINE)

    assert flushed == ["open 0", "n0", "n1"]
    assert text(tmp_path / "steps.txt") == [*flushed, "close in another process: True"]


@pytest.mark.slow
def test_constructor_that_calls_its_base_is_made_by_its_own(attach: Attach, tmp_path: Path) -> None:
    """The outermost constructor's arguments count."""
    bus = attach(in_process(Longer()))
    emit(bus, 1)
    bus.close(DEADLINE)

    assert text(tmp_path / "longer.txt")[:2] == ["open 0", "step 0"]


def test_writer_without_constructor_can_be_sent() -> None:
    """It is its class."""

    def methods(writer: Writer) -> Any:
        return writer._deliver

    target = unpack(pack(methods(TensorBoardWriter()), None, None))

    assert isinstance(target.fn.__self__, TensorBoardWriter)  # type: ignore[attr-defined]


def test_facts_are_those_of_the_first_event(tmp_path: Path) -> None:
    """The run may be resumed after the writer was attached."""
    bus = Bus()
    facts = {"run": Run(work_dir=str(tmp_path))}
    in_process(StepFile("steps.txt")).attach(bus, lambda: facts["run"])
    facts["run"] = Run(work_dir=str(tmp_path), start_iter=7)
    emit(bus, 1)
    bus.close(DEADLINE)

    assert text(tmp_path / "steps.txt")[0] == "open 7"


@pytest.mark.slow
def test_writer_whose_worker_dies_goes_on(attach: Attach, account: Account, tmp_path: Path) -> None:
    """Another worker opens it again, at the first event that was not acknowledged."""
    writer = in_process(StepFile("steps.txt"))
    bus = Bus()
    subscription = writer.attach(bus, lambda: Run(work_dir=str(tmp_path)))
    emit(bus, 5)
    bus.flush(DEADLINE)
    lane = subscription.lane
    assert isinstance(lane, ProcessLane)
    assert lane.worker is not None
    os.kill(lane.worker.pid, signal.SIGKILL)
    bus.emit(AfterTrainIter(iter=5))
    bus.close(DEADLINE)

    lines = text(tmp_path / "steps.txt")
    assert lines[:-1] == ["open 0", "0", "1", "2", "3", "4", "open 5", "5"]


@pytest.mark.slow
def test_tensorboard_in_a_process_survives_a_death(tmp_path: Path) -> None:
    """Its curve is whole: a resumed run is cut off where the new worker goes on, not where the run began."""
    bus = Bus()
    subscription = in_process(TensorBoardWriter()).attach(
        bus, lambda: Run(work_dir=str(tmp_path), start_iter=10)
    )
    lane = subscription.lane
    for step in range(11, 31):
        bus.emit(ScalarsLogged(step=step, scalars={"loss": step / 2}))
        if step == 20:
            bus.flush(DEADLINE)
            os.kill(lane.worker.pid, signal.SIGKILL)
            deadline = monotonic() + DEADLINE
            while lane.deaths == 0:
                assert monotonic() < deadline
                sleep(0.002)
    bus.close(DEADLINE)
    curves = EventAccumulator(str(tmp_path / "tensorboard"))
    curves.Reload()

    assert [(point.step, point.value) for point in curves.Scalars("train/loss")] == [
        (step, step / 2) for step in range(11, 31)
    ]


@pytest.mark.slow
def test_images_in_a_process(attach: Attach, account: Account, tmp_path: Path) -> None:
    """The same files as of a thread."""
    pixels = np.arange(48, dtype=np.uint8).reshape(4, 4, 3)
    bus = attach(in_process(ImageFileWriter()))
    for step in range(3):
        bus.emit(ImageLogged(step=step, name="x", data=pixels.tobytes(), shape=(4, 4, 3)))
    bus.close(DEADLINE)

    assert account(bus).delivered == 3
    assert sorted(path.name for path in (tmp_path / "images/train/x").iterdir()) == [
        "0.png",
        "1.png",
        "2.png",
    ]


@pytest.mark.slow
def test_writer_that_fails_to_open_brings_its_error(
    attach: Attach, account: Account, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As that of a thread does."""
    bus = attach(in_process(StepFile("no/such/folder")))
    emit(bus, 3)
    bus.flush(DEADLINE)

    assert "FileNotFoundError" in account(bus).error
    assert (account(bus).failed, account(bus).dropped) == (1, 2)
    assert "in open" in caplog.text


def test_writer_whose_class_no_worker_can_import_is_refused(attach: Attach) -> None:
    """At the line that attaches it."""

    class Inside(StepFile):
        pass

    with pytest.raises(TypeError, match=r"Inside is defined inside a function.*offload='thread'"):
        attach(in_process(Inside("x")))


def test_writer_whose_arguments_do_not_pickle_is_refused(attach: Attach) -> None:
    """They are what it is made from."""
    with pytest.raises(TypeError, match=r"cannot be sent to a worker process: .*lambda"):
        attach(in_process(StepFile("x", prefix=lambda: 1)))  # type: ignore[arg-type]


def test_constructors_keep_their_signatures() -> None:
    """The registry checks the keys of a config by them."""
    import inspect

    assert list(inspect.signature(StepFile).parameters) == ["filename", "prefix"]
    with pytest.raises(TypeError, match=r"StepFile.__init__\(\) got an unexpected keyword argument 'nme'"):
        StepFile("x", nme="y")  # type: ignore[call-arg]
