"""LrUpdaterHook: mmcv's base, its warm-ups, where initial rates come from, and what it refuses."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import SGD, Adam
from torch.optim.lr_scheduler import StepLR

from eventloop import Trainer
from eventloop.hooks import (
    CheckpointHook,
    CosineAnnealingLrUpdaterHook,
    FixedLrUpdaterHook,
    Hook,
    LrUpdaterHook,
    PolyLrUpdaterHook,
    StepLrUpdaterHook,
)
from eventloop.optim.schedulers import LinearMomentum

MakeTrainer = Callable[..., Trainer]


class Rates(Hook):
    """Writes down the rate of each param group at each step."""

    def __init__(self) -> None:
        self.used: list[list[float]] = []

    def before_optimizer_step(self, trainer: Trainer, event: Any) -> None:
        """Read them."""
        optimizers = (
            trainer.optimizer.values() if isinstance(trainer.optimizer, dict) else [trainer.optimizer]
        )
        self.used.append([float(g["lr"]) for optimizer in optimizers for g in optimizer.param_groups])


class Halve(LrUpdaterHook):
    """A policy of somebody's own."""

    def get_lr(self, trainer: Trainer, base_lr: float) -> float:
        """Half of it after each epoch, or iteration."""
        return base_lr * 0.5 ** self.progress(trainer)


@pytest.fixture
def rates(make_trainer: MakeTrainer) -> Callable[..., list[float]]:
    """Train with an updater; the rate of each iteration."""

    def train(hook: Hook, **options: Any) -> list[float]:
        recorder = Rates()
        model = torch.nn.Linear(2, 1)
        optimizer = SGD(model.parameters(), lr=1.0)
        make_trainer(model=model, optimizer=optimizer, hooks=[hook, recorder], **options).train()
        return [used[0] for used in recorder.used]

    return train


def mmcv_rates(
    get_lr: Callable[[int, int], float],
    warmup: str | None,
    length: int,
    ratio: float,
    epochs: int,
    batches: int,
    *,
    by_epoch: bool,
) -> list[float]:
    """mmcv 1.7.2's before_train_epoch and before_train_iter, written out; `get_lr(epoch, iter)`."""
    used, iteration, lr = [], 0, 1.0
    for epoch in range(epochs):
        regular = get_lr(epoch, iteration)
        if by_epoch:
            lr = regular
        for _ in range(batches):
            if not by_epoch:
                regular = lr = get_lr(epoch, iteration)
            if warmup is not None and iteration == length:
                lr = regular
            if warmup is not None and iteration < length:
                k = (1 - iteration / length) * (1 - ratio)
                lr = {
                    "constant": regular * ratio,
                    "linear": regular * (1 - k),
                    "exp": regular * ratio ** (1 - iteration / length),
                }[warmup]
            used.append(lr)
            iteration += 1
    return used


@pytest.mark.representative(2)
@pytest.mark.parametrize("by_epoch", [True, False])
@pytest.mark.parametrize("warmup", [None, "constant", "linear", "exp"])
def test_warm_up_equals_mmcvs(rates: Callable[..., list[float]], warmup: str | None, by_epoch: bool) -> None:
    """Every warm-up, across an epoch's end, by epoch and by iteration, gives mmcv's rates."""
    hook = Halve(by_epoch, warmup, warmup_iters=5, warmup_ratio=0.25)

    used = rates(hook, batches=3, max_epochs=3)

    def get_lr(epoch: int, iteration: int) -> float:
        return 0.5 ** (epoch if by_epoch else iteration)

    assert used == pytest.approx(mmcv_rates(get_lr, warmup, 5, 0.25, 3, 3, by_epoch=by_epoch))


@pytest.mark.parametrize("by_epoch", [True, False])
def test_warm_up_by_epoch_lasts_whole_epochs(rates: Callable[..., list[float]], by_epoch: bool) -> None:
    """With `warmup_by_epoch` the length is so many epochs, whatever the policy goes by."""
    hook = FixedLrUpdaterHook(by_epoch, "linear", warmup_iters=2, warmup_ratio=0.5, warmup_by_epoch=True)

    used = rates(hook, batches=2, max_epochs=3)

    assert used == pytest.approx([0.5, 0.625, 0.75, 0.875, 1.0, 1.0])


def test_each_group_has_its_own_base(make_trainer: MakeTrainer) -> None:
    """`get_lr` is asked with the initial rate of each group."""
    model, recorder = torch.nn.Linear(2, 1), Rates()
    groups: list[dict[str, Any]] = [{"params": [model.weight]}, {"params": [model.bias], "lr": 0.5}]
    optimizer = SGD(groups, lr=1.0)

    make_trainer(model=model, optimizer=optimizer, hooks=[Halve(by_epoch=False), recorder], batches=2).train()

    assert recorder.used == [[1.0, 0.5], [0.5, 0.25]]


def test_several_optimizers_are_all_set(make_trainer: MakeTrainer) -> None:
    """A mapping of optimizers is scheduled like one, each from its own initial rate."""
    model, recorder = torch.nn.Linear(2, 1), Rates()
    optimizer = {"weight": SGD([model.weight], lr=1.0), "bias": Adam([model.bias], lr=0.5)}

    make_trainer(model=model, optimizer=optimizer, hooks=[Halve(by_epoch=False), recorder], batches=2).train()

    assert recorder.used == [[1.0, 0.5], [0.5, 0.25]]


def test_rate_that_is_a_tensor_stays_one(make_trainer: MakeTrainer) -> None:
    """A captured step holds the tensor: it is filled, not replaced."""
    model, rate = torch.nn.Linear(2, 1), torch.tensor(1.0)
    optimizer = Adam(model.parameters(), lr=rate)

    make_trainer(model=model, optimizer=optimizer, hooks=[Halve(by_epoch=False)], batches=3).train()

    assert optimizer.param_groups[0]["lr"] is rate
    assert rate.item() == 0.25


def test_group_added_in_the_run_is_scheduled(make_trainer: MakeTrainer) -> None:
    """Its rate when it was added is its base."""

    class Unfreeze(Hook):
        def after_train_iter(self, trainer: Trainer, event: Any) -> None:
            if event.iter == 0:
                trainer.optimizer.add_param_group({"params": [trainer.model.bias], "lr": 8.0})

    model, recorder = torch.nn.Linear(2, 1), Rates()
    optimizer = SGD([model.weight], lr=1.0)

    make_trainer(
        model=model, optimizer=optimizer, hooks=[Halve(by_epoch=False), Unfreeze(), recorder], batches=2
    ).train()

    assert recorder.used[-1] == [0.5, 4.0]


def test_rate_changed_in_an_epoch_stays_until_the_next(make_trainer: MakeTrainer) -> None:
    """By epoch and after the warm-up nothing is set inside an epoch, so another hook may."""

    class Change(Hook):
        def after_train_iter(self, trainer: Trainer, event: Any) -> None:
            trainer.optimizer.param_groups[0]["lr"] = 9.0

    model, recorder = torch.nn.Linear(2, 1), Rates()
    optimizer = SGD(model.parameters(), lr=1.0)

    make_trainer(
        model=model, optimizer=optimizer, hooks=[Halve(), recorder, Change()], batches=2, max_epochs=2
    ).train()

    assert [used[0] for used in recorder.used] == [1.0, 9.0, 0.5, 9.0]


def test_hand_written_loop_knows_its_length(
    make_trainer: MakeTrainer, make_batches: Callable[[int], list[Any]]
) -> None:
    """A trainer without a loader takes the length of the run from the loader of `batches`."""
    recorder = Rates()
    hook = PolyLrUpdaterHook(by_epoch=False)
    model = torch.nn.Linear(2, 1)
    trainer = make_trainer(
        model=model,
        optimizer=SGD(model.parameters(), lr=1.0),
        hooks=[hook, recorder],
        train_loader=None,
        max_epochs=2,
    )
    loader = make_batches(2)
    for _ in trainer.epochs():
        for inputs, target in trainer.batches(loader):
            trainer.outputs = {"loss": (model(inputs) - target).square().mean()}

    assert [used[0] for used in recorder.used] == pytest.approx([1.0, 0.75, 0.5, 0.25])


# --- resuming ------------------------------------------------------------------------------------------------


def build(make_trainer: MakeTrainer, hook: Hook, folder: Path, *, lr: float = 1.0) -> tuple[Trainer, Rates]:
    """A trainer that saves every second iteration."""
    model, recorder = torch.nn.Linear(2, 1), Rates()
    trainer = make_trainer(
        model=model,
        optimizer=SGD(model.parameters(), lr=lr),
        hooks=[hook, recorder],
        max_epochs=3,
        batches=4,
        work_dir=folder,
        default_hooks={"checkpoint": CheckpointHook(interval=2, by_epoch=False)},
    )
    return trainer, recorder


class StopAt(Hook):
    """Ends the run after an iteration."""

    def __init__(self, iteration: int) -> None:
        self._at = iteration

    def after_train_iter(self, trainer: Trainer, event: Any) -> None:
        """Stop."""
        if event.iter == self._at:
            trainer.stop("enough")


UPDATERS: dict[str, Callable[[], LrUpdaterHook]] = {
    "warm-up by epoch": lambda: StepLrUpdaterHook([1, 2], warmup="linear", warmup_iters=7, warmup_ratio=0.1),
    "cosine": lambda: CosineAnnealingLrUpdaterHook(min_lr=0.01, by_epoch=False, warmup="exp", warmup_iters=3),
}


@pytest.mark.representative(1)
@pytest.mark.parametrize("name", UPDATERS)
@pytest.mark.parametrize("stop_at", [1, 5, 7])
def test_resumed_run_has_the_rates_of_the_uninterrupted_one(
    make_trainer: MakeTrainer, tmp_path: Path, name: str, stop_at: int
) -> None:
    """In the warm-up, in mid-epoch and between epochs: the rest of the rates is the same."""
    whole, expected = build(make_trainer, UPDATERS[name](), tmp_path / "whole")
    whole.train()
    first, begun = build(make_trainer, UPDATERS[name](), tmp_path / "parts")
    first.bus.subscribe(StopAt(stop_at).after_train_iter, "after_train_iter", priority="LOWEST")
    first.train()

    second, rest = build(make_trainer, UPDATERS[name](), tmp_path / "parts")
    second.resume()
    second.train()

    assert (begun.used + rest.used) == expected.used


def test_resuming_says_that_the_checkpoints_initial_rate_is_used(
    make_trainer: MakeTrainer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """An optimizer built with another rate goes on from the checkpoint's, and that is logged."""
    first, _ = build(make_trainer, Halve(), tmp_path / "run")
    first.bus.subscribe(StopAt(5).after_train_iter, "after_train_iter", priority="LOWEST")
    first.train()
    second, rest = build(make_trainer, Halve(), tmp_path / "run", lr=16.0)
    second.resume(changed="keep")

    with caplog.at_level(logging.WARNING, "eventloop"):
        second.train()

    assert rest.used[0] == [0.5]
    (said,) = [message for message in caplog.messages if "lr" in message]
    assert (
        "lr: 1.0 in the checkpoint, 16.0 in this trainer; the run continues with 1.0 as the base: Halve"
        in said
    )


def test_checkpoint_without_schedule_does_not_make_its_last_rate_the_base(
    make_trainer: MakeTrainer, tmp_path: Path
) -> None:
    """A run that had no schedule saved no initial rate: the base is what the optimizer was built with."""
    plain, _ = build(make_trainer, Rates(), tmp_path / "run")
    plain.optimizer.param_groups[0]["lr"] = 0.125
    plain.bus.subscribe(StopAt(3).after_train_iter, "after_train_iter", priority="LOWEST")
    plain.train()
    second, rest = build(make_trainer, Halve(), tmp_path / "run")
    second.resume(changed="keep")

    second.train()

    assert rest.used[0] == [0.5]


# --- what is refused -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (
            {"warmup": "linea", "warmup_iters": 1},
            ValueError,
            "warmup must be 'constant' or 'linear' or 'exp', got 'linea': did you mean 'linear'",
        ),
        ({"warmup": "exp"}, ValueError, "warmup_iters must be at least 1, got 0"),
        ({"warmup": "exp", "warmup_iters": -3}, ValueError, "warmup_iters must be at least 1, got -3"),
        ({"warmup": "exp", "warmup_iters": 2.5}, TypeError, "warmup_iters must be an int, got 2.5"),
        (
            {"warmup": "exp", "warmup_iters": 2, "warmup_ratio": 0},
            ValueError,
            "warmup_ratio must be above 0 and at most 1, got 0",
        ),
        (
            {"warmup": "exp", "warmup_iters": 2, "warmup_ratio": 1.5},
            ValueError,
            "warmup_ratio must be above 0 and at most 1",
        ),
        (
            {"warmup": "exp", "warmup_iters": 2, "warmup_ratio": "a"},
            TypeError,
            "warmup_ratio must be a number, got 'a'",
        ),
        ({"by_epoch": "no"}, TypeError, r"by_epoch must be True or False, got 'no'"),
    ],
)
def test_bad_arguments_are_refused(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    """The constructor says what was expected and what came."""
    with pytest.raises(error, match=message):
        Halve(**arguments)


def test_base_class_is_no_policy() -> None:
    """A class without `get_lr` cannot be built."""
    with pytest.raises(TypeError, match=r"LrUpdaterHook has no get_lr\(trainer, base_lr\): define it"):
        LrUpdaterHook()


def test_epochs_in_a_run_of_iterations_are_refused(make_trainer: MakeTrainer) -> None:
    """mmcv would never leave the first rate."""
    with pytest.raises(ValueError, match="Halve counts epochs, and a run measured in iterations has none"):
        make_trainer(hooks=[Halve()], max_iters=4)


def test_trainer_without_an_optimizer_is_refused(make_trainer: MakeTrainer) -> None:
    """There is nothing to set."""
    with pytest.raises(ValueError, match="Halve has no optimizer to set lr of: pass optimizer"):
        make_trainer(hooks=[Halve()], optimizer=None)


def test_two_updaters_of_one_value_are_refused(make_trainer: MakeTrainer) -> None:
    """The later one alone would count."""
    first, second = Halve(), Halve()
    second.name = "second"

    with pytest.raises(ValueError, match="Halve and Halve both set lr each time"):
        make_trainer(hooks=[first, second])


def test_second_schedule_of_the_rate_is_refused(make_trainer: MakeTrainer) -> None:
    """Whichever came last would win."""
    model = torch.nn.Linear(2, 1)
    optimizer = SGD(model.parameters(), lr=1.0)

    with pytest.raises(ValueError, match="Halve sets lr each time, so StepLR in schedulers"):
        make_trainer(model=model, optimizer=optimizer, schedulers=[StepLR(optimizer, 1)], hooks=[Halve()])


def test_schedule_of_the_momentum_is_another_matter(make_trainer: MakeTrainer) -> None:
    """A window on the momentum goes with an updater of the rate."""
    model = torch.nn.Linear(2, 1)
    optimizer = SGD(model.parameters(), lr=1.0, momentum=0.5)
    momentum = LinearMomentum(optimizer, 0.5, end=3, by_epoch=False)

    trainer = make_trainer(model=model, optimizer=optimizer, schedulers=[momentum], hooks=[Halve()])
    trainer.train()

    assert optimizer.param_groups[0]["momentum"] == 0.5


class Endless:
    """A loader without a length."""

    def __iter__(self) -> Iterator[Any]:
        while True:
            yield torch.zeros(1, 2), torch.zeros(1, 1)


@pytest.mark.parametrize(
    ("hook", "message"),
    [
        (
            PolyLrUpdaterHook(by_epoch=False),
            "PolyLrUpdaterHook with by_epoch=False .* max_iters .* limit_batches",
        ),
        (
            Halve(warmup="exp", warmup_iters=1, warmup_by_epoch=True),
            "Halve with warmup_by_epoch=True .* warmup_iters .* limit_batches",
        ),
    ],
    ids=["length of the run", "length of an epoch"],
)
def test_length_nobody_knows_is_refused(make_trainer: MakeTrainer, hook: Hook, message: str) -> None:
    """The trainer is not built, and the error says what to change; each of these changes helps."""
    with pytest.raises(ValueError, match=message):
        make_trainer(hooks=[hook], train_loader=Endless(), max_epochs=2)

    make_trainer(hooks=[hook], train_loader=Endless(), max_epochs=2, limit_batches=3)


def test_advice_on_an_unknown_length_fits_the_setting(make_trainer: MakeTrainer) -> None:
    """`max_iters` gives a policy the length of the run, and a warm-up in epochs no length of an epoch."""
    in_epochs = Halve(by_epoch=False, warmup="exp", warmup_iters=1, warmup_by_epoch=True)
    in_iterations = Halve(by_epoch=False, warmup="exp", warmup_iters=1)

    with pytest.raises(ValueError, match="warmup_by_epoch=True needs") as refused:
        make_trainer(hooks=[in_epochs], train_loader=Endless(), max_iters=2)
    assert "max_iters" not in str(refused.value)
    make_trainer(hooks=[in_iterations], train_loader=Endless(), max_iters=2)
    make_trainer(hooks=[PolyLrUpdaterHook(by_epoch=False)], train_loader=Endless(), max_iters=2)
