"""JSONLWriter: every value comes back, also after a kill, a resume and a full disk."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from eventloop.events import (
    AfterRun,
    AfterValEpoch,
    CheckpointSaved,
    CommandApplied,
    CommandRefused,
    Event,
    ImageLogged,
    RunInfo,
    ScalarsLogged,
    TextLogged,
)
from eventloop.events.run import Run
from eventloop.writers import JSONLWriter, read_jsonl
from tests.support.trainers import MakeTrainer
from tests.writers.conftest import FLOATS, Attach, write


def append(work_dir: Path, *events: Event) -> None:
    """Open the file again, and write to it."""
    writer = JSONLWriter()
    writer.open(Run(work_dir=str(work_dir)))
    writer.write_batch(list(events))
    writer.close()


def rows(path: Path) -> list[dict[str, Any]]:
    return list(read_jsonl(path))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "metrics.jsonl"


# --- lines -------------------------------------------------------------------------------------------------


def test_scalars_are_one_flat_line(attach: Attach, path: Path) -> None:
    """A line of scalars is mode, step, iter, epoch and the metrics, in that order."""
    write(attach(JSONLWriter()), ScalarsLogged(step=40, iter=39, epoch=1, scalars={"loss": 0.25, "lr": 1e-3}))

    assert path.read_text() == '{"mode":"train","step":40,"iter":39,"epoch":1,"loss":0.25,"lr":0.001}\n'


def test_every_event_is_a_line_in_order(attach: Attach, path: Path) -> None:
    """Nothing is merged, left out or reordered, however many events one write holds."""
    events = [ScalarsLogged(step=step, scalars={"loss": 1 / (step + 1)}) for step in range(5000)]
    write(attach(JSONLWriter()), *events)

    assert [(row["step"], row["loss"]) for row in rows(path)] == [(s, 1 / (s + 1)) for s in range(5000)]


class FolderMade(Event):
    """An event of the user's own."""

    folder: Path


def test_commands_to_the_run_are_lines(attach: Attach, path: Path) -> None:
    """Applied and refused commands are written without being asked for, with what `eventloop watch` shows of them."""
    write(
        attach(JSONLWriter()),
        CommandApplied(iter=9, command="set", arguments={"lr": 0.1}, source="anna@login1"),
        CommandRefused(iter=10, command="set", arguments={"lr": -1}, reason="lr must be at least 0"),
    )

    applied, refused = rows(path)
    assert (applied["event"], applied["iter"], applied["arguments"]) == ("command_applied", 9, {"lr": 0.1})
    assert (refused["event"], refused["reason"]) == ("command_refused", "lr must be at least 0")


def test_other_events_keep_their_tag(attach: Attach, path: Path) -> None:
    """The key "event" names an event without scalars; a field without a form in JSON becomes its text."""
    write(
        attach(JSONLWriter(events="*")),
        CheckpointSaved(iter=9, path="a", bytes=12, seconds=0.5),
        AfterRun(iter=10, reason="stopped"),
        ImageLogged(name="cat", data=b"\x00\x01", shape=(1, 2, 1)),
        FolderMade(folder=Path("a/b")),
    )

    saved, ended, image, made = rows(path)
    assert (saved["event"], saved["path"], saved["bytes"]) == ("checkpoint_saved", "a", 12)
    assert (ended["event"], ended["reason"], ended["error"]) == ("after_run", "stopped", None)
    assert image["event"] == "image_logged"
    assert made == {"event": "folder_made", "folder": "a/b"}


@FLOATS
def test_every_float_survives(attach: Attach, path: Path, value: float) -> None:
    """The value that is read is bit for bit the one written, in scalars and in a mapping of another event. Any JSON
    parser reads the file, as NaN and the infinities are strings in it."""
    write(
        attach(JSONLWriter(events="*")),
        ScalarsLogged(scalars={"loss": value}),
        AfterValEpoch(metrics={"loss": value}),
    )

    scalars, epoch = rows(path)
    assert repr(scalars["loss"]) == repr(epoch["metrics"]["loss"]) == repr(value)
    texts = {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}
    line = json.loads(path.read_text().splitlines()[0], parse_constant=pytest.fail)
    assert line["loss"] == texts.get(repr(value), value)


@pytest.mark.parametrize("text", ["NaN", "Infinity", "-Infinity", "~NaN", "~~Infinity", "NaNs", "~"])
def test_a_text_that_reads_like_a_number_stays_a_text(attach: Attach, path: Path, text: str) -> None:
    """The encoding of NaN replaces no text."""
    write(attach(JSONLWriter()), TextLogged(text=text), RunInfo(info={"fill": text}))

    logged, info = rows(path)
    assert (logged["text"], info["info"]) == (text, {"fill": text})


def test_two_files_of_one_run(attach: Attach, tmp_path: Path) -> None:
    """A second writer with a name of its own fills a second file, in a folder that it makes."""
    bus = attach(JSONLWriter())
    events = JSONLWriter("logs/events.jsonl", events=[AfterRun], name="event log")
    events.attach(bus, lambda: Run(work_dir=str(tmp_path)))

    write(bus, ScalarsLogged(step=1), AfterRun())

    assert [row["event"] for row in rows(tmp_path / "logs/events.jsonl")] == ["after_run"]
    with pytest.raises(ValueError, match="unknown event 'scalars_loged': did you mean 'scalars_logged'"):
        JSONLWriter(events=["scalars_loged"])


# --- a file that is there ----------------------------------------------------------------------------------


@pytest.mark.parametrize("before", ['{"mode":"train","step":1}\n', '{"mode":"train","step":1}'])
def test_a_resumed_run_appends(tmp_path: Path, path: Path, before: str) -> None:
    """An existing file keeps its lines, also a last one that lacks only its end."""
    path.write_text(before)

    append(tmp_path, ScalarsLogged(step=2))

    assert [row["step"] for row in rows(path)] == [1, 2]


def test_a_new_training_in_the_same_directory_appends(make_trainer: MakeTrainer) -> None:
    """Nothing of the earlier one is lost, and a `before_run` line at iteration 0 begins each."""
    for _ in range(2):
        trainer = make_trainer(writers=[JSONLWriter()], default_hooks={"checkpoint": None})
        trainer.train()
        trainer.close()

    found = rows(trainer.work_dir / "metrics.jsonl")
    begins = [at for at, row in enumerate(found) if row.get("event") == "before_run"]
    assert [found[at]["iter"] for at in begins] == [0, 0]
    first, second = (
        [row["step"] for row in part if "loss" in row] for part in (found[: begins[1]], found[begins[1] :])
    )
    assert first == second != []


def test_a_torn_last_line_is_reported_to_readers(path: Path) -> None:
    """Readers of a run that was killed in the middle of a line get the other lines."""
    path.write_text('{"mode":"train","step":1}\n{"mode":"tra')

    with pytest.warns(UserWarning, match=r"metrics\.jsonl, line 2 was cut short and is left out: b'\{"):
        steps = [row["step"] for row in read_jsonl(path)]

    assert steps == [1]


def test_a_torn_last_line_is_removed(tmp_path: Path, path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Wherever a kill cut it, the next opening leaves whole lines, logs once how many bytes it removed, and goes on."""
    first, line = b'{"mode":"train","step":1}\n', '{"mode":"val","step":2,"scalars/a b":"é"}'.encode()
    for end in range(1, len(line)):
        path.write_bytes(first + line[:end])
        caplog.clear()

        append(tmp_path, ScalarsLogged(step=3))

        assert [json.loads(text)["step"] for text in path.read_bytes().splitlines()] == [1, 3]
        assert caplog.messages == [
            f"{path}: removed the last {end} bytes, a partial line that a kill or a full disk left"
        ]


@pytest.mark.parametrize(
    ("content", "kept"),
    [
        (b'{"event":"image_logged","data":"' + b"A" * 300_000, b""),
        (b'{"step":1}\n{"event":"image_logged","data":"' + b"A" * 300_000, b'{"step":1}\n'),
        (b'{"step":1}\n' + b"\0" * 9, b'{"step":1}\n'),
        (b'{"step":1}\n{"mode":"tr' + b"\0" * 9, b'{"step":1}\n'),
        (b'{"a": 1e999}', b'{"a": 1e999}\n'),
        (b"a line of another program", b"a line of another program\n"),
        (b" {", b" {\n"),
        (b'{"a":' + b"[" * 5000 + b"]" * 5000 + b"}", b'{"a":' + b"[" * 5000 + b"]" * 5000 + b"}\n"),
    ],
    ids=["long and alone", "long", "zeros", "zeros in a line", "whole", "text", "no line of ours", "nested"],
)
def test_what_a_crash_left_is_removed(tmp_path: Path, path: Path, content: bytes, kept: bytes) -> None:
    """A torn line may be longer than a block, and a crash of the machine may leave zeros for the last bytes. Other bytes
    are kept, and get a line end."""
    path.write_bytes(content)

    append(tmp_path)

    assert path.read_bytes() == kept


def test_a_fifo_gets_the_lines(tmp_path: Path, path: Path) -> None:
    """Another program may read them as they come."""
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)

    append(tmp_path, ScalarsLogged(step=2))

    with open(reader, "rb") as file:
        assert json.loads(file.read())["step"] == 2


# --- failures ----------------------------------------------------------------------------------------------
