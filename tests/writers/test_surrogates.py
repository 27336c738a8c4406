"""Texts with a lone surrogate, as each path is that is no UTF-8: every writer writes them, with escapes."""

from __future__ import annotations

import io
import os
import threading
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import numpy as np
import pytest
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from eventloop.bus import Bus
from eventloop.bus.subscription import SubscriptionStats
from eventloop.eventlog.reader import read_events
from eventloop.events import (
    AfterTrainIter,
    CheckpointSaved,
    Event,
    HistogramLogged,
    ImageLogged,
    RunInfo,
    ScalarsLogged,
    TextLogged,
)
from eventloop.events.run import Run
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
from tests.conftest import DEADLINE
from tests.support.process_handlers import MealServed
from tests.writers.csv_rows import rows

Attach = Callable[..., Bus]
Account = Callable[[Bus], SubscriptionStats]

BAD = os.fsdecode(b"caf\xe9")
GOOD = "caf\\udce9"
OFFLOADS = pytest.mark.parametrize("offload", ["thread", "process"])


class Parcel(Event):
    """An event that may hold anything."""

    step: int = 0
    value: Any = None


def write(bus: Bus, *events: Event) -> None:
    for event in events:
        bus.emit(event)
    bus.close(DEADLINE)


def lost(account: Account, bus: Bus) -> tuple[int, int, int]:
    stats = account(bus)
    return stats.failed, stats.dropped, stats.queued


def scalars(count: int, **others: float) -> list[ScalarsLogged]:
    return [ScalarsLogged(step=s, scalars={BAD: s / 2, "b": 2.0, **others}) for s in range(1, count + 1)]


def values_of_log(folder: Path) -> list[Any]:
    return [record.event.value for record in read_events(folder) if isinstance(record.event, Parcel)]


def values_of_lines(folder: Path) -> list[Any]:
    return [row["value"] for row in read_jsonl(folder / "metrics.jsonl") if row.get("event") == "parcel"]


@pytest.mark.parametrize(
    ("make", "read"),
    [
        pytest.param(EventLogWriter, values_of_log, id="event log"),
        pytest.param(lambda: JSONLWriter(events="*"), values_of_lines, id="jsonl"),
    ],
)
@pytest.mark.parametrize(
    ("value", "written"),
    [
        (BAD, GOOD),
        ({BAD: [1, {"a": (BAD,)}]}, {GOOD: [1, {"a": [GOOD]}]}),
        (Path(BAD), GOOD),
        ({"a": Path(BAD), "b": np.float32(0.5)}, {"a": GOOD, "b": 0.5}),
        (MealServed(dish=BAD), None),
        ([2**70, BAD], None),
        ("\ud83d", "\\ud83d"),
    ],
    ids=["text", "nested", "path", "objects", "struct", "large number", "of a pair"],
)
def test_a_field_of_a_file_of_events(
    attach: Attach, account: Account, tmp_path: Path, make: Callable[[], Writer],
    read: Callable[[Path], list[Any]], value: Any, written: Any,
) -> None:  # fmt: skip
    """It is written, its neighbours are what they were, and nothing counts as failed."""
    bus = attach(make())

    write(bus, Parcel(value="größe"), Parcel(value=value), Parcel(value="naïve"))

    first, odd, last = read(tmp_path)
    assert (first, last) == ("größe", "naïve")
    assert odd == written if written is not None else GOOD in str(odd).replace("\\\\", "\\")
    assert lost(account, bus) == (0, 0, 0)


@OFFLOADS
def test_events_of_eventloop_in_lines(attach: Attach, account: Account, tmp_path: Path, offload: str) -> None:
    """A path, a metric's name and a text, on a thread and behind the pipe to a process."""
    writer = JSONLWriter()
    writer.offload = offload
    bus = attach(writer)

    write(bus, CheckpointSaved(path=BAD), *scalars(2), TextLogged(text=BAD), RunInfo(info={"work_dir": BAD}))

    saved, first, second, text, info = read_jsonl(tmp_path / "metrics.jsonl")
    assert (saved["path"], text["text"], info["info"]) == (GOOD, GOOD, {"work_dir": GOOD})
    assert [(row[GOOD], row["b"]) for row in (first, second)] == [(0.5, 2.0), (1.0, 2.0)]
    assert lost(account, bus) == (0, 0, 0)


@OFFLOADS
def test_events_of_eventloop_in_the_log(
    attach: Attach, account: Account, tmp_path: Path, offload: str
) -> None:
    """They come back as events of their classes, and none lacks its number."""
    writer = EventLogWriter()
    writer.offload = offload
    bus = attach(writer)

    write(
        bus, AfterTrainIter(iter=1), CheckpointSaved(path=BAD, bytes=5), *scalars(2), AfterTrainIter(iter=2)
    )

    records = list(read_events(tmp_path))
    assert [record.sequence for record in records] == [0, 1, 2, 3, 4]
    assert [record.event for record in records] == [
        AfterTrainIter(iter=1), CheckpointSaved(path=GOOD, bytes=5),
        *(ScalarsLogged(step=s, scalars={GOOD: s / 2, "b": 2.0}) for s in (1, 2)), AfterTrainIter(iter=2),
    ]  # fmt: skip
    assert lost(account, bus) == (0, 0, 0)


def test_bytes_and_times_beside_one_stay_what_they_are(attach: Attach, tmp_path: Path) -> None:
    """In the event log, which has forms for them."""
    now = datetime.now(UTC)

    write(attach(EventLogWriter()), Parcel(value=[b"\xff", now, BAD]))

    assert values_of_log(tmp_path) == [[b"\xff", now, GOOD]]


def test_what_else_is_wrong_with_the_event_is_named(attach: Attach, account: Account) -> None:
    """Not the text, which could be written."""
    for make in (EventLogWriter, lambda: JSONLWriter("x.jsonl", events="*")):
        bus = attach(make())
        write(bus, Parcel(value={BAD: np.eye(2)}))

        assert "parcel cannot be encoded for its field value, a dict: NoPlainValue" in account(bus).error


@pytest.mark.representative(2)
@OFFLOADS
@pytest.mark.parametrize("make", [EventLogWriter, JSONLWriter, CSVWriter, TensorBoardWriter, ImageFileWriter])
def test_a_run_in_such_a_folder(
    attach: Attach, account: Account, tmp_path: Path, make: type[Writer], offload: str
) -> None:
    """Each writer writes into it."""
    writer = make()
    writer.offload = offload
    folder = tmp_path / BAD
    folder.mkdir()
    bus = attach(writer, work_dir=str(folder))

    image = ImageLogged(name="cat", step=1, data=bytes(3), shape=(1, 1, 3), dtype="uint8")
    write(bus, image if make is ImageFileWriter else scalars(1)[0])

    assert account(bus).delivered == 1
    assert any(path.stat().st_size for path in folder.rglob("*") if path.is_file())


@pytest.mark.slow
@OFFLOADS
def test_columns(attach: Attach, account: Account, tmp_path: Path, offload: str) -> None:
    """A metric's name is a column with escapes, one and the same in each row and after a resume."""
    for begin, writer in ((0, CSVWriter()), (2, CSVWriter())):
        writer.offload = offload
        bus = attach(writer)
        events = [ScalarsLogged(step=begin + s, scalars={BAD: s / 2, "b": 2.0}) for s in (1, 2)]
        write(bus, ScalarsLogged(mode="val", step=begin + 1, scalars={"b": 1.0}), *events)
        assert lost(account, bus) == (0, 0, 0)

    table = rows(tmp_path / "metrics.csv")
    assert [(row["mode"], row["step"], row["b"], row[GOOD]) for row in table] == [
        ("val", "1", "1.0", ""), ("train", "1", "2.0", "0.5"), ("train", "2", "2.0", "1.0"),
        ("val", "3", "1.0", ""), ("train", "3", "2.0", "0.5"), ("train", "4", "2.0", "1.0"),
    ]  # fmt: skip
    assert set(table[0]) == {"mode", "step", "iter", "epoch", "b", GOOD}


def test_a_mode_that_no_file_has_bytes_for(attach: Attach, tmp_path: Path) -> None:
    """Nobody checks a handwritten event's: it is written too."""
    mode: Any = BAD
    write(attach(CSVWriter()), ScalarsLogged(mode=mode, step=1, scalars={"b": 1.0}))

    assert [row["mode"] for row in rows(tmp_path / "metrics.csv")] == [GOOD]


@pytest.mark.slow
@OFFLOADS
def test_tags(attach: Attach, account: Account, tmp_path: Path, offload: str) -> None:
    """Curves, images, histograms, texts and settings: TensorBoard's reader finds them under names with escapes."""
    bus = attach(TensorBoardWriter(hparams={BAD: BAD}, metrics=[f"train/{BAD}"], offload=offload))

    write(
        bus, *scalars(3), TextLogged(step=1, name=f"{BAD}/text", text=BAD), RunInfo(info={"work_dir": BAD}),
        ImageLogged(name=BAD, step=1, data=bytes(3), shape=(1, 1, 3), dtype="uint8"),
        HistogramLogged(name=BAD, step=1, data=np.array([1, np.nan], "f4").tobytes(), shape=(2,), dtype="float32"),
    )  # fmt: skip

    reader: Any = EventAccumulator(str(tmp_path / "tensorboard"))
    reader.Reload()
    tag = f"train/{GOOD}"
    assert [(point.step, point.value) for point in reader.Scalars(tag)] == [(1, 0.5), (2, 1.0), (3, 1.5)]
    assert reader.Scalars(f"{tag}/nonfinite")[0].value == 1
    assert (reader.Tags()["images"], reader.Tags()["histograms"]) == ([tag], [tag])
    assert reader.Tensors(f"{tag}/text")[0].tensor_proto.string_val == [GOOD.encode()]
    info = reader.Tensors("run_info")[0].tensor_proto.string_val[0].decode()
    assert f"|work_dir|{GOOD}|" in info
    assert GOOD.encode() in reader.SummaryMetadata("_hparams_/session_start_info").plugin_data.content
    assert lost(account, bus) == (0, 0, 0)


@pytest.mark.parametrize("name", [BAD, "caf\ud800"])
def test_file_names(attach: Attach, account: Account, tmp_path: Path, name: str) -> None:
    """An image's file has the surrogate as any character that some file system refuses; so each can be opened."""
    bus = attach(ImageFileWriter())

    write(
        bus,
        *(
            ImageLogged(name=text, step=1, data=bytes([7] * 3), shape=(1, 1, 3), dtype="uint8")
            for text in (name, "b")
        ),
    )

    path = tmp_path / "images" / "train" / f"caf%{ord(name[-1]):X}" / "1.png"
    assert np.asarray(Image.open(path)).tolist() == [[[7, 7, 7]]]
    assert (tmp_path / "images/train/b/1.png").exists()
    assert lost(account, bus) == (0, 0, 0)


@pytest.mark.parametrize("progress", [False, True])
def test_lines_of_the_console(attach: Attach, account: Account, progress: bool) -> None:
    """Where the output says how it is encoded, as a terminal and a file do."""
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="utf-8")
    bus = attach(ConsoleWriter(1, stream=stream, progress=progress))

    write(bus, CheckpointSaved(path=BAD), *scalars(2), TextLogged(name="x", text=BAD))

    stream.flush()
    said = raw.getvalue().decode()
    assert f"Checkpoint saved: {GOOD}" in said
    assert f"x: {GOOD}" in said
    assert progress or f"{GOOD}: 0.5000" in said
    assert lost(account, bus) == (0, 0, 0)


class Gated(JSONLWriter):
    """Opens its file when it is told to."""

    queue = 2
    gate = threading.Event()

    def open(self, run: Run) -> None:
        assert self.gate.wait(DEADLINE)
        super().open(run)


def test_what_waits_in_the_spill_file(attach: Attach, account: Account, tmp_path: Path) -> None:
    """Events that a small queue has no room for are written in their order."""
    bus = attach(Gated(events="*"))
    for step in range(200):
        bus.emit(TextLogged(step=step, text=f"{BAD if step % 2 else 'ok'} {step}"))
    deadline = monotonic() + DEADLINE
    while account(bus).spilled <= 100:
        assert monotonic() < deadline
        sleep(0.002)
    Gated.gate.set()
    bus.close(DEADLINE)

    assert account(bus).spilled > 100
    assert lost(account, bus) == (0, 0, 0)
    assert [row["text"] for row in read_jsonl(tmp_path / "metrics.jsonl")] == [
        f"{GOOD if step % 2 else 'ok'} {step}" for step in range(200)
    ]
