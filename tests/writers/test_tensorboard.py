"""TensorBoardWriter: the curves and texts that TensorBoard's own reader finds in the files."""

from __future__ import annotations

import io
import os
import random
import signal
import struct
import sys
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
import pytest
from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import masked_crc32c
from tensorboard.summary.writer.record_writer import RecordWriter

from eventloop.bus import Bus
from eventloop.events import BeforeTrain, ImageLogged, RunInfo, ScalarsLogged, TextLogged
from eventloop.writers import TensorBoardWriter
from eventloop.writers.tensorboard_records import frame
from tests.writers.conftest import Attach, curve, emit, tensorboard, train, val, worker_of, write


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "tensorboard"


def test_every_scalar_is_found_with_its_step(attach: Attach, folder: Path) -> None:
    """Each name is a curve `{mode}/{name}` that has each value at its step, also where ever other names come together."""
    events = [
        ScalarsLogged(step=step, scalars={"loss": float(step), f"part_{step % 150}": float(-step)})
        for step in range(1, 301)
    ]

    write(attach(TensorBoardWriter()), *events, val(10, loss=0.25))

    reader = tensorboard(folder)
    curves = {
        tag: [(point.step, point.value) for point in reader.Scalars(tag)] for tag in reader.Tags()["scalars"]
    }
    assert len(curves) == 152
    assert curves["train/loss"] == [(step, step) for step in range(1, 301)]
    assert curves["train/part_7"] == [(7, -7), (157, -157)]
    assert curves["val/loss"] == [(10, 0.25)]


def test_a_late_value_keeps_its_step(attach: Attach, folder: Path) -> None:
    """A value that arrives after later ones takes none of them away."""
    write(attach(TensorBoardWriter()), *train(40, 36, 50))

    assert sorted(curve(folder, "train/loss")) == [(36, 9.0), (40, 10.0), (50, 12.5)]


def test_texts_are_found(attach: Attach, folder: Path) -> None:
    """A text is under its mode and name, at its step, in TensorBoard's text tab."""
    write(attach(TensorBoardWriter()), TextLogged(mode="val", name="note", text="größer", step=3))

    (text,) = tensorboard(folder).Tensors("val/note")
    assert (text.step, text.tensor_proto.string_val[0].decode()) == (3, "größer")
    assert tensorboard(folder).SummaryMetadata("val/note").plugin_data.plugin_name == "text"


def test_run_info_is_a_table(attach: Attach, folder: Path) -> None:
    """Cells with bars and line breaks stay in their cell; the settings of the program and of the trainer follow."""
    info = RunInfo(
        info={"model": "ResNet", "plan": "a|b\nc"},
        config={"data": {"size": 3}},
        options={"optimizer": {"lr": 0.1}},
    )
    write(attach(TensorBoardWriter()), info)

    (text,) = tensorboard(folder).Tensors("run_info")
    assert text.tensor_proto.string_val[0].decode() == (
        "|key|value|\n|---|---|\n|model|ResNet|\n|plan|a\\|b<br>c|\n|config.data.size|3|\n|optimizer.lr|0.1|"
    )


def test_a_resumed_run_replaces_the_steps_it_runs_again(attach: Attach, folder: Path) -> None:
    """Steps after the checkpoint are shown once, with the values of the resumed run; earlier ones stay."""
    write(attach(TensorBoardWriter()), *train(10, 20, 30, 40, loss=1.0))

    write(attach(TensorBoardWriter(), start_iter=20), *train(30, 40, 50, loss=2.0))

    assert curve(folder, "train/loss") == [(10, 1.0), (20, 1.0), (30, 2.0), (40, 2.0), (50, 2.0)]


def test_a_worker_that_is_started_again_loses_no_validation(attach: Attach, folder: Path) -> None:
    """Validations before its first training values stay, though it replaces the steps that are sent again."""
    write(attach(TensorBoardWriter()), *train(9, 10), val(10, acc=0.1), *train(11))

    write(attach(TensorBoardWriter(), start_iter=10), val(10, acc=0.1), val(12, acc=0.2), *train(13))

    assert [step for step, _ in curve(folder, "train/loss")] == [9, 10, 13]
    assert [step for step, _ in curve(folder, "val/acc")] == [10, 10, 12]


def test_many_resumes_in_one_second_keep_their_order(attach: Attach, folder: Path) -> None:
    """Files are read in the order in which they were opened, however quickly they follow each other."""
    for start in range(0, 120, 10):
        write(attach(TensorBoardWriter(), start_iter=start), *train(*range(start + 1, start + 20)))

    assert [step for step, _ in curve(folder, "train/loss")] == list(range(1, 130))


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error comes when the writer is built, and says what to install."""
    monkeypatch.setitem(sys.modules, "tensorboard.compat.proto.event_pb2", None)

    with pytest.raises(
        ImportError, match=r"needs tensorboard and google-crc32c: pip install 'torch-eventloop\[demo\]'"
    ):
        TensorBoardWriter()


PIXELS = np.arange(48, dtype=np.uint8).reshape(4, 4, 3).tobytes()


# --- images, and a process -------------------------------------------------------------------------------------


def image(step: int) -> ImageLogged:
    return ImageLogged(name="cat", step=step, data=PIXELS, shape=(4, 4, 3))


def steps(entries: list[Any]) -> list[int]:
    return [entry.step for entry in entries]


def accounts(bus: Bus) -> dict[str, tuple[str, int, int]]:
    return {
        stats.name: (stats.runs_on, stats.delivered, stats.failed + stats.dropped) for stats in bus.stats()
    }


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


# --- the record format, against TensorBoard's own --------------------------------------------------------------


def test_the_checksum_is_the_one_in_c() -> None:
    """The library has its C part here: its fallback in Python would hold the interpreter as TensorBoard's does."""
    assert google_crc32c.implementation == "c"


@pytest.mark.parametrize("size", [0, 1, 2, 3, 4, 5, 100, 1023, 1024, 1025, 3079])
def test_records_are_those_of_tensorboard(size: int) -> None:
    """A framed record is byte for byte what tensorboard's RecordWriter writes."""
    data, file = random.Random(size).randbytes(size), io.BytesIO()

    RecordWriter(file).write(data)

    assert frame(data) == file.getvalue()
    assert struct.unpack("<I", frame(data)[-4:]) == (masked_crc32c(data),)
