"""The train and eval modes of modules: what the user has set stays, in all of a training."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from eventloop import Trainer
from eventloop.hooks import CheckpointHook, EMAHook, PreciseBN
from tests.support.trainers import MakeTrainer, batches


def _model() -> nn.Sequential:
    """A net with a BatchNorm and a dropout."""
    torch.default_generator.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 3))


def _frozen() -> nn.Sequential:
    """The net with its BatchNorm in eval mode."""
    model = _model()
    model[1].eval()
    return model


def _by_hand(model: nn.Sequential, epochs: int = 2) -> nn.Sequential:
    """Train a net by PyTorch alone, with its BatchNorm in eval mode."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model.train()
    model[1].eval()
    for _ in range(epochs):
        for inputs, target in batches(3):
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), target).backward()
            optimizer.step()
    return model


def _equal(model: nn.Module, other: nn.Module) -> bool:
    mine, theirs = model.state_dict(), other.state_dict()
    return all(torch.equal(mine[name], theirs[name]) for name in mine)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"val_loader": batches(2), "hooks": [CheckpointHook(interval=1, save_best="accuracy")]},
        {"hooks": [EMAHook(), PreciseBN(num_iter=2)], "val_loader": batches(2), "sanity_val": 1},
    ],
    ids=["training", "validations", "EMA and PreciseBN"],
)
def test_a_frozen_batch_norm_stays_frozen(options: dict[str, Any], make_trainer: MakeTrainer) -> None:
    """It is trained as PyTorch alone would: by its running statistics, which do not change."""
    model = _frozen()

    make_trainer(model=model, **options).train()

    assert _equal(model, _by_hand(_model()))
    assert [module.training for module in model] == [True, False, True, True]


def test_a_loop_of_ones_own_keeps_the_modes(make_trainer: MakeTrainer) -> None:
    """A validation by hand between epochs, which leaves the model in eval mode, is undone by the next epoch."""
    model = _frozen()
    trainer = make_trainer(model=model)

    for _ in trainer.epochs():
        for inputs, target in trainer.batches(batches(3)):
            trainer.outputs = {"loss": F.cross_entropy(model(inputs), target)}
        model.eval()

    assert _equal(model, _by_hand(_model()))


def test_a_resumed_run_has_the_modes_of_its_program(tmp_path: Path, make_trainer: MakeTrainer) -> None:
    """A run that was stopped in its first epoch ends with the bits of an uninterrupted one."""
    hooks = [CheckpointHook(interval=1, by_epoch=False)]
    first = make_trainer(model=_frozen(), hooks=hooks, work_dir=tmp_path)
    first.bus.subscribe(lambda trainer, event: trainer.stop("here"), "after_train_iter", start=1, once=True)
    first.train()
    second = make_trainer(model=_frozen(), work_dir=tmp_path)
    second.resume("auto")

    second.train()

    assert second.iter == 6
    assert _equal(second.model, _by_hand(_model()))


def test_a_second_training_keeps_the_modes(make_trainer: MakeTrainer) -> None:
    """A stop in the middle leaves each module in its mode, and train() goes on with them."""
    trainer = make_trainer(model=_frozen())
    trainer.bus.subscribe(lambda trainer, event: trainer.stop("here"), "after_train_iter", start=1, once=True)

    trainer.train()
    trainer.train()

    assert _equal(trainer.model, _by_hand(_model()))


def _stopped(model: nn.Sequential, make_trainer: MakeTrainer) -> Trainer:
    """Train until the second iteration of the first epoch, in which a handler freezes the BatchNorm."""
    trainer = make_trainer(model=model, max_epochs=3)
    trainer.bus.subscribe(lambda trainer, event: trainer.model[1].eval(), "before_train_epoch", once=True)
    trainer.bus.subscribe(lambda trainer, event: trainer.stop("here"), "after_train_iter", start=1, once=True)
    trainer.train()
    return trainer


def _modes_of_epochs(trainer: Trainer) -> list[bool]:
    """Train on, and return whether the BatchNorm is in train mode in the first iteration of each epoch."""
    seen: dict[int, bool] = {}
    trainer.bus.subscribe(
        lambda trainer, event: seen.setdefault(event.epoch, trainer.model[1].training), "before_train_iter"
    )
    trainer.train()
    return [*seen.values()]


def test_what_a_handler_set_is_not_kept_for_the_next_run(make_trainer: MakeTrainer) -> None:
    """A handler that freezes a module in one epoch does not freeze it in all epochs after a stop in that one."""
    trainer = _stopped(_model(), make_trainer)

    assert not trainer.model[1].training  # type: ignore[index]
    assert _modes_of_epochs(trainer) == [True, True, True]


@pytest.mark.parametrize("event", ["before_run", "before_train"])
def test_what_a_handler_sets_before_the_training_counts(event: str, make_trainer: MakeTrainer) -> None:
    """A handler that freezes a module before the first epoch has done it in time, in each training anew."""
    trainer = make_trainer(model=_model())
    trainer.bus.subscribe(lambda trainer, event: trainer.model[1].eval(), event)
    trainer.bus.subscribe(lambda trainer, event: trainer.stop("here"), "after_train_iter", start=1, once=True)

    trainer.train()
    trainer.train()

    assert _equal(trainer.model, _by_hand(_model()))


@pytest.mark.parametrize("frozen", [False, True])
def test_a_whole_backbone_in_eval_mode_is_a_warning(
    frozen: bool, make_trainer: MakeTrainer, caplog: pytest.LogCaptureFixture
) -> None:
    """Trained with a dropout that does nothing, as `from_pretrained` leaves it, it is named; a frozen one is meant."""
    model = nn.Sequential(nn.Sequential(nn.Linear(2, 8), nn.Dropout(0.5)).eval(), nn.Linear(8, 3))
    model[0].requires_grad_(not frozen)
    caplog.set_level(logging.INFO)

    make_trainer(model=model).train()

    (line,) = [each for each in caplog.records if "left in eval mode while training: 0" in each.getMessage()]
    assert line.levelno == (logging.INFO if frozen else logging.WARNING)


@pytest.mark.parametrize("evaluated", [False, True], ids=["at once", "after an evaluation"])
def test_what_the_user_sets_between_two_runs_counts(evaluated: bool, make_trainer: MakeTrainer) -> None:
    """A module frozen between two calls of train() stays frozen, and one that is thawed is trained."""
    trainer = make_trainer(model=_frozen(), max_epochs=3)
    trainer.bus.subscribe(lambda trainer, event: trainer.stop("here"), "after_train_iter", start=1, once=True)
    trainer.train()
    trainer.model[1].train()  # type: ignore[index]
    trainer.model[0].eval()  # type: ignore[index]
    if evaluated:
        trainer.val_loader = batches(1)
        trainer.val()

    assert _modes_of_epochs(trainer) == [True, True, True]
    assert not trainer.model[0].training  # type: ignore[index]


def test_a_module_frozen_after_an_evaluation_in_eval_mode_stays_frozen(make_trainer: MakeTrainer) -> None:
    """What is set after `model.eval()`, `val()` and `model.train()` counts."""
    trainer = make_trainer(model=_model(), max_epochs=3, val_loader=batches(1))
    trainer.bus.subscribe(lambda trainer, event: trainer.stop("here"), "after_train_iter", start=1, once=True)
    trainer.train()
    trainer.model.eval()
    trainer.val()
    trainer.model.train()
    trainer.model[1].eval()  # type: ignore[index]

    assert _modes_of_epochs(trainer) == [False, False, False]


def test_an_evaluation_by_hand_between_two_runs_thaws_nothing(make_trainer: MakeTrainer) -> None:
    """A model in eval mode as a whole is trained on with the modules frozen that were frozen before."""
    trainer = make_trainer(model=_frozen())
    trainer.bus.subscribe(lambda trainer, event: trainer.stop("here"), "after_train_iter", start=1, once=True)
    trainer.train()
    trainer.model.eval()

    trainer.train()

    assert _equal(trainer.model, _by_hand(_model()))


def test_find_lr_keeps_the_modes(make_trainer: MakeTrainer) -> None:
    """The range test trains as the training will, with the frozen module in eval mode."""
    seen: list[bool] = []

    def step(trainer: Trainer, batch: Any) -> torch.Tensor:
        seen.append(trainer.model[1].training)  # type: ignore[index]
        return F.cross_entropy(trainer.model(batch[0]), batch[1])

    make_trainer(model=_frozen(), train_step=step).find_lr(iterations=2)

    assert seen == [False, False]


def test_an_own_train_method_is_called(make_trainer: MakeTrainer) -> None:
    """A model that freezes a layer in its own `train` is trained so, whatever was set before."""

    class NormEval(nn.Sequential):
        def train(self, mode: bool = True) -> NormEval:
            super().train(mode)
            self[1].eval()
            return self

    model = NormEval(*_model())

    make_trainer(model=model).train()

    assert _equal(model, _by_hand(_model()))


@pytest.mark.parametrize(
    ("trained", "level", "message"),
    [
        ((), logging.INFO, "Sequential was in eval mode and is trained in train mode"),
        ((3,), logging.WARNING, r"was in eval mode .*call model.train\(\), then eval\(\)"),
    ],
    ids=["as a whole", "but for its head"],
)
def test_a_model_in_eval_mode_is_trained_in_train_mode(
    trained: tuple[int, ...],
    level: int,
    message: str,
    make_trainer: MakeTrainer,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A model that from_pretrained has left in eval mode trains as a whole, and the log says so once."""
    caplog.set_level(logging.INFO, logger="eventloop")
    model = _model().eval()
    for index in trained:
        model[index].train()

    make_trainer(model=model).train()

    assert [module.training for module in model] == [True] * 4
    (line,) = [record for record in caplog.records if "eval mode" in record.getMessage()]
    assert line.levelno == level

    assert re.search(message, line.getMessage())


def test_the_log_names_what_is_left_in_eval_mode(
    make_trainer: MakeTrainer, caplog: pytest.LogCaptureFixture
) -> None:
    """One line names the outermost modules that were in eval mode before the training."""
    caplog.set_level(logging.INFO, logger="eventloop")
    model = nn.Sequential(nn.Sequential(nn.Linear(2, 8), nn.ReLU()).eval(), nn.Linear(8, 3))

    make_trainer(model=model).train()

    assert [record.getMessage() for record in caplog.records if "eval mode" in record.getMessage()] == [
        "left in eval mode while training: 0"
    ]
