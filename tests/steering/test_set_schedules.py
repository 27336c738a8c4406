"""A rate that is set by a command: the schedule goes on from there in proportion, to its end."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler as torch_lr

from eventloop import Bus, Trainer
from tests.steering.set_runs import (
    AT,
    ITERS,
    SCHEDULES,
    outcomes,
    receive,
    scaled,
    set_run,
    setting,
    values,
    window,
)
from tests.support.trainers import batches

# SequentialLR of older releases of torch steps its parts in the way that torch itself warns of
pytestmark = pytest.mark.filterwarnings("ignore:The epoch parameter in:UserWarning")

Build = Callable[..., Trainer]
CLOSE = 1e-12


@pytest.fixture
def build(tmp_path: Path) -> Iterator[Build]:
    """Return a function that builds trainers, each in a directory of its own."""
    made: list[Trainer] = []

    def make(*arguments: Any, **options: Any) -> Trainer:
        made.append(set_run(tmp_path / str(len(made)), *arguments, **options))
        return made[-1]

    yield make
    for trainer in made:
        trainer.close()


@pytest.mark.representative(8)
@pytest.mark.parametrize("kind", SCHEDULES)
def test_a_factor_multiplies_what_any_schedule_gives(build: Build, kind: str) -> None:
    """After `lr*=0.3` the rate of each iteration is 0.3 times that of the run without the command."""
    steered = build(kind)
    receive(steered, AT, setting({"lr*": "0.3"}))

    found = values(steered)

    expected = scaled(values(build(kind)), [0.3, 0.3])
    assert len({tuple(row) for row in expected[AT:]}) > 1 or kind == "none"
    for row, wanted in zip(found, expected, strict=True):
        assert row == pytest.approx(wanted, rel=CLOSE)


@pytest.mark.representative(4)
@pytest.mark.parametrize("kind", SCHEDULES)
def test_a_schedule_goes_on_in_proportion_to_a_rate_that_is_set(build: Build, kind: str) -> None:
    """After `lr=0.004` all groups have this rate, and what their schedules give later is in the same proportion."""
    steered = build(kind)
    receive(steered, AT, setting(lr=0.004))
    results = outcomes(steered)

    found = values(steered)

    whole = values(build(kind))
    given = [results[0][f"lr[{group}]"]["old"] for group in (0, 1)]
    assert [results[0][f"lr[{group}]"]["new"] for group in (0, 1)] == [0.004, 0.004]
    for row, wanted in zip(found, scaled(whole, [0.004 / each for each in given]), strict=True):
        assert row == pytest.approx(wanted, rel=CLOSE)


def test_the_rates_are_those_of_the_closed_form(build: Build) -> None:
    """The oracle of the other tests is a run; here it is the formula of the cosine."""
    steered = build("none", schedule=lambda o: [torch_lr.CosineAnnealingLR(o, ITERS, 0.01)])
    receive(steered, AT, setting({"lr*": 2}))

    found = [row[0] for row in values(steered)]

    cosine = [0.01 + 0.09 * (1 + math.cos(math.pi * step / ITERS)) / 2 for step in range(ITERS)]
    assert found == pytest.approx([*cosine[:AT], *(2 * rate for rate in cosine[AT:])], rel=1e-6)


@pytest.mark.parametrize("kind", ["StepLR", "SequentialLR", "OneCycleLR", "CosineAnnealingWarmRestarts"])
def test_a_schedule_that_is_stepped_by_epoch_goes_on_in_proportion(build: Build, kind: str) -> None:
    """Schedulers of PyTorch that the hook steps after each epoch are scaled alike."""
    steered = build(kind, by_epoch=True)
    receive(steered, AT, setting({"lr*": 0.3}))

    found = values(steered)

    for row, wanted in zip(found, scaled(values(build(kind, by_epoch=True)), [0.3, 0.3]), strict=True):
        assert row == pytest.approx(wanted, rel=CLOSE)


@pytest.mark.parametrize("kind", ["StepLR", "CyclicLR", "SequentialLR", "windows", "mmcv by iteration"])
def test_a_rate_in_a_tensor_is_set_in_place(build: Build, kind: str) -> None:
    """The tensor that a captured step refers to keeps its identity, and has the scaled rates."""
    options = {"lr": torch.tensor(0.1)}
    schedule = (lambda o: [torch_lr.LambdaLR(o, lambda step: 0.9**step)]) if kind == "CyclicLR" else None
    steered = build(kind, schedule=schedule, **options)
    tensors = [group["lr"] for group in steered.optimizer.param_groups]
    receive(steered, AT, setting({"lr*": 0.3}))

    found = values(steered)

    assert all(
        group["lr"] is tensor for group, tensor in zip(steered.optimizer.param_groups, tensors, strict=True)
    )
    whole = values(build(kind, schedule=schedule, **options))
    for row, wanted in zip(found, scaled(whole, [0.3, 0.3]), strict=True):
        assert row == pytest.approx(wanted, rel=1e-6)


@pytest.mark.parametrize(
    ("kind", "optimizer", "schedule"),
    [
        ("momentum", torch.optim.SGD, lambda o: [window("LinearMomentum", start_factor=0.5, end=20)]),
        ("betas", torch.optim.Adam, lambda o: [window("CosineAnnealingMomentum", eta_min=0.5, T_max=9)]),
        ("one cycle", torch.optim.SGD, lambda o: [torch_lr.OneCycleLR(o, 0.5, ITERS)]),
        ("cycle of betas", torch.optim.Adam, lambda o: [torch_lr.CyclicLR(o, 0.01, 0.1, 5)]),
        ("mmcv in a cycle", torch.optim.SGD, lambda o: []),
    ],
)
def test_a_schedule_of_the_momentum_goes_on_in_proportion(
    build: Build, kind: str, optimizer: Any, schedule: Any
) -> None:
    """`momentum` is set like the rate, whichever schedule moves it and wherever it is in the group."""
    options = {"optimizer": optimizer, "schedule": schedule}
    steered = build(kind, **options)
    receive(steered, AT, setting({"momentum*": 0.9}))

    found = values(steered, "momentum")

    whole = values(build(kind, **options), "momentum")
    for row, wanted in zip(found, scaled(whole, [0.9, 0.9]), strict=True):
        assert row == pytest.approx(wanted, rel=CLOSE)


def test_commands_follow_one_another(build: Build) -> None:
    """Two factors multiply, and a rate that is set replaces both."""
    steered = build("SequentialLR")
    receive(steered, 3, setting({"lr*": 0.5}))
    receive(steered, AT, setting({"lr*": 0.2}))
    receive(steered, 17, setting({"lr[0]": 0.04}))
    results = outcomes(steered)

    found = values(steered)

    whole = scaled(scaled(values(build("SequentialLR")), [0.5, 0.5], 3), [0.2, 0.2])
    expected = scaled(whole, [0.04 / whole[17][0], 1.0], 17)
    assert [*results[2]] == ["lr[0]"]
    for row, wanted in zip(found, expected, strict=True):
        assert row == pytest.approx(wanted, rel=CLOSE)


def test_a_rate_of_zero_is_left_again(build: Build) -> None:
    """`lr=0` stops the training of the weights, and a later `lr=` continues the schedule in proportion."""
    steered = build("StepLR")
    receive(steered, 3, setting(lr=0))
    receive(steered, AT, setting(lr=0.05))

    found = values(steered)

    whole = values(build("StepLR"))
    assert found[3:AT] == [[0.0, 0.0]] * (AT - 3)
    expected = scaled(whole, [0.05 / rate for rate in whole[AT]])
    for row, wanted in zip(found[AT:], expected[AT:], strict=True):
        assert row == pytest.approx(wanted, rel=CLOSE)


def test_a_schedule_at_zero_has_no_proportion(build: Build) -> None:
    """Where the schedule gives 0, `lr=` is refused with the way out, and the run goes on."""
    steered = build("none", schedule=lambda o: [torch_lr.LambdaLR(o, lambda step: float(step >= 10))])
    receive(steered, AT, setting(lr=0.05))
    results = outcomes(steered)

    found = values(steered)

    assert results[0].startswith(
        "lr[0] is scheduled, and its schedule gives 0 now, to which 0.05 has no proportion: multiply the schedule"
    )
    assert found[-1] == [0.1, 0.2]


def test_a_factor_counts_although_the_schedule_is_at_zero(build: Build) -> None:
    """A warm-up that begins at 0 can be scaled before it rises."""
    steered = build("none", schedule=lambda o: [torch_lr.LambdaLR(o, lambda step: float(step >= 10))])
    receive(steered, AT, setting({"lr*": 0.5}))

    assert values(steered)[-1] == [0.05, 0.1]


def test_an_edit_by_the_program_is_kept(build: Build) -> None:
    """A handler that multiplies the rate of a recursive schedule does so in a steered run, too."""

    def edited() -> Trainer:
        trainer = build("ExponentialLR")

        def edit(trainer: Trainer, event: Any) -> None:
            if event.iter == 12:
                trainer.optimizer.param_groups[0]["lr"] *= 0.1

        trainer.bus.subscribe(edit, "before_train_iter", priority="LOWEST")
        return trainer

    steered = edited()
    receive(steered, AT, setting({"lr*": 0.3}))

    for row, wanted in zip(values(steered), scaled(values(edited()), [0.3, 0.3]), strict=True):
        assert row == pytest.approx(wanted, rel=CLOSE)


def test_get_last_lr_returns_the_rate_that_is_trained_with(build: Build) -> None:
    """A program that logs `scheduler.get_last_lr()` logs the scaled rate."""
    steered = build("StepLR")
    receive(steered, AT, setting({"lr*": 0.3}))
    last: list[Any] = []
    steered.bus.subscribe(
        lambda trainer, event: last.append(trainer.schedulers[0].get_last_lr()), "before_train_iter"
    )

    assert values(steered) == last


def test_the_next_log_has_the_new_rate(build: Build) -> None:
    """Writers get the rate that the iteration was trained with."""
    steered = build("none", default_hooks={"logger": {"interval": 1}})
    receive(steered, AT, setting(lr=0.004))
    logged: dict[int, float] = {}
    steered.bus.subscribe(
        lambda event: logged.update({event.step: event.scalars["lr"]}) if "lr" in event.scalars else None,
        "scalars_logged",
        offload="thread",
    )

    steered.train()
    steered.close()

    assert [logged[step] for step in (AT, AT + 1)] == [0.1, 0.004]


def test_a_schedule_of_one_optimizer_is_set_by_its_name(build: Build, tmp_path: Path) -> None:
    """`gen.lr` sets the rate of that optimizer alone, and `lr` of both."""

    first, second = (torch.nn.Linear(2, 3) for _ in range(2))
    model = torch.nn.ModuleDict({"gen": first, "disc": second})
    optimizers = {name: torch.optim.SGD(part.parameters(), lr=0.1) for name, part in model.items()}

    def step(trainer: Trainer, batch: Any) -> torch.Tensor:
        inputs, target = batch
        outputs = first(inputs) + second(inputs)
        return torch.nn.functional.cross_entropy(outputs, target)

    trainer = Trainer(
        model,
        optimizer=optimizers,
        train_step=step,
        train_loader=batches(3),
        max_epochs=2,
        work_dir=tmp_path,
        bus=Bus(),
        schedulers=[torch_lr.ExponentialLR(optimizers["gen"], 0.5)],
    )
    receive(trainer, 2, setting({"gen.lr*": 0.5}), setting({"disc.lr": 0.3}))
    receive(trainer, 4, setting({"lr*": 0.5}))
    results = outcomes(trainer)
    found: list[tuple[float, float]] = []
    trainer.bus.subscribe(
        lambda trainer, event: found.append(
            tuple(each.param_groups[0]["lr"] for each in optimizers.values())
        ),
        "before_train_iter",
    )

    trainer.train()
    trainer.close()

    assert found == [
        (0.1, 0.1),
        (0.05, 0.1),
        (0.0125, 0.3),
        (0.00625, 0.3),
        (0.0015625, 0.15),
        (0.00078125, 0.15),
    ]
    assert [[*result] for result in results] == [["gen.lr"], ["disc.lr"], ["gen.lr", "disc.lr"]]
    assert results[1] == {"disc.lr": {"old": 0.1, "new": 0.3}}


def test_a_scheduler_that_the_program_steps_is_said(build: Build) -> None:
    """Without the hook that steps schedulers the rate is written, and the answer says who may write it again."""
    trainer = build("StepLR", default_hooks={"param_scheduler": None})
    receive(trainer, AT, setting({"lr[1]": 0.004}))
    results = outcomes(trainer)

    trainer.train()

    note = "a scheduler that the trainer does not step may write lr again"
    assert results == [{"lr[1]": {"old": 0.2, "new": 0.004, "note": note}}]


def test_a_group_is_set_by_its_name(build: Build) -> None:
    """A group that has a `name` is addressed by it."""
    trainer = build("StepLR")
    trainer.optimizer.param_groups[1]["name"] = "head"
    receive(trainer, AT, setting({"lr[head]*": 0.5}))

    found = values(trainer)

    for row, wanted in zip(found, scaled(values(build("StepLR")), [1.0, 0.5]), strict=True):
        assert row == pytest.approx(wanted, rel=CLOSE)
