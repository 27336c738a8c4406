"""Signals that end a run: wherever they come, the run ends at its next boundary with a durable checkpoint."""

from __future__ import annotations

import logging
import random
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from eventloop import Trainer
from eventloop.hooks import CheckpointHook, PreciseBN
from tests.support.preempted import PLACES, Trials
from tests.support.signals import Heard, send, send_in
from tests.support.trainers import MakeTrainer, batches, collect, event_name, shuffled
from tests.training.test_hand_written import train_by_hand

TRIALS = 13
"""Of each place."""


@pytest.mark.representative(2)
@pytest.mark.parametrize("place", [*PLACES])
def test_a_signal_anywhere(make_trainer: MakeTrainer, tmp_path: Path, received: Heard, place: str) -> None:
    """The run ends without another iteration or batch of an evaluation, its last checkpoint is durable and of the
    iteration it ended at, and a run resumed from it comes to what the uninterrupted one does, bit for bit."""
    trials = Trials(make_trainer, tmp_path, place, random.Random(place))

    for number in range(TRIALS):
        trials.make(number)

    assert len(received) == TRIALS


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
        model=model,
        max_epochs=3,
        work_dir=folder,
        train_loader=shuffled(4),
        val_loader=batches(2),
        hooks=[PreciseBN(1, 3, forward=forward), CheckpointHook(**saving)],
        default_hooks={"garbage_collection": None},
    )
    return trainer, ran


@pytest.mark.slow
@pytest.mark.parametrize("interval", [1, -1])
def test_a_signal_in_precise_bn(
    make_trainer: MakeTrainer, tmp_path: Path, received: Heard, interval: int
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
    assert len(received) == 9


class Endless:
    """A loader that says when it is let go of, where a DataLoader waits for its workers."""

    def __init__(self, order: list[str]) -> None:
        self._order = order

    def __iter__(self) -> Iterator[Any]:
        try:
            while True:
                yield from batches(3)
        finally:
            self._order.append("let go")


@pytest.mark.representative(2)
@pytest.mark.parametrize("by_hand", [False, True])
@pytest.mark.parametrize("mode", ["train", "val"])
def test_the_state_is_saved_first(
    make_trainer: MakeTrainer, received: Heard, mode: str, by_hand: bool
) -> None:
    """A pass that a signal cuts short keeps its loader until everything is durable and delivered."""
    order: list[str] = []
    loaders = {"train_loader": batches(3), "val_loader": batches(2), f"{mode}_loader": Endless(order)}
    trainer = make_trainer(max_iters=9, val_interval=3, **loaders)
    send_in(trainer, f"before_{mode}_iter", 2)
    for event in ("checkpoint_saved", "after_run"):
        trainer.bus.subscribe(lambda seen: order.append(event_name(seen)), event)

    train_by_hand(trainer, trainer.train_loader) if by_hand else trainer.train()

    assert order == ["checkpoint_saved", "after_run", "let go"]
    assert len(received) == 1


def test_a_training_on_another_thread(
    make_trainer: MakeTrainer, default_handlers: None, caplog: pytest.LogCaptureFixture
) -> None:
    """Python gives signals to the main thread alone: no handler is installed, and the log says what stops the run."""
    caplog.set_level(logging.INFO, "eventloop")
    trainer = make_trainer()
    found: list[Any] = []
    trainer.bus.subscribe(
        lambda event: found.append(signal.getsignal(signal.SIGTERM)), "before_train", name="look"
    )
    training = threading.Thread(target=trainer.train)

    training.start()
    training.join()

    assert (found, trainer.iter) == ([signal.SIG_DFL], 6)
    assert "SIGTERM and Ctrl-C do not stop it. Call trainer.stop(reason)" in caplog.text
