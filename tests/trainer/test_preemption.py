"""Signals that end a run: wherever they come, the run ends at its next boundary with a durable checkpoint."""

from __future__ import annotations

import random
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from eventloop import Trainer
from eventloop.hooks import CheckpointHook, PreciseBN
from tests.trainer.conftest import MakeTrainer, batches, collect, event_name, shuffled
from tests.trainer.signals import Heard, send

WORKFLOW = [("train", 1), ("val", 1), ("test", 1)]
TRIALS = 13
"""Of each place."""


# --- wherever it comes -------------------------------------------------------------------------------------


class Job:
    """A training with validations and tests, shuffled, with a dropout: what a resume has to continue exactly."""

    def __init__(self, make_trainer: MakeTrainer, folder: Path) -> None:
        self._make, self._folder = make_trainer, folder
        self.scores: dict[tuple[int, str], dict[str, float]] = {}

    def trainer(self, name: str, *, interval: int = -1, save_last: bool = False) -> Trainer:
        """A new one."""
        torch.manual_seed(3)
        trainer = self._make(
            train_loader=shuffled(4), val_loader=batches(3), test_loader=batches(3), max_epochs=3,
            hooks=[CheckpointHook(interval, save_last=save_last)], work_dir=self._folder / name,
            default_hooks={"garbage_collection": None},  # it takes longer than all the rest
        )  # fmt: skip

        def note(event: Any) -> None:
            if event.reason == "completed":  # repeated after a resume, it is what it was
                key = (event.iter, event_name(event))
                assert self.scores.setdefault(key, event.metrics) == event.metrics

        trainer.bus.subscribe(note, "after_val_epoch", "after_test_epoch", name="note")
        return trainer

    def result(self, trainer: Trainer) -> tuple[Any, ...]:
        """What a training came to."""
        weights = {name: value.tolist() for name, value in trainer.model.state_dict().items()}
        return trainer.iter, trainer.epoch, weights, self.scores


PLACES = {
    "train": (("before_train_iter", "after_train_iter"), 11),
    "val": (("before_val_iter", "after_val_iter"), 8),
    "test": (("before_test_iter", "after_test_iter"), 8),
    "epoch edge": (
        ("after_train_epoch", "before_val", "before_val_epoch", "after_val_epoch", "after_val", "before_test",
         "before_test_epoch", "after_test_epoch", "after_test", "before_train_epoch"), 2,
    ),
}  # fmt: skip


@pytest.mark.parametrize("place", [*PLACES])
def test_a_signal_anywhere(make_trainer: MakeTrainer, tmp_path: Path, heard: Heard, place: str) -> None:
    """The run ends without another iteration or batch of an evaluation, its last checkpoint is durable and of the
    iteration it ended at, and a run resumed from it comes to what the uninterrupted one does, bit for bit."""
    whole = Job(make_trainer, tmp_path)
    reference = whole.trainer("whole")
    reference.run(WORKFLOW)
    choose = random.Random(place)

    for trial in range(TRIALS):
        job = Job(make_trainer, tmp_path)
        trainer = job.trainer(str(trial), interval=choose.choice([-1, -1, 1]), save_last=True)
        events, most = PLACES[place]
        event, count = choose.choice(events), choose.randint(1, most)
        count += event == "before_train_epoch"  # before the first there is nothing to save
        signum = choose.choice([signal.SIGTERM, signal.SIGUSR1])
        begun = begun_after_signal(trainer, event, count, signum)
        seen = collect(trainer, "preemption_requested", "stop_requested", "after_train", "after_run")

        trainer.run(WORKFLOW)

        assert [event.reason for event in seen] == [f"preempted by {signal.Signals(signum).name}"] * 4
        assert len(begun) <= (place == "epoch edge"), (event, count, begun)
        resumed = job.trainer(str(trial))
        resumed.resume("auto")
        assert (resumed.iter, resumed.epoch) == (trainer.iter, trainer.epoch)
        resumed.run(WORKFLOW)
        assert job.result(resumed) == whole.result(reference), (event, count)
    assert len(heard) == TRIALS


def begun_after_signal(trainer: Trainer, event: str, count: int, signum: int) -> list[str]:
    """Send a signal in a handler; returns the iterations that begin afterwards."""
    begun: list[str] = []
    seen: list[Any] = []

    def send_once(event: Any) -> None:
        seen.append(event)
        if len(seen) != count:
            return
        send(signum)
        trainer.bus.subscribe(
            lambda event: begun.append(event_name(event)),
            *("before_train_iter", "before_val_iter", "before_test_iter"), name="begun",
        )  # fmt: skip

    trainer.bus.subscribe(send_once, event, priority="LOWEST", name="sends")
    return begun


def precise_trainer(
    make_trainer: MakeTrainer, folder: Path, at: int = 0, **saving: Any
) -> tuple[Trainer, list[int]]:
    """A trainer with three passes of PreciseBN, of three batches each; a signal comes in a batch of one of them."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 3), nn.Dropout())
    ran: list[int] = []

    def forward(model: nn.Module, batch: Any) -> Any:
        ran.append(1)
        if len(ran) == at:
            send()
        return model(batch[0])

    trainer = make_trainer(
        model=model, max_epochs=3, work_dir=folder, train_loader=shuffled(4), val_loader=batches(2),
        hooks=[PreciseBN(1, 3, forward=forward), CheckpointHook(**saving)], default_hooks={"garbage_collection": None},
    )  # fmt: skip
    return trainer, ran


@pytest.mark.parametrize("interval", [1, -1])
def test_a_signal_in_precise_bn(
    make_trainer: MakeTrainer, tmp_path: Path, heard: Heard, interval: int
) -> None:
    """A pass of PreciseBN ends at its next batch and changes nothing; its epoch is saved. The resumed run makes the pass
    before the validation that was to follow it, and comes to what the uninterrupted one does."""
    whole, _ = precise_trainer(make_trainer, tmp_path / "whole", save_last=False)
    scores = collect(whole, "after_val_epoch")
    whole.train()

    for at in range(1, 10):
        folder = tmp_path / str(at)
        trainer, ran = precise_trainer(make_trainer, folder, at, interval=interval)
        trainer.train()
        assert (len(ran), trainer.epoch) == (at, (at - 1) // 3 + 1)

        resumed, _ = precise_trainer(make_trainer, folder, save_last=False)
        again = collect(resumed, "after_val_epoch")
        resumed.resume("auto")
        resumed.train()

        assert resumed.epoch == 3
        assert [event.metrics for event in again] == [event.metrics for event in scores[-len(again) :]]
        for name, value in resumed.model.state_dict().items():
            assert torch.equal(value, whole.model.state_dict()[name]), (at, name)
    assert len(heard) == 9
