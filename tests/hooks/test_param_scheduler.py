"""ParamSchedulerHook: PyTorch's schedulers, by iteration, by epoch, or by a metric."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import SGD
from torch.optim import lr_scheduler as torch_lr
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, MultiStepLR, ReduceLROnPlateau, StepLR

from eventloop import Trainer
from eventloop.hooks import Hook, ParamSchedulerHook
from tests.support.skipping import SkipSecond

Schedule = Callable[[SGD], Any]
Train = Callable[..., tuple[Trainer, list[float]]]

SCHEDULES: dict[str, Schedule] = {
    "step": lambda opt: StepLR(opt, 7, gamma=0.5),
    "multi step": lambda opt: MultiStepLR(opt, [2, 9]),
    "cosine": lambda opt: CosineAnnealingLR(opt, T_max=12),
    "warm-up": lambda opt: LinearLR(opt, 0.25, total_iters=8),
    "one cycle": lambda opt: torch_lr.OneCycleLR(opt, 2.0, total_steps=13),
    "sequential": lambda opt: torch_lr.SequentialLR(
        opt, [LinearLR(opt, 0.25, total_iters=4), CosineAnnealingLR(opt, T_max=8)], [4]
    ),
}


class Rates(Hook):
    """Writes down the rate of each step."""

    def __init__(self) -> None:
        self.used: list[float] = []

    def before_optimizer_step(self, trainer: Trainer, event: Any) -> None:
        """Read it."""
        assert trainer.optimizer is not None
        self.used.append(trainer.optimizer.param_groups[0]["lr"])


@pytest.fixture
def train(make_trainer: Callable[..., Trainer]) -> Train:
    """Train with schedulers made from the optimizer; return the trainer and the rate of each iteration."""

    def train(
        *schedules: Schedule, hooks: tuple[Hook, ...] = (), **options: Any
    ) -> tuple[Trainer, list[float]]:
        model = torch.nn.Linear(2, 1)
        optimizer = SGD(model.parameters(), lr=1.0)
        made = [schedule(optimizer) for schedule in schedules]
        rates = Rates()
        trainer = make_trainer(
            model=model, optimizer=optimizer, schedulers=made, hooks=[rates, *hooks], **options
        )
        trainer.train()
        return trainer, rates.used

    return train


def by_hand(schedule: Schedule, epochs: int, batches: int, *, by_epoch: bool) -> list[float]:
    """The rates of a plain PyTorch loop."""
    optimizer = SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = schedule(optimizer)
    used = []
    for _ in range(epochs):
        for _ in range(batches):
            used.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            if not by_epoch:
                scheduler.step()
        if by_epoch:
            scheduler.step()
    return used


@pytest.mark.representative(2)
@pytest.mark.filterwarnings("ignore:The epoch parameter:UserWarning")
@pytest.mark.parametrize("name", SCHEDULES)
def test_by_iteration_equals_a_hand_written_loop(train: Train, name: str) -> None:
    """Stepped after each iteration, across epochs, every scheduler gives the loop's sequence of rates."""
    _, used = train(SCHEDULES[name], batches=4, max_epochs=3)

    assert used == by_hand(SCHEDULES[name], 3, 4, by_epoch=False)


@pytest.mark.representative(2)
@pytest.mark.parametrize("how", ["hook option", "attribute"])
@pytest.mark.parametrize("name", ["step", "multi step", "cosine"])
def test_by_epoch_equals_a_hand_written_loop(train: Train, name: str, how: str) -> None:
    """The hook's option, or `scheduler.by_epoch = True`, steps after each epoch."""

    def schedule(optimizer: SGD) -> Any:
        scheduler = SCHEDULES[name](optimizer)
        if how == "attribute":
            scheduler.by_epoch = True
        return scheduler

    hooks = (ParamSchedulerHook(by_epoch=True),) if how == "hook option" else ()
    _, used = train(schedule, hooks=hooks, batches=2, max_epochs=10)

    assert used == by_hand(SCHEDULES[name], 10, 2, by_epoch=True)


def test_attribute_outranks_the_hooks_option(train: Train) -> None:
    """A scheduler that says `by_epoch = False` counts iterations under a hook that counts epochs."""

    def schedule(optimizer: SGD) -> Any:
        scheduler = StepLR(optimizer, 1, gamma=0.5)
        scheduler.by_epoch = False  # type: ignore[attr-defined]
        return scheduler

    _, used = train(schedule, hooks=(ParamSchedulerHook(by_epoch=True),), batches=2, max_epochs=2)

    assert used == [1.0, 0.5, 0.25, 0.125]


def test_both_kinds_side_by_side(train: Train) -> None:
    """A warm-up by iteration and a decay by epoch multiply, as chained schedulers do."""

    def decay(optimizer: SGD) -> Any:
        scheduler = StepLR(optimizer, 1, gamma=0.5)
        scheduler.by_epoch = True  # type: ignore[attr-defined]
        return scheduler

    _, used = train(lambda o: LinearLR(o, 0.5, total_iters=2), decay, batches=2, max_epochs=2)

    assert used == pytest.approx([0.5, 0.75, 0.5, 0.5])


def test_single_scheduler_needs_no_list(make_trainer: Callable[..., Trainer]) -> None:
    """`schedulers=scheduler` is a list of one."""
    model = torch.nn.Linear(2, 1)
    optimizer = SGD(model.parameters(), lr=1.0)
    trainer = make_trainer(model=model, optimizer=optimizer, schedulers=StepLR(optimizer, 2, gamma=0.5))

    trainer.train()

    assert optimizer.param_groups[0]["lr"] == 0.25


def plateau(optimizer: SGD) -> ReduceLROnPlateau:
    """Halve the rate when a metric has not become better."""
    return ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.0)


def test_plateau_is_stepped_with_the_monitored_metric(
    train: Train, scripted: Callable[..., dict[str, Any]]
) -> None:
    """After each validation, with the metric named; the rate of the next epoch follows."""
    losses = [{"val_loss": value, "loss": 0.0} for value in (1.0, 2.0, 0.5, 0.75)]

    hook = ParamSchedulerHook(monitor="val_loss")
    trainer, used = train(plateau, hooks=(hook,), batches=1, max_epochs=4, **scripted(*losses))

    assert used == [1.0, 1.0, 0.5, 0.5]
    assert trainer.schedulers[0].get_last_lr() == [0.25]


def test_plateau_watches_the_loss_by_default(train: Train, scripted: Callable[..., dict[str, Any]]) -> None:
    """Without `monitor` the metric is `loss`."""
    losses = [{"loss": 1.0}, {"loss": 2.0}, {"loss": 3.0}]

    _, used = train(plateau, batches=1, max_epochs=3, **scripted(*losses))

    assert used == [1.0, 1.0, 0.5]


def test_plateau_without_its_metric_is_an_error(
    train: Train, scripted: Callable[..., dict[str, Any]]
) -> None:
    """The first validation that lacks it says which metrics there are."""
    hook = ParamSchedulerHook(monitor="val_los")

    with pytest.raises(
        ValueError, match=r"watches 'val_los', which the validation does not report: did you mean"
    ):
        train(plateau, hooks=(hook,), **scripted({"val_loss": 1.0}))


def test_plateau_without_a_validation_is_an_error(make_trainer: Callable[..., Trainer]) -> None:
    """It would never be stepped, so the trainer is not built."""
    optimizer = SGD(torch.nn.Linear(2, 1).parameters(), lr=1.0)

    with pytest.raises(
        ValueError, match="ReduceLROnPlateau needs a validation: give the Trainer a val_loader"
    ):
        make_trainer(schedulers=[plateau(optimizer)])


def test_epoch_schedule_in_a_run_of_iterations_is_an_error(make_trainer: Callable[..., Trainer]) -> None:
    """The units contradict each other: it would be stepped once, at the end."""
    optimizer = SGD(torch.nn.Linear(2, 1).parameters(), lr=1.0)
    hook = ParamSchedulerHook(by_epoch=True)

    with pytest.raises(ValueError, match="StepLR counts epochs, and a run measured in iterations has none"):
        make_trainer(schedulers=[StepLR(optimizer, 3)], hooks=[hook], max_iters=9)


def test_what_is_no_scheduler_is_refused(make_trainer: Callable[..., Trainer]) -> None:
    """The error comes when the trainer is built, with the value."""
    with pytest.raises(TypeError, match=r"must be PyTorch schedulers with a step\(\), got 'cosine'"):
        make_trainer(schedulers=["cosine"])


def test_cut_epoch_does_not_count(train: Train) -> None:
    """An epoch that a stop cut short steps no scheduler by epoch."""

    class Stop(Hook):
        def after_train_iter(self, trainer: Trainer, event: Any) -> None:
            if event.iter == 5:
                trainer.stop("enough")

    hooks = (Stop(), ParamSchedulerHook(by_epoch=True))
    trainer, _ = train(lambda o: StepLR(o, 1, gamma=0.5), hooks=hooks, batches=4, max_epochs=3)

    assert trainer.schedulers[0].get_last_lr() == [0.5]  # after epoch 0, not after half of epoch 1


def test_cut_validation_does_not_count(train: Train, scripted: Callable[..., dict[str, Any]]) -> None:
    """A validation that a stop cut short has no metric to step with."""

    class Stop(Hook):
        def before_val_iter(self, trainer: Trainer, event: Any) -> None:
            trainer.stop("enough")

    options = scripted({"loss": 1.0}, {"loss": 1.0})
    options["val_loader"] *= 2
    trainer, _ = train(plateau, hooks=(Stop(),), **options)

    assert trainer.schedulers[0].last_epoch == 0


def test_validation_between_two_trainings_does_not_count(
    make_trainer: Callable[..., Trainer], scripted: Callable[..., dict[str, Any]]
) -> None:
    """Looking at a model that was stopped does not lower the rate it goes on with."""
    model = torch.nn.Linear(2, 1)
    optimizer = SGD(model.parameters(), lr=1.0)
    rates = Rates()
    options = scripted(*[{"loss": value} for value in (1.0, 0.75, 2.0, 2.0, 0.5)])
    trainer = make_trainer(
        model=model,
        optimizer=optimizer,
        schedulers=[plateau(optimizer)],
        hooks=[rates],
        batches=1,
        max_epochs=3,
        **options,
    )
    trainer.bus.subscribe(
        lambda trainer, event: trainer.stop("enough"), "after_val_epoch", start=1, once=True
    )

    trainer.train()
    trainer.val()
    trainer.val()
    trainer.train()

    assert rates.used == [1.0] * 3


def test_skipped_optimizer_step_does_not_count(train: Train) -> None:
    """After `optimizer_step_skipped` schedulers by iteration stay where they are, for that iteration."""

    _, used = train(lambda o: StepLR(o, 1, gamma=0.5), hooks=(SkipSecond(),), batches=4)

    assert used == [1.0, 0.5, 0.25]


def test_no_schedulers_is_fine(train: Train) -> None:
    """A run without schedulers keeps its rate."""
    assert train()[1] == [1.0] * 4


def test_a_scheduler_of_another_optimizer_is_warned_of(make_trainer: Callable[..., Trainer]) -> None:
    """It would be stepped, and change nothing that is trained."""
    other = StepLR(SGD(torch.nn.Linear(2, 1).parameters(), lr=1.0), 1)
    with pytest.warns(
        UserWarning, match="StepLR is of another optimizer than the trainer's, .* optimizer=..."
    ):
        make_trainer(schedulers=[other])


def test_a_scheduler_of_one_of_several_optimizers(make_trainer: Callable[..., Trainer]) -> None:
    """Each of a mapping is the trainer's own, and a trainer that has none knows nothing of others."""
    model = torch.nn.Linear(2, 1)
    several = {"weight": SGD([model.weight], lr=1.0), "bias": SGD([model.bias], lr=1.0)}
    scheduler = StepLR(several["bias"], 1)

    assert make_trainer(model=model, optimizer=several, schedulers=[scheduler]).schedulers == [scheduler]
    assert make_trainer(model=model, optimizer=None, schedulers=[scheduler]).schedulers == [scheduler]
