"""Texts with a lone surrogate, as each path is that is no UTF-8: every writer writes them, with escapes."""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from eventloop import read_events
from eventloop.events import (
    CheckpointSaved,
    HistogramLogged,
    ImageLogged,
    RunInfo,
    ScalarsLogged,
    TextLogged,
)
from eventloop.writers import (
    ConsoleWriter,
    CSVWriter,
    EventLogWriter,
    ImageFileWriter,
    JSONLWriter,
    TensorBoardWriter,
    Writer,
    read_jsonl,
)
from tests.writers.conftest import Account, Attach, tensorboard, val, write
from tests.writers.csv_rows import rows

BAD = os.fsdecode(b"caf\xe9")
GOOD = "caf\\udce9"


def scalars(*steps: int) -> list[ScalarsLogged]:
    return [ScalarsLogged(step=step, scalars={BAD: step / 2, "b": 2.0}) for step in steps]


def image(name: str = BAD) -> ImageLogged:
    return ImageLogged(name=name, step=1, data=bytes([7] * 3), shape=(1, 1, 3), dtype="uint8")


def check_lines(folder: Path) -> None:
    saved, first, second, text, info = read_jsonl(folder / "metrics.jsonl")
    assert (saved["path"], text["text"], info["info"]) == (GOOD, GOOD, {"work_dir": GOOD})
    assert [(row[GOOD], row["b"]) for row in (first, second)] == [(0.5, 2.0), (1.0, 2.0)]


def check_log(folder: Path) -> None:
    saved, first, second, *_ = read_events(folder)
    assert saved.event == CheckpointSaved(path=GOOD, bytes=5)
    for step, record in enumerate((first, second), start=1):
        assert record.event == ScalarsLogged(step=step, scalars={GOOD: step / 2, "b": 2.0})


def check_rows(folder: Path) -> None:
    assert [(row["step"], row["b"], row[GOOD]) for row in rows(folder / "metrics.csv")] == [
        ("1", "2.0", "0.5"),
        ("2", "2.0", "1.0"),
    ]


def check_tags(folder: Path) -> None:
    reader, tag = tensorboard(folder / "tensorboard"), f"train/{GOOD}"
    assert [(point.step, point.value) for point in reader.Scalars(tag)] == [(1, 0.5), (2, 1.0)]
    assert reader.Scalars(f"{tag}/nonfinite")[0].value == 1
    assert (reader.Tags()["images"], reader.Tags()["histograms"]) == ([tag], [tag])
    assert reader.Tensors(f"{tag}/text")[0].tensor_proto.string_val == [GOOD.encode()]
    info = reader.Tensors("run_info")[0].tensor_proto.string_val[0].decode()
    assert f"|work_dir|{GOOD}|" in info
    assert GOOD.encode() in reader.SummaryMetadata("_hparams_/session_start_info").plugin_data.content


def check_image(folder: Path) -> None:
    assert np.asarray(Image.open(folder / "images/train/caf%DCE9/1.png")).tolist() == [[[7, 7, 7]]]


@pytest.mark.representative(6)
@pytest.mark.parametrize(
    ("make", "check"),
    [
        (JSONLWriter, check_lines),
        (lambda: EventLogWriter(events="*"), check_log),
        (CSVWriter, check_rows),
        (lambda: TensorBoardWriter(hparams={BAD: BAD}, metrics=[f"train/{BAD}"]), check_tags),
        (ImageFileWriter, check_image),
    ],
    ids=["jsonl", "event log", "csv", "tensorboard", "images"],
)
@pytest.mark.parametrize("offload", ["thread", "process"])
def test_events_of_eventloop(
    attach: Attach,
    account: Account,
    tmp_path: Path,
    make: Callable[[], Writer],
    check: Callable[[Path], None],
    offload: str,
) -> None:
    """Paths, names, texts and settings have escapes, on a thread and behind the pipe to a process; none is lost."""
    folder = tmp_path / BAD
    folder.mkdir()
    writer = make()
    writer.offload = offload
    bus = attach(writer, work_dir=str(folder))

    write(
        bus,
        CheckpointSaved(path=BAD, bytes=5),
        *scalars(1, 2),
        TextLogged(step=1, name=f"{BAD}/text", text=BAD),
        RunInfo(info={"work_dir": BAD}),
        image(),
        HistogramLogged(
            name=BAD, step=1, data=np.array([1, np.nan], "f4").tobytes(), shape=(2,), dtype="float32"
        ),
    )

    check(folder.rename(tmp_path / "run"))  # TensorBoard's reader cannot open it
    assert account(bus).delivered > 0
    assert (account(bus).failed, account(bus).dropped, account(bus).queued) == (0, 0, 0)


def test_columns_of_a_resumed_run(attach: Attach, tmp_path: Path) -> None:
    """A column is the same one after a resume; a mode is written with escapes too."""
    mode: Any = BAD
    write(attach(CSVWriter()), *scalars(1), val(1, b=1.0))
    write(attach(CSVWriter()), *scalars(2), ScalarsLogged(mode=mode, step=1, scalars={"b": 3.0}))

    assert [(row["mode"], row["step"], row["b"], row[GOOD]) for row in rows(tmp_path / "metrics.csv")] == [
        ("train", "1", "2.0", "0.5"),
        ("val", "1", "1.0", ""),
        ("train", "2", "2.0", "1.0"),
        (GOOD, "1", "3.0", ""),
    ]


@pytest.mark.parametrize("progress", [False, True])
def test_lines_of_the_console(attach: Attach, account: Account, progress: bool) -> None:
    """Where the output has an encoding, as a terminal and a file do."""
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="utf-8")
    bus = attach(ConsoleWriter(1, stream=stream, progress=progress))

    write(bus, CheckpointSaved(path=BAD), *scalars(1, 2), TextLogged(name="x", text=BAD))

    stream.flush()
    shown = raw.getvalue().decode()
    assert f"Checkpoint saved: {GOOD}" in shown
    assert f"x: {GOOD}" in shown
    assert progress or f"{GOOD}: 0.5000" in shown
    assert account(bus).delivered == 4
