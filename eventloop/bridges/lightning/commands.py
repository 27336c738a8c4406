"""Apply the commands `checkpoint`, `validate` and `set` in a Lightning training, by Lightning's methods."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from eventloop.bridges.host_commands import HostSchedules, validate_aside
from eventloop.bridges.hosted import HostedTrainer
from eventloop.bridges.lightning.costs import replaced
from eventloop.steering.protocols import CommandError


def checkpoint(trainer: HostedTrainer) -> dict[str, str]:
    """Save a Lightning checkpoint in the run's directory; `fit(ckpt_path=...)` resumes from it."""
    native = trainer.native
    path = native.strategy.broadcast(str(trainer.work_dir.absolute() / f"iter_{trainer.iter}.ckpt"))
    native.save_checkpoint(path, weights_only=False)
    return {"path": path}


def validate(trainer: HostedTrainer) -> dict[str, float]:
    """Validate now, by Lightning's validation loop, and answer with the metrics."""
    native = trainer.native
    if not native.enable_validation:
        raise CommandError("the trainer has no validation_step, no loader for it, or limit_val_batches=0")
    loop, connector = native.fit_loop.epoch_loop.val_loop, native._logger_connector

    def run() -> None:
        """Run the validation loop as within an epoch; set the trainer back also after an error."""
        first = connector._first_loop_iter
        native.validating = True
        try:
            loop.run()
        finally:  # as Lightning does after a validation within an epoch
            native.training, connector._first_loop_iter = True, first

    loaders = native.val_dataloaders
    return validate_aside(trainer, run, loaders if isinstance(loaders, list) else [loaders])


def steer(trainer: HostedTrainer) -> None:
    """Make a trainer's commands `checkpoint`, `validate` and `set` use Lightning's methods."""

    def schedulers() -> Iterator[Any]:
        native = trainer.native
        if native.lightning_module.automatic_optimization:  # else the module steps them itself
            yield from (config.scheduler for config in native.lr_scheduler_configs)

    def follow(schedules: HostSchedules) -> None:
        loop = trainer.native.fit_loop.epoch_loop
        trainer.during_run.enter_context(replaced(loop, "update_lr_schedulers", schedules.around))

    commands = trainer.commands
    commands.known.replace(checkpoint)
    commands.known.replace(validate)
    commands.steppers.append(HostSchedules(trainer, schedulers, follow))
    commands.ends_pause = lambda: trainer.native.received_sigterm
