"""The helpers of hooks: MMEngine's names and values; and a text for a writer, or the log."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from eventloop import Trainer
from eventloop.events import AfterTrainEpoch, AfterTrainIter, TextLogged
from eventloop.hooks import Hook
from eventloop.hooks.log_text import log_text
from tests.hooks.conftest import Make


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


def test_last_train_epoch_and_iter(make_trainer: Make) -> None:
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


@pytest.mark.parametrize(("rank", "writer", "logged"), [(0, True, []), (0, False, ["fast"]), (1, False, [])])
def test_a_text_goes_to_the_writers_or_else_to_the_log(
    make_trainer: Make, caplog: pytest.LogCaptureFixture, rank: int, writer: bool, logged: list[str]
) -> None:
    """Once: it is logged on rank 0 only, and only if nothing subscribes to texts."""
    caplog.set_level(logging.INFO, "eventloop")
    trainer = make_trainer()
    trainer.rank = rank
    seen: list[TextLogged] = []
    if writer:
        trainer.bus.subscribe(seen.append, TextLogged, offload="thread")

    log_text(trainer, "timing", "fast")
    trainer.bus.flush()

    assert [(e.name, e.text, e.mode, e.step) for e in seen] == [("timing", "fast", "train", 0)] * writer
    assert [record.getMessage() for record in caplog.records] == logged
