"""CheckInvalidLossHook: a loss that is no number ends the training, and nobody waits to find out."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from eventloop import Trainer
from eventloop.bus import Bus
from eventloop.hooks import CheckInvalidLossHook, CheckpointHook, Hook
from eventloop.metrics.device import HostCopy
from tests.support.internals import substitute

Make = Callable[..., Trainer]
LONG = 10**6
"""More iterations than a test has time for."""


def breaking(at: int, value: float = math.nan) -> Callable[[Trainer, Any], torch.Tensor]:
    """A train step whose loss is `value` in one iteration, and leaves the weights alone there."""

    def step(trainer: Trainer, batch: Any) -> torch.Tensor:
        loss = F.mse_loss(trainer.model(batch[0]), batch[1])
        return loss * 0.0 + value if trainer.iter == at else loss

    return step


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_invalid_loss_ends_the_training(make_trainer: Make, value: float) -> None:
    """The error names the iteration, also one between two intervals."""
    trainer = make_trainer(batches=9, train_step=breaking(2, value), hooks=[CheckInvalidLossHook(interval=4)])

    with pytest.raises(
        FloatingPointError,
        match=rf"the loss is {value} in iteration 2 \(epoch 0, batch 2\), found in iteration [3-9]:",
    ):
        trainer.train()


def test_background_reads_and_the_training_ends(make_trainer: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """No tensor is read on the training thread, with no other background subscriber, and the run ends at once."""
    readers, item = set(), torch.Tensor.item

    def read(tensor: torch.Tensor) -> Any:
        readers.add(threading.current_thread().name)
        return item(tensor)

    monkeypatch.setattr(torch.Tensor, "item", read)
    trainer = make_trainer(max_iters=LONG, train_step=breaking(1), hooks=[CheckInvalidLossHook(interval=2)])

    with pytest.raises(FloatingPointError, match=r"in iteration 1 \(epoch 0, batch 1\)") as raised:
        trainer.train()

    assert trainer.iter < LONG
    assert any("CheckInvalidLossHook.after_train_iter" in note for note in raised.value.__notes__)
    assert readers == {"eventloop background"}


def test_background_that_cannot_run_is_not_waited_for(
    make_trainer: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When too many losses wait the training thread reads the oldest itself."""
    substitute(monkeypatch, "check_invalid_loss.UNREAD_LIMIT", 4)
    monkeypatch.setattr(Bus, "post", lambda *ignored: None)
    trainer = make_trainer(batches=20, train_step=breaking(1), hooks=[CheckInvalidLossHook(interval=2)])

    with pytest.raises(FloatingPointError, match=r"in iteration 1 .*found in iteration 5"):
        trainer.train()


def test_place_is_that_of_its_epoch(make_trainer: Make) -> None:
    """Iteration, epoch and batch are those of the loss, whenever it is found."""
    trainer = make_trainer(
        batches=3, max_epochs=3, train_step=breaking(4), hooks=[CheckInvalidLossHook(interval=7)]
    )

    with pytest.raises(
        FloatingPointError, match=r"in iteration 4 \(epoch 1, batch 1\), found in iteration [6-9]:"
    ):
        trainer.train()


def test_rest_is_checked_at_the_end(make_trainer: Make) -> None:
    """A run shorter than the interval is checked too."""
    trainer = make_trainer(batches=3, train_step=breaking(2), hooks=[CheckInvalidLossHook()])

    with pytest.raises(FloatingPointError, match=r"in iteration 2 \(epoch 0, batch 2\)"):
        trainer.train()


def test_another_error_keeps_its_place(make_trainer: Make) -> None:
    """An invalid loss that is found while the run ends by an error is told as a note of that."""

    def step(trainer: Trainer, batch: Any) -> torch.Tensor:
        if trainer.iter == 2:
            raise ZeroDivisionError("on purpose")
        return breaking(1)(trainer, batch)

    trainer = make_trainer(train_step=step, hooks=[CheckInvalidLossHook()])

    with pytest.raises(ZeroDivisionError, match="on purpose") as raised:
        trainer.train()

    assert any("the loss is nan in iteration 1" in note for note in raised.value.__notes__)


def test_valid_losses_change_nothing(make_trainer: Make) -> None:
    """Training goes as without the hook."""
    plain, checked = make_trainer(), make_trainer(hooks=[CheckInvalidLossHook(interval=2)])

    plain.train()
    checked.train()

    pairs = zip(plain.model.parameters(), checked.model.parameters(), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)


def test_second_training_starts_afresh(make_trainer: Make) -> None:
    """What is left of a run that failed is no business of the next one with this hook."""
    hook = CheckInvalidLossHook(interval=2)
    failing = make_trainer(train_step=breaking(0), hooks=[hook])
    with pytest.raises(FloatingPointError):
        failing.train()

    make_trainer(hooks=[hook]).train()


def test_no_checkpoint_of_a_lost_model(make_trainer: Make, files: Callable[..., list[str]]) -> None:
    """What has arrived is looked at before a checkpoint is taken; the older one stays the newest."""
    trainer = make_trainer(
        batches=4,
        train_step=breaking(5),
        max_epochs=3,
        hooks=[CheckInvalidLossHook(interval=50), CheckpointHook(interval=1, max_keep_ckpts=1)],
    )

    with pytest.raises(FloatingPointError, match=r"in iteration 5 \(epoch 1, batch 1\)"):
        trainer.train()

    assert files() == ["epoch_1"]


class LateCopy(HostCopy):
    """A copy that takes its time: it is ready when it was asked so many times."""

    requested = 0
    waited = False

    def ready(self) -> bool:
        """Not yet."""
        self.requested += 1
        return self.requested > 3

    def values(self) -> list[float]:
        type(self).waited = self.waited or self.requested <= 3
        return super().values()


@pytest.mark.slow
def test_values_on_their_way_are_not_waited_for(make_trainer: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps go on until the copy is there, and the error still names the iteration."""
    monkeypatch.setattr(LateCopy, "waited", False)
    substitute(monkeypatch, "check_invalid_loss._start_copy", LateCopy)
    trainer = make_trainer(max_iters=LONG, train_step=breaking(1), hooks=[CheckInvalidLossHook(interval=2)])

    with pytest.raises(FloatingPointError, match=r"in iteration 1 \(epoch 0, batch 1\)"):
        trainer.train()

    assert trainer.iter < LONG
    assert not LateCopy.waited


def test_loss_in_a_buffer_that_is_used_again(make_trainer: Make) -> None:
    """A loss that is no result of the graph is kept as it was in its iteration."""
    buffer = torch.zeros(())

    class Own(Hook):
        def after_train_iter(self, trainer: Trainer, event: Any) -> None:
            buffer.fill_(math.nan if event.iter == 1 else 1.0)
            trainer.outputs = {"loss": buffer}

    trainer = make_trainer(batches=4, hooks=[Own(), CheckInvalidLossHook(interval=4)])

    with pytest.raises(FloatingPointError, match="in iteration 1 "):
        trainer.train()


def test_plain_number_is_checked(make_trainer: Make) -> None:
    """A step of one's own may report a float."""

    def step(trainer: Trainer, batch: Any) -> dict[str, float]:
        return {"loss": math.inf if trainer.iter == 1 else 0.5}

    trainer = make_trainer(
        train_step=step, default_hooks={"optimizer": None}, hooks=[CheckInvalidLossHook(interval=2)]
    )

    with pytest.raises(FloatingPointError, match="the loss is inf in iteration 1"):
        trainer.train()


@pytest.mark.parametrize("outputs", [None, {"los": 1.0}, {"loss": torch.zeros(2)}])
def test_outputs_without_a_loss_are_an_error(make_trainer: Make, outputs: Any) -> None:
    """A hook that finds nothing to check says so."""
    trainer = make_trainer(default_hooks={"optimizer": None}, hooks=[CheckInvalidLossHook()])

    def loop() -> None:
        for _ in trainer.epochs():
            for _ in trainer.batches(trainer.train_loader or ()):
                trainer.outputs = outputs

    with pytest.raises(TypeError, match=r"CheckInvalidLossHook needs trainer\.outputs\['loss'\]"):
        loop()


@pytest.mark.parametrize(
    ("interval", "message"),
    [(0, "interval must be at least 1, got 0"), ("50", "interval must be an int, got '50'")],
)
def test_bad_interval_is_refused(interval: Any, message: str) -> None:
    """The interval is checked when the hook is built."""
    with pytest.raises((TypeError, ValueError), match=message):
        CheckInvalidLossHook(interval)
