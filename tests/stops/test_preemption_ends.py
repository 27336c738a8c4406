"""How a program ends whose run a signal has ended."""

from __future__ import annotations

import logging
import os
import signal
from typing import Any

import pytest
from torch import nn

from eventloop import Trainer
from eventloop.hooks import CheckpointHook
from eventloop.hooks.preemption import HINT
from tests.support.signals import Heard, send, send_in
from tests.support.trainers import MakeTrainer, batches, collect, event_name
from tests.training.test_hand_written import train_by_hand

# --- how the program ends ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGTERM, 143), (signal.SIGUSR1, 138)])
def test_exit_codes(make_trainer: MakeTrainer, default_handlers: None, signum: int, code: int) -> None:
    """Where nobody else takes care of the signal, `train` raises SystemExit with the code the shell would show, once
    everything is closed and saved."""
    trainer = make_trainer(hooks=[CheckpointHook(interval=1)])
    send_in(trainer, "after_train_iter", 2, signum)
    seen = collect(trainer, "checkpoint_saved", "after_run")

    with pytest.raises(SystemExit) as ended:
        trainer.train()

    assert ended.value.code == code
    assert trainer.bus.closed
    assert [event_name(event) for event in seen] == ["checkpoint_saved", "after_run"]
    assert (trainer.iter, trainer.running) == (2, False)


def test_ctrl_c_is_a_keyboard_interrupt_after_a_clean_end(
    make_trainer: MakeTrainer, default_handlers: None
) -> None:
    """A script that is interrupted ends as ever, but with a checkpoint; the event is no preemption."""
    trainer = make_trainer(hooks=[CheckpointHook(interval=1)])
    send_in(trainer, "after_train_iter", 2, signal.SIGINT)
    seen = collect(trainer, "preemption_requested", "stop_requested", "checkpoint_saved", "after_run")

    with pytest.raises(KeyboardInterrupt):
        trainer.train()

    assert [event_name(event) for event in seen] == ["stop_requested", "checkpoint_saved", "after_run"]
    assert seen[-1].reason == "interrupted by Ctrl-C"


@pytest.mark.parametrize(("signum", "said"), [(signal.SIGINT, f"{HINT}\n"), (signal.SIGTERM, "")])
def test_ctrl_c_is_answered(
    make_trainer: MakeTrainer,
    default_handlers: None,
    capfd: pytest.CaptureFixture[str],
    signum: int,
    said: str,
) -> None:
    """Who pressed it sees at once that it was heard, and what a second one does; a scheduler need not."""
    trainer = make_trainer()
    send_in(trainer, "after_train_iter", 2, signum)

    with pytest.raises((KeyboardInterrupt, SystemExit)):
        trainer.train()

    assert capfd.readouterr().err == said


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGUSR1])
@pytest.mark.parametrize("by_hand", [False, True])
def test_the_log_says_where_to_resume(
    make_trainer: MakeTrainer,
    default_handlers: None,
    caplog: pytest.LogCaptureFixture,
    signum: int,
    by_hand: bool,
) -> None:
    """Of a scheduler's signal, which leaves no traceback that could have a note; once."""
    trainer = make_trainer(hooks=[CheckpointHook(interval=1)])
    send_in(trainer, "after_train_iter", 2, signum)

    with caplog.at_level(logging.INFO, "eventloop"), pytest.raises(SystemExit):
        train_by_hand(trainer, batches(3)) if by_hand else trainer.train()

    place = f"the newest checkpoint to resume from is {trainer.work_dir / 'iter_2'} (iteration 2)"
    told = [record.getMessage() for record in caplog.records if "to resume from" in record.getMessage()]
    assert told == [f"the run was preempted by {signal.Signals(signum).name}: {place}"]


@pytest.mark.parametrize("ends", ["Ctrl-C", "an error"])
def test_what_has_a_note_is_not_told_twice(
    make_trainer: MakeTrainer, default_handlers: None, caplog: pytest.LogCaptureFixture, ends: str
) -> None:
    """The KeyboardInterrupt of Ctrl-C says where to resume, and so does an error that ends a run that a signal was to."""
    trainer = make_trainer(hooks=[CheckpointHook(interval=1)])
    send_in(trainer, "after_train_iter", 5, signal.SIGINT if ends == "Ctrl-C" else signal.SIGTERM)

    @trainer.bus.on("stop_requested")
    def fail(event: Any) -> None:
        if ends == "an error":
            raise ValueError("no more")

    with caplog.at_level(logging.INFO, "eventloop"), pytest.raises((KeyboardInterrupt, ValueError)) as ended:
        trainer.train()

    assert "the newest checkpoint to resume from" in "".join(ended.value.__notes__)
    assert "to resume from" not in caplog.text


def test_the_interrupt_says_where_to_resume(make_trainer: MakeTrainer, default_handlers: None) -> None:
    """In a note, as an error does."""
    trainer = make_trainer(hooks=[CheckpointHook(interval=1)])
    send_in(trainer, "after_train_iter", 2, signal.SIGINT)

    with pytest.raises(KeyboardInterrupt) as interrupted:
        trainer.train()

    path = trainer.work_dir / "iter_2"
    assert interrupted.value.__notes__ == [f"the newest checkpoint to resume from is {path} (iteration 2)"]


def test_the_interrupt_of_a_run_that_saved_nothing(make_trainer: MakeTrainer, default_handlers: None) -> None:
    """There is nothing to resume from, and nothing to say."""
    trainer = make_trainer(default_hooks={"checkpoint": None})
    send_in(trainer, "after_train_iter", 2, signal.SIGINT)

    with pytest.raises(KeyboardInterrupt) as interrupted:
        trainer.train()

    assert not hasattr(interrupted.value, "__notes__")


def test_a_second_ctrl_c_ends_at_once(make_trainer: MakeTrainer, default_handlers: None) -> None:
    """KeyboardInterrupt where the program is, the closing events are those of an error, nothing is saved."""
    trainer = make_trainer(hooks=[CheckpointHook(interval=1)])
    reached: list[str] = []

    @trainer.bus.on("after_train_iter", once=True)
    def twice(event: Any) -> None:
        send(signal.SIGINT)
        send(signal.SIGINT)
        reached.append("never")

    seen = collect(trainer, "checkpoint_saved", "after_train", "after_run")
    with pytest.raises(KeyboardInterrupt):
        trainer.train()

    assert [(event_name(event), event.reason) for event in seen] == [
        ("after_train", "error"),
        ("after_run", "error"),
    ]
    assert reached == []


def test_ctrl_c_while_an_error_ends_the_run(make_trainer: MakeTrainer, default_handlers: None) -> None:
    """No loop polls any more: it raises at once, the first one too."""
    trainer = make_trainer()
    trainer.bus.subscribe(lambda event: 1 / 0, "after_train_iter", name="fails")
    send_in(trainer, "after_train", signum=signal.SIGINT)

    with pytest.raises(KeyboardInterrupt) as ended:
        trainer.train()

    assert isinstance(ended.value.__context__, ZeroDivisionError)


def test_an_error_after_the_signal(make_trainer: MakeTrainer, default_handlers: None) -> None:
    """The error that ends the run is what the caller sees."""
    trainer = make_trainer()
    send_in(trainer, "before_train_iter")
    trainer.bus.subscribe(lambda event: 1 / 0, "after_train_iter", name="fails")

    with pytest.raises(ZeroDivisionError):
        trainer.train()


def test_a_second_sigterm_is_harmless(make_trainer: MakeTrainer, default_handlers: None) -> None:
    """While the run is closing, saves and delivers, further signals change nothing; the first one decides."""
    trainer = make_trainer(hooks=[CheckpointHook(interval=1)])
    send_in(trainer, "after_train_iter", 2)
    for event in ("after_train_iter", "before_save_checkpoint", "after_train", "after_run"):
        trainer.bus.subscribe(
            lambda event: send(signal.SIGUSR1), event, start=int(event == "after_train_iter"), name=event
        )
    seen = collect(trainer, "preemption_requested", "checkpoint_saved", "after_run")

    with pytest.raises(SystemExit) as ended:
        trainer.train()

    assert ended.value.code == 143
    assert [event_name(event) for event in seen] == ["preemption_requested", "checkpoint_saved", "after_run"]


@pytest.mark.parametrize("event", ["after_train", "after_run"])
def test_a_signal_too_late_to_stop_anything(
    make_trainer: MakeTrainer, default_handlers: None, event: str
) -> None:
    """A run that was complete says so, and the program ends as the signal has it."""
    trainer = make_trainer()
    send_in(trainer, event)
    seen = collect(trainer, "stop_requested", "after_run")

    with pytest.raises(SystemExit, match="143"):
        trainer.train()

    assert [e.reason for e in seen] == ["completed"]


def test_the_next_run_knows_nothing_of_it(make_trainer: MakeTrainer, heard: Heard) -> None:
    """Where a handler of the program's own had it go on."""
    trainer = make_trainer()
    send_in(trainer, "after_run")

    trainer.train()
    trainer.max_epochs = 3
    trainer.train()

    assert (len(heard), trainer.epoch, trainer.stop_reason) == (1, 3, None)


def test_in_the_last_iteration(make_trainer: MakeTrainer, default_handlers: None) -> None:
    """The run is complete, its reason is the signal's, and the program ends as the signal has it."""
    trainer = make_trainer()
    send_in(trainer, "after_train_iter", 6)
    seen = collect(trainer, "after_train_epoch", "after_run")

    with pytest.raises(SystemExit, match="143"):
        trainer.train()

    assert [event.reason for event in seen] == ["completed", "completed", "preempted by SIGTERM"]


@pytest.mark.parametrize("mode", ["val", "test"])
def test_an_evaluation_alone(make_trainer: MakeTrainer, default_handlers: None, mode: str) -> None:
    """`trainer.val()` and `trainer.test()` are ended like a training."""
    trainer = make_trainer(val_loader=batches(3), test_loader=batches(3))
    send_in(trainer, f"before_{mode}_iter", 2)
    seen = collect(trainer, f"after_{mode}_iter", f"after_{mode}", "after_run")

    with pytest.raises(SystemExit, match="143"):
        getattr(trainer, mode)()

    assert len(seen) == 4
    assert [event.reason for event in seen[2:]] == ["preempted by SIGTERM"] * 2


def hand_written(trainer: Trainer, *, leave: bool = False) -> None:
    """A loop of one's own."""
    for _ in trainer.epochs():
        for inputs, target in trainer.batches(trainer.train_loader or ()):
            trainer.outputs = {"loss": nn.functional.cross_entropy(trainer.model(inputs), target)}
            if leave and trainer.asked_to_stop:
                return


def test_a_loop_of_ones_own(make_trainer: MakeTrainer, default_handlers: None) -> None:
    """It ends at the boundary, and the exit is raised from it."""
    trainer = make_trainer()
    send_in(trainer, "before_train_iter", 2)
    seen = collect(trainer, "after_train_epoch", "after_train", "after_run")

    with pytest.raises(SystemExit, match="143"):
        hand_written(trainer)

    assert trainer.iter == 2
    assert [event.reason for event in seen] == ["preempted by SIGTERM"] * 3


def test_a_loop_that_is_left_is_sent_the_signal_again(
    make_trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch, default_handlers: None
) -> None:
    """What is raised while a loop is left by `return` or `break` reaches nobody: so the program gets, once everything is
    closed, what it would have got without the hook."""
    trainer = make_trainer()
    send_in(trainer, "before_train_iter", 2)
    seen = collect(trainer, "after_run")
    kill, sent = os.kill, list[tuple[int, Any, int]]()

    def note(pid: int, signum: int) -> None:
        if len(seen):
            sent.append((signum, signal.getsignal(signum), pid))
        else:
            kill(pid, signum)

    monkeypatch.setattr(os, "kill", note)
    hand_written(trainer, leave=True)

    assert sent == [(signal.SIGTERM, signal.SIG_DFL, os.getpid())]
