"""Provide MMEngine's schedulers by their names and parameters, and build schedulers from configs.

    Trainer(..., schedulers=[
        dict(type="LinearLR", start_factor=0.001, by_epoch=False, begin=0, end=500),
        dict(type="MultiStepLR", milestones=[8, 11], gamma=0.1),
    ])

Each is a `Window`: it runs a scheduler of PyTorch from the step `begin` to the step `end` of the run. Several
can be combined, as each continues from the current value. `begin` and `end` count epochs, or iterations with
`by_epoch=False`; arguments such as `milestones` are counted from `begin`. The `...Momentum` classes schedule
`momentum`, or the first of `betas`, and a subclass with another `param_name` schedules that value:

    class LinearWeightDecay(LinearLR):
        param_name = "weight_decay"
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from torch.optim import Optimizer
from torch.optim import lr_scheduler as torch_lr

from eventloop.events.run import Run
from eventloop.migration.tables import CLASSES
from eventloop.optim.cycles import CosineRestartLR, OneCycleLR, ReduceOnPlateauLR
from eventloop.optim.decays import (
    ConstantLR,
    CosineAnnealingLR,
    ExponentialLR,
    LinearLR,
    MultiStepLR,
    NamedWindow,
    PolyLR,
    StepLR,
)
from eventloop.optim.optimizers import Optimizers, named_optimizers
from eventloop.optim.windows import Window
from eventloop.registry import Registry, build
from eventloop.util.suggest import suggest


class _OfMomentum(Window):
    """Schedule `momentum`, or the first of `betas`.

    It must be the first base of each class named after momentum.
    """

    param_name = "momentum"


class StepMomentum(_OfMomentum, StepLR):
    """Schedule the momentum as `StepLR` does the learning rate."""


class MultiStepMomentum(_OfMomentum, MultiStepLR):
    """Schedule the momentum as `MultiStepLR` does the learning rate."""


class ConstantMomentum(_OfMomentum, ConstantLR):
    """Schedule the momentum as `ConstantLR` does the learning rate."""


class LinearMomentum(_OfMomentum, LinearLR):
    """Schedule the momentum as `LinearLR` does the learning rate."""


class ExponentialMomentum(_OfMomentum, ExponentialLR):
    """Schedule the momentum as `ExponentialLR` does the learning rate."""


class CosineAnnealingMomentum(_OfMomentum, CosineAnnealingLR):
    """Schedule the momentum as `CosineAnnealingLR` does the learning rate."""


class PolyMomentum(_OfMomentum, PolyLR):
    """Schedule the momentum as `PolyLR` does the learning rate."""


class CosineRestartMomentum(_OfMomentum, CosineRestartLR):
    """Schedule the momentum as `CosineRestartLR` does the learning rate."""


class ReduceOnPlateauMomentum(_OfMomentum, ReduceOnPlateauLR):
    """Schedule the momentum as `ReduceOnPlateauLR` does the learning rate."""


__all__ = [
    "ConstantLR",
    "ConstantMomentum",
    "CosineAnnealingLR",
    "CosineAnnealingMomentum",
    "CosineRestartLR",
    "CosineRestartMomentum",
    "ExponentialLR",
    "ExponentialMomentum",
    "LinearLR",
    "LinearMomentum",
    "MultiStepLR",
    "MultiStepMomentum",
    "OneCycleLR",
    "PolyLR",
    "PolyMomentum",
    "ReduceOnPlateauLR",
    "ReduceOnPlateauMomentum",
    "StepLR",
    "StepMomentum",
    "Window",
]

SCHEDULERS = Registry("scheduler", __name__)
"""The registry of schedulers for configs: `@SCHEDULERS.register` adds a class that takes `optimizer`."""


def build_schedulers(schedulers: list[Any], optimizer: Optimizers | None, run: Run) -> None:
    """Replace the configs in a list of schedulers by schedulers, one for each of the trainer's optimizers.

    `type` is a class, or a name from this module, from your own `@SCHEDULERS.register`, or from
    `torch.optim.lr_scheduler`. If a schedule of this module needs an `end` and none is given, it ends with
    the run. With `convert_to_iter_based=True` the arguments are in epochs, and the scheduler is stepped after
    each iteration.

    Args:
        schedulers: the list, in which each config `dict(type=..., **arguments)` is replaced.
        optimizer: the trainer's optimizer, or its optimizers by name.
        run: the length of the run.

    Raises:
        TypeError, ValueError: an unknown type or argument (with a suggestion), or a value that the scheduler
            refuses.
    """
    built: list[Any] = []
    for given in schedulers:
        if not isinstance(given, Mapping):
            built.append(given)
            continue
        optimizers = named_optimizers(optimizer)
        if not optimizers:
            raise ValueError(
                "a scheduler's config needs the trainer's optimizer: pass optimizer=... to the Trainer"
            )
        built += [_build(given, each, run) for each in optimizers.values()]
    schedulers[:] = built


def check_windows(schedulers: Sequence[Any], run: Run) -> None:
    """Warn of schedules that extend beyond the run, probably because their unit is wrong.

    Warns:
        UserWarning: a window begins at or ends after the end of the run.
    """
    for scheduler in schedulers:
        if not isinstance(scheduler, Window):
            continue
        unit, total = ("epoch", run.max_epochs) if scheduler.by_epoch else ("iteration", run.max_iters)
        if total is not None and (scheduler.begin >= total or (scheduler.end or 0) > total):
            warnings.warn(
                f"{type(scheduler).__name__} runs from {unit} {scheduler.begin} to {scheduler.end}, and the "
                f"run has {total}: by_epoch={scheduler.by_epoch} is the unit of begin and end",
                UserWarning,
                stacklevel=2,
            )


def _build(config: Mapping[str, Any], optimizer: Optimizer, run: Run) -> Any:
    """Return the scheduler of a config for one optimizer; see `build_schedulers`."""
    arguments = dict(config)
    if "type" not in arguments:
        raise TypeError(f"expected a scheduler or a config dict(type=...), got {config!r}")
    cls = _find(arguments.pop("type"))
    convert = arguments.pop("convert_to_iter_based", False)
    length_from = cls.length_from if issubclass(cls, NamedWindow) else None
    if length_from is not None and arguments.get(length_from) is None and arguments.get("end") is None:
        arguments["end"] = run.max_epochs if arguments.get("by_epoch", True) else run.max_iters
    if not convert:
        return build({"type": cls, **arguments}, optimizer=optimizer)
    if not issubclass(cls, NamedWindow):
        raise TypeError(
            f"convert_to_iter_based is for schedules of eventloop.optim.schedulers, not {cls.__name__}"
        )
    if run.iters_per_epoch is None:
        raise ValueError(
            "convert_to_iter_based needs a train_loader with a length: write the schedule in iterations"
        )
    return cls.build_iter_from_epoch(optimizer, epoch_length=run.iters_per_epoch, **arguments)


def _find(kind: Any) -> type:
    """Return the class of a scheduler, given the class or its name; the error suggests the nearest name."""
    if isinstance(kind, type):
        return kind
    scheduler_class = SCHEDULERS.find(kind) if isinstance(kind, str) else None
    if scheduler_class is None and kind in torch_lr.__all__:
        scheduler_class = getattr(torch_lr, kind)
    if scheduler_class is None:
        if kind in CLASSES:
            raise ValueError(f"unknown scheduler {kind!r}: use {CLASSES[kind]}")
        known = [*dict.fromkeys([*SCHEDULERS.names(), *torch_lr.__all__])]
        raise ValueError(f"unknown scheduler {kind!r}{suggest(str(kind), known)}")
    return scheduler_class
