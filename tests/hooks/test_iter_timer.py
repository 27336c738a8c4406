"""IterTimerHook: where the time of an iteration went."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.nn import functional as F

from eventloop.events import ScalarsLogged
from eventloop.hooks import Hook, on
from eventloop.training.loops import SkipIteration
from eventloop.training.trainer import Trainer

if TYPE_CHECKING:
    from tests.hooks.conftest import Clock

DATA, FORWARD, BACKWARD, HOOK, VAL = 0.5, 0.25, 0.125, 2.0, 64.0


class SlowLoader:
    """A loader whose every batch takes a while."""

    def __init__(self, clock: Clock, batches: list[Any]) -> None:
        self.clock = clock
        self.batches = batches

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Any]:
        for batch in self.batches:
            self.clock.advance(DATA)
            yield batch


class SlowHook(Hook):
    """A hook after the timer, as slow as a checkpoint."""

    priority = "VERY_LOW"

    def __init__(self, clock: Clock) -> None:
        self.clock = clock

    def after_train_iter(self, trainer: Trainer, event: Any) -> None:
        """Take long."""
        self.clock.advance(HOOK)


def timed(clock: Clock, batches: list[Any], **options: Any) -> dict[str, Any]:
    """Trainer options for a run in which everything takes time on the clock."""

    def step(trainer: Trainer, batch: Any) -> torch.Tensor:
        clock.advance(FORWARD)
        loss = F.mse_loss(trainer.model(batch[0]), batch[1])
        loss.register_hook(lambda gradient: clock.advance(BACKWARD))
        return loss

    def val_step(trainer: Trainer, batch: Any) -> dict[str, float]:
        clock.advance(VAL)
        return {"acc": 0.5}

    return {
        "train_loader": SlowLoader(clock, batches), "train_step": step, "hooks": [SlowHook(clock)],
        "val_step": val_step, **options,
    }  # fmt: skip


def put(trainer: Trainer, name: str) -> list[float]:
    """The values of a metric, iteration by iteration."""
    return [value for value, _ in trainer.metrics.history(name).values()]


@pytest.fixture
def run(
    clock: Clock, make_trainer: Callable[..., Trainer], make_batches: Callable[[int], list[Any]]
) -> Callable[..., Trainer]:
    """Train on the clock, three batches an epoch, and return the trainer."""

    def train(**options: Any) -> Trainer:
        trainer = make_trainer(**timed(clock, make_batches(3), **options))
        trainer.train()
        return trainer

    return train


def test_slow_loader_is_data_time(run: Callable[..., Trainer]) -> None:
    """The wait for a batch is booked on the iteration that uses it, and on nothing else."""
    assert put(run(), "data_time") == [DATA] * 3


def test_forward_backward_and_step_are_step_time(run: Callable[..., Trainer]) -> None:
    """The train step and what the optimizer hook does make `step_time`."""
    assert put(run(), "step_time") == [FORWARD + BACKWARD] * 3


def test_slow_later_hook_is_hook_time(run: Callable[..., Trainer]) -> None:
    """A hook after the timer is booked as hooks' time, not as data time of the next iteration."""
    trainer = run()

    assert put(trainer, "hook_time") == [0.0, HOOK, HOOK]
    assert put(trainer, "data_time") == [DATA] * 3


def test_parts_add_up_exactly(run: Callable[..., Trainer]) -> None:
    """time == data_time + step_time + hook_time in every iteration."""
    trainer = run()

    parts = zip(*(put(trainer, f"{part}_time") for part in ("data", "step", "hook")), strict=True)
    assert put(trainer, "time") == [sum(of_one) for of_one in parts]
    assert put(trainer, "time") == [0.875, 2.875, 2.875]


def test_parts_add_up_on_the_real_clock(make_trainer: Callable[..., Trainer]) -> None:
    """Measured, too, they add up, and none is negative."""
    trainer = make_trainer(batches=20)

    trainer.train()

    data, step, hook = (put(trainer, f"{part}_time") for part in ("data", "step", "hook"))
    assert put(trainer, "time") == pytest.approx([sum(parts) for parts in zip(data, step, hook, strict=True)])
    assert min(*data, *step, *hook) >= 0.0


@pytest.mark.parametrize(
    "unit", [{"max_epochs": 2}, {"max_iters": 6, "val_interval": 1}], ids=["epochs", "iters"]
)
def test_validation_in_between_belongs_to_none(run: Callable[..., Trainer], unit: dict[str, int]) -> None:
    """Neither time nor any part of it contains the validation after an epoch or iteration."""
    trainer = run(val_loader=[torch.zeros(1)], **unit)

    for name in ("time", "data_time", "step_time", "hook_time"):
        assert max(put(trainer, name)) < VAL


def test_validation_does_not_hide_the_hooks_before_it(run: Callable[..., Trainer]) -> None:
    """With a validation after each iteration, the slow hook is still booked in full."""
    trainer = run(val_loader=[torch.zeros(1)], max_iters=3, val_interval=1)

    assert put(trainer, "hook_time") == [0.0, HOOK, HOOK]


def test_hooks_of_the_validation_belong_to_it(
    clock: Clock, make_trainer: Callable[..., Trainer], make_batches: Callable[[int], list[Any]]
) -> None:
    """Slow handlers of before_val and after_val, at any priority, are no part of a train iteration."""

    class AroundVal(Hook):
        @on(priority="VERY_HIGH")
        def before_val(self, trainer: Trainer, event: Any) -> None:
            clock.advance(VAL)

        @on(priority="VERY_LOW")
        def after_val(self, trainer: Trainer, event: Any) -> None:
            clock.advance(VAL)

    options = timed(clock, make_batches(3), val_loader=[torch.zeros(1)], max_iters=3, val_interval=1)
    trainer = make_trainer(**{**options, "hooks": [AroundVal()]})
    trainer.train()

    assert put(trainer, "hook_time") == [0.0] * 3


@pytest.mark.parametrize("priority", ["HIGHEST", "VERY_LOW"])
def test_validation_inside_a_hook_belongs_to_none(
    clock: Clock,
    make_trainer: Callable[..., Trainer],
    make_batches: Callable[[int], list[Any]],
    priority: str,
) -> None:
    """A hook that calls `trainer.val()`, before or after the timer, adds nothing to an iteration."""

    class Validate(Hook):
        def after_train_iter(self, trainer: Trainer, event: Any) -> None:
            trainer.val()

    Validate.priority = priority
    options = timed(clock, make_batches(3), val_loader=[torch.zeros(1)], val_interval=9)
    trainer = make_trainer(**{**options, "hooks": [Validate()]})
    trainer.train()

    assert put(trainer, "time") == [DATA + FORWARD + BACKWARD] * 3
    assert put(trainer, "hook_time") == [0.0] * 3


def test_validation_inside_a_hand_written_loop_belongs_to_none(
    clock: Clock, make_trainer: Callable[..., Trainer], make_batches: Callable[[int], list[Any]]
) -> None:
    """`trainer.val()` in the body of the loop is no part of the step, and no part becomes negative."""
    options = timed(clock, make_batches(3), val_loader=[torch.zeros(1)], val_interval=9)
    trainer = make_trainer(**{**options, "hooks": []})

    for _ in trainer.epochs():
        for batch in trainer.batches(options["train_loader"]):
            trainer.outputs = trainer.train_step(batch)
            trainer.val()

    assert put(trainer, "step_time") == [FORWARD + BACKWARD] * 3
    assert put(trainer, "hook_time") == [0.0] * 3


def test_fetching_skipped_batches_is_data_time(
    clock: Clock, make_trainer: Callable[..., Trainer], make_batches: Callable[[int], list[Any]]
) -> None:
    """The wait for a batch that `SkipIteration` drops is data time of the next one that is trained on."""

    class SkipFirst(Hook):
        def before_train_iter(self, trainer: Trainer, event: Any) -> None:
            if event.batch_idx == 0:
                raise SkipIteration

    options = timed(clock, make_batches(3))
    trainer = make_trainer(**{**options, "hooks": [SkipFirst()]})
    trainer.train()

    assert put(trainer, "data_time") == [2 * DATA, DATA]
    assert put(trainer, "hook_time") == [0.0, 0.0]


def test_first_iteration_of_an_epoch_starts_with_it(run: Callable[..., Trainer]) -> None:
    """What happens between two epochs is booked on no iteration."""
    trainer = run(max_epochs=2)

    assert put(trainer, "hook_time") == [0.0, HOOK, HOOK] * 2


def test_times_are_logged_as_means_of_the_interval(
    run: Callable[..., Trainer],
    clock: Clock,
    make_trainer: Callable[..., Trainer],
    make_batches: Callable[[int], list[Any]],
    record_scalars: Callable[[Trainer], list[ScalarsLogged]],
) -> None:
    """Writers are given the mean over the logging interval."""
    trainer = make_trainer(**timed(clock, make_batches(4)))
    seen = record_scalars(trainer)

    trainer.train()

    assert [event.scalars["time"] for event in seen] == [0.875 + HOOK * 3 / 4]


@pytest.mark.parametrize("where", ["after_backward", "after_train_iter", "before_train_iter"])
def test_test_inside_a_hook_belongs_to_none(
    clock: Clock, make_trainer: Callable[..., Trainer], make_batches: Callable[[int], list[Any]], where: str
) -> None:
    """A test pass, too, is left out, at whatever point of an iteration a hook asks for it."""
    ask = type("Ask", (Hook,), {where: lambda self, trainer, event: trainer.test()})
    options = timed(clock, make_batches(3), test_loader=[torch.zeros(1)])
    trainer = make_trainer(**{**options, "hooks": [ask()]})

    trainer.train()

    assert put(trainer, "time") == [DATA + FORWARD + BACKWARD] * 3
    assert put(trainer, "hook_time") == [0.0] * 3
    assert trainer.clock.phases.wall == 3 * (DATA + FORWARD + BACKWARD)
