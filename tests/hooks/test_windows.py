"""Windows: MMEngine's schedulers over PyTorch's, from one step of the run to another."""

from __future__ import annotations

import logging
from collections.abc import Callable
from math import cos, inf, nan, pi
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import SGD, Adam
from torch.optim import lr_scheduler as torch_lr

from eventloop import Trainer
from eventloop.hooks import CheckpointHook, Hook, ParamSchedulerHook
from eventloop.optim.schedulers import (
    SCHEDULERS,
    ConstantLR,
    CosineAnnealingLR,
    CosineRestartLR,
    ExponentialLR,
    LinearLR,
    LinearMomentum,
    MultiStepLR,
    OneCycleLR,
    PolyLR,
    ReduceOnPlateauLR,
    ReduceOnPlateauMomentum,
    StepLR,
    StepMomentum,
    Window,
)
from tests.support.skipping import SkipSecond

MakeTrainer = Callable[..., Trainer]
Schedule = Callable[[Any], Any]


class Rates(Hook):
    """Writes down the rate of each step."""

    def __init__(self) -> None:
        self.used: list[float] = []

    def before_optimizer_step(self, trainer: Trainer, event: Any) -> None:
        """Read it."""
        self.used.append(trainer.optimizer.param_groups[0]["lr"])


def sgd(lr: float = 1.0) -> SGD:
    """An optimizer with a rate of 1."""
    return SGD([torch.nn.Parameter(torch.zeros(1))], lr=lr, momentum=0.5)


def rates(schedule: Schedule, steps: int, lr: float = 1.0) -> list[float]:
    """The rates of a plain loop."""
    optimizer, used = sgd(lr), []
    scheduler = schedule(optimizer)
    for _ in range(steps):
        used.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return used


@pytest.fixture
def train(make_trainer: MakeTrainer) -> Callable[..., list[float]]:
    """Train with schedulers, or configs, made for the optimizer; the rate of each iteration."""

    def train(*schedules: Any, hooks: tuple[Hook, ...] = (), **options: Any) -> list[float]:
        recorder, model = Rates(), torch.nn.Linear(2, 1)
        optimizer = SGD(model.parameters(), lr=1.0)
        made = [each if isinstance(each, dict) else each(optimizer) for each in schedules]
        make_trainer(
            model=model, optimizer=optimizer, schedulers=made, hooks=[recorder, *hooks], **options
        ).train()
        return recorder.used

    return train


# --- a window ------------------------------------------------------------------------------------------------

WHOLE: dict[str, tuple[Schedule, Schedule]] = {
    "StepLR": (lambda o: StepLR(o, 3, 0.5), lambda o: torch_lr.StepLR(o, 3, 0.5)),
    "MultiStepLR": (lambda o: MultiStepLR(o, [2, 5, 5]), lambda o: torch_lr.MultiStepLR(o, [2, 5, 5])),
    "ConstantLR": (lambda o: ConstantLR(o, 0.5, end=6), lambda o: torch_lr.ConstantLR(o, 0.5, 5)),
    "LinearLR": (lambda o: LinearLR(o, 0.1, end=6), lambda o: torch_lr.LinearLR(o, 0.1, total_iters=5)),
    "ExponentialLR": (lambda o: ExponentialLR(o, 0.9), lambda o: torch_lr.ExponentialLR(o, 0.9)),
    "CosineAnnealingLR": (lambda o: CosineAnnealingLR(o, 4), lambda o: torch_lr.CosineAnnealingLR(o, 4)),
    "PolyLR": (lambda o: PolyLR(o, power=0.9, end=9), lambda o: torch_lr.PolynomialLR(o, 8, 0.9)),
    "OneCycleLR": (
        lambda o: OneCycleLR(o, 2.0, end=12),
        lambda o: torch_lr.OneCycleLR(o, 2.0, 12, cycle_momentum=False),
    ),
    "any of PyTorch's": (
        lambda o: Window(o, lambda o: torch_lr.CosineAnnealingWarmRestarts(o, 3)),
        lambda o: torch_lr.CosineAnnealingWarmRestarts(o, 3),
    ),
    "a lambda": (
        lambda o: Window(o, lambda o: torch_lr.LambdaLR(o, lambda t: 1 / (1 + t))),
        lambda o: torch_lr.LambdaLR(o, lambda t: 1 / (1 + t)),
    ),
}


@pytest.mark.parametrize("name", WHOLE)
def test_window_from_the_start_equals_pytorchs(name: str) -> None:
    """To the last bit; with the lengths MMEngine derives from the window."""
    own, pytorchs = WHOLE[name]

    assert rates(own, 12) == rates(pytorchs, 12)


@pytest.mark.parametrize("name", ["StepLR", "LinearLR", "CosineAnnealingLR", "a lambda"])
def test_others_may_move_the_value_too(name: str) -> None:
    """A window goes on from the value that is there, as PyTorch's scheduler does, step by step."""
    schedule: Schedule = WHOLE[name][1]
    theirs, ours = schedule(sgd()), Window(sgd(), schedule)

    for _ in range(9):
        for scheduler in (theirs, ours):
            scheduler.optimizer.step()
            scheduler.optimizer.param_groups[0]["lr"] *= 0.9
            scheduler.step()
        assert ours.get_last_lr() == theirs.get_last_lr()
        assert ours.optimizer.param_groups[0]["lr"] == theirs.optimizer.param_groups[0]["lr"]


def test_a_step_of_ones_own_is_called() -> None:
    """A scheduler with another `step` than PyTorch's base, in its class or on itself, is stepped by that."""
    called: list[str] = []

    class Own(torch_lr.StepLR):
        def step(self, epoch: int | None = None) -> None:
            called.append("class")
            super().step()

    def patched(optimizer: SGD) -> torch_lr.LRScheduler:
        scheduler = torch_lr.StepLR(optimizer, 1)
        scheduler.step = lambda epoch=None: called.append("object")  # type: ignore[method-assign]
        return scheduler

    schedules: dict[str, Schedule] = {"class": lambda o: Own(o, 1), "object": patched}
    for where, schedule in schedules.items():
        window = Window(sgd(), schedule)
        called.clear()
        window.step()
        assert called == [where]


@pytest.mark.parametrize("name", ["StepLR", "MultiStepLR", "ExponentialLR"])
def test_window_later_is_the_same_later(name: str) -> None:
    """Steps are counted from `begin`; before it and after `end` the value stays."""
    make, pytorchs = WHOLE[name]

    def later(optimizer: SGD) -> Any:
        inner: Schedule = pytorchs
        return Window(optimizer, inner, begin=3, end=9)

    inside = rates(make, 6)
    assert rates(later, 12) == [1.0] * 3 + inside + [inside[-1]] * 3


def test_eta_min_of_cosine_and_poly() -> None:
    """The floor is a number, or a ratio of the initial rate; PolynomialLR of PyTorch has none."""
    cosine = rates(lambda o: CosineAnnealingLR(o, 4, eta_min=0.5), 5, lr=2.0)
    by_ratio = rates(lambda o: CosineAnnealingLR(o, eta_min_ratio=0.25, end=4), 4, lr=2.0)
    poly = rates(lambda o: PolyLR(o, 0.5, 2.0, end=5), 7, lr=2.0)

    assert cosine == pytest.approx([0.5 + 1.5 * (1 + cos(pi * t / 4)) / 2 for t in range(5)])
    assert by_ratio == pytest.approx(cosine[:4])
    assert poly == pytest.approx([0.5 + 1.5 * (1 - t / 4) ** 2 for t in range(5)] + [0.5, 0.5])


def test_one_cycle_stays_at_its_minimum() -> None:
    """After `total_steps`, where PyTorch and MMEngine raise."""
    used = rates(lambda o: OneCycleLR(o, 2.0, 5, div_factor=10, final_div_factor=100, end=9), 9)

    assert used[4:] == pytest.approx([2 / 10 / 100] * 5)


def test_cosine_restarts() -> None:
    """Each period from the initial rate times its weight to the minimum; then the value stays."""
    used = rates(lambda o: CosineRestartLR(o, [2, 4], [1, 0.5], eta_min=0.1), 8)

    first = [0.1 + 0.9 * (1 + cos(pi * t / 2)) / 2 for t in range(2)]
    second = [0.1 + 0.4 * (1 + cos(pi * t / 4)) / 2 for t in range(4)]
    assert used == pytest.approx(first + second + [second[-1]] * 2)


def test_windows_that_overlap_multiply() -> None:
    """A value moved by one is where the other goes on from."""
    optimizer = sgd()
    both = [LinearLR(optimizer, 0.5, end=3), StepLR(optimizer, 1, 0.5)]
    used = []
    for _ in range(4):
        used.append(optimizer.param_groups[0]["lr"])
        for scheduler in both:
            scheduler.step()

    assert used == pytest.approx([0.5, 0.375, 0.25, 0.125])


def test_momentum_of_sgd_and_adam() -> None:
    """The twins move `momentum`, or the first of `betas`; the rate is left alone."""
    for optimizer in (sgd(), Adam([torch.nn.Parameter(torch.zeros(1))], lr=1.0, betas=(0.5, 0.75))):
        scheduler = StepMomentum(optimizer, 1, 0.5, end=3)
        for _ in range(4):
            scheduler.step()
        group = optimizer.param_groups[0]
        assert group.get("momentum", group.get("betas")) in (0.125, (0.125, 0.75))
        assert group["lr"] == 1.0


def test_any_value_of_the_groups() -> None:
    """`param_name`, as an argument or of a subclass."""

    class StepWeightDecay(StepLR):
        param_name = "weight_decay"

    optimizer = SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0, weight_decay=0.5)
    schedulers = [
        StepWeightDecay(optimizer, 1, 0.5),
        Window(optimizer, lambda o: torch_lr.ExponentialLR(o, 0.5), param_name="weight_decay"),
    ]
    for scheduler in schedulers:
        scheduler.step()

    assert optimizer.param_groups[0]["weight_decay"] == 0.125
    assert schedulers[0].get_last_value() == [0.125]


def test_rate_that_is_a_tensor_stays_one() -> None:
    """A captured step holds it."""
    rate = torch.tensor(1.0)
    optimizer = Adam([torch.nn.Parameter(torch.zeros(1))], lr=rate)
    scheduler = StepLR(optimizer, 1, 0.5)

    scheduler.step()

    assert optimizer.param_groups[0]["lr"] is rate
    assert rate.item() == 0.5


def test_optimizer_that_loaded_a_state_is_moved_on() -> None:
    """Loading gives an optimizer new groups: the window goes on from their values, and moves those."""
    optimizer = sgd()
    scheduler = StepLR(optimizer, 1, 0.5)
    saved = optimizer.state_dict()
    scheduler.step()
    optimizer.load_state_dict(saved)

    scheduler.step()

    assert scheduler.get_last_value() == [0.5]


def test_groups_added_later_are_an_error() -> None:
    """Their base would be a guess."""
    optimizer = sgd()
    scheduler = StepLR(optimizer, 1)
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(1))]})

    with pytest.raises(
        RuntimeError, match="StepLR was built for 1 param groups, and the optimizer now has 2"
    ):
        scheduler.step()


# --- in a trainer --------------------------------------------------------------------------------------------


def composition(main: Callable[[int, int], float], epochs: int, batches: int, warm: int) -> list[float]:
    """A warm-up by iteration from a tenth, and a factor by `(epoch, iteration)`, written by hand."""
    return [
        main(i // batches, i) * (0.1 + 0.9 * min(i, warm - 1) / (warm - 1)) for i in range(epochs * batches)
    ]


WARM = {"type": "LinearLR", "start_factor": 0.1, "by_epoch": False, "begin": 0, "end": 5}
MAIN: dict[str, tuple[dict[str, Any], Callable[[int, int], float]]] = {
    "steps by epoch": (
        {"type": "MultiStepLR", "milestones": [1, 3], "gamma": 0.5},
        lambda e, i: 0.5 ** ((e >= 1) + (e >= 3)),
    ),
    "cosine by epoch": (
        {"type": "CosineAnnealingLR", "T_max": 4},
        lambda e, i: (1 + cos(pi * e / 4)) / 2,
    ),
    "cosine by iteration after the warm-up": (
        {"type": "CosineAnnealingLR", "by_epoch": False, "begin": 5, "end": 12},
        lambda e, i: (1 + cos(pi * max(i - 5, 0) / 7)) / 2,
    ),
    "converted": (
        {"type": "CosineAnnealingLR", "T_max": 4, "convert_to_iter_based": True},
        lambda e, i: (1 + cos(pi * i / 12)) / 2,
    ),
}


@pytest.mark.parametrize("name", MAIN)
def test_warm_up_and_main_equal_a_composition_by_hand(train: Callable[..., list[float]], name: str) -> None:
    """500 iterations of warm-up, and the rest by epoch, as MMEngine's configs have it; here 5."""
    config, main = MAIN[name]

    used = train(WARM, config, batches=3, max_epochs=4)

    assert used == pytest.approx(composition(main, 4, 3, 5))


def test_objects_do_as_configs_do(train: Callable[..., list[float]]) -> None:
    """The same schedules, built by hand."""
    used = train(
        lambda o: LinearLR(o, 0.1, by_epoch=False, end=5),
        lambda o: MultiStepLR(o, [1, 3], 0.5),
        batches=3,
        max_epochs=4,
    )

    assert used == train(WARM, MAIN["steps by epoch"][0], batches=3, max_epochs=4)


def test_end_of_a_config_is_that_of_the_run(train: Callable[..., list[float]]) -> None:
    """In its unit, where a schedule needs one; an object has to say it."""
    by_iteration = {"type": "PolyLR", "by_epoch": False}
    by_epoch = {"type": "PolyLR"}

    assert train(by_iteration, max_iters=5) == pytest.approx([1.0, 0.75, 0.5, 0.25, 0.0])
    assert train(by_epoch, batches=1, max_epochs=3) == pytest.approx([1.0, 0.5, 0.0])


def test_convert_takes_every_count() -> None:
    """Milestones, sizes, periods and windows become iterations; a decay becomes its root."""
    optimizer = sgd()
    steps = MultiStepLR.build_iter_from_epoch(optimizer, milestones=[1, 2], begin=1, end=4, epoch_length=10)
    decay = ExponentialLR.build_iter_from_epoch(sgd(), gamma=0.25, epoch_length=2)
    decay.step()

    assert (steps.begin, steps.end, steps.by_epoch) == (10, 40, False)
    assert decay.get_last_value() == [0.5]


def test_pytorchs_and_registered_names_in_configs(train: Callable[..., list[float]]) -> None:
    """What this module does not have is PyTorch's, or one's own."""

    class Third(StepLR):
        def __init__(self, optimizer: Any) -> None:
            super().__init__(optimizer, 1, 1 / 4, by_epoch=False)

    SCHEDULERS.register(Third)
    try:
        used = train({"type": "LambdaLR", "lr_lambda": lambda t: 0.5**t}, max_iters=3)
        own = train({"type": "Third"}, max_iters=3)
    finally:
        SCHEDULERS.forget("Third")

    assert used == [1.0, 0.5, 0.25]
    assert own == [1.0, 0.25, 0.0625]


def test_config_for_several_optimizers(make_trainer: MakeTrainer) -> None:
    """One for each."""
    model = torch.nn.Linear(2, 1)
    optimizer = {"a": SGD([model.weight], lr=1.0), "b": SGD([model.bias], lr=2.0)}
    trainer = make_trainer(
        model=model, optimizer=optimizer, schedulers={"type": "StepLR", "step_size": 1, "gamma": 0.5}
    )

    trainer.train()

    assert [o.param_groups[0]["lr"] for o in optimizer.values()] == [0.5, 1.0]


def test_skipped_step_does_not_advance(train: Callable[..., list[float]]) -> None:
    """An iteration without an optimizer step is none for a window."""

    used = train(
        {"type": "StepLR", "step_size": 1, "gamma": 0.5, "by_epoch": False, "begin": 1},
        hooks=(SkipSecond(),),
    )

    assert used == [1.0, 1.0, 0.5]


def test_plateau_has_its_own_metric_and_window(
    train: Callable[..., list[float]], scripted: Callable[..., dict[str, Any]]
) -> None:
    """Validations before `begin` are not looked at; `rule` says what is better."""
    accuracies = scripted(0.5, 0.5, 0.5, 0.5, 0.9)
    config = {
        "type": "ReduceOnPlateauLR",
        "monitor": "acc",
        "rule": "greater",
        "factor": 0.5,
        "patience": 0,
        "begin": 2,
    }

    used = train(config, batches=1, max_epochs=5, **accuracies)

    assert used == [1.0, 1.0, 1.0, 0.5, 0.25]


# --- resuming ------------------------------------------------------------------------------------------------


def build(
    make_trainer: MakeTrainer, folder: Path, *schedulers: Any, stop_at: int | None = None, **options: Any
) -> tuple[Trainer, Rates]:
    """A trainer that saves after every iteration, and may end after one."""
    recorder, model = Rates(), torch.nn.Linear(2, 1)
    trainer = make_trainer(
        model=model,
        optimizer=SGD(model.parameters(), lr=1.0, momentum=0.5),
        batches=3,
        max_epochs=4,
        schedulers=[dict(each) for each in schedulers],
        hooks=[recorder],
        work_dir=folder,
        default_hooks={"checkpoint": CheckpointHook(interval=1, by_epoch=False)},
        **options,
    )
    if stop_at is not None:
        trainer.bus.subscribe(
            lambda trainer, event: trainer.stop("enough"),
            "after_train_iter",
            start=stop_at,
            priority=80,
            name="stop",
        )
    return trainer, recorder


RESTARTS = {
    "type": "CosineRestartLR",
    "periods": [3, 5],
    "restart_weights": [1, 0.5],
    "by_epoch": False,
    "begin": 2,
}
MOMENTUM = {"type": "LinearMomentum", "start_factor": 0.5, "by_epoch": False, "begin": 3, "end": 9}


@pytest.fixture(scope="module")
def wholes() -> dict[str, tuple[Trainer, Rates]]:
    """Runs that were never stopped, by the names of their schedules; each made for the first test that needs it."""
    return {}


@pytest.mark.representative(2)
@pytest.mark.parametrize("stop_at", [0, 2, 5, 7])
@pytest.mark.parametrize("name", [*MAIN, "restarts"])
def test_resumed_run_has_the_rates_of_the_uninterrupted_one(
    make_trainer: MakeTrainer,
    tmp_path: Path,
    wholes: dict[str, tuple[Trainer, Rates]],
    name: str,
    stop_at: int,
) -> None:
    """Before a window, in it, at its end and between epochs."""
    schedulers = [WARM, MOMENTUM, RESTARTS if name == "restarts" else MAIN[name][0]]
    if name not in wholes:
        wholes[name] = build(make_trainer, tmp_path / "whole", *schedulers)
        wholes[name][0].train()
    whole, expected = wholes[name]
    first, begun = build(make_trainer, tmp_path / "parts", *schedulers, stop_at=stop_at)
    first.train()

    second, rest = build(make_trainer, tmp_path / "parts", *schedulers)
    second.resume()
    second.train()

    assert begun.used + rest.used == expected.used
    assert second.optimizer.param_groups[0]["momentum"] == whole.optimizer.param_groups[0]["momentum"]


def test_resuming_says_which_arguments_are_not_used(
    make_trainer: MakeTrainer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As in PyTorch the checkpoint's replace them; here that is logged."""
    first, _ = build(make_trainer, tmp_path / "run", {"type": "StepLR", "step_size": 2, "end": 3}, stop_at=4)
    first.train()
    second, _ = build(make_trainer, tmp_path / "run", {"type": "StepLR", "step_size": 4})

    with caplog.at_level(logging.WARNING, "eventloop"):
        second.resume(changed="keep")

    assert "StepLR continues with the arguments of the checkpoint" in caplog.text
    assert "end 3 instead of None; step_size 2 instead of 4" in caplog.text


def test_resuming_with_the_same_arguments_says_nothing(
    make_trainer: MakeTrainer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing differs."""
    schedulers = [WARM, MOMENTUM, RESTARTS, MAIN["steps by epoch"][0]]
    build(make_trainer, tmp_path / "run", *schedulers, stop_at=4)[0].train()
    second, _ = build(make_trainer, tmp_path / "run", *schedulers)

    with caplog.at_level(logging.WARNING, "eventloop"):
        second.resume()

    assert not caplog.text


# --- what is refused -----------------------------------------------------------------------------------------


def untyped(value: object) -> Any:
    """What a type checker would have refused already."""
    return value


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (
            lambda o: StepLR(o, 2, begin=3, end=3),
            ValueError,
            "end, of a window with begin=3, must be at least 4, got 3",
        ),
        (lambda o: StepLR(o, 2, begin=-1), ValueError, "begin must be at least 0, got -1"),
        (
            lambda o: StepLR(o, 2, end=untyped(2.5)),
            TypeError,
            "end, of a window with begin=0, must be an int, got 2.5",
        ),
        (lambda o: StepLR(o, 2, by_epoch=untyped(1)), TypeError, r"by_epoch must be True or False, got 1"),
        (
            lambda o: StepLR(untyped("sgd"), 2),
            TypeError,
            "optimizer must be a torch.optim.Optimizer, got 'sgd'",
        ),
        (
            lambda o: CosineAnnealingLR(untyped("sgd"), 2),
            TypeError,
            "optimizer must be a torch.optim.Optimizer, got 'sgd'",
        ),
        (lambda o: StepLR(o, 0), ValueError, "step_size must be at least 1, got 0"),
        (lambda o: StepLR(o, 2, gamma=0), ValueError, "gamma must be above 0, got 0"),
        (
            lambda o: MultiStepLR(o, untyped(3)),
            TypeError,
            "milestones must be a list of positive ints, got 3",
        ),
        (lambda o: MultiStepLR(o, [3, 0]), ValueError, "each of milestones must be at least 1, got 0"),
        (lambda o: MultiStepLR(o, [3, 2]), ValueError, r"milestones must rise, got \[3, 2\]"),
        (lambda o: ConstantLR(o, 2.0, end=3), ValueError, "factor must be above 0 and at most 1, got 2.0"),
        (lambda o: ConstantLR(o), ValueError, "ConstantLR needs end: the epoch"),
        (
            lambda o: LinearLR(o, 0.0, end=3),
            ValueError,
            "start_factor must be above 0 and at most 1, got 0.0",
        ),
        (
            lambda o: LinearLR(o, 0.5, 2.0, end=3),
            ValueError,
            "end_factor must be at least 0 and at most 1, got 2.0",
        ),
        (lambda o: LinearLR(o, by_epoch=False), ValueError, "LinearLR needs end: the iteration"),
        (
            lambda o: LinearMomentum(o, end=1),
            ValueError,
            "LinearMomentum needs a window of at least 2 steps, got begin=0, end=1",
        ),
        (lambda o: ExponentialLR(o, -1), ValueError, "gamma must be above 0, got -1"),
        (lambda o: CosineAnnealingLR(o), ValueError, "CosineAnnealingLR without T_max needs end"),
        (lambda o: CosineAnnealingLR(o, 0), ValueError, "T_max must be at least 1, got 0"),
        (
            lambda o: CosineAnnealingLR(o, 3, 0.1, eta_min_ratio=0.1),
            ValueError,
            "give eta_min or eta_min_ratio, not both: got 0.1 and 0.1",
        ),
        (lambda o: PolyLR(o, power=0, end=3), ValueError, "power must be above 0, got 0"),
        (lambda o: OneCycleLR(o, 1.0), ValueError, "OneCycleLR without total_steps needs end"),
        (lambda o: OneCycleLR(o, 1.0, 0), ValueError, "total_steps must be at least 1, got 0"),
        (lambda o: OneCycleLR(o, -1.0, 5), ValueError, "eta_max must be above 0, got -1.0"),
        (
            lambda o: OneCycleLR(o, 1.0, 5, 1.5),
            ValueError,
            "pct_start must be at least 0 and at most 1, got 1.5",
        ),
        (
            lambda o: OneCycleLR(o, 1.0, 4, 0.25),
            ValueError,
            "pct_start=0.25 of total_steps=4 is a rise of one step",
        ),
        (
            lambda o: CosineRestartLR(o, [2], [1, 1]),
            ValueError,
            r"restart_weights must be .*1 periods, got \[1, 1\]",
        ),
        (
            lambda o: ReduceOnPlateauLR(o, rule=untyped("lower")),
            ValueError,
            "rule must be 'less' or 'greater', got 'lower'",
        ),
        (
            lambda o: ReduceOnPlateauLR(o, by_epoch=False),
            ValueError,
            "ReduceOnPlateauLR counts validations, got by_epoch=False",
        ),
        (
            lambda o: ReduceOnPlateauLR(o, factor=1.0),
            ValueError,
            "factor must be above 0 and below 1, got 1.0",
        ),
        (lambda o: ReduceOnPlateauLR(o, threshold=-1), ValueError, "threshold must be at least 0, got -1"),
        (
            lambda o: ReduceOnPlateauLR(o, threshold=untyped("1e-4")),
            TypeError,
            "threshold must be a number, got '1e-4'",
        ),
        (
            lambda o: ReduceOnPlateauLR(o, threshold_rule=untyped("abd")),
            ValueError,
            "threshold_rule must be 'rel' or 'abs', got 'abd'",
        ),
        (lambda o: ReduceOnPlateauLR(o, patience=-1), ValueError, "patience must be at least 0, got -1"),
        (
            lambda o: ReduceOnPlateauLR(o, patience=untyped(1.5)),
            TypeError,
            "patience must be an int, got 1.5",
        ),
        (lambda o: ReduceOnPlateauLR(o, cooldown=-1), ValueError, "cooldown must be at least 0, got -1"),
        (lambda o: ReduceOnPlateauLR(o, eps=-1e-8), ValueError, "eps must be at least 0, got -1e-08"),
        (
            lambda o: ReduceOnPlateauLR(o, min_value=-0.1),
            ValueError,
            "min_value must be at least 0, got -0.1",
        ),
        (
            lambda o: ReduceOnPlateauLR(o, min_value=[-0.1]),
            ValueError,
            "each of min_value must be at least 0, got -0.1",
        ),
        (
            lambda o: ReduceOnPlateauLR(o, min_value=[0, 0]),
            ValueError,
            r"min_value must be one number, or .* the 1 param groups, got \[0, 0\]",
        ),
        (
            lambda o: ReduceOnPlateauLR(o, monitor=untyped(3)),
            TypeError,
            "monitor must be the name of a metric, got 3",
        ),
        (
            lambda o: ReduceOnPlateauLR(o, monitor=""),
            TypeError,
            "monitor must be the name of a metric, got ''",
        ),
        (
            lambda o: ReduceOnPlateauLR(o, by_epoch=untyped("no")),
            TypeError,
            "by_epoch must be True .* got 'no'",
        ),
        (
            lambda o: ReduceOnPlateauMomentum(o, threshold=-1),
            ValueError,
            "threshold must be at least 0, got -1",
        ),
        (
            lambda o: ParamSchedulerHook(monitor=untyped(3)),
            TypeError,
            "monitor must be the name of a metric, got 3",
        ),
        (lambda o: ExponentialLR(o, inf), ValueError, "gamma must be a finite number, got inf"),
        (lambda o: CosineAnnealingLR(o, 3, nan), ValueError, "eta_min must be a finite number, got nan"),
        (lambda o: CosineAnnealingLR(o, 3, untyped([])), TypeError, r"eta_min must be a number, got \[\]"),
        (
            lambda o: OneCycleLR(o, [1.0, 2.0], 5),
            ValueError,
            r"eta_max must be one number, or .* the 1 param groups, got \[1.0, 2.0\]",
        ),
        (lambda o: OneCycleLR(o, 1.0, 5, untyped("0.3")), TypeError, "pct_start must be a number, got '0.3'"),
        (lambda o: OneCycleLR(o, 1.0, 5, nan), ValueError, "pct_start must be a finite number, got nan"),
        (
            lambda o: OneCycleLR(o, 1.0, 5, anneal_strategy=untyped("cosine")),
            ValueError,
            "anneal_strategy must be 'cos' or 'linear', got 'cosine'",
        ),
        (
            lambda o: OneCycleLR(o, 1.0, 5, three_phase=untyped("no")),
            TypeError,
            "three_phase must be True or False, got 'no'",
        ),
        (
            lambda o: CosineRestartLR(o, [2], untyped(1.0)),
            ValueError,
            "restart_weights must be .*1 periods, got 1.0",
        ),
        (
            lambda o: CosineRestartLR(o, [2], [-1]),
            ValueError,
            "each of restart_weights must be at least 0, got -1",
        ),
        (
            lambda o: Window(o, lambda o: untyped(3)),
            TypeError,
            "schedule must return a scheduler of torch.optim.lr_scheduler, got 3",
        ),
        (
            lambda o: Window(o, lambda o: untyped(3), begin=5),
            TypeError,
            "schedule must return a scheduler of torch.optim.lr_scheduler, got 3",
        ),
        (
            lambda o: Window(o, torch_lr.ReduceLROnPlateau),
            TypeError,
            "ReduceLROnPlateau is stepped with a metric: use ReduceOnPlateauLR",
        ),
        (
            lambda o: Window(o, torch_lr.LRScheduler, param_name="momentun"),
            ValueError,
            "of SGD have no 'momentun': did you mean 'momentum'",
        ),
        (
            lambda o: StepLR.build_iter_from_epoch(o, step_size=1, epoch_length=0),
            ValueError,
            "epoch_length must be at least 1",
        ),
        (
            lambda o: StepLR.build_iter_from_epoch(o, step_size=1, epoch_length=2, by_epoch=False),
            ValueError,
            "StepLR already counts iterations",
        ),
    ],
)
def test_bad_arguments_are_refused(make: Schedule, error: type[Exception], message: str) -> None:
    """The constructor says what was expected and what came, also for a window that begins later."""
    with pytest.raises(error, match=message):
        make(sgd())


@pytest.mark.parametrize(
    ("config", "options", "error", "message"),
    [
        ({"type": "LinearLr"}, {}, ValueError, "unknown scheduler 'LinearLr': did you mean 'LinearLR'"),
        (
            {"type": "StepLR", "step": 3},
            {},
            ValueError,
            "StepLR has no argument 'step': did you mean 'step_size'",
        ),
        ({"step_size": 3}, {}, TypeError, r"expected a scheduler or a config dict\(type=...\), got"),
        (
            {"type": "StepLR", "step_size": 3},
            {"optimizer": None},
            ValueError,
            "a scheduler's config needs the trainer's optimizer",
        ),
        (
            {"type": "StepLR", "step_size": 3},
            {"max_iters": 4},
            ValueError,
            "StepLR counts epochs, and a run measured in iterations",
        ),
        ({"type": "ReduceOnPlateauLR"}, {}, ValueError, "ReduceOnPlateauLR needs a validation"),
        (
            {"type": "LambdaLR", "convert_to_iter_based": True},
            {},
            TypeError,
            "is for schedules of eventloop.optim.schedulers, not LambdaLR",
        ),
        (
            {"type": "StepLR", "step_size": 3, "convert_to_iter_based": True},
            {"train_loader": None},
            ValueError,
            "convert_to_iter_based needs a train_loader with a length",
        ),
    ],
)
def test_bad_configs_are_refused(
    make_trainer: MakeTrainer, config: Any, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    """When the trainer is built."""
    with pytest.raises(error, match=message):
        make_trainer(schedulers=[config], **options)


def test_window_past_the_run_warns(make_trainer: MakeTrainer) -> None:
    """500 iterations of warm-up without `by_epoch=False` are 500 epochs."""
    with pytest.warns(
        UserWarning, match="LinearLR runs from epoch 0 to 500, and the run has 2: by_epoch=True"
    ):
        make_trainer(schedulers=[{"type": "LinearLR", "end": 500}], max_epochs=2)


def test_unknown_schedule_names_each_known_one_once(make_trainer: MakeTrainer) -> None:
    """What eventloop and PyTorch both have is one name."""
    with pytest.raises(ValueError, match="unknown scheduler 'Warm': known are ") as caught:
        make_trainer(schedulers=[{"type": "Warm"}])

    known = str(caught.value).split("known are ")[1].split(", ")
    assert {"StepLR", "CosineRestartLR", "LambdaLR"} < set(known)
    assert len(known) == len(set(known))
