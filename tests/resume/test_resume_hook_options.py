"""Test that options of hooks which change a training are compared with those of the checkpoint's run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from eventloop import Trainer
from eventloop.checkpoint import CheckpointError, load_checkpoint
from eventloop.hooks import (
    AmpOptimizerHook,
    CosineAnnealingLrUpdaterHook,
    CyclicMomentumUpdaterHook,
    EarlyStoppingHook,
    EMAHook,
    Fp16OptimizerHook,
    GradientCumulativeOptimizerHook,
    Hook,
    LrUpdaterHook,
    OptimizerHook,
    ParamSchedulerHook,
    PreciseBN,
    StepLrUpdaterHook,
)
from tests.checkpoints import rewrite
from tests.support.interrupted import stop_after
from tests.support.trainers import MakeTrainer


class Halve(LrUpdaterHook):
    """A user's policy with an argument that is compared, and a function that cannot be."""

    def __init__(self, every: int, fn: Callable[[float], float] = abs, *, by_epoch: bool = True) -> None:
        super().__init__(by_epoch)
        self.every, self.fn = every, fn

    def get_lr(self, trainer: Trainer, base_lr: float) -> float:
        """Return the base rate, halved every so many epochs."""
        return float(self.fn(base_lr * 0.5 ** (trainer.epoch // self.every)))


class Inherits(CyclicMomentumUpdaterHook):
    """A user's policy that inherits the arguments of another one."""


class Temperature(Hook):
    """A user's hook that declares its options in `settings`."""

    def __init__(self, temperature: float, verbose: bool = False) -> None:
        self.temperature, self.verbose = temperature, verbose

    def settings(self) -> dict[str, Any]:
        """Return the options that change the training."""
        return {"temperature": self.temperature, "nothing plain": object()}


class Unrelated(Hook):
    """A hook whose attribute `settings` is not a method."""

    settings = {"a": 1}  # type: ignore[assignment]  # noqa: RUF012

    def __init__(self) -> None:
        self.settings = {"a": 1}


def saved(make_trainer: MakeTrainer, *hooks: Hook) -> None:
    """Train four iterations, and save."""
    trainer = make_trainer(hooks=list(hooks), model=model())
    stop_after(trainer, 4)
    trainer.train()


def model() -> torch.nn.Module:
    """Return a model with batch norm, for PreciseBN."""
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 3))


def refused(make_trainer: MakeTrainer, *hooks: Hook) -> list[str]:
    """Return the changes that the refusal lists."""
    with pytest.raises(
        CheckpointError, match="is of a run with other settings; nothing was loaded:"
    ) as error:
        make_trainer(hooks=list(hooks), model=model()).resume()
    return [line.strip() for line in str(error.value).splitlines()[1:-1]]


CASES: list[tuple[Hook, Hook, list[str]]] = [
    (
        OptimizerHook(grad_clip={"max_norm": 35}),
        OptimizerHook(grad_clip={"max_norm": 1.0}),
        ["optimizer.grad_clip: {'type': 'norm', 'max_norm': 35}"],
    ),
    (
        OptimizerHook(),
        GradientCumulativeOptimizerHook(3, grad_clip={"max_norm": 1}),
        ["optimizer.grad_clip: None", "optimizer.cumulative_iters: 1 in the checkpoint, 3 in this trainer"],
    ),
    (
        Fp16OptimizerHook(loss_scale=512.0),
        Fp16OptimizerHook(loss_scale=64.0),
        ["optimizer.loss_scale: 512.0 in the checkpoint, 64.0 in this trainer"],
    ),
    (
        AmpOptimizerHook("dynamic", "float16"),
        AmpOptimizerHook({"init_scale": 2.0, "growth_interval": 7}, "float16"),
        ["optimizer.growth_interval: 2000 in the checkpoint, 7 in this trainer"],
    ),
    (
        EMAHook(),
        EMAHook("StochasticWeightAverage", interval=2, begin_iter=3),
        ["EMAHook.begin_iter: 0", "EMAHook.ema_type: 'ExponentialMovingAverage'", "EMAHook.interval: 1"],
    ),
    (EMAHook(momentum=0.0002), EMAHook(momentum=0.1), ["EMAHook.momentum: 0.0002 in the checkpoint, 0.1"]),
    (
        PreciseBN(num_iter=2),
        PreciseBN(num_iter=None, interval=1, by_epoch=False, unbiased=True),
        [
            "PreciseBN.interval: -1",
            "PreciseBN.by_epoch: True",
            "PreciseBN.num_iter: 2 in the checkpoint, None",
            "PreciseBN.unbiased: False",
        ],
    ),
    (
        StepLrUpdaterHook([1, 2], gamma=0.5),
        StepLrUpdaterHook([1, 3]),
        [
            "StepLrUpdaterHook.step: [1, 2] in the checkpoint, [1, 3] in this trainer",
            "StepLrUpdaterHook.gamma: 0.5 in the checkpoint, 0.1 in this trainer",
        ],
    ),
    (
        CosineAnnealingLrUpdaterHook(min_lr_ratio=0.1),
        CosineAnnealingLrUpdaterHook(min_lr=0.0, by_epoch=False, warmup="linear", warmup_iters=2),
        [
            "CosineAnnealingLrUpdaterHook.by_epoch: True",
            "CosineAnnealingLrUpdaterHook.warmup: None",
            "CosineAnnealingLrUpdaterHook.warmup_iters: 0",
            "CosineAnnealingLrUpdaterHook.min_lr: None",
            "CosineAnnealingLrUpdaterHook.min_lr_ratio: 0.1",
        ],
    ),
    (
        CyclicMomentumUpdaterHook(),
        CyclicMomentumUpdaterHook(cyclic_times=2),
        ["CyclicMomentumUpdaterHook.cyclic_times: 1 in the checkpoint, 2 in this trainer"],
    ),
    (
        ParamSchedulerHook(),
        ParamSchedulerHook(by_epoch=True, monitor="acc"),
        ["param_scheduler.by_epoch: False", "param_scheduler.monitor: 'loss'"],
    ),
    (Halve(2), Halve(3, fn=float), ["Halve.every: 2 in the checkpoint, 3 in this trainer"]),
    (
        Temperature(0.5),
        Temperature(2.0, verbose=True),
        ["Temperature.temperature: 0.5 in the checkpoint, 2.0"],
    ),
]


@pytest.mark.representative(2)
@pytest.mark.filterwarnings("ignore:cumulative_iters")
@pytest.mark.parametrize(("was", "now", "lines"), CASES)
def test_what_was_changed_is_listed(
    make_trainer: MakeTrainer, was: Hook, now: Hook, lines: list[str]
) -> None:
    """Every changed option is listed by hook and name with both values, and nothing else."""
    saved(make_trainer, was)

    found = refused(make_trainer, now)

    assert len(found) == len(lines), found
    assert all(line.startswith(start) for line, start in zip(found, lines, strict=True)), found


SAME: dict[str, Callable[[], list[Hook]]] = {
    "all of them": lambda: [
        AmpOptimizerHook(dtype="bfloat16", cumulative_iters=2, grad_clip={"max_norm": 1.0}),
        EMAHook(),
        PreciseBN(num_iter=1),
        StepLrUpdaterHook([1, 2], warmup="exp", warmup_iters=3),
        Inherits(),
        Temperature(1.0),
    ],
    "settings that are none": lambda: [Unrelated()],
}


@pytest.mark.filterwarnings("ignore:cumulative_iters")
@pytest.mark.parametrize("name", SAME)
def test_the_same_options_are_no_change(
    make_trainer: MakeTrainer, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    """The same hooks resume without a message, also a second time."""
    saved(make_trainer, *SAME[name]())
    for stop in (5, 6):
        caplog.clear()
        trainer = make_trainer(hooks=SAME[name](), model=model())
        trainer.resume()
        assert caplog.text == ""
        stop_after(trainer, stop)
        trainer.train()


@pytest.mark.parametrize("changed", ["keep", "apply"])
def test_a_hook_keeps_what_it_was_built_with(
    make_trainer: MakeTrainer, caplog: pytest.LogCaptureFixture, changed: Any
) -> None:
    """With "keep" and "apply" a hook continues with its own options, and the log says so."""
    saved(make_trainer, EMAHook())
    trainer = make_trainer(hooks=[EMAHook(momentum=0.1)], model=model())
    with pytest.raises(CheckpointError) as error:
        trainer.resume()
    last = 'with changed="apply" the run continues, and EMAHook.momentum is this trainer\'s'
    assert str(error.value).splitlines()[-1] == last

    trainer.resume(changed=changed)

    why = ': changed="keep" cannot change that' if changed == "keep" else ""
    line = (
        f"EMAHook.momentum: 0.0002 in the checkpoint, 0.1 in this trainer; the run continues with 0.1{why}\n"
    )
    assert line in caplog.text
    stop_after(trainer, 5)
    trainer.train()
    caplog.clear()
    make_trainer(hooks=[EMAHook(momentum=0.1)], model=model()).resume()
    assert caplog.text == ""


def test_when_to_stop_may_be_changed(make_trainer: MakeTrainer, caplog: pytest.LogCaptureFixture) -> None:
    """The patience of EarlyStoppingHook is not compared, because it only changes the length of the run."""
    batch = [(torch.zeros(2, 2), torch.zeros(2, dtype=torch.long))]
    first = make_trainer(hooks=[EarlyStoppingHook("accuracy", patience=2)], val_loader=batch)
    stop_after(first, 4)
    first.train()

    make_trainer(hooks=[EarlyStoppingHook("accuracy", patience=9)], val_loader=batch).resume()

    assert caplog.text == ""


def test_options_are_plain(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    """A checkpoint has the plain options by hook; options that it lacks are not compared."""
    saved(make_trainer, Temperature(0.5), Halve(2))
    path = tmp_path / "run" / "iter_4"

    options = load_checkpoint(path)["meta"]["settings"]["hook_options"]

    assert options["Temperature"] == {"temperature": 0.5}
    assert options["Halve"].items() >= {"every": 2, "by_epoch": True}.items()
    assert "fn" not in options["Halve"]
    assert options["optimizer"] == {"grad_clip": None, "cumulative_iters": 1}
    assert "checkpoint" not in options
    rewrite(path, lambda state: state["meta"]["settings"]["hook_options"]["Halve"].pop("every"))
    make_trainer(hooks=[Temperature(0.5), Halve(3)], model=model()).resume()
