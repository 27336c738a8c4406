"""Trainings that a signal ends somewhere, beside one that nothing disturbs: for the tests, and for `scripts/torture
signals`, which does many of them."""

from __future__ import annotations

import random
import signal
from pathlib import Path
from typing import Any

import torch

from eventloop import Trainer
from eventloop.hooks import CheckpointHook
from tests.support.signals import send
from tests.support.trainers import MakeTrainer, batches, collect, event_name, shuffled

WORKFLOW = [("train", 1), ("val", 1), ("test", 1)]


class Job:
    """A training with validations and tests, shuffled, with a dropout: what a resume has to continue exactly."""

    def __init__(self, make_trainer: MakeTrainer, folder: Path) -> None:
        self.make_trainer, self.folder = make_trainer, folder
        self.scores: dict[tuple[int, str], dict[str, float]] = {}

    def trainer(self, name: str, *, interval: int = -1, save_last: bool = False) -> Trainer:
        """A new one."""
        torch.manual_seed(3)
        trainer = self.make_trainer(
            train_loader=shuffled(4),
            val_loader=batches(3),
            test_loader=batches(3),
            max_epochs=3,
            hooks=[CheckpointHook(interval, save_last=save_last)],
            work_dir=self.folder / name,
            default_hooks={"garbage_collection": None},  # it takes longer than all the rest
        )

        def record(event: Any) -> None:
            if event.reason == "completed":  # repeated after a resume, it is what it was
                key = (event.iter, event_name(event))
                assert self.scores.setdefault(key, event.metrics) == event.metrics

        trainer.bus.subscribe(record, "after_val_epoch", "after_test_epoch", name="record")
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
        (
            "after_train_epoch",
            "before_val",
            "before_val_epoch",
            "after_val_epoch",
            "after_val",
            "before_test",
            "before_test_epoch",
            "after_test_epoch",
            "after_test",
            "before_train_epoch",
        ),
        2,
    ),
}


class Trials:
    """Signals in one of the `PLACES`, at random points of it."""

    def __init__(self, make_trainer: MakeTrainer, folder: Path, place: str, chance: random.Random) -> None:
        self._job = Job(make_trainer, folder)
        self._place, self._chance = place, chance
        reference = self._job.trainer("whole")
        reference.run(WORKFLOW)
        self._expected = self._job.result(reference)

    def make(self, number: int) -> None:
        """One of them.

        Raises:
            AssertionError: the run did not end at once, or its checkpoint is not whole.
        """
        job, choose = Job(self._job.make_trainer, self._job.folder), self._chance
        trainer = job.trainer(str(number), interval=choose.choice([-1, -1, 1]), save_last=True)
        events, most = PLACES[self._place]
        event, count = choose.choice(events), choose.randint(1, most)
        count += event == "before_train_epoch"  # before the first there is nothing to save
        signum = choose.choice([signal.SIGTERM, signal.SIGUSR1])
        begun = begun_after_signal(trainer, event, count, signum)
        seen = collect(trainer, "preemption_requested", "stop_requested", "after_train", "after_run")

        trainer.run(WORKFLOW)

        assert [event.reason for event in seen] == [f"preempted by {signal.Signals(signum).name}"] * 4
        assert len(begun) <= (self._place == "epoch edge"), (event, count, begun)
        resumed = job.trainer(str(number))
        resumed.resume("auto")
        assert (resumed.iter, resumed.epoch) == (trainer.iter, trainer.epoch)
        resumed.run(WORKFLOW)
        assert job.result(resumed) == self._expected, (event, count)
        resumed.close()
        trainer.close()


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
            *("before_train_iter", "before_val_iter", "before_test_iter"),
            name="begun",
        )

    trainer.bus.subscribe(send_once, event, priority="LOWEST", name="sends")
    return begun
