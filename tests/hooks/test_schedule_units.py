"""A schedule whose length counts another unit than it is stepped in is logged, once, with the cure."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch.optim import SGD
from torch.optim import lr_scheduler as torch_lr

from eventloop import Trainer
from eventloop.hooks import ParamSchedulerHook
from eventloop.optim.schedulers import ExponentialLR

# SequentialLR of older releases of torch steps its parts in the way that torch itself warns of
pytestmark = pytest.mark.filterwarnings("ignore:The epoch parameter in:UserWarning")

EPOCHS = 4
MakeTrainer = Callable[..., Trainer]
Build = Callable[..., Trainer]
Schedule = Callable[[SGD], Any]


class Unsized:
    """A loader without a length, of some batches."""

    def __init__(self, batches: int) -> None:
        self.batches = [(torch.zeros(1, 2), torch.zeros(1, 1))] * batches

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)


class Own(torch_lr.LRScheduler):
    """Has state under PyTorch's names that means something else."""

    def __init__(self, optimizer: SGD) -> None:
        self.milestones, self._schedulers, self.step_size, self.gamma = ["a"], [object()], "b", 0.1
        super().__init__(optimizer)

    def get_lr(self) -> list[Any]:
        return self.base_lrs


@pytest.fixture
def build(make_trainer: MakeTrainer) -> Build:
    """Build a trainer of 4 epochs with a scheduler, or with its config."""

    def build(schedule: Schedule, by_epoch: bool = False, **options: Any) -> Trainer:
        model = torch.nn.Linear(2, 1)
        optimizer = SGD(model.parameters(), lr=1.0, momentum=0.9)
        options = {"max_epochs": EPOCHS} | options if "max_iters" not in options else options
        return make_trainer(
            model=model,
            optimizer=optimizer,
            schedulers=[schedule(optimizer)],
            hooks=[ParamSchedulerHook(by_epoch=by_epoch)],
            **options,
        )

    return build


def of_length(steps: int) -> dict[str, tuple[Schedule, str]]:
    """Schedules that take a number of steps, with the argument that says so."""

    def sequence(optimizer: SGD, last: int) -> Any:
        warm_up = torch_lr.LinearLR(optimizer, 0.1, total_iters=1)
        return torch_lr.SequentialLR(optimizer, [warm_up, torch_lr.CosineAnnealingLR(optimizer, last)], [1])

    def linear(step: int, *, num_warmup_steps: int, num_training_steps: int) -> float:
        return max(0.0, 1 - step / num_training_steps)

    partly = partial(linear, num_warmup_steps=1, num_training_steps=steps)
    return {
        "cosine": (lambda o: torch_lr.CosineAnnealingLR(o, steps), f"T_max={steps}"),
        "lambda": (lambda o: torch_lr.LambdaLR(o, partly), f"num_training_steps={steps}"),
        "poly": (lambda o: torch_lr.PolynomialLR(o, steps), f"total_iters={steps}"),
        "linear": (lambda o: torch_lr.LinearLR(o, 1.0, 0.1, steps), f"total_iters={steps}"),
        "one cycle": (lambda o: torch_lr.OneCycleLR(o, 0.5, steps), f"total_steps={steps}"),
        "restarts": (lambda o: torch_lr.CosineAnnealingWarmRestarts(o, steps), f"T_0={steps}"),
        "sequence": (lambda o: sequence(o, steps), f"T_max={steps}"),
        "chain": (
            lambda o: torch_lr.ChainedScheduler([torch_lr.LinearLR(o), torch_lr.CosineAnnealingLR(o, steps)]),
            f"T_max={steps}",
        ),
    }


@pytest.mark.parametrize(("name", "batches"), [*((name, 2) for name in of_length(EPOCHS)), ("cosine", 300)])
def test_as_long_as_the_epochs_and_stepped_by_iteration(
    build: Build, caplog: pytest.LogCaptureFixture, name: str, batches: int
) -> None:
    """The trainer's construction logs it, at any number of batches: the length, the unit and the cure."""
    schedule, argument = of_length(EPOCHS)[name]

    build(schedule, batches=batches)

    (said,) = caplog.messages
    assert (
        f"is stepped after each iteration, and its {argument} looks like a number of epochs, of max_epochs=4"
        in said
    )
    assert "ParamSchedulerHook(by_epoch=True)" in said
    assert said.endswith(f"the length in iterations, {EPOCHS * batches}")


@pytest.mark.parametrize("name", of_length(12))
def test_as_long_as_the_iterations_and_stepped_by_epoch(
    build: Build, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    """The trainer's construction logs the reverse, too."""
    schedule, argument = of_length(12)[name]

    build(schedule, by_epoch=True, batches=3)

    (said,) = caplog.messages
    assert f"is stepped after each epoch, and its {argument} is the number of iterations of a run of" in said
    assert "by_epoch=False" in said


@pytest.mark.parametrize(
    ("schedule", "pattern"),
    [
        (
            lambda o: torch_lr.StepLR(o, 1, 0.7),
            r"StepLR .* step_size=1, gamma=0.7 multiplies the rate by 2.6e-19",
        ),
        (lambda o: torch_lr.ExponentialLR(o, 0.5), r"ExponentialLR .* gamma=0.5 .* by 6.2e-02 in 4 epochs"),
        (
            lambda o: ExponentialLR(o, gamma=0.5, by_epoch=False),
            r"ExponentialLR .* gamma=0.5 .* step it by epoch with",
        ),
        (
            lambda o: torch_lr.MultiStepLR(o, [2, 3]),
            r"MultiStepLR .* last milestone, 3, .* tenth of 120 iter",
        ),
    ],
    ids=["step", "exponential", "window", "milestones"],
)
def test_lowered_by_iteration_as_if_by_epoch(
    build: Build, caplog: pytest.LogCaptureFixture, schedule: Schedule, pattern: str
) -> None:
    """The trainer's construction logs a rate that is gone long before the end, with the cure."""
    build(schedule, batches=30)

    (message,) = caplog.messages
    assert re.search(f"{pattern}.*by_epoch=True", message)


def test_it_is_logged_once(build: Build, caplog: pytest.LogCaptureFixture) -> None:
    """Training, and training on, adds nothing."""
    trainer = build(of_length(EPOCHS)["cosine"][0], batches=2)
    trainer.bus.subscribe(lambda trainer, event: trainer.stop("enough"), "after_train_iter", once=True)

    trainer.train()
    trainer.train()

    assert sum("stepped after each" in message for message in caplog.messages) == 1


@pytest.mark.parametrize(
    ("by_epoch", "steps", "pattern"),
    [
        (
            False,
            EPOCHS,
            "CosineAnnealingLR is stepped after each iteration, and its T_max=4 .* with by_epoch=True",
        ),
        (
            True,
            12,
            "CosineAnnealingLR is stepped after each epoch, and its T_max=12 .* give it by_epoch=False",
        ),
    ],
)
def test_a_window_is_named_with_its_own_argument(
    build: Build, caplog: pytest.LogCaptureFixture, by_epoch: bool, steps: int, pattern: str
) -> None:
    """MMEngine's schedules say their unit themselves."""
    build(lambda o: {"type": "CosineAnnealingLR", "T_max": steps, "by_epoch": by_epoch}, batches=3)

    assert re.search(pattern, caplog.text)


@pytest.mark.parametrize(("batches", "logged"), [(1, 0), (2, 1), (5, 1)])
@pytest.mark.parametrize("own_loop", [False, True], ids=["train", "own loop"])
def test_of_a_loader_without_a_length(
    build: Build, caplog: pytest.LogCaptureFixture, batches: int, logged: int, own_loop: bool
) -> None:
    """The second batch of an epoch shows that iterations are not epochs; of one batch each they are."""
    schedule = of_length(EPOCHS)["cosine"][0]
    trainer = build(schedule, train_loader=None if own_loop else Unsized(batches))

    if own_loop:
        for _ in trainer.epochs():
            for inputs, target in trainer.batches(Unsized(batches)):
                trainer.outputs = {"loss": (trainer.model(inputs) - target).square().mean()}
    else:
        trainer.train()

    said = [message for message in caplog.messages if "is stepped after each iteration" in message]
    assert len(said) == logged
    assert all(message.endswith("or give it the length in iterations") for message in said)


RIGHT: dict[str, tuple[Schedule, dict[str, Any]]] = {
    "length in iterations": (of_length(84)["cosine"][0], {"batches": 21}),
    "sequence in iterations": (of_length(84)["sequence"][0], {"batches": 21}),
    "by epoch": (of_length(EPOCHS)["cosine"][0], {"batches": 21, "by_epoch": True}),
    "steps by epoch": (lambda o: torch_lr.StepLR(o, 2), {"batches": 21, "by_epoch": True}),
    "one batch": (of_length(EPOCHS)["cosine"][0], {"batches": 1}),
    "one batch by epoch": (of_length(EPOCHS)["cosine"][0], {"batches": 1, "by_epoch": True}),
    "run of iterations": (of_length(42)["cosine"][0], {"batches": 21, "max_iters": 42}),
    "short run of iterations": (of_length(EPOCHS)["cosine"][0], {"batches": 21, "max_iters": 42}),
    "linear warm-up": (lambda o: torch_lr.LinearLR(o, 0.1, total_iters=EPOCHS), {"batches": 21}),
    "constant warm-up": (lambda o: torch_lr.ConstantLR(o, 0.1, EPOCHS), {"batches": 21}),
    "small decays": (lambda o: torch_lr.StepLR(o, 1, gamma=0.999), {"batches": 21}),
    "milestones after a warm-up": (
        lambda o: torch_lr.SequentialLR(
            o, [torch_lr.LinearLR(o, 0.1, total_iters=40), torch_lr.MultiStepLR(o, [3])], [40]
        ),
        {"batches": 21},
    ),
    "partial of another name": (
        lambda o: torch_lr.LambdaLR(o, partial(lambda i, length: 1.0, length=EPOCHS)),
        {"batches": 21},
    ),
    "slow decay": (lambda o: torch_lr.ExponentialLR(o, 0.99), {"batches": 21}),
    "own": (lambda o: Own(o), {"batches": 21}),
    "few batches": (lambda o: torch_lr.MultiStepLR(o, [2, 4]), {"batches": 2}),
}


@pytest.mark.parametrize("name", RIGHT)
def test_what_is_right_is_not_logged(build: Build, caplog: pytest.LogCaptureFixture, name: str) -> None:
    """Lengths in the unit of the steps, warm-ups, and what may be either."""
    schedule, options = RIGHT[name]

    build(schedule, **options)

    assert not caplog.text


# --- batches and updates -----------------------------------------------------------------------------------


def warmed_up(optimizer: torch.optim.Optimizer, steps: int) -> torch_lr.SequentialLR:
    """A warm-up of one step, and a cosine for the others."""
    parts = [
        torch_lr.LinearLR(optimizer, total_iters=1),
        torch_lr.CosineAnnealingLR(optimizer, T_max=steps - 1),
    ]
    return torch_lr.SequentialLR(optimizer, parts, milestones=[1])


def windows(steps: int) -> dict[str, tuple[Schedule, str]]:
    """Schedules of this project and of PyTorch that end after a number of steps."""
    return {
        **of_length(steps),
        "milestones": (lambda o: torch_lr.MultiStepLR(o, [2, steps]), f"last of milestones={steps}"),
        "warm-up": (lambda o: warmed_up(o, steps), f"length of all parts={steps}"),
        "window": (lambda o: ExponentialLR(o, gamma=0.9, end=steps, by_epoch=False), f"end={steps}"),
    }


@pytest.mark.parametrize(
    ("name", "length"),
    [*((name, {"max_epochs": EPOCHS, "batches": 6}) for name in windows(8)), ("cosine", {"max_iters": 24})],
)
def test_as_long_as_the_updates_and_stepped_by_batch(
    build: Build, caplog: pytest.LogCaptureFixture, name: str, length: dict[str, int]
) -> None:
    """The construction logs the length, and both cures."""
    schedule, argument = windows(8)[name]

    build(schedule, default_hooks={"optimizer": {"cumulative_iters": 3}}, **length)

    (said,) = caplog.messages
    assert f"is stepped after each batch, and its {argument} is the number of updates of the run" in said
    assert said.endswith('with Trainer(unit="update"), or give it the length in batches, 24')


@pytest.mark.filterwarnings("ignore:ExponentialLR runs from iteration 0 to 24, and the run has 8")
@pytest.mark.parametrize(
    ("name", "length"),
    [*((name, {"max_epochs": EPOCHS, "batches": 6}) for name in windows(24)), ("cosine", {"max_iters": 8})],
)
def test_as_long_as_the_batches_and_stepped_by_update(
    build: Build, caplog: pytest.LogCaptureFixture, name: str, length: dict[str, int]
) -> None:
    """The construction logs the reverse, too."""
    schedule, argument = windows(24)[name]

    build(schedule, unit="update", default_hooks={"optimizer": {"cumulative_iters": 3}}, **length)

    (said,) = caplog.messages
    assert f"its {argument} is the number of batches of the run, 3 for an update" in said
    assert said.endswith("give it the length in updates, 8")


@pytest.mark.parametrize(
    ("name", "steps", "unit", "count"),
    [
        *((name, 24, "batch", 3) for name in windows(24)),
        *((name, 8, "update", 3) for name in windows(8)),
        ("cosine", 12, "batch", 3),
        ("cosine", 6, "update", 3),
        ("cosine", 24, "update", 1),
        ("cosine", 8, "batch", 1),
    ],
)
def test_nothing_is_said_of_batches_and_updates_otherwise(
    build: Build, caplog: pytest.LogCaptureFixture, name: str, steps: int, unit: str, count: int
) -> None:
    """A schedule of the run's own length, of another one, or of a run whose updates have one batch is right."""
    schedule = windows(steps)[name][0]

    build(schedule, unit=unit, batches=6, default_hooks={"optimizer": {"cumulative_iters": count}})

    assert caplog.messages == []


@pytest.mark.filterwarnings("ignore:MultiStepLR runs from iteration 0 to")
@pytest.mark.parametrize(
    "schedule",
    [
        lambda o: torch_lr.MultiStepLR(o, [12, 18]),
        lambda o: {"type": "MultiStepLR", "milestones": [12, 18], "by_epoch": False},
    ],
    ids=["torch", "window"],
)
def test_milestones_in_batches_and_stepped_by_update(
    build: Build, caplog: pytest.LogCaptureFixture, schedule: Schedule
) -> None:
    """The construction logs a last milestone that no update reaches, but a batch."""
    build(schedule, unit="update", batches=6, default_hooks={"optimizer": {"cumulative_iters": 3}})

    (said,) = caplog.messages
    assert re.search(r"its last milestone, 18, is after the run's 8 updates, but within its 24 batches", said)
    assert said.endswith("3 for an update: give it the milestones in updates")


@pytest.mark.parametrize(
    ("milestones", "unit", "by_epoch"),
    [
        ([3, 7], "update", False),
        ([30, 60], "update", False),
        ([3, 7], "batch", False),
        ([3, 18], "update", True),
    ],
    ids=["within", "after both", "early", "epochs"],
)
def test_other_milestones_are_not_logged(
    build: Build, caplog: pytest.LogCaptureFixture, milestones: list[int], unit: str, by_epoch: bool
) -> None:
    """Milestones of the run, of a longer one and in epochs may be meant; an early end of the decay, too."""
    options = {"unit": unit, "batches": 6, "default_hooks": {"optimizer": {"cumulative_iters": 3}}}

    build(lambda o: torch_lr.MultiStepLR(o, milestones), by_epoch=by_epoch, **options)

    assert caplog.messages == []
