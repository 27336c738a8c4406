"""NotifyWriter: which messages it sends, when, and what an address that is away does to a run."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from eventloop.events import (
    AfterRun,
    AfterTrainIter,
    AfterVal,
    AfterValIter,
    BeforeRun,
    BeforeTrain,
    CheckpointFailed,
    CommandApplied,
    Event,
    HandlerFailed,
    InvalidLoss,
    RolledBack,
    ScalarsLogged,
    SlowHandler,
)
from eventloop.events.run import Run
from eventloop.hooks import EarlyStoppingHook, LoggerHook
from eventloop.writers import ConsoleWriter, EventLogWriter
from eventloop.writers.notify_addresses import Message, load_services, open_addresses
from tests.conftest import DEADLINE
from tests.support.signals import Heard, send
from tests.support.trainers import MakeTrainer, batches
from tests.writers.conftest import Account, Attach, emit, write
from tests.writers.notify_target import Target
from tests.writers.otlp_collector import is_missing

if is_missing("apprise"):
    pytest.skip(
        "apprise is not installed, so NotifyWriter is NOT tested: pip install 'torch-eventloop[notify]'",
        allow_module_level=True,
    )

from eventloop.writers import NotifyWriter

MakeTarget = Callable[..., Target]


class SupperReady(Event, kw_only=True):
    """An event of a program's own."""

    dish: str = ""


@pytest.fixture
def make_target() -> Iterator[MakeTarget]:
    """Make servers that receive messages; they end with the test."""
    made: list[Target] = []

    def make(status: int | None = 200) -> Target:
        made.append(Target(status))
        return made[-1]

    yield make
    for target in made:
        target.close()


@pytest.fixture
def target(make_target: MakeTarget) -> Target:
    """One that answers 200."""
    return make_target()


def lines(message: dict[str, Any]) -> list[str]:
    """The lines of a message."""
    return str(message["message"]).splitlines()


# --- messages ------------------------------------------------------------------------------------------------


def test_the_end_of_a_training_is_told(make_trainer: MakeTrainer, target: Target, tmp_path: Path) -> None:
    """A training that ends sends one message with its reason, iterations, last and best scores, and directory."""
    scores = iter([0.5, 0.75, 0.625])
    trainer = make_trainer(
        max_epochs=3,
        val_loader=batches(1),
        evaluator={"accuracy": lambda *_: next(scores)},
        hooks=[LoggerHook(1)],
        writers=[NotifyWriter(target.url)],
    )

    trainer.train()
    trainer.close()

    (message,) = target.messages
    assert message["title"] == "run: training completed"
    assert message["type"] == "success"
    assert lines(message)[:2] == ["reason: completed", "iterations: 9 of 9, epochs: 3"]
    assert "accuracy: last 0.625, best 0.75" in lines(message)
    assert any(line.startswith("time: ") for line in lines(message))
    assert any(line.startswith("loss in training: ") for line in lines(message))
    assert lines(message)[-1].endswith(f":{tmp_path / 'run'}")


def test_early_stopping_is_told(make_trainer: MakeTrainer, target: Target) -> None:
    """A training that stops because a metric no longer improves says so in the title."""
    trainer = make_trainer(
        max_epochs=9,
        val_loader=batches(1),
        evaluator={"accuracy": lambda *_: 0.5},
        hooks=[EarlyStoppingHook("accuracy", patience=2)],
        writers=[NotifyWriter(target.url)],
    )

    trainer.train()
    trainer.close()

    (title,) = target.titles
    assert title.startswith("run: training stopped: early stopping: accuracy has not become better")


def test_an_error_is_told(make_trainer: MakeTrainer, target: Target) -> None:
    """A training that an error ends sends the error's text."""

    def fail(*args: Any) -> torch.Tensor:
        raise ValueError("no such batch")

    trainer = make_trainer(train_step=fail, writers=[NotifyWriter(target.url)])

    with pytest.raises(ValueError, match="no such batch"):
        trainer.train()
    trainer.close()

    (message,) = target.messages
    assert (message["title"], message["type"]) == ("run: training failed", "failure")
    assert "error: ValueError: no such batch" in message["message"]


def test_a_signal_is_told(make_trainer: MakeTrainer, target: Target, received: Heard) -> None:
    """A signal sends a message when it comes, and one when the run has ended by it."""
    trainer = make_trainer(max_epochs=50, writers=[NotifyWriter(target.url)])

    def preempt(event: Any) -> None:
        if event.iter == 2:
            send(signal.SIGTERM)

    trainer.bus.subscribe(preempt, "after_train_iter", name="preempts")

    trainer.train()
    trainer.close()

    assert target.titles == ["run: preemption requested", "run: training ended by SIGTERM"]
    assert "reason: preempted by SIGTERM" in target.messages[0]["message"]
    assert "signal: SIGTERM" in lines(target.messages[1])


def test_an_invalid_loss_is_told(make_trainer: MakeTrainer, target: Target) -> None:
    """A loss that is NaN sends a message, before or after that of the end of a short training."""

    def lose(*args: Any) -> torch.Tensor:
        return torch.full((), float("nan"), requires_grad=True)

    trainer = make_trainer(train_step=lose, hooks=[LoggerHook(1)], writers=[NotifyWriter(target.url)])

    trainer.train()
    trainer.close()

    assert sorted(target.titles) == ["run: invalid loss", "run: training completed"]


def test_a_failed_checkpoint_is_told(attach: Attach, target: Target) -> None:
    """A checkpoint that could not be saved sends its path and its error."""
    bus = attach(NotifyWriter(target.url))

    write(bus, CheckpointFailed(path="runs/digits/epoch_1", error="OSError: no space left"))

    (message,) = target.messages
    assert message["type"] == "failure"
    assert {"path: runs/digits/epoch_1", "error: OSError: no space left"} <= {*lines(message)}


def test_a_rollback_is_told(attach: Attach, target: Target) -> None:
    """A run that goes back sends the checkpoint, the reason, and how many batches it skips."""
    bus = attach(NotifyWriter(target.url))

    write(bus, RolledBack(path="runs/digits/iter_40", reason="loss is nan", skipped=8))

    (message,) = target.messages
    assert (message["title"].partition(": ")[2], message["type"]) == ("rolled back", "warning")
    assert {"path: runs/digits/iter_40", "reason: loss is nan", "skipped: 8"} <= {*lines(message)}


def test_a_validation_has_other_words(make_trainer: MakeTrainer, target: Target) -> None:
    """A validation without a training is no training that has completed."""
    trainer = make_trainer(
        val_loader=batches(1), evaluator={"accuracy": lambda *_: 0.5}, writers=[NotifyWriter(target.url)]
    )

    trainer.val()
    trainer.close()

    assert target.titles == ["run: run completed"]
    assert "accuracy: last 0.5, best 0.5" in lines(target.messages[0])


def test_a_metric_whose_better_side_is_unknown_has_no_best(attach: Attach, target: Target) -> None:
    """The best of a metric is named only if it is known which of its values are better."""
    bus = attach(NotifyWriter(target.url))
    scores = [AfterVal(metrics={"warmth": value, "loss": value}) for value in (1.0, 0.25, 0.5)]

    write(bus, BeforeRun(), BeforeTrain(), *scores, AfterRun())

    assert {"warmth: last 0.5", "loss: last 0.5, best 0.25"} <= {*lines(target.messages[0])}


def test_chosen_events_are_told(attach: Attach, target: Target) -> None:
    """With `events`, only these are told, also those of a program's own."""
    bus = attach(NotifyWriter(target.url, events=["supper_ready", CheckpointFailed]))

    write(bus, BeforeRun(), SupperReady(dish="soup"), InvalidLoss(), CheckpointFailed(), AfterRun())

    assert [title.partition(": ")[2] for title in target.titles] == ["supper ready", "checkpoint failed"]
    assert "dish: soup" in lines(target.messages[0])


def test_a_dev_run_tells_nothing(make_trainer: MakeTrainer, target: Target) -> None:
    """`fast_dev_run` sends no message."""
    trainer = make_trainer(work_dir=None, fast_dev_run=1, max_epochs=1, writers=[NotifyWriter(target.url)])

    trainer.train()
    trainer.close()

    assert target.messages == []


def test_a_text_is_made_printable(attach: Attach, target: Target) -> None:
    """Control characters and lone surrogates, such as of a path, arrive as escapes."""
    bus = attach(NotifyWriter(target.url))

    write(bus, CheckpointFailed(path="a\udcff", error="\x1b[2J"))

    assert {"path: a\\udcff", "error: \\x1b[2J"} <= {*lines(target.messages[0])}


def test_a_long_error_is_cut(attach: Attach, target: Target) -> None:
    """A field has at most 1,000 characters in a message."""
    bus = attach(NotifyWriter(target.url))

    write(bus, CheckpointFailed(error="x" * 5000))

    assert f"error: {'x' * 1000}…" in lines(target.messages[0])


# --- how many ------------------------------------------------------------------------------------------------


def test_many_events_send_few_messages(attach: Attach, target: Target, account: Account) -> None:
    """A hundred thousand events send `limit` messages, and the end of the training counts the others."""
    bus = attach(NotifyWriter(target.url, events=["slow_handler", "after_run"], limit=3, period=3600))
    many = [SlowHandler(handler="h")] * 100_000

    write(bus, BeforeRun(), BeforeTrain(), *many, AfterRun())

    assert [title.partition(": ")[2] for title in target.titles] == [
        *["slow handler"] * 3,
        "training completed",
    ]
    assert lines(target.messages[-1])[-2].endswith("since the last one: 99,997 slow_handler")
    assert account(bus).failed == 0


def test_what_was_held_back_is_counted_at_the_close(attach: Attach, target: Target) -> None:
    """Events that had no message are counted in a last one, if no end of a training follows."""
    bus = attach(NotifyWriter(target.url, limit=1, period=3600))

    write(bus, *[CheckpointFailed()] * 3)

    assert lines(target.messages[-1])[0].endswith("2 checkpoint_failed")
    assert len(target.messages) == 2


def test_messages_go_on_after_the_period(attach: Attach, target: Target) -> None:
    """Once `period` has passed, the next event has a message, which counts those held back before."""
    bus = attach(NotifyWriter(target.url, limit=1, period=1e-9))

    write(bus, *[CheckpointFailed()] * 3)

    assert len(target.messages) == 3


# --- addresses that are away -----------------------------------------------------------------------------------


def failures(caplog: pytest.LogCaptureFixture) -> list[str]:
    """The lines of the log that name the first of two addresses."""
    return [
        line for line in caplog.messages if line.startswith("NotifyWriter: address 1 of 2 (json://) did not")
    ]


def test_an_address_that_refuses_harms_no_other(
    make_target: MakeTarget, attach: Attach, account: Account, caplog: pytest.LogCaptureFixture
) -> None:
    """The other addresses get each message; the events count as failed, and the address is named once."""
    refuses, alive = make_target(500), make_target()
    bus = attach(NotifyWriter(refuses.url, alive.url, timeout=DEADLINE))

    write(bus, *[CheckpointFailed()] * 3)

    assert [len(refuses.messages), len(alive.messages)] == [3, 3]
    assert account(bus).failed == 3
    (line,) = failures(caplog)
    assert line.endswith("or refuses the message. Further failures of it are only counted")


def test_an_address_that_never_answers_harms_no_other(
    make_target: MakeTarget, attach: Attach, account: Account, caplog: pytest.LogCaptureFixture
) -> None:
    """It gets no second message before it has answered; the other address gets its own."""
    silent, alive = make_target(None), make_target()
    bus = attach(NotifyWriter(silent.url, alive.url, timeout=0.2))

    emit(bus, CheckpointFailed())
    alive.wait_for(1)
    silent.wait_for(1)
    write(bus, CheckpointFailed())

    assert len(silent.messages) == 1
    assert account(bus).failed == 2
    (line,) = failures(caplog)
    assert line.endswith("it did not answer in time. Further failures of it are only counted")


def test_a_message_that_is_not_sent_is_not_accepted(make_target: MakeTarget) -> None:
    """An answer to the message before it, which comes while the writer waits, does not stand for it."""
    late = make_target(None)
    load_services()
    (address,) = open_addresses([late.url])
    address.start_sending(Message("first", "text"))
    late.wait_for(1)

    address.start_sending(Message("second", "text"))
    late.release()

    assert address.wait_sent(DEADLINE) == "it has not answered to an earlier message"
    assert late.titles == ["first"]


def test_an_address_recovers(make_target: MakeTarget, attach: Attach, account: Account) -> None:
    """A writer goes on after a refused message: the next one is delivered."""
    target = make_target(500)
    bus = attach(NotifyWriter(target.url))
    emit(bus, CheckpointFailed())

    target.status = 200
    write(bus, CheckpointFailed())

    assert (account(bus).failed, account(bus).delivered) == (1, 1)
    assert account(bus).error.startswith(
        "NotTaken: checkpoint_failed failed: address 1 of 1 (json://) did not take the message: the service"
    )


def test_a_message_that_waits_holds_up_no_iteration(
    make_trainer: MakeTrainer, make_target: MakeTarget
) -> None:
    """The training runs to its end while a service has not answered the first message."""
    target = make_target(None)
    trainer = make_trainer(
        max_epochs=3, writers=[NotifyWriter(target.url, events="before_train", timeout=3600)]
    )
    unanswered: list[int] = []

    def wait_for_request(event: Any) -> None:
        if event.iter == 0:
            target.wait_for(1)

    def release(event: Any) -> None:
        unanswered.append(event.iter)
        target.release()

    trainer.bus.subscribe(wait_for_request, "after_train_iter", name="waits")
    trainer.bus.subscribe(release, "after_train", name="releases")

    trainer.train()
    trainer.close()

    assert unanswered == [9]


def test_the_end_of_a_run_is_bounded(make_trainer: MakeTrainer, make_target: MakeTarget) -> None:
    """A run whose only address never answers ends, after `timeout` seconds for its message."""
    target = make_target(None)
    trainer = make_trainer(writers=[NotifyWriter(target.url, timeout=0.5)])

    trainer.train()
    trainer.close()

    target.wait_for(1)
    assert target.titles == ["run: training completed"]
    assert [(row.failed, row.queued) for row in trainer.bus.stats() if row.name == "NotifyWriter"] == [(1, 0)]


def test_an_address_that_is_away_is_one_line(
    make_trainer: MakeTrainer,
    make_target: MakeTarget,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The log names it once, however many messages fail, and neither the console nor the end of the run does again."""
    target = make_target(500)
    trainer = make_trainer(
        writers=[NotifyWriter(target.url, events=["after_train_epoch", "after_run"]), ConsoleWriter()]
    )
    heard: list[HandlerFailed] = []
    trainer.bus.subscribe(heard.append, HandlerFailed, offload="thread")

    trainer.train()
    trainer.close()

    (line,) = [text for text in caplog.messages if "NotifyWriter" in text]
    assert line.startswith("NotifyWriter: address 1 of 1 (json://) did not take the message 'run: ")
    assert "NotifyWriter" not in capsys.readouterr().out
    assert heard
    assert all(event.logged and event.error.startswith("NotTaken: after_") for event in heard)


def test_its_own_failures_are_not_told(attach: Attach, make_target: MakeTarget) -> None:
    """A failed message sends no further message, even if failures of subscribers are told."""
    target = make_target(500)
    bus = attach(NotifyWriter(target.url, events=[HandlerFailed, CheckpointFailed]))

    write(bus, CheckpointFailed())

    assert len(target.messages) == 1


# --- hangs -----------------------------------------------------------------------------------------------------


class Ticks:
    """Takes the place of the clock of the watch: runs one action at each tick, and ends after the last one."""

    def __init__(self, *actions: Callable[[], object] | None) -> None:
        self._actions = iter(actions)

    def wait(self, seconds: float) -> bool:
        """Run the next action; return True if there is none."""
        for action in self._actions:
            if action is not None:
                action()
            return False
        return True


def watched(target: Target, run_dir: Path, *actions: Callable[[NotifyWriter], object] | None) -> None:
    """Let the watch of a running writer see these actions, one at each tick, of which 10 are `hang_after`."""
    writer = NotifyWriter(target.url, hang_after=3600.0)
    writer.open(Run(str(run_dir)))
    writer._closed.set()  # its own watch ends
    writer.write(BeforeRun())
    bound = [None if action is None else lambda action=action: action(writer) for action in actions]
    writer._closed = Ticks(*bound)  # type: ignore[assignment]
    writer._watch(3600.0)


def test_a_run_that_hangs_is_told(attach: Attach, target: Target) -> None:
    """A run in which no iteration ends for `hang_after` seconds sends a message, by a clock of its own."""
    bus = attach(NotifyWriter(target.url, hang_after=0.01))

    bus.emit(BeforeRun())

    (message,) = target.wait_for(1)
    assert (message["title"].partition(": ")[2], message["type"]) == ("no progress", "warning")
    assert lines(message)[0].startswith("No iteration has ended for 10.0 ms.")


def test_a_hang_is_told_once(target: Target, tmp_path: Path) -> None:
    """A run that hangs for long sends one message; a second hang sends another."""

    def move(writer: NotifyWriter) -> None:
        writer.write(AfterTrainIter())

    watched(target, tmp_path, *[None] * 100)
    assert len(target.messages) == 1

    watched(target, tmp_path, *[None] * 100, move, *[None] * 100)
    assert len(target.messages) == 3


def test_a_long_validation_is_no_hang(target: Target, tmp_path: Path) -> None:
    """Iterations of a validation show that the run does not hang."""

    def validate(writer: NotifyWriter) -> None:
        writer.write(AfterValIter())

    watched(target, tmp_path, *[None, None, None, None, None, None, None, None, validate] * 20)

    assert target.messages == []


def test_a_pause_is_no_hang(target: Target, tmp_path: Path) -> None:
    """A run that a command has paused does not hang, also if it validates meanwhile; once it goes on, it may."""

    def emits(event: Event) -> Callable[[NotifyWriter], object]:
        return lambda writer: writer.write(event)

    pause = [emits(CommandApplied(command="pause")), *[None] * 50, emits(AfterValIter()), *[None] * 50]

    watched(target, tmp_path, *pause)
    assert target.messages == []

    watched(target, tmp_path, *pause, emits(CommandApplied(command="go")), *[None] * 50)
    assert len(target.messages) == 1


def test_a_run_that_has_ended_does_not_hang(target: Target, tmp_path: Path) -> None:
    """No hang is told after the end of the run."""

    def end(writer: NotifyWriter) -> None:
        writer.write(AfterRun())

    watched(target, tmp_path, end, *[None] * 100)

    assert [title.partition(": ")[2] for title in target.titles] == ["run completed"]


def test_iterations_cost_no_message(make_trainer: MakeTrainer, target: Target) -> None:
    """With `hang_after`, a training that does not hang sends only the message of its end."""
    trainer = make_trainer(writers=[EventLogWriter(), NotifyWriter(target.url, hang_after=3600)])

    trainer.train()
    trainer.close()

    assert target.titles == ["run: training completed"]
    assert not [event for event in NotifyWriter(target.url).events if event is AfterTrainIter]
    assert ScalarsLogged in NotifyWriter(target.url).events
