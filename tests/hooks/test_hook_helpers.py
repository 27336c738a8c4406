"""The helpers of hooks: MMEngine's names and values."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from eventloop.events import AfterTrainEpoch, AfterTrainIter
from eventloop.hooks import Hook
from eventloop.training.trainer import Trainer


@pytest.mark.parametrize(
    ("n", "start", "fires"),
    [
        (1, 0, [1, 2, 3, 4, 5, 6, 7, 8, 9]),
        (2, 5, [5, 7, 9]),
        (4, 3, [3, 7]),
        (3, 0, [3, 6, 9]),
        (0, 0, []),
        (-1, 0, []),
        (-1, 5, []),
    ],
)
def test_every_n_helpers_have_mmengines_values(n: int, start: int, fires: list[int]) -> None:
    """`start` itself fires, then every n-th; never for n <= 0."""
    hook = Hook()
    places: list[Any] = [SimpleNamespace(epoch=i, iter=i) for i in range(9)]

    assert [p.epoch + 1 for p in places if hook.every_n_epochs(p, n, start)] == fires
    assert [p.iter + 1 for p in places if hook.every_n_train_iters(p, n, start)] == fires
    assert [p.iter + 1 for p in places if hook.every_n_iters(p, n, start)] == fires


def test_every_n_inner_iters_counts_batches() -> None:
    """Every n-th batch of a pass, 1-based."""
    assert [i for i in range(7) if Hook().every_n_inner_iters(i, 3)] == [2, 5]
    assert not any(Hook().every_n_inner_iters(i, 0) for i in range(7))


def test_end_of_epoch_is_the_last_batch() -> None:
    """True at index len - 1 alone."""
    assert [i for i in range(5) if Hook().end_of_epoch([0, 1, 2], i)] == [2]


def test_last_train_epoch_and_iter(make_trainer: Callable[..., Trainer]) -> None:
    """`is_last_train_iter` and `is_last_train_epoch` are true once, at the end of the run."""
    lasts: list[str] = []

    class Last(Hook):
        def after_train_iter(self, trainer: Trainer, event: AfterTrainIter) -> None:
            if self.is_last_train_iter(trainer):
                lasts.append(f"iter {event.iter}")

        def after_train_epoch(self, trainer: Trainer, event: AfterTrainEpoch) -> None:
            if self.is_last_train_epoch(trainer):
                lasts.append(f"epoch {event.epoch}")

    make_trainer(batches=3, max_epochs=2, hooks=[Last()]).train()

    assert lasts == ["iter 5", "epoch 1"]
