"""Runs whose rate is set by a command: their trainers, their commands, and the rates that they train with."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.optim import lr_scheduler as torch_lr

from eventloop import Trainer
from eventloop.commands.messages import Command, new_id
from eventloop.hooks import (
    CosineAnnealingLrUpdaterHook,
    CyclicLrUpdaterHook,
    OneCycleLrUpdaterHook,
    OneCycleMomentumUpdaterHook,
    ParamSchedulerHook,
    StepLrUpdaterHook,
)
from tests.support.trainers import batches, build_trainer, tiny_model

PER_EPOCH, EPOCHS = 3, 8
ITERS = PER_EPOCH * EPOCHS
AT = 7
"""The number of iterations after which most commands are applied."""

Rates = list[list[float]]
"""The rates of all param groups, by iteration."""


class OwnDecay(torch_lr.LRScheduler):
    """A user's scheduler that multiplies the last rate by what it alone knows."""

    def __init__(self, optimizer: Any) -> None:
        self.secret = 1.0
        super().__init__(optimizer)

    def get_lr(self) -> list[Any]:
        self.secret *= 0.99
        return [group["lr"] * self.secret for group in self.optimizer.param_groups]


def window(kind: str, **arguments: Any) -> dict[str, Any]:
    """Return the config of one of eventloop's schedulers that counts iterations."""
    return {"type": kind, "by_epoch": False, **arguments}


def nested(o: Any) -> list[Any]:
    """A chain whose first part is a sequence; PyTorch's sequence has no chain in it."""
    sequence = torch_lr.SequentialLR(o, [torch_lr.LinearLR(o, 0.1, 1, 10), torch_lr.StepLR(o, 4, 0.5)], [10])
    return [torch_lr.ChainedScheduler([sequence, torch_lr.ExponentialLR(o, 0.95)])]


SCHEDULES: dict[str, Callable[[Any], list[Any]]] = {
    "SequentialLR": lambda o: [
        torch_lr.SequentialLR(
            o,
            [
                torch_lr.LinearLR(o, 0.1, 1, 5),
                torch_lr.StepLR(o, 3, 0.5),
                torch_lr.CosineAnnealingLR(o, 9, 0.01),
            ],
            [5, 15],
        )
    ],
    "OneCycleLR": lambda o: [torch_lr.OneCycleLR(o, 0.5, ITERS, three_phase=True)],
    "ReduceLROnPlateau": lambda o: [
        torch_lr.ReduceLROnPlateau(o, factor=0.5, patience=0, threshold=1e9, min_lr=0.02)
    ],
    "nested": nested,
    "windows": lambda o: [
        window("LinearLR", start_factor=0.1, end=5),
        window("CosineAnnealingLR", begin=5, end=ITERS, eta_min=0.02),
    ],
    "mmcv by iteration": lambda o: [],
    "CyclicLR": lambda o: [torch_lr.CyclicLR(o, 0.01, 0.1, 5, mode="triangular2")],
    "CosineAnnealingLR": lambda o: [torch_lr.CosineAnnealingLR(o, 10, 0.01)],
    "none": lambda o: [],
    "LambdaLR": lambda o: [torch_lr.LambdaLR(o, lambda step: 0.9**step)],
    "MultiplicativeLR": lambda o: [torch_lr.MultiplicativeLR(o, lambda step: 0.9)],
    "StepLR": lambda o: [torch_lr.StepLR(o, 5, 0.3)],
    "MultiStepLR": lambda o: [torch_lr.MultiStepLR(o, [4, 9, 15], 0.3)],
    "ConstantLR": lambda o: [torch_lr.ConstantLR(o, 0.3, 12)],
    "LinearLR": lambda o: [torch_lr.LinearLR(o, 0.1, 1.0, 12)],
    "ExponentialLR": lambda o: [torch_lr.ExponentialLR(o, 0.9)],
    "PolynomialLR": lambda o: [torch_lr.PolynomialLR(o, 20, 0.9)],
    "ChainedScheduler": lambda o: [
        torch_lr.ChainedScheduler([torch_lr.ConstantLR(o, 0.1, 10), torch_lr.ExponentialLR(o, 0.9)])
    ],
    "CosineAnnealingWarmRestarts": lambda o: [torch_lr.CosineAnnealingWarmRestarts(o, 4, 2, 0.001)],
    "two": lambda o: [torch_lr.LinearLR(o, 0.1, total_iters=10), torch_lr.ExponentialLR(o, 0.9)],
    "of the user": lambda o: [OwnDecay(o)],
    "windows by epoch": lambda o: [{"type": "MultiStepLR", "milestones": [2, 4, 6], "gamma": 0.5}],
    "a later window": lambda o: [window("PolyLR", begin=12, end=ITERS, eta_min=0.01)],
    "restarts": lambda o: [window("CosineRestartLR", periods=[6, 8, 10], restart_weights=[1, 0.5, 0.2])],
    "a plateau's window": lambda o: [
        {"type": "ReduceOnPlateauLR", "factor": 0.5, "patience": 0, "threshold": 1e9, "min_value": 0.02}
    ],
    "mmcv by epoch": lambda o: [],
    "mmcv in a cycle": lambda o: [],
    "mmcv in cycles": lambda o: [],
}
"""Schedules of the rate, as the schedulers of an optimizer; PyTorch's have its names."""
HOOKS: dict[str, Callable[[], list[Any]]] = {
    "mmcv by epoch": lambda: [
        StepLrUpdaterHook([2, 4, 6], 0.5, min_lr=0.02, warmup="linear", warmup_iters=5)
    ],
    "mmcv by iteration": lambda: [CosineAnnealingLrUpdaterHook(min_lr=0.01, by_epoch=False)],
    "mmcv in a cycle": lambda: [OneCycleLrUpdaterHook(max_lr=0.3), OneCycleMomentumUpdaterHook()],
    "mmcv in cycles": lambda: [CyclicLrUpdaterHook(target_ratio=(4.0, 0.1), cyclic_times=2)],
}


def set_run(
    directory: Path,
    kind: str = "none",
    *,
    lr: Any = 0.1,
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.SGD,
    schedule: Callable[[Any], list[Any]] | None = None,
    by_epoch: bool = False,
    **options: Any,
) -> Trainer:
    """Return a trainer of two param groups with a schedule of `SCHEDULES`."""
    model = tiny_model()
    first, *rest = model.parameters()
    built = optimizer([{"params": [first]}, {"params": rest, "lr": lr * 2}], lr=lr * 1)  # a tensor of its own
    for group in built.param_groups:
        group |= {"momentum": 0.9} if "momentum" in group else {}
    hooks = [*HOOKS.get(kind, list)(), *options.pop("hooks", [])]
    default_hooks: dict[str, Any] = {"checkpoint": None, "garbage_collection": None}  # no part of what is set
    if by_epoch:
        default_hooks["param_scheduler"] = ParamSchedulerHook(by_epoch=True)
    default_hooks |= options.pop("default_hooks", {})
    arguments: dict[str, Any] = {
        "schedulers": (schedule or SCHEDULES[kind])(built),
        "max_epochs": EPOCHS,
        "train_loader": batches(PER_EPOCH),
        "val_loader": batches(1),
        "hooks": hooks,
        "default_hooks": default_hooks,
        "work_dir": directory,
        **options,
    }
    return build_trainer(model=model, optimizer=built, **arguments)


def setting(given: Mapping[str, Any] | None = None, /, **arguments: Any) -> Command:
    """Return a command `set` as `eventloop tell` sends it; names that are no identifiers come in a mapping."""
    return Command(id=new_id(), command="set", arguments={**(given or {}), **arguments}, source="test")


def receive(trainer: Trainer, after: int, *commands: Command) -> None:
    """Have commands arrive within an iteration, and so applied after so many."""

    def arrive(trainer: Trainer, event: Any) -> None:
        if event.iter + 1 == after:
            trainer.stops.commands.extend(commands)

    trainer.bus.subscribe(arrive, "after_train_iter")


def outcomes(trainer: Trainer) -> list[Any]:
    """Return a list that gets the result of each applied command, and the reason of each refused one."""
    found: list[Any] = []
    trainer.bus.subscribe(lambda trainer, event: found.append(event.result), "command_applied")
    trainer.bus.subscribe(lambda trainer, event: found.append(event.reason), "command_refused")
    return found


def values(trainer: Trainer, name: str = "lr") -> Rates:
    """Train, and return a value of all param groups in each iteration, as a handler reads it."""
    found: Rates = []

    def record(trainer: Trainer, event: Any) -> None:
        groups = trainer.optimizer.param_groups
        found.append([float(group[name] if name in group else group["betas"][0]) for group in groups])

    trainer.bus.subscribe(record, "before_train_iter")
    trainer.train()
    return found


def scaled(rates: Rates, factors: Sequence[float], after: int = AT) -> Rates:
    """Return rates of which those after so many iterations are multiplied, group by group."""
    later = [[rate * factor for rate, factor in zip(row, factors, strict=True)] for row in rates[after:]]
    return [*rates[:after], *later]
