"""mmcv's momentum policies, in momentum and in betas."""

from __future__ import annotations

from collections.abc import Callable
from math import cos, pi
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import SGD, Adagrad, Adam
from torch.optim.lr_scheduler import OneCycleLR

from eventloop import Trainer
from eventloop.hooks import (
    CheckpointHook,
    CosineAnnealingMomentumUpdaterHook,
    CyclicMomentumUpdaterHook,
    Hook,
    LinearAnnealingMomentumUpdaterHook,
    MomentumUpdaterHook,
    OneCycleLrUpdaterHook,
    OneCycleMomentumUpdaterHook,
    StepMomentumUpdaterHook,
)

MakeTrainer = Callable[..., Trainer]
BASE, RUN = 0.8, 12


class Half(MomentumUpdaterHook):
    """A policy of somebody's own."""

    def get_momentum(self, trainer: Trainer, base_momentum: float) -> float:
        """Half of it, from the second epoch or iteration on."""
        return base_momentum * (0.5 if self.progress(trainer) else 1)


class Momenta(Hook):
    """Writes down the momentum of each param group at each step."""

    def __init__(self) -> None:
        self.used: list[list[float]] = []

    def before_optimizer_step(self, trainer: Trainer, event: Any) -> None:
        """Read them."""
        optimizers = (
            trainer.optimizer.values() if isinstance(trainer.optimizer, dict) else [trainer.optimizer]
        )
        groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        self.used.append([float(g["momentum"] if "momentum" in g else g["betas"][0]) for g in groups])


@pytest.fixture
def momenta(make_trainer: MakeTrainer) -> Callable[..., list[float]]:
    """The momenta of 12 iterations (of so many epochs of one), and the one after the run."""

    def train(*hooks: Hook, adam: bool = False, **options: Any) -> list[float]:
        recorder, model = Momenta(), torch.nn.Linear(2, 1)
        optimizer: Any = (
            Adam(model.parameters(), betas=(BASE, 0.99)) if adam else SGD(model.parameters(), 0.1, BASE)
        )
        options = {"batches": 1, "max_epochs": RUN} | options
        make_trainer(model=model, optimizer=optimizer, hooks=[*hooks, recorder], **options).train()
        last = optimizer.param_groups[0]["betas"][0] if adam else optimizer.param_groups[0]["momentum"]
        return [used[0] for used in recorder.used] + [last]

    return train


def cosine(start: float, end: float, factor: float) -> float:
    """mmcv's annealing_cos."""
    return end + 0.5 * (start - end) * (cos(pi * factor) + 1)


POLICIES: dict[str, tuple[Callable[[], MomentumUpdaterHook], Callable[[int], float]]] = {
    "step": (lambda: StepMomentumUpdaterHook(5), lambda p: BASE * 0.5 ** (p // 5)),
    "clipped steps": (
        lambda: StepMomentumUpdaterHook([2, 9], 0.1, min_momentum=0.05),
        lambda p: max(BASE * 0.1 ** ((p >= 2) + (p >= 9)), 0.05),
    ),
    "cosine": (
        lambda: CosineAnnealingMomentumUpdaterHook(min_momentum=0.2, by_epoch=False),
        lambda p: cosine(BASE, 0.2, p / RUN),
    ),
    "linear": (
        lambda: LinearAnnealingMomentumUpdaterHook(min_momentum_ratio=0.5),
        lambda p: BASE + (0.4 - BASE) * p / RUN,
    ),
    "cyclic": (
        lambda: CyclicMomentumUpdaterHook(cyclic_times=2, step_ratio_up=0.5),
        lambda p: (
            cosine(BASE, BASE * 0.85 / 0.95, p % 6 / 3)
            if p % 6 < 3
            else cosine(BASE * 0.85 / 0.95, BASE, (p % 6 - 3) / 3)
        ),
    ),
}


@pytest.mark.parametrize("adam", [False, True], ids=["momentum", "betas"])
@pytest.mark.parametrize("name", POLICIES)
def test_policy_equals_mmcvs_formula(momenta: Callable[..., list[float]], name: str, adam: bool) -> None:
    """Each iteration, or epoch, is trained with mmcv's momentum, wherever the optimizer has it."""
    make, formula = POLICIES[name]

    assert momenta(make(), adam=adam)[:RUN] == pytest.approx([formula(p) for p in range(RUN)])


@pytest.mark.parametrize(
    ("hook", "end"),
    [
        (CosineAnnealingMomentumUpdaterHook(min_momentum=0.25), 0.25),
        (LinearAnnealingMomentumUpdaterHook(min_momentum_ratio=0.5), 0.4),
        (CyclicMomentumUpdaterHook(target_ratio=(0.5, 1), cyclic_times=5), BASE),
        (OneCycleMomentumUpdaterHook(0.5, 0.75), 0.75),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Hook) else "",
)
def test_completed_run_ends_at_the_end(momenta: Callable[..., list[float]], hook: Hook, end: float) -> None:
    """As the rates do."""
    assert momenta(hook)[-1] == end


@pytest.mark.filterwarnings("ignore:The epoch parameter:UserWarning")
@pytest.mark.parametrize("adam", [False, True], ids=["momentum", "betas"])
@pytest.mark.parametrize("three_phase", [False, True])
def test_one_cycle_equals_pytorchs(
    momenta: Callable[..., list[float]], three_phase: bool, adam: bool
) -> None:
    """With the rate's policy it is PyTorch's OneCycleLR."""
    parameters = [torch.nn.Parameter(torch.zeros(1))]
    reference: Any = Adam(parameters) if adam else SGD(parameters, 0.1, BASE)
    scheduler, expected = OneCycleLR(reference, 1.0, RUN, three_phase=three_phase), []
    for _ in range(RUN):
        group = reference.param_groups[0]
        expected.append(group["betas"][0] if adam else group["momentum"])
        reference.step()
        scheduler.step()

    used = momenta(
        OneCycleLrUpdaterHook(1.0), OneCycleMomentumUpdaterHook(three_phase=three_phase), adam=adam
    )

    assert used[:RUN] == pytest.approx(expected)


@pytest.mark.parametrize("by_epoch", [True, False])
@pytest.mark.parametrize(
    ("warmup", "factors"),
    [
        ("constant", [0.9] * 4),
        ("linear", [0.9, 0.925, 0.95, 0.975]),
        ("exp", [0.9 ** (1 - i / 4) for i in range(4)]),
    ],
)
def test_warm_up_divides(
    momenta: Callable[..., list[float]], warmup: str, factors: list[float], by_epoch: bool
) -> None:
    """It begins with more momentum; with "constant" too, which mmcv's does not apply."""
    hook = StepMomentumUpdaterHook(100, by_epoch=by_epoch, warmup=warmup, warmup_iters=4, warmup_ratio=0.9)

    used = momenta(hook, batches=3, max_epochs=2)

    assert used == pytest.approx([BASE / factor for factor in factors] + [BASE] * 3)


def test_several_optimizers_have_their_own(make_trainer: MakeTrainer) -> None:
    """Each is scheduled from its own momentum; a second run does not begin another cycle."""
    model, recorder = torch.nn.Linear(2, 1), Momenta()
    optimizer = {"weight": SGD([model.weight], 0.1, 0.5), "bias": Adam([model.bias], betas=(0.25, 0.9))}
    hook = CyclicMomentumUpdaterHook(target_ratio=(0.5, 1), step_ratio_up=0.5, anneal_strategy="linear")
    trainer = make_trainer(model=model, optimizer=optimizer, hooks=[hook, recorder])

    trainer.train()
    trainer.train()

    assert recorder.used == [[0.5, 0.25], [0.375, 0.1875], [0.25, 0.125], [0.375, 0.1875]]


def test_one_cycle_by_name_of_the_optimizer(make_trainer: MakeTrainer) -> None:
    """Bounds for each optimizer, and the rest of betas stays."""
    model = torch.nn.Linear(2, 1)
    optimizer = {"weight": SGD([model.weight], 0.1, 0.5), "bias": Adam([model.bias], betas=(0.25, 0.875))}
    hook = OneCycleMomentumUpdaterHook({"weight": 0.5, "bias": [0.25]}, {"weight": 0.75, "bias": 0.5})

    make_trainer(model=model, optimizer=optimizer, hooks=[hook]).train()

    assert optimizer["weight"].param_groups[0]["momentum"] == 0.75
    assert optimizer["bias"].param_groups[0]["betas"] == (0.5, 0.875)


def test_resumed_run_has_the_momenta_of_the_uninterrupted_one(
    make_trainer: MakeTrainer, tmp_path: Path
) -> None:
    """In the middle of a cycle."""

    def build(folder: str) -> tuple[Trainer, Momenta]:
        model, recorder = torch.nn.Linear(2, 1), Momenta()
        trainer = make_trainer(
            model=model,
            optimizer=SGD(model.parameters(), 0.1, 0.5),
            batches=6,
            work_dir=tmp_path / folder,
            hooks=[OneCycleMomentumUpdaterHook(), recorder],
            default_hooks={"checkpoint": CheckpointHook(interval=2, by_epoch=False)},
        )
        return trainer, recorder

    whole, expected = build("whole")
    whole.train()
    first, begun = build("parts")
    first.bus.subscribe(
        lambda trainer, event: trainer.stop("enough"), "after_train_iter", start=3, priority=80, name="stop"
    )
    first.train()
    second, rest = build("parts")
    second.resume()

    second.train()

    assert begun.used + rest.used == expected.used


# --- what is refused -----------------------------------------------------------------------------------------


def test_base_class_is_no_policy() -> None:
    """A class without `get_momentum` cannot be built."""
    with pytest.raises(TypeError, match=r"MomentumUpdaterHook has no get_momentum\(trainer, base_momentum\)"):
        MomentumUpdaterHook()


def test_optimizer_without_momentum_is_refused(make_trainer: MakeTrainer) -> None:
    """mmcv would do nothing, or fail with a KeyError."""
    model = torch.nn.Linear(2, 1)

    with pytest.raises(ValueError, match="the param groups of Adagrad have no 'momentum': known are"):
        make_trainer(model=model, optimizer=Adagrad(model.parameters()), hooks=[Half()])


def test_pytorchs_cycle_of_the_momentum_is_a_second_schedule(make_trainer: MakeTrainer) -> None:
    """OneCycleLR moves the momentum too, unless told not to."""
    model = torch.nn.Linear(2, 1)
    optimizer = SGD(model.parameters(), 0.1, 0.5)

    with pytest.raises(ValueError, match="Half sets momentum each time, so OneCycleLR in schedulers"):
        make_trainer(
            model=model, optimizer=optimizer, schedulers=[OneCycleLR(optimizer, 1.0, 5)], hooks=[Half()]
        )


def test_warm_up_from_one_or_more_warns(make_trainer: MakeTrainer) -> None:
    """mmcv's default ratio makes 1 of 0.9."""
    model = torch.nn.Linear(2, 1)

    with pytest.warns(UserWarning, match=r"Half divides the momentum by 0.9 .* makes it 1: with 1 or more"):
        make_trainer(
            model=model,
            optimizer=SGD(model.parameters(), 0.1, 0.9),
            hooks=[Half(warmup="exp", warmup_iters=2)],
        )


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: Half(warmup="lin", warmup_iters=1),
            "warmup must be 'constant' or 'linear' or 'exp', got 'lin'",
        ),
        (lambda: StepMomentumUpdaterHook(1, min_momentum=-1), "min_momentum must be at least 0, got -1"),
        (
            lambda: CosineAnnealingMomentumUpdaterHook(),
            "exactly one of min_momentum and min_momentum_ratio, got neither",
        ),
        (
            lambda: LinearAnnealingMomentumUpdaterHook(0.1, 0.1),
            r"got both \(min_momentum=0.1, min_momentum_ratio=0.1\)",
        ),
        (lambda: CyclicMomentumUpdaterHook(by_epoch=True), "CyclicMomentumUpdaterHook counts iterations"),
        (lambda: OneCycleMomentumUpdaterHook(by_epoch=True), "OneCycleMomentumUpdaterHook counts iterations"),
        (lambda: OneCycleMomentumUpdaterHook(base_momentum=0), "base_momentum must be above 0, got 0"),
    ],
)
def test_bad_arguments_are_refused(make: Callable[[], Any], message: str) -> None:
    """The constructor names the argument of the momentum; the rate's tests have the policies' own arguments."""
    with pytest.raises(ValueError, match=message):
        make()
