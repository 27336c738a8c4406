"""Test how `Retention` counts checkpoints while saves are running or have failed."""

from __future__ import annotations

from pathlib import Path

import pytest

from eventloop.checkpoint.retention.best import BestMetrics
from eventloop.checkpoint.retention.retention import Replaced, Retention


def kept(limit: int, *names: str) -> Retention:
    """Return a record with durable checkpoints."""
    record = Retention(BestMetrics(None), limit)
    record.load({"kept": [*names], "bests": {}}, Path())
    return record


@pytest.mark.parametrize(
    ("ends", "durable", "saved_at"),
    [
        (("done", "done"), ["3", "4"], 4),
        (("done", "failed"), ["2", "3"], 3),
        (("failed", "done"), ["2", "4"], 4),
        (("failed", "failed"), ["1", "2"], -1),
    ],
)
def test_two_running_saves(ends: tuple[str, str], durable: list[str], saved_at: int) -> None:
    """Whichever of two running saves fail, the newest two durable checkpoints are kept."""
    record = kept(2, "1", "2")
    record.begin("3", 3)
    record.begin("4", 4)
    assert (record.names, record.saved_at) == (["1", "2", "3", "4"], 4)

    for name, end in zip("34", ends, strict=True):
        getattr(record, end)(name)

    assert (record.durable, record.names, record.saved_at) == (durable, durable, saved_at)


def test_one_of_a_name_that_is_there() -> None:
    """A save under an existing name counts once; if it fails, the former checkpoint still counts."""
    record = kept(2, "1", "2")
    assert record.begin("1", 3) == Replaced(("2",), 1)
    assert record.names == ["2", "1"]
    record.failed("1")
    assert record.durable == ["1", "2"]

    record.begin("1", 3)
    record.done("1")
    assert record.durable == ["2", "1"]


def test_a_save_of_another_run() -> None:
    """The end of a save that began before a state was loaded changes nothing."""
    record = kept(2, "a")

    record.done("1")
    record.failed("1")
    assert record.durable == ["a"]
