"""Apply commands in a training of MMEngine, by the runner's own means."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from mmengine.hooks import ParamSchedulerHook

from eventloop.bridges.host_commands import HostSchedules, validate_aside
from eventloop.bridges.hosted import HostedTrainer
from eventloop.bridges.replaced_methods import ReplacedMethods
from eventloop.steering.protocols import CommandError

STEPS = ("after_train_iter", "after_train_epoch", "after_val_epoch")
"""The methods of MMEngine's hook that step schedulers."""


def checkpoint(trainer: HostedTrainer) -> dict[str, str]:
    """Save a checkpoint of MMEngine in the run's directory, for `Runner(load_from=..., resume=True)`."""
    name = f"iter_{trainer.iter}.pth"
    trainer.native.save_checkpoint(str(trainer.work_dir.absolute()), name, by_epoch=False)
    return {"path": str(trainer.work_dir.absolute() / name)}


def validate(trainer: HostedTrainer) -> dict[str, float]:
    """Validate now, by the runner's loop of validation, and answer with the metrics."""
    if (loop := trainer.native.val_loop) is None:
        raise CommandError("the runner has no val_dataloader, val_cfg and val_evaluator")
    return validate_aside(trainer, loop.run, [getattr(loop, "dataloader", None)])


def steer(trainer: HostedTrainer, methods: ReplacedMethods) -> None:
    """Give a trainer the runner's checkpoints, validations and schedulers.

    Args:
        methods: the methods that the bridge replaces until the run ends.
    """
    hooks = [hook for hook in trainer.native.hooks if isinstance(hook, ParamSchedulerHook)]

    def schedulers() -> Iterator[Any]:
        found = trainer.native.param_schedulers if hooks else None
        for each in found.values() if isinstance(found, dict) else [found or []]:
            yield from each

    def follow(schedules: HostSchedules) -> None:
        for hook in hooks:
            for name in STEPS:
                methods.replace(hook, name, schedules.around)

    trainer.commands.known.replace(checkpoint)
    trainer.commands.known.replace(validate)
    trainer.commands.steppers.append(HostSchedules(trainer, schedulers, follow))
