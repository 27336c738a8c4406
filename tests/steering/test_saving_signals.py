"""Test signals that save a checkpoint, and end nothing."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from eventloop import Trainer
from eventloop.hooks import CheckpointHook
from tests.steering.job import build, collected
from tests.support.signals import Heard

pytestmark = pytest.mark.usefixtures("default_handlers")


def signalled(folder: Path, event: str, at: int, **options: Any) -> Trainer:
    """Train, and send SIGUSR1 to this process in an event."""
    trainer = build(
        folder,
        hooks=[CheckpointHook(save_last=False)],
        default_hooks={
            "preemption": {"checkpoint_signals": ("SIGUSR1",), **options},
            "garbage_collection": None,
        },
    )
    trainer.bus.subscribe(
        lambda each: os.kill(os.getpid(), signal.SIGUSR1) if each.iter == at else None, event
    )
    return trainer


@pytest.mark.parametrize(
    ("event", "at", "name"),
    [
        ("before_train_iter", 5, "iter_6"),
        ("after_train_iter", 5, "iter_6"),
        ("before_val_iter", 8, "epoch_2"),
    ],
)
def test_the_run_saves_and_goes_on(tmp_path: Path, event: str, at: int, name: str) -> None:
    """The signal saves at the next boundary, though it is among those that end a run by default."""
    trainer = signalled(tmp_path / "run", event, at)
    saves = collected(trainer, "checkpoint_saved")

    trainer.train()
    trainer.close()

    assert [Path(each.path).name for each in saves] == [name]
    assert (trainer.iter, trainer.stop_reason) == (12, None)


def test_the_other_signals_end_the_run(tmp_path: Path) -> None:
    """SIGTERM ends the run as ever."""
    trainer = signalled(tmp_path / "run", "before_train_iter", 3)
    trainer.bus.subscribe(
        lambda event: os.kill(os.getpid(), signal.SIGTERM) if event.iter == 5 else None, "before_train_iter"
    )

    with pytest.raises(SystemExit):
        trainer.train()
    trainer.close()

    assert (trainer.iter, trainer.stop_signal) == (6, signal.SIGTERM)
    assert (tmp_path / "run" / "iter_4").exists()


def test_the_programs_own_handler_is_called_too(tmp_path: Path, received: Heard) -> None:
    """A Python handler of the program gets the signal, and is restored after the run."""
    before = signal.getsignal(signal.SIGUSR1)
    trainer = signalled(tmp_path / "run", "before_train_iter", 3)

    trainer.train()
    trainer.close()

    assert (tmp_path / "run" / "iter_4").exists()
    assert received == [signal.SIGUSR1]
    assert signal.getsignal(signal.SIGUSR1) == before
