"""Test which checkpoints are on the current lineage, and the file `line.json` that records it."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path

import pytest
import torch

from eventloop.checkpoint import CheckpointError, load_best, load_newest, save_checkpoint
from eventloop.checkpoint.directory import (
    LINE,
    NOTHING,
    StepBack,
    begin_new_run,
    go_back,
    lineage_filter,
    read_steps_back,
    same_run_filter,
    scan,
    write_steps_back,
)
from eventloop.checkpoint.manifest import Label
from tests.support.recording_disk import RecordingDisk


def save(directory: Path, *sequences: int, best: bool = False, acc: float | None = None) -> None:
    """Save checkpoints that are named by their sequence, which is their score by default."""
    for sequence in sequences:
        metrics: dict[str, float | str] = {"acc": float(sequence) if acc is None else acc}
        label = Label(sequence=sequence, best={"acc": "greater"} if best else {}, metrics=metrics)
        save_checkpoint({"meta": {}, "state_dict": {"w": torch.zeros(1)}}, directory / str(sequence), label)


def names(directory: Path) -> list[str]:
    """Return the names of a directory's checkpoints in the order of a scan."""
    return [path.name for path in scan(directory).paths]


def back(directory: Path, sequence: int) -> bool:
    """Record that a run goes back to the checkpoint of a sequence."""
    return go_back(scan(directory), directory / str(sequence))


# --- the line ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("turns", "on_line"),
    [
        ([(3, 5)], [1, 2, 3, 6, 7]),
        ([(3, 5), (6, 7)], [1, 2, 3, 6]),
        ([(3, 5), (5, 7)], [1, 2, 3, 4, 5]),
        ([(3, 5), (5, 5)], [1, 2, 3, 4, 5, 6, 7]),
        ([(3, 5), (2, 5)], [1, 2, 6, 7]),
        ([(2, 3), (3, 4), (4, 6)], [1, 2, 4, 7]),
    ],
)
def test_what_led_to_where_the_run_is(turns: list[tuple[int, int]], on_line: list[int]) -> None:
    """On the lineage are the checkpoints since the last step back, and those that led to the one it went back
    to."""
    line = lineage_filter([StepBack(*turn) for turn in turns])

    assert [sequence for sequence in range(1, 8) if line(sequence)] == on_line


@pytest.mark.parametrize(
    ("turns", "same"),
    [
        ([], [1, 2, 3, 4, 5, 6, 7]),
        ([(2, 3)], [1, 2, 3, 4, 5, 6, 7]),
        ([(NOTHING, 3)], [4, 5, 6, 7]),
        ([(NOTHING, 3), (4, 5)], [4, 5, 6, 7]),
        ([(NOTHING, 3), (NOTHING, 5)], [6, 7]),
        ([(NOTHING, 3), (2, 5)], [1, 2, 3, 6, 7]),
        ([(NOTHING, 3), (2, 5), (5, 6)], [4, 5, 7]),
    ],
)
def test_which_checkpoints_are_of_the_newest_run(turns: list[tuple[int, int]], same: list[int]) -> None:
    """A run that goes back is the same run, or the other one that it goes back to; a new run goes back to nothing."""
    of_this_run = same_run_filter([StepBack(*turn) for turn in turns])

    assert [sequence for sequence in range(1, 8) if of_this_run(sequence)] == same


# --- the directory -----------------------------------------------------------------------------------------


def test_what_was_left_behind_comes_first(tmp_path: Path) -> None:
    """After a step back its target is the newest checkpoint until the next save; abandoned ones sort first
    and stay."""
    save(tmp_path, 1, 2, 3, 4)

    assert back(tmp_path, 2)
    assert names(tmp_path) == ["3", "4", "1", "2"]
    assert scan(tmp_path).abandoned == {tmp_path / "3", tmp_path / "4"}
    save(tmp_path, 5)
    assert names(tmp_path) == ["3", "4", "1", "2", "5"]


def test_back_to_what_was_left_behind(tmp_path: Path) -> None:
    """A run may go back to an abandoned checkpoint, which is then on the lineage."""
    save(tmp_path, 1, 2, 3)
    back(tmp_path, 1)
    save(tmp_path, 4)

    assert back(tmp_path, 3)
    assert names(tmp_path) == ["4", "1", "2", "3"]
    assert read_steps_back(tmp_path) == (StepBack(1, 3), StepBack(3, 4))


def test_a_sequence_is_given_once(tmp_path: Path) -> None:
    """The sequence of an abandoned and removed checkpoint is not used again, so the next checkpoint is on the
    lineage."""
    save(tmp_path, 1, 2, 3)
    back(tmp_path, 1)
    for name in ("2", "3"):
        shutil.rmtree(tmp_path / name)

    assert scan(tmp_path).last == 3
    save(tmp_path, 4)
    assert names(tmp_path) == ["1", "4"]
    assert scan(tmp_path / "none").last == 0


def test_several_directories_have_one_line(tmp_path: Path) -> None:
    """A step back abandons newer checkpoints in every directory of the run, and each directory records it."""
    left, right = tmp_path / "left", tmp_path / "right"
    save(left, 1, 3, 5)
    save(right, 2, 4)
    found = scan(left, right)
    assert [path.name for path in found.paths] == ["1", "2", "3", "4", "5"]

    assert go_back(found, left / "3")
    assert not go_back(scan(left, right), left / "3")
    found = scan(left, right)
    assert [path.name for path in found.paths] == ["4", "5", "1", "2", "3"]
    assert found.abandoned_after(left / "3") == [str(right / "4"), str(left / "5")]
    assert (names(left), names(right)) == (["5", "1", "3"], ["4", "2"])
    save(right, 6)
    assert names(right) == ["4", "2", "6"]


def test_the_newest_of_the_line_is_loaded(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The newest checkpoint of the lineage is loaded, and the log names newer abandoned ones; going on from
    the newest writes no record."""
    save(tmp_path, 1, 2, 3)
    assert not back(tmp_path, 3)
    assert not (tmp_path / LINE).exists()
    back(tmp_path, 1)

    assert load_newest(tmp_path)[0].name == "1"
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith(f"{tmp_path / '1'} is the newest checkpoint of the current lineage; ")
    assert line.endswith("before it saved 2, 3, which are passed over")
    save(tmp_path, 4)
    caplog.clear()
    assert load_newest(tmp_path)[0].name == "4"
    assert caplog.text == ""


def test_what_was_left_behind_is_better_than_nothing(tmp_path: Path) -> None:
    """If no checkpoint of the lineage is intact, the newest abandoned one is loaded."""
    save(tmp_path, 1, 2)
    back(tmp_path, 1)
    (tmp_path / "1" / "state.pth").write_bytes(b"")

    assert load_newest(tmp_path)[0].name == "2"


def test_the_best_is_the_best(tmp_path: Path) -> None:
    """An abandoned checkpoint can be the best: a step back does not change its score."""
    save(tmp_path, 1, 2, best=True)
    back(tmp_path, 1)

    assert load_best(tmp_path)[0].name == "2"


def test_the_best_is_of_the_newest_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A run that begins among another's checkpoints has a best one of its own, however good the other's were; until it
    has, the other's is loaded, with a line in the log."""
    save(tmp_path, 1, 2, best=True)
    begin_new_run(scan(tmp_path))

    assert load_best(tmp_path)[0].name == "2"
    assert caplog.messages == [
        f"{tmp_path / '2'} is of an earlier run: the newest run has no best checkpoint that can be used"
    ]
    save(tmp_path, 3, best=True, acc=0.5)
    assert load_best(tmp_path)[0].name == "3"
    assert load_newest(tmp_path)[0].name == "3"


def test_the_other_run_goes_on(tmp_path: Path) -> None:
    """A run that is resumed after another began in its directory is on the lineage again, with all its checkpoints."""
    save(tmp_path, 1, 2, best=True)
    begin_new_run(scan(tmp_path))
    found = scan(tmp_path)
    assert found.abandoned == found.foreign == {tmp_path / "1", tmp_path / "2"}

    assert back(tmp_path, 2)

    found = scan(tmp_path)
    assert not found.abandoned | found.foreign
    assert load_best(tmp_path)[0].name == "2"


# --- the file ----------------------------------------------------------------------------------------------


LATER = b'{"schema":2,"turns":"anything"}'
SEALED = b'{"sha256":"%s","line":%s}' % (hashlib.sha256(LATER).hexdigest().encode(), LATER)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", r"line\.json is damaged: Input data was truncated"),
        (b'{"sha256":"0","line":{}}', r"line\.json is damaged: its contents do not match the hash in it"),
        (
            b'{"sha256":"a","line":' + b"[" * 100_000,
            r"line\.json is damaged: maximum recursion depth exceeded",
        ),
        (SEALED, r"has schema 2, this version of eventloop reads 1: update eventloop"),
    ],
    ids=["truncated", "hash", "too deep", "later version"],
)
def test_a_damaged_file(tmp_path: Path, content: bytes, message: str) -> None:
    """A damaged `line.json` is reported like a damaged checkpoint, and all checkpoints count as on the
    lineage."""
    save(tmp_path, 1, 2)
    back(tmp_path, 1)
    (tmp_path / LINE).write_bytes(content)

    with pytest.raises(CheckpointError, match=message):
        read_steps_back(tmp_path)
    found = scan(tmp_path)
    assert [path.name for path in found.paths] == ["1", "2"]
    assert len(found.damaged) == 1
    assert back(tmp_path, 1)
    assert names(tmp_path) == ["2", "1"]


def test_turns_are_read_as_they_were_written(tmp_path: Path) -> None:
    """Steps back are read in the order in which they were written; without a file there are none."""
    assert read_steps_back(tmp_path) == ()

    write_steps_back(tmp_path, [StepBack(1, 3), StepBack(2, 9)], tmp_path / ".work")

    assert read_steps_back(tmp_path) == (StepBack(1, 3), StepBack(2, 9))


@pytest.mark.parametrize("number", range(4))
def test_a_write_that_fails_leaves_nothing_behind(tmp_path: Path, number: int) -> None:
    """Whichever operation of the write fails before the rename is done, no file is left."""
    with pytest.raises(OSError, match="No space left on device"):
        write_steps_back(tmp_path, [StepBack(1, 2)], tmp_path / ".work", RecordingDisk(tmp_path, number))

    assert [*tmp_path.iterdir()] == []
