"""SyncBuffersHook in one process; what it does in two is in tests/training/test_two_ranks.py."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from eventloop import SkipIteration, Trainer
from eventloop.events import BeforeTrainIter
from eventloop.hooks import CheckpointHook, EMAHook, Hook, SyncBuffersHook
from tests.support.internals import substitute

Make = Callable[..., Trainer]


def test_nothing_without_a_group(make_trainer: Make) -> None:
    """In one process training ends with the buffers it would have had."""
    ends = []
    for hooks in ([], [SyncBuffersHook()]):
        model = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 1))
        torch.manual_seed(0)
        nn.init.normal_(model[1].weight)  # type: ignore[arg-type]
        make_trainer(model=model, hooks=hooks).train()
        ends.append([buffer.tolist() for buffer in model.buffers()])

    assert ends[0] == ends[1]


@pytest.fixture
def synced_at(monkeypatch: pytest.MonkeyPatch, make_trainer: Make) -> Callable[..., list[int]]:
    """Train as one of two ranks, and return the completed iterations at which buffers were synced."""

    def train(*, fail: bool = False, more: Sequence[Hook] = (), **options: Any) -> list[int]:
        at: list[int] = []
        trainer = make_trainer(hooks=[SyncBuffersHook(), *more], batches=3, **options)
        trainer.world_size = 2
        substitute(monkeypatch, "sync_buffers.sync_buffers", lambda buffers: at.append(trainer.iter))
        if fail:
            trainer.bus.subscribe(lambda event: 1 / 0, "after_train_iter", every=2)
            with pytest.raises(ZeroDivisionError):
                trainer.train()
        else:
            trainer.train()
            if trainer.test_loader is not None:
                trainer.test()
        return at

    return train


def test_once_an_epoch(synced_at: Any, scripted: Any) -> None:
    """After each epoch, and not again for its validation, nor for a test that follows."""
    options = {**scripted(0.1, 0.2, 0.3), "test_loader": [torch.zeros(1)]}

    assert synced_at(max_epochs=2, **options) == [3, 6]


def test_before_validations_in_mid_epoch(synced_at: Any, scripted: Any) -> None:
    """A run measured in iterations is one epoch: there it syncs before each validation, and at the end."""
    assert synced_at(max_iters=5, val_interval=2, **scripted(0.1, 0.2, 0.3)) == [2, 4, 5]


def test_within_an_iteration(
    monkeypatch: pytest.MonkeyPatch, make_trainer: Make, scripted: Callable[..., Any]
) -> None:
    """A validation that a handler asks for within an iteration has what its forward pass moved synced, right after a
    validation at the boundary too; the boundary behind it is synced again."""
    at: list[tuple[int, bool]] = []
    trainer = make_trainer(
        hooks=[SyncBuffersHook()], batches=3, max_iters=6, val_interval=3, **scripted(0.1, 0.2, 0.3, 0.4)
    )
    trainer.world_size = 2
    substitute(
        monkeypatch,
        "sync_buffers.sync_buffers",
        lambda buffers: at.append((trainer.iter, trainer.metrics.in_iteration)),
    )
    for priority in (20, 95):
        trainer.bus.subscribe(
            lambda trainer, event: trainer.val() if event.iter == 3 else None,
            "after_train_iter",
            priority=priority,
        )

    trainer.train()

    assert at == [(3, False), (3, True), (3, True), (6, False)]


def test_a_skipped_batch_is_no_iteration(synced_at: Any, scripted: Any) -> None:
    """On a rank whose last batch is skipped the end of the epoch is synced as often as on the others."""

    class Skip(Hook):
        def before_train_iter(self, trainer: Trainer, event: BeforeTrainIter) -> None:
            if event.batch_idx == 2:
                raise SkipIteration

    assert synced_at(more=[Skip()], max_epochs=2, **scripted(0.1, 0.2)) == [2, 4]


def test_after_going_back(monkeypatch: pytest.MonkeyPatch, make_trainer: Make, tmp_path: Path) -> None:
    """A trainer that goes back to a checkpoint syncs at the iterations it comes by once more."""
    at: list[int] = []
    trainer = make_trainer(hooks=[SyncBuffersHook(), CheckpointHook(interval=1)], batches=3, max_epochs=2)
    trainer.train()
    trainer.world_size = 2
    substitute(monkeypatch, "sync_buffers.sync_buffers", lambda buffers: at.append(trainer.iter))
    for _ in range(2):
        trainer.world_size = 1
        trainer.resume(tmp_path / "run" / "epoch_1")
        trainer.world_size = 2
        trainer.train()

    assert at == [6, 6]


@pytest.mark.parametrize("update_buffers", [False, True])
def test_the_models_own_buffers_are_synced_before_an_average_is_put_there(
    monkeypatch: pytest.MonkeyPatch, make_trainer: Make, scripted: Any, update_buffers: bool
) -> None:
    """A validation of an average in mid-epoch, in the run's last iteration too, leaves them synced."""

    def fill(buffers: Any) -> None:
        for buffer in buffers:
            buffer.fill_(7)

    substitute(monkeypatch, "sync_buffers.sync_buffers", fill)
    model = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 1))
    trainer = make_trainer(
        model=model,
        hooks=[EMAHook(update_buffers=update_buffers), SyncBuffersHook()],
        max_iters=4,
        val_interval=2,
        **scripted(0.1, 0.2),
    )
    trainer.world_size = 2
    trainer.train()

    assert all(bool((buffer == 7).all()) for buffer in model.buffers())


@pytest.mark.parametrize(("stopped_after", "at"), [(2, [2]), (3, [3])])
def test_an_epoch_that_was_cut_short_is_not_over(
    monkeypatch: pytest.MonkeyPatch, make_trainer: Make, stopped_after: int, at: list[int]
) -> None:
    """A stop within an epoch leaves each rank its own buffers, which the run that resumes goes on with; a test behind it
    has them synced. A stop in the epoch's last iteration ends it as any other."""
    seen: list[int] = []
    trainer = make_trainer(
        hooks=[SyncBuffersHook()],
        batches=3,
        max_epochs=2,
        test_loader=[torch.zeros(1)],
        val_step=lambda trainer, batch: {"acc": batch},
    )
    trainer.bus.subscribe(
        lambda trainer, event: trainer.stop("enough") if event.iter + 1 == stopped_after else None,
        "after_train_iter",
    )
    substitute(monkeypatch, "sync_buffers.sync_buffers", lambda buffers: seen.append(trainer.iter))
    synced = SyncBuffersHook._sync

    def as_one_of_two(hook: SyncBuffersHook, trainer: Trainer) -> None:
        monkeypatch.setattr(trainer, "world_size", 2)
        synced(hook, trainer)
        monkeypatch.setattr(trainer, "world_size", 1)

    monkeypatch.setattr(SyncBuffersHook, "_sync", as_one_of_two)
    trainer.train()
    assert seen == (at if stopped_after == 3 else [])
    trainer.test()

    assert seen == at


def test_not_after_an_error(synced_at: Any) -> None:
    """An epoch that an error ended has no collective at its end: the other ranks may not come to it."""
    assert synced_at(fail=True) == []
