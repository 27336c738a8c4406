"""A run driven step by step, from a loop that is not the trainer's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from eventloop import SkipIteration, Trainer
from tests.support.trainers import MakeTrainer, batches, record


def drive(trainer: Trainer, loader: Any, epochs: int = 2) -> None:
    """Train as `Trainer.begin_run` documents it, with a validation after each epoch."""
    trainer.begin_run()
    try:
        for _ in range(epochs):
            trainer.begin_epoch(len(loader))
            for inputs, target in loader:
                if not trainer.begin_iter((inputs, target)):
                    continue
                trainer.model.train()
                if trainer.end_iter({"loss": F.cross_entropy(trainer.model(inputs), target)}):
                    break
            trainer.end_epoch()
            if trainer.stopping:
                break
            trainer.begin_val()
            trainer.model.eval()
            for batch_idx, batch in enumerate(batches(1)):
                trainer.begin_val_iter(batch, batch_idx)
                trainer.end_val_iter(trainer.val_step(batch), batch_idx)
            trainer.end_val({"loss": 0.5})
    except BaseException as error:
        trainer.end_run(error)
        raise
    trainer.end_run()


def test_same_events_as_train(make_trainer: MakeTrainer) -> None:
    """A driven run emits the events of `trainer.train()`, in their order, with their counters."""
    theirs = make_trainer(train_loader=batches(3), val_loader=batches(1), max_epochs=2)
    ours = make_trainer(val_loader=batches(1), max_epochs=2)
    ours.max_iters = theirs.max_iters
    expected, rows = record(theirs), record(ours)

    theirs.train()
    drive(ours, batches(3))

    assert rows == expected


def test_same_weights_as_train(make_trainer: MakeTrainer) -> None:
    """The optimizer hook steps at the end of a driven iteration: the weights are those of `trainer.train()`."""
    theirs, ours = make_trainer(train_loader=batches(3), max_epochs=2), make_trainer(max_epochs=2)

    torch.manual_seed(3)
    theirs.train()
    torch.manual_seed(3)
    drive(ours, batches(3))

    for a, b in zip(theirs.model.parameters(), ours.model.parameters(), strict=True):
        assert torch.equal(a, b)


def test_a_stop_is_returned_and_ends_the_epoch_early(make_trainer: MakeTrainer) -> None:
    """`end_iter` returns True after the iteration in which a handler asked for a stop; that epoch does not count."""
    trainer = make_trainer(max_epochs=2)
    rows = record(trainer)

    @trainer.bus.on("after_train_iter")
    def stop(trainer: Trainer, event: Any) -> None:
        if event.iter == 1:
            trainer.stop("enough")

    drive(trainer, batches(3))

    assert (trainer.iter, trainer.epoch) == (2, 0)
    assert [row[0] for row in rows][-3:] == ["after_train_epoch", "after_train", "after_run"]
    assert (after_run := trainer.bus.latest("after_run")) is not None
    assert after_run.reason == "enough"


def test_a_skipped_batch_is_no_iteration(make_trainer: MakeTrainer) -> None:
    """`begin_iter` returns False where a handler skips the batch, and counts it in the pass alone."""
    trainer = make_trainer(max_epochs=1)

    @trainer.bus.on("before_train_iter")
    def skip(trainer: Trainer, event: Any) -> None:
        if event.batch_idx == 1:
            raise SkipIteration

    drive(trainer, batches(3), epochs=1)

    assert (trainer.iter, trainer.epoch) == (2, 1)


def test_an_error_of_the_loop_closes_all_that_is_open(make_trainer: MakeTrainer) -> None:
    """`end_run(error)` emits the closing events of the epoch, the training and the run, with the error."""
    trainer = make_trainer(max_epochs=2)
    rows = record(trainer)
    trainer.begin_run()
    trainer.begin_epoch()
    trainer.begin_iter(None)

    trainer.end_run(OSError("the host's loader broke"))

    assert [row[0] for row in rows][-3:] == ["after_train_epoch", "after_train", "after_run"]
    assert (after_run := trainer.bus.latest("after_run")) is not None
    assert (after_run.reason, after_run.error) == ("error", "OSError: the host's loader broke")
    assert not trainer.running


def test_an_error_of_a_closing_handler_reaches_the_loop(make_trainer: MakeTrainer) -> None:
    """A handler of `after_train_epoch` that raises makes `end_epoch` raise, and `end_run` still closes the run."""
    trainer = make_trainer(max_epochs=1)
    rows = record(trainer)

    @trainer.bus.on("after_train_epoch")
    def fail(trainer: Trainer, event: Any) -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        drive(trainer, batches(1), epochs=1)

    assert [row[0] for row in rows][-2:] == ["after_train", "after_run"]


def begin_twice(trainer: Trainer) -> None:
    trainer.begin_run()
    trainer.begin_run()


def epoch_in_epoch(trainer: Trainer) -> None:
    trainer.begin_run()
    trainer.begin_epoch()
    trainer.begin_epoch()


def iter_outside(trainer: Trainer) -> None:
    trainer.begin_run()
    trainer.begin_iter(None)


def end_before_begin(trainer: Trainer) -> None:
    trainer.begin_run()
    trainer.begin_epoch()
    trainer.end_iter(None)


def val_in_val(trainer: Trainer) -> None:
    trainer.begin_run()
    trainer.begin_val()
    trainer.begin_val()


def epoch_ends_in_val(trainer: Trainer) -> None:
    trainer.begin_run()
    trainer.begin_epoch()
    trainer.begin_val()
    trainer.end_epoch()


@pytest.mark.representative(2)
@pytest.mark.parametrize(
    ("steps", "words"),
    [
        (begin_twice, r"begin_run\(\) was called in the middle of a run"),
        (
            lambda trainer: trainer.begin_epoch(),
            r"begin_epoch\(\) belongs after begin_run\(\) or end_epoch\(\)",
        ),
        (epoch_in_epoch, r"begin_epoch\(\) belongs after begin_run\(\) or end_epoch\(\)"),
        (iter_outside, r"begin_iter\(\) belongs after begin_epoch\(\)"),
        (end_before_begin, r"end_iter\(\) belongs after begin_iter\(\)"),
        (lambda trainer: trainer.begin_val(), r"begin_val\(\) belongs after begin_run\(\)"),
        (val_in_val, r"begin_val\(\) belongs after begin_run\(\), end_iter\(\)"),
        (lambda trainer: trainer.end_val({}), "got that of the evaluation: no run was begun"),
        (lambda trainer: trainer.end_epoch(), "got that of the epoch: no run was begun"),
        (epoch_ends_in_val, "got that of the epoch: the evaluation was begun last"),
    ],
)
def test_steps_out_of_order(
    make_trainer: MakeTrainer, steps: Callable[[Trainer], object], words: str
) -> None:
    """A step out of order is refused by name, with the steps that it belongs after; the run can still be ended."""
    trainer = make_trainer(max_epochs=1)

    with pytest.raises(RuntimeError, match=words):
        steps(trainer)

    trainer.end_run()
    assert not trainer.running
