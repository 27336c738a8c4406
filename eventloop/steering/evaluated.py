"""Define the command with which an evaluator reports the metrics of a checkpoint to the training.

`eventloop.sidecar` sends the command, and the hooks handle the event `checkpoint_evaluated` like a validation
of the training itself.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from eventloop.commands.messages import EVALUATED
from eventloop.events import CheckpointEvaluated
from eventloop.steering.protocols import CheckpointSaver, CommandError, SteeredTrainer
from eventloop.steering.signature import CommandSpec


def evaluated(
    trainer: SteeredTrainer, name: str, iter: int, epoch: int, metrics: dict[str, float | str]
) -> None:
    """Report the metrics of a checkpoint; `eventloop evaluate` sends this command."""
    refuse_future(trainer, iter)
    for command in trainer.commands.recorded:
        if command.command == EVALUATED and command.arguments.get("iter") == iter:
            raise CommandError(
                f"the checkpoint of iteration {iter} has its metrics, since iteration {command.iter}"
            )
    try:
        scores = {metric: float(value) for metric, value in metrics.items()}
    except ValueError as error:
        raise CommandError(f"expected numbers as metrics, got {metrics!r}: {error}") from None
    event = CheckpointEvaluated(
        path=str(_path_of(trainer, name)),
        metrics=scores,
        iter=iter,
        epoch=epoch,
        max_iters=trainer.max_iters,
        max_epochs=trainer.max_epochs,
    )
    if trainer.bus.wants(CheckpointEvaluated):
        trainer.bus.emit(event, trainer)


def refuse_future(trainer: SteeredTrainer, iteration: Any) -> None:
    """Refuse metrics that an evaluator reports for an iteration that this run has not reached.

    The evaluator has read a checkpoint of another run, or of iterations that this run has abandoned by a
    rollback.

    Raises:
        CommandError: `iteration` is beyond the run's iteration, or is no int.
    """
    if not isinstance(iteration, int) or iteration > trainer.iter:
        raise CommandError(
            f"expected a checkpoint of this run, which is at iteration {trainer.iter}, got one of iteration "
            f"{iteration!r}"
        )


def _path_of(trainer: SteeredTrainer, name: str) -> Path:
    """Return the path of the checkpoint with a name, among those of the hooks or in the `work_dir`."""
    for hook in trainer.hooks:
        for path in hook.known() if isinstance(hook, CheckpointSaver) else ():
            if path.name == name:
                return path
    return trainer.work_dir / name


EVALUATED_SPEC = CommandSpec(EVALUATED, evaluated)
