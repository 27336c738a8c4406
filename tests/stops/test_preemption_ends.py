"""How a program ends whose run a signal has ended."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from eventloop.checkpoint import find_checkpoints
from eventloop.hooks import CheckpointHook
from tests.forked import ROOT, Forked
from tests.support.signals import Heard, send, send_in
from tests.support.trainers import MakeTrainer, batches, collect, event_name
from tests.training.test_hand_written import train_by_hand


def places_to_resume(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return what was logged of where to resume."""
    return [line for line in caplog.messages if "to resume from" in line]


@pytest.mark.representative(2)
@pytest.mark.parametrize("by_hand", [False, True], ids=["train()", "hand-written"])
@pytest.mark.parametrize(("signum", "code"), [(signal.SIGTERM, 143), (signal.SIGUSR1, 138)])
def test_exit_codes(
    make_trainer: MakeTrainer,
    default_handlers: None,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
    signum: int,
    code: int,
    by_hand: bool,
) -> None:
    """Without a handler of the program's own the run raises SystemExit with the code a shell would show, once everything
    is closed and saved. The log says once where to resume, as there is no traceback to have a note."""
    trainer = make_trainer(hooks=[CheckpointHook(interval=1)])
    send_in(trainer, "after_train_iter", 2, signum)
    seen = collect(trainer, "checkpoint_saved", "after_train_epoch", "after_train", "after_run")

    with caplog.at_level(logging.INFO, "eventloop"), pytest.raises(SystemExit) as ended:
        train_by_hand(trainer, batches(3)) if by_hand else trainer.train()

    assert ended.value.code == code
    assert (trainer.iter, trainer.running, trainer.bus.closed) == (2, False, True)
    name = signal.Signals(signum).name
    closing = [(event_name(event), event.reason) for event in seen if event_name(event) != "checkpoint_saved"]
    assert closing == [
        (name_, f"preempted by {name}") for name_ in ("after_train_epoch", "after_train", "after_run")
    ]
    assert "checkpoint_saved" in [event_name(event) for event in seen]
    place = f"the newest checkpoint to resume from is {trainer.work_dir / 'iter_2'} (iteration 2)"
    assert places_to_resume(caplog) == [f"the run was preempted by {name}: {place}"]
    assert capfd.readouterr().err == ""


def test_ctrl_c_is_a_keyboard_interrupt_after_a_clean_end(
    make_trainer: MakeTrainer,
    default_handlers: None,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """A script that is interrupted ends with a checkpoint, and its error has a note of where to resume, not the log.
    The terminal shows at once that Ctrl-C was heard, and what a second one does. The event is no preemption."""
    trainer = make_trainer(hooks=[CheckpointHook(interval=1)])
    send_in(trainer, "after_train_iter", 2, signal.SIGINT)
    seen = collect(trainer, "preemption_requested", "stop_requested", "checkpoint_saved", "after_run")

    with caplog.at_level(logging.INFO, "eventloop"), pytest.raises(KeyboardInterrupt) as interrupted:
        trainer.train()

    assert [event_name(event) for event in seen] == ["stop_requested", "checkpoint_saved", "after_run"]
    assert seen[-1].reason == "interrupted by Ctrl-C"
    path = trainer.work_dir / "iter_2"
    assert interrupted.value.__notes__ == [f"the newest checkpoint to resume from is {path} (iteration 2)"]
    assert places_to_resume(caplog) == []
    assert capfd.readouterr().err.endswith("Ctrl-C again ends at once.\n")


def test_a_second_ctrl_c_ends_at_once(make_trainer: MakeTrainer, default_handlers: None) -> None:
    """KeyboardInterrupt is raised where the program is, the closing events are those of an error, nothing is saved."""
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

    assert [(event_name(e), e.reason) for e in seen] == [("after_train", "error"), ("after_run", "error")]
    assert reached == []


def test_ctrl_c_while_an_error_ends_the_run(make_trainer: MakeTrainer, default_handlers: None) -> None:
    """No loop polls any more: the first Ctrl-C raises at once, too. Of a run that saved nothing it has no note."""
    trainer = make_trainer(default_hooks={"checkpoint": None})
    trainer.bus.subscribe(lambda event: 1 / 0, "after_train_iter", name="fails")
    send_in(trainer, "after_train", signum=signal.SIGINT)

    with pytest.raises(KeyboardInterrupt) as ended:
        trainer.train()

    assert isinstance(ended.value.__context__, ZeroDivisionError)
    assert "resume" not in "".join(getattr(ended.value, "__notes__", []))


def test_an_error_after_the_signal(
    make_trainer: MakeTrainer, default_handlers: None, caplog: pytest.LogCaptureFixture
) -> None:
    """The error that ends the run is raised; its note says where to resume, and the log does not repeat it."""
    trainer = make_trainer(hooks=[CheckpointHook(interval=1)])
    send_in(trainer, "after_train_iter", 5)
    trainer.bus.subscribe(lambda event: 1 / 0, "stop_requested", name="fails")

    with caplog.at_level(logging.INFO, "eventloop"), pytest.raises(ZeroDivisionError) as ended:
        trainer.train()

    assert "the newest checkpoint to resume from" in "".join(ended.value.__notes__)
    assert places_to_resume(caplog) == []


def test_a_second_sigterm_is_harmless(make_trainer: MakeTrainer, default_handlers: None) -> None:
    """While the run is closing, saves and delivers, further signals change nothing; the first one decides."""
    trainer = make_trainer(hooks=[CheckpointHook(interval=1)])
    send_in(trainer, "after_train_iter", 2)
    for event in ("after_train_iter", "before_save_checkpoint", "after_train", "after_run"):
        start = int(event == "after_train_iter")
        trainer.bus.subscribe(lambda event: send(signal.SIGUSR1), event, start=start, name=event)
    seen = collect(trainer, "preemption_requested", "checkpoint_saved", "after_run")

    with pytest.raises(SystemExit, match="143"):
        trainer.train()

    assert [event_name(event) for event in seen] == ["preemption_requested", "checkpoint_saved", "after_run"]


@pytest.mark.parametrize(
    ("event", "count", "reasons"),
    [
        ("after_train_iter", 6, ["completed", "completed", "preempted by SIGTERM"]),  # the last iteration
        ("after_train", 1, ["completed", "completed", "completed"]),
        ("after_run", 1, ["completed", "completed", "completed"]),
    ],
)
def test_a_signal_too_late_to_stop_anything(
    make_trainer: MakeTrainer, default_handlers: None, event: str, count: int, reasons: list[str]
) -> None:
    """Epochs, and a run, that were complete say so, and the program ends as the signal has it."""
    trainer = make_trainer()
    send_in(trainer, event, count)
    seen = collect(trainer, "after_train_epoch", "after_run")

    with pytest.raises(SystemExit, match="143"):
        trainer.train()

    assert [event.reason for event in seen] == reasons


def test_the_next_run_knows_nothing_of_it(make_trainer: MakeTrainer, received: Heard) -> None:
    """With a handler of the program's own, which goes on, the next run is not stopped."""
    trainer = make_trainer()
    send_in(trainer, "after_run")

    trainer.train()
    trainer.max_epochs = 3
    trainer.train()

    assert (len(received), trainer.epoch, trainer.stop_reason) == (1, 3, None)


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


PROGRAM = """
import sys, torch
from eventloop import Trainer

class Endless(torch.utils.data.IterableDataset):
    def __iter__(self):
        while True:
            yield torch.ones(1, 1)

torch.set_num_threads(1)
model = torch.nn.Linear(1, 1)
trainer = Trainer(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.0), max_iters=10**9,
    train_step=lambda trainer, batch: model(batch).sum(), train_loader=Endless(), work_dir="run")

@trainer.bus.on("after_train_iter", once=True)
def ready(event):
    print("ready", flush=True)
    sys.stdin.readline()

if sys.argv[1:] == ["left"]:
    for epoch in trainer.epochs():
        for batch in trainer.batches(Endless()):
            trainer.outputs = {"loss": model(batch).sum()}
            if trainer.asked_to_stop:
                break
        break
else:
    trainer.train()
print("went on", flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("how", "code"), [("train()", 143), ("left", -signal.SIGTERM)])
def test_exit_codes_of_a_process(tmp_path: Path, how: str, code: int) -> None:
    """128 + the signal's number, with a checkpoint. What is raised while a loop is left by `break` reaches nothing, so
    the process gets the signal again, and dies of it. Nothing of the script after the loop is run."""
    process = Forked(
        ["-c", PROGRAM, how],
        cwd=tmp_path,
        env={"PATH": os.defpath, "PYTHONPATH": ROOT},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGTERM)
        said, _ = process.communicate("go on\n", timeout=60)
    finally:
        process.kill()
        process.communicate()

    assert (process.returncode, said) == (code, "")
    assert (find_checkpoints(tmp_path / "run") != []) == (how == "train()")
