"""Which checkpoints `max_keep_ckpts` counts, and which go for a new one, while others are under way or have failed."""

from __future__ import annotations

import pytest

from eventloop.checkpoint.retention.best import BestMetrics
from eventloop.checkpoint.retention.retention import Replaced, Retention


def kept(limit: int, *names: str) -> Retention:
    """A record with checkpoints that are durable."""
    record = Retention(BestMetrics(None), limit)
    record.load(names, {}, {}, {}, None)
    return record


def test_the_oldest_go() -> None:
    """What is beyond the limit goes once the new one is durable, not before."""
    record = kept(2, "1", "2")

    assert record.begin("3", 3) == Replaced(("1", "2"), 1)
    assert record.durable == ["1", "2"]
    record.done("3")
    assert record.durable == ["2", "3"]


def test_without_a_limit_nothing_goes() -> None:
    """-1 keeps all."""
    assert kept(-1, "1", "2").begin("3", 3) == Replaced()


def test_a_running_save_may_be_replaced_by_the_next_one() -> None:
    """Both are counted when the later one is durable, if they exist then."""
    record = kept(2, "1", "2")
    record.begin("3", 3)

    assert record.begin("4", 4) == Replaced(("1", "2", "3"), 1)


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
    """The newest two durable checkpoints are left, whichever of the saves fails."""
    record = kept(2, "1", "2")
    record.begin("3", 3)
    record.begin("4", 4)
    assert (record.names, record.saved_at) == (["1", "2", "3", "4"], 4)

    for name, end in zip("34", ends, strict=True):
        getattr(record, end)(name)

    assert (record.durable, record.names, record.saved_at) == (durable, durable, saved_at)


def test_one_of_a_name_that_is_there() -> None:
    """Counts once, as the newest; if it fails the former one is still there."""
    record = kept(2, "1", "2")
    assert record.begin("1", 3) == Replaced(("2",), 1)
    assert record.names == ["2", "1"]
    record.failed("1")
    assert record.durable == ["1", "2"]

    record.begin("1", 3)
    record.done("1")
    assert record.durable == ["2", "1"]


def test_names_that_are_not_there() -> None:
    """Are forgotten: a save that was under way when the checkpoint was taken may have failed."""
    record = kept(2, "1", "2", "3")

    record.only(["2", "best"])

    assert record.durable == ["2"]


def test_a_save_of_another_run() -> None:
    """What becomes of one that was under way when a checkpoint was loaded does not matter."""
    record = kept(2, "a")

    record.done("1")
    record.failed("1")
    assert record.durable == ["a"]
