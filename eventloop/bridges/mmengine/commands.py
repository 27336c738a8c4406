"""Apply the commands `checkpoint`, `validate` and `set` in a training of MMEngine, by the runner's code."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from mmengine.hooks import ParamSchedulerHook

from eventloop.bridges.host_commands import HostSchedules, validate_aside
from eventloop.bridges.hosted import HostedTrainer
from eventloop.bridges.replaced_methods import ReplacedMethods
from eventloop.steering.protocols import CommandError

STEPS = ("after_train_iter", "after_train_epoch", "after_val_epoch")
"""The methods of MMEngine's ParamSchedulerHook, which steps schedulers."""


def checkpoint(trainer: HostedTrainer) -> dict[str, str]:
    """Save an MMEngine checkpoint in the run's directory; `Runner(load_from=..., resume=True)` loads it."""
    name = f"iter_{trainer.iter}.pth"
    trainer.native.save_checkpoint(str(trainer.work_dir.absolute()), name, by_epoch=False)
    return {"path": str(trainer.work_dir.absolute() / name)}


def validate(trainer: HostedTrainer) -> dict[str, float]:
    """Validate now, by the runner's `val_loop`, and answer with the metrics."""
    if (loop := trainer.native.val_loop) is None:
        raise CommandError("the runner has no val_dataloader, val_cfg and val_evaluator")
    return validate_aside(trainer, loop.run, [getattr(loop, "dataloader", None)])


def steer(trainer: HostedTrainer, methods: ReplacedMethods) -> None:
    """Make a trainer's commands `checkpoint`, `validate` and `set` use the methods of its MMEngine runner.

    Args:
        methods: the methods that the bridge replaces until the run ends.
    """
    hooks = [hook for hook in trainer.native.hooks if isinstance(hook, ParamSchedulerHook)]

    def schedulers() -> Iterator[Any]:
        """Yield the schedulers that the runner has now; none without a hook that steps them."""
        if not hooks:
            return
        configured = trainer.native.param_schedulers  # a list, or lists by the name of an optimizer, or None
        if isinstance(configured, dict):
            for named in configured.values():
                yield from named
        else:
            yield from configured or []

    def follow(schedules: HostSchedules) -> None:
        for hook in hooks:
            for name in STEPS:
                methods.replace(hook, name, schedules.around)

    trainer.commands.known.replace(checkpoint)
    trainer.commands.known.replace(validate)
    trainer.commands.steppers.append(HostSchedules(trainer, schedulers, follow))
