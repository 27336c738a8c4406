"""What fails, on the training thread or in the background, and what is left standing."""

from __future__ import annotations

import json
import threading
import traceback
from pathlib import Path
from typing import Any

import pytest

from eventloop import Bus, Trainer
from eventloop.checkpoint import find_checkpoints
from eventloop.events import AfterRun, Event, ScalarsLogged
from eventloop.hooks import CheckpointHook, Hook
from eventloop.writers import JSONLWriter, Writer
from tests.support.trainers import DEADLINE, MakeTrainer, batches, collect, names, record


class Faulty(Hook):
    """Raises in the second iteration."""

    priority = "LOW"

    def after_train_iter(self, trainer: Trainer, event: Any) -> None:
        if event.iter == 1:
            raise ValueError("no luck")


class Kept(Writer):
    """Keeps in memory what it is given."""

    events = ("*",)

    def __init__(self) -> None:
        self.seen: list[Event] = []
        self.closed_on = ""

    def write(self, event: Event) -> None:
        self.seen.append(event)

    def close(self) -> None:
        self.closed_on = threading.current_thread().name


def fail_in(trainer: Trainer, event: str) -> None:
    """Raise in a handler."""

    @trainer.bus.on(event)
    def faulty(event: Any) -> None:
        raise ValueError("no luck")


def crash(trainer: Trainer, match: str = "no luck") -> ValueError:
    """Train until it fails."""
    with pytest.raises(ValueError, match=match) as caught:
        trainer.train()
    return caught.value


def test_the_error_names_line_and_handler(make_trainer: MakeTrainer) -> None:
    """The last frame of a hook's error is the line of the hook that raised; a note names handler, priority and event."""
    error = crash(make_trainer(hooks=[Faulty()]))

    last = traceback.extract_tb(error.__traceback__)[-1]
    assert (last.filename, last.name, last.line) == (
        __file__,
        "after_train_iter",
        'raise ValueError("no luck")',
    )
    note = "\n".join(error.__notes__)
    assert "Faulty.after_train_iter (priority 70, " in note
    assert "AfterTrainIter(iter=1, epoch=0" in note


def test_remaining_after_handlers_run(make_trainer: MakeTrainer) -> None:
    """The handlers of an after_* event that come after the one that raised are reached all the same, and the state of
    the crash is not saved, in that iteration or at the end of the run."""
    trainer = make_trainer(hooks=[Faulty(), CheckpointHook(interval=1, by_epoch=False)])
    rows = record(trainer, "after_train_iter")

    crash(trainer)

    assert rows == [("after_train_iter", 0, 0), ("after_train_iter", 1, 0)]
    assert [path.name for path in find_checkpoints(trainer.work_dir)] == ["iter_1"]


def test_closing_events_of_a_crash(make_trainer: MakeTrainer) -> None:
    """A crash emits every closing event with reason "error", and after_run with the error's text."""
    trainer = make_trainer(hooks=[Faulty()])
    seen = collect(trainer, "after_train_epoch", "after_train", "after_run")

    crash(trainer)

    assert [event.reason for event in seen] == ["error"] * 3
    assert seen[-1].error == "ValueError: no luck"
    assert not trainer.running


def test_a_crash_in_a_validation_closes_both(make_trainer: MakeTrainer) -> None:
    """An error within a validation closes the validation and the training, and the mode is back."""
    trainer = make_trainer(val_loader=batches(1))
    fail_in(trainer, "before_val_iter")
    seen = collect(trainer, "after_val_epoch", "after_val", "after_train", "after_run")
    crash(trainer)

    assert [(type(event).__name__, event.reason) for event in seen] == [
        ("AfterValEpoch", "error"),
        ("AfterVal", "error"),
        ("AfterTrain", "error"),
        ("AfterRun", "error"),
    ]
    assert (trainer.mode, trainer.model.training) == ("train", True)


@pytest.mark.representative(2)
@pytest.mark.parametrize(
    ("event", "closing"),
    [
        ("before_run", ["after_run"]),
        ("before_train", ["after_train", "after_run"]),
        ("before_train_epoch", ["after_train_epoch", "after_train", "after_run"]),
        ("before_val", ["after_train_epoch", "after_val", "after_train", "after_run"]),
        (
            "before_val_epoch",
            ["after_train_epoch", "after_val_epoch", "after_val", "after_train", "after_run"],
        ),
    ],
)
def test_an_opening_that_fails_is_closed(make_trainer: MakeTrainer, event: str, closing: list[str]) -> None:
    """When a handler of an opening event raises, the closing one comes too: others have seen the opening."""
    trainer = make_trainer(val_loader=batches(1))
    fail_in(trainer, event)
    rows = record(trainer, "after_train_epoch", "after_val_epoch", "after_val", "after_train", "after_run")

    crash(trainer)

    assert names(rows) == closing
    assert trainer.mode == "train"


def test_an_error_while_closing_is_added_to_the_first(make_trainer: MakeTrainer) -> None:
    """A handler that fails on a closing event after a crash does not hide the crash: it becomes a note of it."""
    trainer = make_trainer(hooks=[Faulty()])

    @trainer.bus.on("after_train")
    def faulty(event: Any) -> None:
        raise KeyError("also this")

    error = crash(trainer)

    assert "KeyError: 'also this'" in "\n".join(error.__notes__)


def test_an_error_of_a_closing_handler_alone(make_trainer: MakeTrainer) -> None:
    """A handler that fails on after_train fails the run, and after_run says so."""
    trainer = make_trainer()
    fail_in(trainer, "after_train")
    seen = collect(trainer, "after_run")

    crash(trainer)

    assert [(event.reason, event.error) for event in seen] == [("error", "ValueError: no luck")]


def test_writers_are_drained_and_closed(make_trainer: MakeTrainer) -> None:
    """After a crash every writer has been given everything up to after_run, which has the error, and was closed."""
    writer = Kept()
    trainer = make_trainer(hooks=[Faulty()], writers=[writer, JSONLWriter()])

    crash(trainer)

    assert isinstance(writer.seen[-1], AfterRun)
    assert [event.iter for event in writer.seen if isinstance(event, ScalarsLogged)] == [1]
    assert "Kept" in writer.closed_on
    last = json.loads((trainer.work_dir / "metrics.jsonl").read_text().splitlines()[-1])
    assert (last["event"], last["error"]) == ("after_run", "ValueError: no luck")


# --- the background ----------------------------------------------------------------------------------------


def disk_full(event: Any) -> None:
    raise OSError("disk full")


async def disk_full_in_a_task(event: Any) -> None:
    raise OSError("disk full")


@pytest.mark.parametrize(("faulty", "offload"), [(disk_full, "thread"), (disk_full_in_a_task, None)])
def test_a_background_subscriber_that_raises(make_trainer: MakeTrainer, faulty: Any, offload: Any) -> None:
    """It is named in the summary, and training never notices."""
    trainer = make_trainer(max_epochs=1)
    trainer.bus.subscribe(faulty, "after_train_iter", offload=offload, name="faulty writer")
    trainer.train()

    report = trainer.summary().split("not everything was delivered:")[1]
    assert trainer.iter == 3
    assert "faulty writer" in report
    assert "OSError: disk full" in report


def test_a_writer_that_cannot_open(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    """A writer whose file cannot be opened fails alone."""
    (tmp_path / "file").touch()
    trainer = make_trainer(writers=[JSONLWriter(tmp_path / "file" / "metrics.jsonl")], max_epochs=1)

    trainer.train()

    assert trainer.iter == 3
    assert "JSONLWriter" in trainer.summary().split("not everything was delivered:")[1]


@pytest.mark.parametrize("kind", ["hangs", "is slow"])
def test_a_background_subscriber_that_holds_on(make_trainer: MakeTrainer, kind: str) -> None:
    """A subscriber that hangs, or is slow, holds up no iteration; the run ends, and the summary names it."""
    gate, entered = threading.Event(), threading.Event()
    bus = Bus(drain_timeout=0.2 if kind == "hangs" else DEADLINE)
    trainer = make_trainer(bus=bus, train_loader=batches(50))
    iterations: list[int] = []

    def held(event: Any) -> None:
        entered.set()
        gate.wait(DEADLINE)

    trainer.bus.subscribe(held, "before_train", "after_train_iter", offload="thread", name="held")

    @trainer.bus.on("after_train")
    def end(event: Any) -> None:
        assert entered.wait(DEADLINE)
        iterations.append(event.iter)
        if kind == "is slow":
            gate.set()

    trainer.train()
    summary = trainer.summary()
    gate.set()

    assert iterations == [100]
    assert "held" in summary
    assert ("not everything was delivered" in summary) is (kind == "hangs")


def test_on_error_raise(make_trainer: MakeTrainer) -> None:
    """`on_error="raise"` brings the error to the training thread, at an iteration boundary."""
    trainer = make_trainer(max_epochs=1)
    failed = threading.Event()

    def faulty(event: Any) -> None:
        failed.set()
        raise ValueError("no luck")

    trainer.bus.subscribe(faulty, "before_train_epoch", offload="thread", on_error="raise")

    @trainer.bus.on("before_train_iter")
    def wait(event: Any) -> None:
        trainer.bus.flush()
        assert failed.wait(DEADLINE)

    crash(trainer)

    assert trainer.iter == 1
