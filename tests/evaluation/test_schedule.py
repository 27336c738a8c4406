"""When a training validates: MMEngine's intervals and mmcv's workflow."""

from __future__ import annotations

import shutil
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from eventloop import Trainer
from eventloop.events import ScalarsLogged
from eventloop.hooks import LoggerHook
from tests.support.interrupted import assert_same
from tests.support.trainers import MakeTrainer, batches, collect, record, shuffled


def validated_at(make_trainer: MakeTrainer, **arguments: Any) -> list[int]:
    """The completed epochs (iterations) at which a run of single-batch epochs validates."""
    trainer = make_trainer(train_loader=batches(1), val_loader=batches(1), **arguments)
    seen = collect(trainer, "before_val")
    trainer.train()
    return [event.epoch if trainer.by_epoch else event.iter for event in seen]


@pytest.mark.representative(6)
@pytest.mark.parametrize("unit", ["max_epochs", "max_iters"])
@pytest.mark.parametrize(
    ("total", "options", "expected"),
    [
        (4, {"val_interval": 1}, [1, 2, 3, 4]),
        (7, {"val_interval": 3}, [3, 6, 7]),
        (5, {"val_interval": 2}, [2, 4, 5]),
        (6, {"val_interval": 2, "val_begin": 3}, [4, 6]),
        (7, {"val_interval": 2, "val_begin": 5}, [6, 7]),
        (3, {"val_interval": 1, "val_begin": 5}, []),
        (12, {"val_interval": 5, "dynamic_intervals": [(11, 2)]}, [5, 10, 12]),
        (8, {"val_interval": 4, "dynamic_intervals": [(6, 1)]}, [4, 5, 6, 7, 8]),
        (10, {"val_interval": 5, "dynamic_intervals": [(4, 3), (8, 1)]}, [3, 6, 7, 8, 9, 10]),
    ],
)
def test_intervals(
    make_trainer: MakeTrainer, unit: str, total: int, options: dict[str, Any], expected: list[int]
) -> None:
    """Validate at `done >= val_begin and (done % interval == 0 or done == total)`, a dynamic interval applying
    once `done + 1 >= milestone`: MMEngine's rule, for epochs and for iterations."""
    assert validated_at(make_trainer, **{unit: total}, **options) == expected


def test_the_default_is_every_epoch(make_trainer: MakeTrainer) -> None:
    """A run measured in epochs validates after each unless told otherwise."""
    assert validated_at(make_trainer, max_epochs=3) == [1, 2, 3]


def test_the_default_is_every_thousand_iterations(make_trainer: MakeTrainer) -> None:
    """A run measured in iterations validates every 1000, and at its end."""
    assert validated_at(make_trainer, max_iters=5) == [5]


@pytest.mark.parametrize("unit", ["max_epochs", "max_iters"])
def test_a_validation_before_the_training(make_trainer: MakeTrainer, unit: str) -> None:
    """`val_before_train=True` validates the model as it is, before the first epoch begins, and logs it at step 0; the
    interval goes on as without it."""
    trainer = make_trainer(
        train_loader=batches(1),
        val_loader=batches(2),
        val_interval=1,
        val_begin=2,
        val_before_train=True,
        default_hooks={"checkpoint": {"interval": 1, "save_best": "loss"}},
        **{unit: 3},
    )
    inputs, target = (torch.cat(each) for each in zip(*batches(2), strict=True))
    with torch.no_grad():
        untrained = float(F.cross_entropy(trainer.model.eval()(inputs), target))
    trainer.model.train()
    rows = record(trainer)
    with trainer.bus.capture(ScalarsLogged) as seen:
        trainer.train()

    names = [name for name, _, _ in rows]
    assert names.index("after_val") < names.index("before_train_epoch")
    logged = [event for event in seen if isinstance(event, ScalarsLogged) and event.mode == "val"]
    assert [event.step for event in logged] == [0, 2, 3]
    assert logged[0].scalars["loss"] == pytest.approx(untrained)


@pytest.mark.parametrize("name", ["best_loss_epoch_0", "auto"])
def test_a_resumed_run_does_not_repeat_the_one_before_the_training(
    make_trainer: MakeTrainer, name: str
) -> None:
    """Neither the best checkpoint, which it may save itself, nor one within the first epoch begins with it again, and
    the run ends as an uninterrupted one."""

    def build() -> tuple[Trainer, list[Any]]:
        torch.manual_seed(4)
        trainer = make_trainer(
            train_loader=shuffled(2),
            val_loader=shuffled(2),
            val_before_train=True,
            default_hooks={"checkpoint": {"interval": 1, "save_best": "loss", "keep_best": -1}},
        )
        return trainer, collect(trainer, "after_val_epoch")

    whole, expected = build()
    whole.train()
    weights = whole.model.state_dict()
    if name == "auto":
        shutil.rmtree(whole.work_dir)
        cut, _ = build()
        cut.bus.subscribe(lambda trainer, event: trainer.stop("enough"), "after_train_iter", once=True)
        cut.train()
    resumed, after = build()
    resumed.resume(name)
    resumed.train()

    assert [event.iter for event in expected] == [0, 2, 4]
    assert [event.metrics for event in after] == [event.metrics for event in expected[1:]]
    assert_same(weights, resumed.model.state_dict())


def test_a_loop_of_ones_own_validates_before_the_training(make_trainer: MakeTrainer) -> None:
    """The validation comes when the loop asks for its first epoch."""
    trainer = make_trainer(val_loader=batches(1), val_before_train=True, max_epochs=1)
    seen = collect(trainer, "before_val", "before_train_iter")

    for _ in trainer.epochs():
        for inputs, target in trainer.batches(batches(1)):
            trainer.outputs = {"loss": F.cross_entropy(trainer.model(inputs), target)}

    assert [type(event).__name__ for event in seen] == ["BeforeVal", "BeforeTrainIter", "BeforeVal"]


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        (
            {"val_before_train": True},
            ValueError,
            "val_before_train=True needs .* give the Trainer a val_loader",
        ),
        ({"val_before_train": 1}, TypeError, "val_before_train must be True or False, got 1"),
    ],
)
def test_a_validation_before_the_training_that_cannot_be(
    make_trainer: MakeTrainer, given: dict[str, Any], error: type[Exception], message: str
) -> None:
    """The error comes when the trainer is built."""
    with pytest.raises(error, match=message):
        make_trainer(**given)


def letters(make_trainer: MakeTrainer, workflow: list[tuple[str, int]], **arguments: Any) -> str:
    """What a workflow does, T for a training epoch, V and E for a validation and a test."""
    loaders = {f"{mode}_loader": batches(1) for mode in ("train", "val", "test")}
    trainer = make_trainer(**loaders, **arguments)
    seen: list[str] = []
    for event, letter in (("before_train_epoch", "T"), ("before_val_epoch", "V"), ("before_test_epoch", "E")):
        trainer.bus.subscribe(lambda event, letter=letter: seen.append(letter), event)
    trainer.run(workflow)
    return "".join(seen)


@pytest.mark.representative(2)
@pytest.mark.parametrize(
    ("workflow", "epochs", "expected"),
    [
        ([("train", 2), ("val", 1)], 3, "TTVTV"),
        ([("train", 1), ("val", 1), ("train", 2), ("test", 1)], 4, "TVTTETVE"),
        ([("train", 1)], 3, "TTT"),
        ([("val", 1), ("train", 1)], 2, "VTVT"),
        ([("train", 1), ("val", 2)], 2, "TVVTVV"),
    ],
)
def test_workflow(
    make_trainer: MakeTrainer, workflow: list[tuple[str, int]], epochs: int, expected: str
) -> None:
    """A workflow cycles until `max_epochs`, and takes the place of `val_interval`. As in mmcv only training counts, and
    the evaluations that follow it are still done."""
    assert letters(make_trainer, workflow, max_epochs=epochs, val_interval=1) == expected


def test_run_without_a_workflow(make_trainer: MakeTrainer) -> None:
    """`run()` is `train()`, whose validations are at the trainer's interval."""
    trainer = make_trainer(val_loader=batches(1), max_epochs=3, val_interval=2)
    seen = collect(trainer, "before_val")

    trainer.run()

    assert [event.epoch for event in seen] == [2, 3]


def test_workflow_in_iterations(make_trainer: MakeTrainer) -> None:
    """In a run measured in iterations the workflow's units are iterations."""
    trainer = make_trainer(val_loader=batches(1), max_iters=5)
    seen = collect(trainer, "before_val")

    trainer.run([("train", 2), ("val", 1)])

    assert [event.iter for event in seen] == [2, 4, 5]


def test_a_validation_between_two_logs(make_trainer: MakeTrainer) -> None:
    """One by iteration, off the logger's interval, neither ends an interval of training nor is mixed into one."""
    trainer = make_trainer(
        val_loader=batches(1),
        max_iters=6,
        val_interval=2,
        hooks=[LoggerHook(interval=4)],
        val_step=lambda trainer, batch: {"number": 100.0},
    )
    trainer.bus.subscribe(
        lambda trainer, event: trainer.metrics.put_scalar("number", float(event.iter)), "before_train_iter"
    )
    with trainer.bus.capture(ScalarsLogged) as seen:
        trainer.train()

    logged = [event for event in seen if isinstance(event, ScalarsLogged) and "number" in event.scalars]
    numbers = sorted((event.mode, event.step, event.scalars["number"]) for event in logged)
    assert numbers == [("train", 4, 1.5), ("train", 6, 4.5), *[("val", step, 100.0) for step in (2, 4, 6)]]


@pytest.mark.parametrize(
    ("workflow", "error", "message"),
    [
        ([("val", 1)], ValueError, "a workflow must train"),
        (
            [("trian", 1)],
            ValueError,
            "a mode of the workflow must be 'train' or 'val' or 'test', got 'trian': did you mean 'train'",
        ),
        ([("train", 0)], ValueError, "the times of 'train' in a workflow must be at least 1"),
        ([("train", 1.5)], TypeError, "the times of 'train' in a workflow must be an int"),
        (["train"], TypeError, r"a workflow is a list of \(mode, times\)"),
        ("train", TypeError, r"a workflow is a list of \(mode, times\), got 'train'"),
        ([("train", 1), ("test", 1)], ValueError, "the trainer has no test_loader to evaluate on"),
    ],
)
def test_a_wrong_workflow(
    make_trainer: MakeTrainer, workflow: Any, error: type[Exception], message: str
) -> None:
    """A workflow that cannot be followed to its end is refused before anything is trained."""
    trainer = make_trainer()
    rows = record(trainer)

    with pytest.raises(error, match=message):
        trainer.run(workflow)

    assert rows == []


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"val_interval": 0}, ValueError, "val_interval must be at least 1, got 0"),
        ({"val_interval": 1.0}, TypeError, "val_interval must be an int"),
        ({"val_begin": 0}, ValueError, "val_begin must be at least 1"),
        ({"dynamic_intervals": [(0, 1)]}, ValueError, "a milestone of dynamic_intervals must be at least 1"),
        ({"dynamic_intervals": [(2, 0)]}, ValueError, "an interval of dynamic_intervals must be at least 1"),
        ({"dynamic_intervals": [(5, 1), (3, 2)]}, ValueError, "rising milestones"),
        ({"dynamic_intervals": [5]}, TypeError, r"a list of \(milestone, interval\), got the entry 5"),
    ],
)
def test_wrong_intervals(
    make_trainer: MakeTrainer, arguments: dict[str, Any], error: type[Exception], message: str
) -> None:
    """A number that is no interval is refused when the trainer is built."""
    with pytest.raises(error, match=message):
        make_trainer(val_loader=batches(1), **arguments)
