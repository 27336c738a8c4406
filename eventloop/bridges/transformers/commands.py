"""Apply commands such as `checkpoint` in a training of Transformers (the host), by the host's methods."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from eventloop.bridges.driven import DrivenTrainer
from eventloop.bridges.host_commands import HostSchedules, validate_aside
from eventloop.bridges.hosted import HostedTrainer
from eventloop.state.undo import Undo
from eventloop.steering.protocols import CommandError, Saving

_REQUESTS = ("should_evaluate", "should_log", "should_save")
"""The flags of the host's `control` by which callbacks make requests; an evaluation resets some of them."""


class HostCommands:
    """Apply the commands `checkpoint`, `validate` and `set` by the methods of a Transformers trainer.

    A command `checkpoint` only sets `saves`. At the end of the host's step the bridge therefore sets
    `control.should_save`. The host saves after all callbacks, and at its `on_save` the bridge calls
    `report_saved`.
    """

    def __init__(self) -> None:
        self.saves = False
        """True from the command `checkpoint` until the host has saved."""
        self.schedules: HostSchedules | None = None

    def steer(self, trainer: HostedTrainer) -> None:
        """Make a trainer's commands `checkpoint`, `validate` and `set` use the methods of the host."""
        self.schedules = HostSchedules(trainer, lambda: [trainer.native.lr_scheduler])
        trainer.commands.known.replace(self._checkpoint())
        trainer.commands.known.replace(validate)
        trainer.commands.steppers.append(self.schedules)

    def report_saved(self, trainer: DrivenTrainer) -> None:
        """Answer the commands that wait for the checkpoint, once the host has saved."""
        self.saves = False
        path = checkpoint_path(trainer)
        trainer.commands.saved(str(path), "" if path.is_dir() else "Transformers saved elsewhere")

    def before_schedule(self) -> None:
        """Remove the factors of commands before the host's scheduler makes its step."""
        if self.schedules is not None and self.schedules.following:
            self.schedules.remove()

    def after_schedule(self) -> None:
        """Apply the factors of commands to the values that the host's scheduler has written."""
        if self.schedules is not None and self.schedules.following:
            self.schedules.apply()

    def _checkpoint(self) -> Callable[[HostedTrainer], Saving]:
        """Return the function that applies the command `checkpoint`."""

        def checkpoint(trainer: HostedTrainer) -> Saving:
            """Save a Transformers checkpoint; `resume_from_checkpoint` resumes from it."""
            if trainer.commands.paused:
                raise CommandError(
                    "Transformers saves after its step, which ends when the run goes on: go first"
                )
            self.saves = True
            return Saving(checkpoint_path(trainer))

        return checkpoint


def checkpoint_path(trainer: DrivenTrainer) -> Path:
    """Return the absolute path of the folder in which the host saves a checkpoint at its present step."""
    host = trainer.native
    return Path(host.args.output_dir, f"{PREFIX_CHECKPOINT_DIR}-{host.state.global_step}").absolute()


def validate(trainer: HostedTrainer) -> dict[str, float]:
    """Validate now, by the host's `evaluate`, and answer with the metrics."""
    host = trainer.native
    if host.eval_dataset is None:
        raise CommandError("the Trainer of Transformers has no eval_dataset")
    undo = Undo()
    with undo, undo:  # twice: an interrupt may skip one of the two exits
        undo.attributes(host.control, *_REQUESTS)
        return validate_aside(trainer, host.evaluate)
