"""Loops that users write themselves emit what `trainer.train()` does, however they are left."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext, suppress
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from eventloop import Trainer
from eventloop.hooks import CheckpointHook
from tests.support.trainers import MakeTrainer, batches, collect, event_name, record

CLOSING = ("after_train_epoch", "after_train", "after_run")


def train_by_hand(trainer: Trainer, loader: Any) -> None:
    """What the documentation shows."""
    for _ in trainer.epochs():
        for inputs, target in trainer.batches(loader):
            trainer.outputs = {"loss": F.cross_entropy(trainer.model(inputs), target)}


@pytest.mark.parametrize("unit", [{"max_epochs": 2}, {"max_iters": 5, "val_interval": 2}], ids=str)
def test_same_events_as_train(make_trainer: MakeTrainer, unit: dict[str, int]) -> None:
    """A hand-written loop emits the events of `trainer.train()`, in their order, with their counters."""
    loader = batches(3)
    theirs = make_trainer(train_loader=loader, val_loader=batches(1), **unit)
    ours = make_trainer(val_loader=batches(1), **unit)
    expected, rows = record(theirs), record(ours)

    theirs.train()
    train_by_hand(ours, loader)

    assert rows == expected


def test_same_weights_as_train(make_trainer: MakeTrainer) -> None:
    """The optimizer hook steps in a hand-written loop too: the weights are those of `trainer.train()`."""
    theirs, ours = make_trainer(), make_trainer()
    torch.manual_seed(3)
    theirs.train()
    torch.manual_seed(3)
    train_by_hand(ours, batches(3))

    for a, b in zip(theirs.model.parameters(), ours.model.parameters(), strict=True):
        assert torch.equal(a, b)


def test_epochs_yields_the_indices(make_trainer: MakeTrainer) -> None:
    """`epochs` yields 0, 1, ... and `trainer.epoch` is that index meanwhile. A `break` out of the inner loop alone ends
    that epoch, which counts."""
    trainer = make_trainer(max_epochs=3)
    rows = record(trainer, "after_train_epoch", "after_train")
    seen: list[tuple[int, int]] = []

    for epoch in trainer.epochs():
        seen.append((epoch, trainer.epoch))
        for batch in trainer.batches(batches(3)):
            trainer.outputs = trainer.train_step(batch)
            if trainer.batch_idx == 1:
                break

    assert seen == [(0, 0), (1, 1), (2, 2)]
    ends = [("after_train_epoch", epoch + 1, epoch) for epoch in range(3)]
    assert rows == [*ends, ("after_train", 3, 3)]


def break_out(trainer: Trainer) -> None:
    """Break out of the inner loop, then of the outer one."""
    for _ in trainer.epochs():
        for batch in trainer.batches(batches(3)):
            trainer.outputs = trainer.train_step(batch)
            if trainer.iter == 1:
                break
        break


def return_out(trainer: Trainer) -> None:
    """Return from within both loops."""
    for _ in trainer.epochs():
        for batch in trainer.batches(batches(3)):
            if trainer.iter == 1:
                return
            trainer.outputs = trainer.train_step(batch)


def raise_out(trainer: Trainer) -> None:
    """Raise from within both loops."""
    with suppress(ZeroDivisionError):
        for _ in trainer.epochs():
            for batch in trainer.batches(batches(3)):
                trainer.outputs = trainer.train_step(batch)
                if trainer.iter == 1:
                    raise ZeroDivisionError


def break_outer(trainer: Trainer) -> None:
    """Break out of the outer loop, after a whole epoch."""
    for _ in trainer.epochs():
        for batch in trainer.batches(batches(3)):
            trainer.outputs = trainer.train_step(batch)
        break


@pytest.mark.representative(2)
@pytest.mark.parametrize("leave", [break_out, return_out, raise_out, break_outer])
def test_leaving_emits_the_closing_events(
    make_trainer: MakeTrainer, caplog: pytest.LogCaptureFixture, leave: Callable[[Trainer], None]
) -> None:
    """A loop left by break, return or an exception emits every closing event, once, with the reason "left". Background
    subscribers have been given everything then, and the log says where to resume."""
    trainer = make_trainer(hooks=[CheckpointHook(interval=1, by_epoch=False)])
    seen, background = collect(trainer, *CLOSING), list[Any]()
    trainer.bus.subscribe(background.append, "after_train_iter", "after_run", offload="thread")

    leave(trainer)

    epoch = "completed" if leave is break_outer else "left"
    assert [(event_name(event), event.reason) for event in seen] == [
        *zip(CLOSING, (epoch, "left", "left"), strict=True)
    ]
    assert [event.iter for event in background] == [*range(trainer.iter), trainer.iter]
    newest = trainer.work_dir / f"iter_{trainer.iter}"
    where = f"the newest checkpoint to resume from is {newest} (iteration {trainer.iter})"
    assert f"the training was left before its end: {where}" in caplog.text


@pytest.mark.parametrize(
    ("optimizer", "step"),
    [({}, "the optimizer makes no step for its outputs, and it is not counted"), (None, "it is not counted")],
)
def test_a_body_that_is_left_is_told_of(
    make_trainer: MakeTrainer, caplog: pytest.LogCaptureFixture, optimizer: Any, step: str
) -> None:
    """What was to be done with its outputs is done when the next batch is asked for, which nobody does."""
    trainer = make_trainer(default_hooks={"optimizer": optimizer})

    break_out(trainer)

    assert trainer.iter == 1
    told = [record.getMessage() for record in caplog.records if "left within" in record.message]
    why = f"iteration 1 was left within its body, by break, return or an exception: {step}; "
    assert told == [why + 'trainer.stop("...") ends the loop once an iteration is done']


def test_nothing_is_logged_where_nothing_is_lost(
    make_trainer: MakeTrainer, caplog: pytest.LogCaptureFixture
) -> None:
    """A body that is left before it set outputs loses none, and without a checkpoint there is nowhere to resume from."""
    return_out(make_trainer())

    assert "left" not in caplog.text


def test_stop_finishes_the_iteration(make_trainer: MakeTrainer, caplog: pytest.LogCaptureFixture) -> None:
    """What to do instead of a break: the step is made, and the iteration counts."""
    trainer = make_trainer()
    for _ in trainer.epochs():
        for batch in trainer.batches(batches(3)):
            trainer.outputs = trainer.train_step(batch)
            if trainer.iter == 1:
                trainer.stop("enough")

    assert trainer.iter == 2
    assert "left within" not in caplog.text


@pytest.mark.parametrize("caught", [False, True])
def test_a_handler_that_fails_is_an_error_and_not_left(make_trainer: MakeTrainer, caught: bool) -> None:
    """What a handler raises ends a hand-written loop with reason "error" in every closing event. A loop that catches it
    and goes on to the end has a completed run."""
    trainer = make_trainer(max_epochs=1)
    seen = collect(trainer, *CLOSING)

    @trainer.bus.on("after_train_iter", once=True)
    def faulty(event: Any) -> None:
        raise ValueError("no luck")

    def loop() -> None:
        for _ in trainer.epochs():
            with suppress(ValueError if caught else ZeroDivisionError):
                for batch in trainer.batches(batches(2)):
                    trainer.outputs = trainer.train_step(batch)

    with nullcontext() if caught else pytest.raises(ValueError, match="no luck"):
        loop()

    if caught:
        assert [event.reason for event in seen] == ["error", "completed", "completed", "completed"]
    else:
        assert [event.reason for event in seen] == ["error"] * 3
        assert seen[-1].error == "ValueError: no luck"


def test_forgotten_outputs(make_trainer: MakeTrainer) -> None:
    """A body that sets no `trainer.outputs` raises at its first iteration, and does not train on the one before."""
    trainer = make_trainer()

    with pytest.raises(TypeError, match=r"expected trainer\.outputs .* set in this iteration; got None"):  # noqa: PT012
        for _ in trainer.epochs():
            for i, batch in enumerate(trainer.batches(batches(3))):
                if i == 0:
                    trainer.outputs = trainer.train_step(batch)

    assert trainer.iter == 1


def test_backward_and_step_by_hand(make_trainer: MakeTrainer) -> None:
    """With `default_hooks=dict(optimizer=None)` the body does backward and step, and nobody else does."""
    trainer = make_trainer(default_hooks={"optimizer": None})
    optimizer = trainer.optimizer
    assert optimizer is not None
    counted: list[int] = []
    optimizer.register_step_post_hook(lambda *_: counted.append(trainer.iter))

    for _ in trainer.epochs():
        for batch in trainer.batches(batches(2)):
            loss = trainer.train_step(batch)["loss"]
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    assert counted == [0, 1, 2, 3]


@pytest.mark.parametrize("unit", [{"max_epochs": 3}, {"max_iters": 9}], ids=str)
def test_two_passes_in_an_epoch(make_trainer: MakeTrainer, unit: dict[str, int]) -> None:
    """Each call of `batches` is an epoch, and none comes after the last one; iterations end where they should."""
    trainer, loader = make_trainer(**unit), batches(3)

    def train() -> None:
        for _ in trainer.epochs():
            for _ in range(2):
                for inputs, target in trainer.batches(loader):
                    trainer.outputs = {"loss": F.cross_entropy(trainer.model(inputs), target)}

    if "max_iters" in unit:
        train()
    else:
        with pytest.raises(
            RuntimeError, match=r"trainer\.batches is an epoch: expected at most max_epochs=3 .* one more"
        ):
            train()
    assert trainer.iter == 9


def test_loops_that_do_not_nest(make_trainer: MakeTrainer) -> None:
    """`batches` without `epochs` around it would emit half a run, and `epochs` without `batches` would never end."""
    trainer = make_trainer()

    with pytest.raises(RuntimeError, match=r"belongs inside `for epoch in trainer\.epochs"):
        next(iter(trainer.batches(batches(1))))
    with pytest.raises(RuntimeError, match="epoch 0 trained no iteration"):
        list(trainer.epochs())

    assert not trainer.running
