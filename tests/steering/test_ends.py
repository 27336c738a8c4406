"""Test commands to runs that end, that only evaluate, that a host drives, and that a killed run has left."""

from __future__ import annotations

import json
from collections import deque
from pathlib import Path
from typing import Any

import msgspec
import pytest

from eventloop import Trainer
from eventloop.bridges import DrivenTrainer
from eventloop.commands.messages import CLAIMED, INBOX, OUTBOX, SENT, Answer, Command
from eventloop.commands.private_directory import create_private
from eventloop.commands.record import NAME
from eventloop.steering.mailbox import Mailbox
from eventloop.writers import JSONLWriter
from tests.steering.job import PER_EPOCH, build, collected, command, recorded, steer, weights
from tests.support.trainers import batches, tiny_model


def put(folder: Path, sent: Command, suffix: str = SENT) -> None:
    """Put a command into the inbox of a directory."""
    folder.mkdir(exist_ok=True)
    create_private(folder / INBOX)
    (folder / INBOX / (sent.id + suffix)).write_bytes(msgspec.json.encode(sent))


def answers(folder: Path) -> list[Answer]:
    """Return the answers in the outbox of a directory."""
    files = sorted((folder / OUTBOX).iterdir())
    return [msgspec.json.decode(file.read_bytes(), type=Answer) for file in files]


def test_a_run_that_ends_by_an_error_answers(tmp_path: Path) -> None:
    """Commands that wait are refused, with the error."""
    trainer = build(tmp_path / "run")

    def fail(event: Any) -> None:
        if event.iter == 3:
            put(tmp_path / "run", command("checkpoint"))
            raise ValueError("out of luck")

    trainer.bus.subscribe(fail, "before_train_iter")
    with pytest.raises(ValueError, match="out of luck"):
        trainer.train()
    trainer.close()

    (answer,) = answers(tmp_path / "run")
    assert (answer.outcome, answer.iteration) == ("refused", 3)
    assert answer.reason.startswith("the run has ended: ValueError: out of luck")


def test_a_command_that_does_not_fit_is_logged(tmp_path: Path) -> None:
    """A file in the inbox with an unknown command or a wrong argument is answered, and is `command_refused` in the log."""
    put(tmp_path / "run", command("shak", "0.1"))
    put(tmp_path / "run", command("shake", "much"))
    trainer = build(tmp_path / "run", writers=[JSONLWriter()])
    trainer.train()
    trainer.close()

    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    logged = [(row["command"], row["reason"]) for row in rows if row.get("event") == "command_refused"]
    assert logged == [(answer.command, answer.reason) for answer in answers(tmp_path / "run")]
    assert [command for command, _ in logged] == ["shak", "shake"]


def test_a_run_that_is_stopped_answers(tmp_path: Path) -> None:
    """Commands that wait are refused, with the reason of the stop."""
    trainer = build(tmp_path / "run")
    trainer.bus.subscribe(lambda event: put(tmp_path / "run", command("note", "late")), "after_run")
    trainer.bus.subscribe(
        lambda event: trainer.stop("enough") if event.iter == 3 else None, "before_train_iter"
    )

    trainer.train()
    trainer.close()

    assert [answer.reason for answer in answers(tmp_path / "run")] == ["the run has ended: enough"]


def test_a_look_that_was_late_leaves_the_commands_to_the_next_run(tmp_path: Path) -> None:
    """A look into the inbox that begins when the run has ended takes no command from it."""
    received: list[Command] = []
    mailbox = Mailbox(tmp_path, [], received.append, keeps=True)
    mailbox.close(lambda command: Answer(id=command.id, command="", outcome="refused"), deque())
    sent = command("note", "late")
    put(tmp_path, sent)
    mailbox.poll()

    assert received == []
    assert [path.name for path in (tmp_path / INBOX).iterdir()] == [sent.id + SENT]
    Mailbox(tmp_path, [], received.append, keeps=True).poll()
    assert received == [sent]


def test_a_command_that_a_killed_run_has_claimed(tmp_path: Path) -> None:
    """It is applied once, after the first iteration, and answered."""
    put(tmp_path / "run", command("shake", "0.1"), CLAIMED)
    trainer = build(tmp_path / "run")

    trainer.train()
    trainer.close()

    (answer,) = answers(tmp_path / "run")
    assert (answer.outcome, answer.iteration) == ("applied", 1)
    assert recorded(tmp_path / "run") == [(1, "shake")]


def test_a_command_that_a_killed_run_has_recorded(tmp_path: Path) -> None:
    """It is answered, and not applied once more."""
    first = build(tmp_path / "run")
    steer(first, {3: [("shake", "0.1")]})
    first.train()
    first.close()
    (row,) = first.applied_commands
    put(
        tmp_path / "run", Command(id=row.id, command=row.command, words=row.words, source=row.source), CLAIMED
    )

    then = build(tmp_path / "run", max_epochs=4)
    then.resume("auto")
    then.train()
    then.close()

    (answer,) = answers(tmp_path / "run")
    assert (answer.outcome, answer.iteration) == ("applied", 3)
    assert recorded(tmp_path / "run") == [(3, "shake")]


def test_an_evaluation_receives_no_commands(tmp_path: Path) -> None:
    """A run that only evaluates leaves the inbox to a training."""
    put(tmp_path / "run", command("note", "hello"))
    trainer = build(tmp_path / "run", writers=[JSONLWriter()])

    trainer.val()
    trainer.close()

    assert [path.suffix for path in (tmp_path / "run" / INBOX).iterdir()] == [SENT]
    assert not (tmp_path / "run" / OUTBOX).exists()


def test_a_trial_run_repeats_nothing(tmp_path: Path) -> None:
    """A `fast_dev_run` has a directory of its own, few iterations, and no commands."""
    first = build(tmp_path / "run")
    steer(first, {3: [("shake", "0.1")]})
    first.train()
    first.close()

    trial = build(tmp_path / "run", fast_dev_run=4, commands=tmp_path / "run" / NAME)
    trial.train()
    trial.close()

    assert trial.applied_commands == []
    assert recorded(tmp_path / "run") == [(3, "shake")]


def hosted(folder: Path, **options: Any) -> DrivenTrainer:
    """Return a trainer that a loop of another engine drives."""
    return DrivenTrainer(tiny_model(), work_dir=folder, max_epochs=2, host="the other engine", **options)


def drive(driven: DrivenTrainer) -> None:
    """Be the host."""
    driven.begin_run()
    for _ in range(2):
        driven.begin_epoch(PER_EPOCH)
        for batch in batches(PER_EPOCH):
            if driven.begin_iter(batch) and driven.end_iter({"loss": 1.0}):
                break
        driven.end_epoch()
        if driven.stopping:
            break
    driven.end_run()


def test_a_hosts_run(tmp_path: Path) -> None:
    """What needs the trainer's own loop or saves is refused by name; notes, own commands and a stop are applied."""
    driven = hosted(tmp_path / "run")
    seen, refusals = collected(driven, "command_applied"), collected(driven, "command_refused")
    driven.command(shout)
    steer(driven, {2: [("note", "x"), ("shout",), ("checkpoint",), ("validate",)], 3: [("stop", "enough")]})

    drive(driven)
    driven.close()

    assert [each.command for each in seen] == ["note", "shout", "stop"]
    assert [each.command for each in refusals] == ["checkpoint", "validate"]
    assert (driven.iter, driven.stop_reason) == (3, "enough")


def shout(trainer: Trainer) -> None:
    """Do nothing."""


def test_a_host_that_resumes_repeats_nothing(tmp_path: Path) -> None:
    """The host goes on with its own state; the record of its earlier run is set aside."""
    driven = hosted(tmp_path / "run")
    steer(driven, {2: [("note", "x")]})
    drive(driven)
    driven.close()
    assert recorded(tmp_path / "run") == [(2, "note")]

    again = hosted(tmp_path / "run")
    again.iter = again.metrics.iter = 8
    drive(again)
    again.close()

    assert again.iter == 16
    assert json.loads((tmp_path / "run" / "commands-1.jsonl").read_text())["command"] == "note"


def test_a_loop_of_steps_repeats_a_run(tmp_path: Path) -> None:
    """A loop that calls the steps itself applies recorded commands after the same iterations."""
    results = []
    for name, record in (("first", None), ("again", tmp_path / "first" / NAME)):
        trainer = build(tmp_path / name, loss_fn=None, commands=record)
        if record is None:
            steer(trainer, {2: [("shake", "0.1")], 4: [("shake", "0.2")]})
        trainer.begin_run()
        for _ in range(2):
            trainer.begin_epoch(PER_EPOCH)
            for inputs, target in batches(PER_EPOCH):
                trainer.begin_iter((inputs, target))
                trainer.end_iter({"loss": trainer.model(inputs).sum()})
            trainer.end_epoch()
        trainer.end_run()
        trainer.close()
        results.append(weights(trainer))

    assert results[0] == results[1]
