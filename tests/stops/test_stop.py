"""Ending a run before its end: stop, Ctrl-C, and skipping a batch."""

from __future__ import annotations

from typing import Any

import pytest

from eventloop import SkipIteration
from tests.support.trainers import MakeTrainer, batches, collect, record

CLOSING = ("after_train_epoch", "after_train", "after_run")


def stop_at(trainer: Any, event: str, count: int, reason: str = "enough") -> None:
    """Ask for a stop at the `count`-th event."""
    trainer.bus.subscribe(lambda trainer, event: trainer.stop(reason), event, start=count - 1, once=True)


@pytest.mark.parametrize("unit", [{"max_epochs": 3}, {"max_iters": 9}], ids=str)
def test_stop_ends_at_the_next_boundary(make_trainer: MakeTrainer, unit: dict[str, int]) -> None:
    """After `stop` the iteration under way is finished, no other begins, and every closing event has the reason."""
    trainer = make_trainer(train_loader=batches(5), **unit)
    stop_at(trainer, "before_train_iter", 2)
    rows, seen = record(trainer, "after_train_iter", "before_train_iter"), collect(trainer, *CLOSING)

    trainer.train()

    assert [(name, i) for name, i, _ in rows] == [
        ("before_train_iter", 0),
        ("after_train_iter", 0),
        ("before_train_iter", 1),
        ("after_train_iter", 1),
    ]
    assert [event.reason for event in seen] == ["enough"] * 3
    assert trainer.stop_reason == "enough"


@pytest.mark.parametrize(
    ("unit", "iterations", "reasons", "epoch"),
    [
        ({"max_epochs": 4}, 2, ["enough", "enough", "enough"], 0),
        ({"max_epochs": 4}, 3, ["completed", "enough", "enough"], 1),
        ({"max_iters": 9}, 3, ["enough", "enough", "enough"], 0),  # the one epoch is the run
    ],
    ids=["within an epoch", "in its last iteration", "at the end of a pass"],
)
def test_an_epoch_cut_short_is_not_counted(
    make_trainer: MakeTrainer, unit: dict[str, int], iterations: int, reasons: list[str], epoch: int
) -> None:
    """An epoch counts, and says "completed", if its last iteration asked for the stop; no validation follows."""
    trainer = make_trainer(train_loader=batches(3), val_loader=batches(1), **unit)
    stop_at(trainer, "after_train_iter", iterations)
    rows, seen = record(trainer, "before_val"), collect(trainer, *CLOSING)

    trainer.train()

    assert [event.reason for event in seen] == reasons
    assert (trainer.iter, trainer.epoch, rows) == (iterations, epoch, [])


@pytest.mark.parametrize(
    ("batch", "reason", "metrics"), [(2, "enough", set()), (3, "completed", {"loss", "accuracy"})]
)
def test_stop_during_a_validation(
    make_trainer: MakeTrainer, batch: int, reason: str, metrics: set[str]
) -> None:
    """It ends the validation after that batch, without metrics, and the training with it. A validation that saw every
    batch is completed and has its metrics."""
    trainer = make_trainer(val_loader=batches(3), max_epochs=2)
    stop_at(trainer, "after_val_iter", batch)
    rows = record(trainer, "after_val_iter")
    seen = collect(trainer, "after_val_epoch", "after_val", "after_train", "after_run")

    trainer.train()

    assert [event.reason for event in seen] == [reason, reason, "enough", "enough"]
    assert seen[0].metrics.keys() == metrics
    assert (len(rows), trainer.epoch) == (batch, 1)


def test_stop_by_a_handler_of_after_val_epoch(make_trainer: MakeTrainer) -> None:
    """Early stopping: the validation is completed, the training is not, and no further epoch begins."""
    trainer = make_trainer(val_loader=batches(1), max_epochs=5)
    trainer.bus.subscribe(lambda trainer, event: trainer.stop("no progress"), "after_val_epoch")
    seen = collect(trainer, "after_val_epoch", "after_val", "after_train", "after_run")

    trainer.train()

    assert [event.reason for event in seen] == ["completed", "completed", "no progress", "no progress"]
    assert trainer.epoch == 1


def test_stop_before_the_first_epoch(make_trainer: MakeTrainer) -> None:
    """A stop asked for in before_run or before_train lets no epoch begin."""
    trainer = make_trainer()
    stop_at(trainer, "before_train", 1)
    rows = record(trainer, "before_train_epoch", "after_train")

    trainer.train()

    assert rows == [("after_train", 0, 0)]


@pytest.mark.parametrize("first", ["stop", "request_stop"])
def test_the_first_of_two_reasons_wins(make_trainer: MakeTrainer, first: str) -> None:
    """Later requests change nothing, and are not announced."""
    trainer = make_trainer()

    @trainer.bus.on("after_train_iter", once=True)
    def several(trainer: Any, event: Any) -> None:
        getattr(trainer, first)("first")
        trainer.request_stop("second")
        trainer.stop("third")

    seen = collect(trainer, "stop_requested", "after_run")
    trainer.train()

    assert [event.reason for event in seen] == ["first", "first"]


def test_request_stop_is_announced_at_the_boundary(make_trainer: MakeTrainer) -> None:
    """`request_stop` only takes a note: stop_requested is emitted at the next iteration boundary."""
    trainer = make_trainer()
    trainer.bus.subscribe(
        lambda trainer, event: trainer.request_stop("signal"), "before_train_iter", once=True
    )
    rows = record(trainer, "after_train_iter", "stop_requested", "after_train_epoch")

    trainer.train()

    assert rows == [("after_train_iter", 0, 0), ("stop_requested", 1, 0), ("after_train_epoch", 1, 0)]


@pytest.mark.parametrize("method", ["stop", "request_stop"])
def test_a_stop_needs_a_reason(make_trainer: MakeTrainer, method: str) -> None:
    """An empty reason would look like none in every report."""
    trainer = make_trainer()

    with pytest.raises(ValueError, match=r"trainer\.stop needs a reason"):
        getattr(trainer, method)("")


def test_training_goes_on_after_a_stop(make_trainer: MakeTrainer) -> None:
    """`train()` called again after a stop in mid-epoch trains the batches that were left."""
    trainer = make_trainer(train_loader=batches(3), max_epochs=1)
    stop_at(trainer, "after_train_iter", 2)
    trainer.train()
    seen = collect(trainer, "after_train_iter", "after_run")

    trainer.train()

    assert [(event.iter, event.batch_idx) for event in seen[:-1]] == [(2, 2)]
    assert seen[-1].reason == "completed"


def test_skip_iteration(make_trainer: MakeTrainer) -> None:
    """SkipIteration from before_train_iter leaves the batch out: no step, no after_train_iter, no count. A stop asked for
    in an iteration that is skipped ends the run there."""
    trained: list[int] = []

    def step(trainer: Any, batch: Any) -> Any:
        trained.append(trainer.batch_idx)
        return trainer.model(batch[0]).sum()

    trainer = make_trainer(train_loader=batches(6), max_epochs=1, train_step=step)

    @trainer.bus.on("before_train_iter")
    def skip(trainer: Any, event: Any) -> None:
        if event.batch_idx == 4:
            trainer.stop("enough")
        if event.batch_idx in (0, 2, 4):
            raise SkipIteration

    rows = record(trainer, "after_train_iter", "after_train_epoch")
    trainer.train()

    assert trained == [1, 3]
    assert rows == [("after_train_iter", 0, 0), ("after_train_iter", 1, 0), ("after_train_epoch", 2, 0)]
    assert trainer.stop_reason == "enough"


def test_skipping_everything(make_trainer: MakeTrainer) -> None:
    """A pass in which every batch was skipped is an error: the run would never end."""
    trainer = make_trainer(max_iters=5)

    @trainer.bus.on("before_train_iter")
    def skip(event: Any) -> None:
        raise SkipIteration

    with pytest.raises(ValueError, match="every batch was skipped"):
        trainer.train()
