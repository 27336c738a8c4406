"""The curves, last values and notices of a run, from its growing logs."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

import msgspec
import pytest

from eventloop.eventlog.format import FILE_NAME as EVENTS
from eventloop.eventlog.jsonl import FILE_NAME as ROWS
from eventloop.events import CommandApplied, CommandRefused, RolledBack
from eventloop.reporting.curves import read_curves
from eventloop.watching import RunReader
from eventloop.watching.view import CurveView
from eventloop.writers import EventLogWriter, JSONLWriter
from tests.support.trainers import MakeTrainer, batches
from tests.watching.conftest import add_rows, row


def begins(iteration: int) -> dict[str, Any]:
    """The row at the begin of a run."""
    return {"event": "before_run", "iter": iteration, "epoch": 0}


def curve_of(run: Path, name: str = "loss", **options: Any) -> CurveView:
    """The only curve of the training."""
    (curve,) = RunReader(run, metrics=[f"train/{name}"], **options).read().curves
    return curve


# --- curves ------------------------------------------------------------------------------------------------


def test_a_short_curve_has_every_record(run: Path) -> None:
    """Steps and values as they were logged."""
    add_rows(run, *(row(step, loss=1 / step) for step in range(1, 6)))

    curve = curve_of(run)

    assert (curve.steps, curve.mean) == ([1, 2, 3, 4, 5], [1, 1 / 2, 1 / 3, 1 / 4, 1 / 5])
    assert (curve.low, curve.high, curve.count, curve.last, curve.last_step) == ([], [], 5, 0.2, 5)


@pytest.mark.parametrize("count", [11, 64, 1000, 100_000])
def test_a_long_curve_is_bounded_and_keeps_its_extremes(run: Path, count: int) -> None:
    """At most as many points as asked for; every record is in one, with the mean, the least and the greatest value."""
    values = [random.Random(step).random() for step in range(count)]
    add_rows(run, *(row(step + 1, loss=value) for step, value in enumerate(values)))

    curve = curve_of(run, points=10)

    assert 5 <= len(curve.steps) <= 10
    assert (curve.count, curve.steps[-1], curve.last) == (count, count, values[-1])
    for begin, end, mean, low, high in zip(
        [0, *curve.steps], curve.steps, curve.mean, curve.low, curve.high, strict=False
    ):
        part = values[begin:end]
        assert (low, high) == (min(part), max(part))
        assert mean == pytest.approx(sum(part) / len(part))


def test_what_is_read_in_pieces_is_what_is_read_at_once(run: Path) -> None:
    """Whatever the run had written at each read, also half a row."""
    path = add_rows(run, *(row(step, loss=math.sin(step)) for step in range(1, 400)))
    whole = path.read_bytes()
    path.write_bytes(b"")
    reader = RunReader(run, points=20)
    with path.open("ab") as file:
        for begin in range(0, len(whole), 777):
            file.write(whole[begin : begin + 777])
            file.flush()
            view = reader.read()

    assert view.curves == RunReader(run, points=20).read().curves


def test_a_read_begins_where_the_last_has_ended(run: Path) -> None:
    """Rows that were read are not read again: the reader does not see that somebody has changed them."""
    path = add_rows(run, row(1, loss=1.0), row(2, loss=2.0))
    reader = RunReader(run)
    reader.read()
    size = path.stat().st_size
    with path.open("r+b") as file:
        file.write(b" " * (size - 1) + b"\n")
    add_rows(run, row(3, loss=3.0))

    (curve,) = reader.read().curves

    assert (curve.steps, curve.mean) == ([1, 2, 3], [1, 2, 3])


def test_a_row_that_is_being_written_waits(run: Path) -> None:
    """It counts once it is complete; a torn row that a resumed run removes never does."""
    path = add_rows(run, row(1, loss=1.0), end=b'{"mode":"train","step":2,"lo')
    reader = RunReader(run)
    assert reader.read().latest == {"train/loss": 1.0}

    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - len(b'{"mode":"train","step":2,"lo'))
    add_rows(run, row(2, loss=5.0))

    assert reader.read().latest == {"train/loss": 5.0}


def test_damaged_rows_are_left_out(run: Path) -> None:
    """Those before and after them are read."""
    add_rows(
        run, row(1, loss=1.0), end=b'\x00\x00 no row\n[1]\n{"mode":"train","step":-1,"loss":9}\n{"a":1}\n'
    )
    add_rows(run, row(2, loss=2.0))

    assert curve_of(run).mean == [1, 2]


def test_a_resumed_run_replaces_what_it_repeats(run: Path) -> None:
    """The records after the iteration of the resume are those of the later run, as in the report."""
    add_rows(run, begins(0), *(row(step, loss=1.0) for step in range(1, 9)))
    add_rows(run, begins(4), *(row(step, loss=2.0) for step in range(5, 7)))

    curve = curve_of(run)

    (expected,) = read_curves(run / ROWS).curves
    assert (curve.steps, curve.mean) == ([1, 2, 3, 4, 5, 6], [1, 1, 1, 1, 2, 2])
    assert (curve.steps, curve.mean) == (expected.steps, expected.mean)


def test_steps_that_go_back_without_a_begin_do_the_same(run: Path) -> None:
    """As in a file whose writer leaves out the events of the run."""
    add_rows(
        run, *(row(step, loss=1.0) for step in range(1, 9)), *(row(step, loss=2.0) for step in range(5, 7))
    )

    assert curve_of(run).mean == [1, 1, 1, 1, 2, 2]


def test_a_new_training_in_the_directory_begins_anew(run: Path) -> None:
    """Neither curves nor last values are those of the training before."""
    add_rows(run, begins(0), row(1, loss=1.0, lr=0.1), row(2, loss=1.0, lr=0.1))
    reader = RunReader(run)
    reader.read()
    add_rows(run, begins(0), row(1, loss=3.0))

    view = reader.read()

    assert (view.latest, [curve.mean for curve in view.curves]) == ({"train/loss": 3.0}, [[3.0]])


def test_a_replaced_file_begins_anew(run: Path) -> None:
    """A file of another inode under the name is read from its begin."""
    path = add_rows(run, row(1, loss=1.0), row(2, loss=1.0))
    reader = RunReader(run)
    reader.read()
    path.rename(run / "old.jsonl")
    add_rows(run, row(1, loss=7.0), row(2, loss=8.0), row(3, loss=9.0))

    assert [curve.mean for curve in reader.read().curves] == [[7, 8, 9]]


def test_values_that_are_not_finite_break_a_curve(run: Path) -> None:
    """They have a point, which is NaN; null in JSON."""
    add_rows(run, row(1, loss=1.0), row(2, loss=math.nan), row(3, loss=-math.inf), row(4, loss=2.0))

    curve = curve_of(run)

    assert msgspec.json.encode(curve.mean) == b"[1.0,null,null,2.0]"
    assert RunReader(run).read().latest == {"train/loss": 2.0}


# --- the choice --------------------------------------------------------------------------------------------


def names(run: Path, *patterns: str) -> list[str]:
    """The curves that patterns choose; without any, those by default."""
    return [f"{curve.mode}/{curve.name}" for curve in RunReader(run, metrics=patterns or None).read().curves]


def test_curves_are_chosen_by_name_and_pattern(run: Path) -> None:
    """By default the training's loss, and what is validated; else names in any mode, names of a mode, or patterns."""
    add_rows(run, row(1, loss=1.0, lr=0.1, time=0.1), row(1, "val", loss=1.0, acc=0.5, time=0.1))

    assert names(run) == ["train/loss", "val/loss", "val/acc"]
    assert names(run, "loss") == ["train/loss", "val/loss"]
    assert names(run, "train/lr", "acc") == ["train/lr", "val/acc"]
    assert names(run, "val/*") == ["val/loss", "val/acc", "val/time"]


def test_a_name_that_is_not_logged_is_named_with_those_that_are(run: Path) -> None:
    """A misspelled metric is no empty screen."""
    add_rows(run, row(1, loss=1.0, lr=0.1))

    view = RunReader(run, metrics=["los", "lr"]).read()

    assert "No scalar 'los' so far, there are: train/loss, train/lr." in view.notes


def test_a_metric_with_a_reserved_name_has_its_name(run: Path) -> None:
    """A scalar named as a column is shown by its own name."""
    add_rows(run, row(1, epoch=3.0))

    assert RunReader(run).read().latest == {"train/epoch": 3.0}


# --- the event log -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("writers", [(EventLogWriter,), (JSONLWriter,), (JSONLWriter, EventLogWriter)])
def test_each_log_gives_the_curves_and_the_end(make_trainer: MakeTrainer, writers: tuple[Any, ...]) -> None:
    """Rows, events, or both, which count once."""
    seen: list[float] = []
    trainer = make_trainer(
        writers=[writer() for writer in writers],
        max_epochs=4,
        val_loader=batches(1),
        sanity_val=0,
        val_step=lambda trainer, batch: {"acc": trainer.epoch / 4},
    )
    trainer.bus.subscribe(
        lambda trainer, event: seen.append(event.metrics["acc"]), "after_val_epoch", name="see"
    )
    trainer.train()

    view = RunReader(trainer.work_dir, metrics=["acc"]).read()

    (curve,) = view.curves
    assert (curve.steps, curve.mean) == ([3, 6, 9, 12], seen)
    ends = [line.text for line in view.lines if line.event == "after_run"]
    assert (ends, view.reason) == (["Run ended at iteration 12: completed"], "completed")
    assert not view.notes


def test_a_run_without_logs_still_shows_progress(make_trainer: MakeTrainer) -> None:
    """The heartbeat has the counters; a note says which writers give curves."""
    trainer = make_trainer(writers=[])
    trainer.train()

    view = RunReader(trainer.work_dir).read()

    assert (view.iter, view.curves) == (6, [])
    assert [note for note in view.notes if ROWS in note and EVENTS in note and "JSONLWriter" in note]


def test_a_failing_writer_is_ill_health(make_trainer: MakeTrainer) -> None:
    """Its name and its error are a line of health, from either log."""

    def fail(event: Any) -> None:
        raise OSError("no such disk")

    trainer = make_trainer(writers=[JSONLWriter()])
    trainer.bus.subscribe(fail, "after_train_epoch", offload="thread", name="Broken")
    trainer.train()

    view = RunReader(trainer.work_dir).read()

    assert view.health[0].event == "handler_failed"
    assert view.health[0].text.startswith("Broken FAILED")
    assert "no such disk" in view.health[0].text
    assert [line for line in view.lines if line.bad] == view.health


def test_events_of_a_steered_run_are_sentences(run: Path) -> None:
    """Commands with their arguments and senders, and a rollback with its reason, which is ill health."""
    events = [
        CommandApplied(iter=3, command="set", arguments={"lr": 0.1}, source="anna@login1"),
        CommandRefused(iter=4, command="set", reason="lr must be\nat least 0"),
        RolledBack(iter=2, path="runs/iter_2", reason="spike", skipped=7),
    ]
    add_rows(run, *map(msgspec.to_builtins, events))

    view = RunReader(run).read()

    assert [(line.iter, line.text, line.bad) for line in view.lines] == [
        (3, "Command applied: set lr=0.1 (from anna@login1)", False),
        (4, "Command refused: set: lr must be at least 0", False),
        (2, "Rolled back to runs/iter_2 (iteration 2), skipping 7 batches: spike", True),
    ]


def test_an_event_log_of_another_format_is_a_note(run: Path) -> None:
    """The rest is shown."""
    add_rows(run, row(1, loss=1.0))
    (run / EVENTS).write_bytes(b"nothing of the kind")

    view = RunReader(run).read()

    assert view.latest == {"train/loss": 1.0}
    assert [note for note in view.notes if "is not an event log" in note]
