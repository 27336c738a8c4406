"""`run.json`: what a reader finds there, whatever was there before."""

from __future__ import annotations

from pathlib import Path

import pytest

from eventloop.description.record import FILE, MOST_BEGINS, Begin, RunRecord, read_record, write_record


def record(iteration: int, **config: object) -> RunRecord:
    """A record of a training that begins after an iteration."""
    return RunRecord(begins=[Begin(time=1.0 + iteration, iter=iteration, host="node")], config=config)


def test_each_training_adds_its_begin_and_replaces_the_options(tmp_path: Path) -> None:
    """The begins stay in their order; a file that cannot be read is replaced. No other file is left."""
    (tmp_path / FILE).write_text("{")
    for iteration in (0, 40):
        write_record(tmp_path, record(iteration, lr=0.1 + iteration))

    found = read_record(tmp_path)

    assert found is not None
    assert [begin.iter for begin in found.begins] == [0, 40]
    assert found.config == {"lr": 40.1}
    assert [path.name for path in tmp_path.iterdir()] == [FILE]


def test_the_begins_are_bounded(tmp_path: Path) -> None:
    """Of more than fit, the first one and the newest are kept."""
    begins = [Begin(time=0.0, iter=iteration, host="node") for iteration in range(MOST_BEGINS)]
    write_record(tmp_path, RunRecord(begins=begins))

    write_record(tmp_path, record(5000))

    found = read_record(tmp_path)
    assert found is not None
    iterations = [begin.iter for begin in found.begins]
    assert iterations == [0, *range(2, MOST_BEGINS), 5000]


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ('{"begins": [', "run.json is truncated or not the record of a run: "),
        (
            '{"begins": {}}',
            "run.json is truncated or not the record of a run: Expected `array`, got `object`",
        ),
        (
            '{"version": 9, "begins": []}',
            "run.json must be of version 1 or older, .* got version 9 with 0 begins",
        ),
    ],
)
def test_another_file_is_refused(text: str, error: str, tmp_path: Path) -> None:
    """The error names the file and what is wrong with it."""
    (tmp_path / FILE).write_text(text)

    with pytest.raises(ValueError, match=error):
        read_record(tmp_path)


def test_a_run_without_the_file(tmp_path: Path) -> None:
    """A run of an earlier version has no record."""
    assert read_record(tmp_path) is None
