"""TensorBoardWriter: the curves and texts that TensorBoard's own reader finds in the files."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from eventloop.events import RunInfo, ScalarsLogged, TextLogged
from eventloop.writers import TensorBoardWriter
from tests.writers.conftest import Attach, curve, tensorboard, train, val, write


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
    """Cells with bars and line breaks stay in their cell."""
    write(attach(TensorBoardWriter()), RunInfo(info={"model": "ResNet", "plan": "a|b\nc"}))

    (text,) = tensorboard(folder).Tensors("run_info")
    assert text.tensor_proto.string_val[0].decode() == (
        "|key|value|\n|---|---|\n|model|ResNet|\n|plan|a\\|b<br>c|"
    )


def test_a_resumed_run_replaces_the_steps_it_runs_again(attach: Attach, folder: Path) -> None:
    """Steps after the checkpoint are shown once, with the values of the resumed run; earlier ones stay."""
    write(attach(TensorBoardWriter()), *train(10, 20, 30, 40, loss=1.0))

    write(attach(TensorBoardWriter(), start_iter=20), *train(30, 40, 50, loss=2.0))

    assert curve(folder, "train/loss") == [(10, 1.0), (20, 1.0), (30, 2.0), (40, 2.0), (50, 2.0)]


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
