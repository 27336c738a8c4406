"""Go back to a checkpoint within a run.

The command `rollback` reads and checks the checkpoint at the end of an iteration. If a run cannot be resumed
from it, the command is refused, and the training goes on. Otherwise the training ends there, `go_back` loads
the checkpoint, and the training begins again, as in a new process that has resumed.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from eventloop.checkpoint.commit import MANIFEST
from eventloop.checkpoint.directory import Found, scan
from eventloop.checkpoint.retention.run_directory import record_rewind
from eventloop.events import RolledBack
from eventloop.resume import restoring
from eventloop.resume.choice import OlderThan, WasRead
from eventloop.state.exchange import decided_by_rank_0
from eventloop.steering.protocols import CommandError, GoingBack, Skip, SteeredTrainer, savers
from eventloop.steering.set_values import set_values
from eventloop.util.errors import CheckpointError

IN_STEPS = (
    "expected a run of train(), run() or epochs(), got one of begin_run(), whose loop fetches the batches "
    "itself: stop it, and resume from the checkpoint"
)


INTERNAL = ("before", "until", "scale_lr", "stop", "reason")
"""The parameters of the command that only `RollbackHook` passes; the help does not show them."""


def rollback(
    trainer: SteeredTrainer,
    checkpoint: str = "",
    skip: Skip = 0,
    before: int = 0,
    until: int = 0,
    scale_lr: float = 1.0,
    stop: bool = False,
    reason: str = "",
) -> GoingBack:
    """Go back to a checkpoint, by default the newest one before this iteration, and skip batches there."""
    if trainer.in_steps:
        raise CommandError(IN_STEPS)
    if trainer.commands.going_back is not None:
        raise CommandError(f"the run goes back to {trainer.commands.going_back.name} already")
    if trainer.stop_reason is not None:
        raise CommandError(f"the run is stopping: {trainer.stop_reason}")
    if skip != "seen" and skip < 0:
        raise CommandError(f"expected a number of batches to skip, at least 0, got {skip}")
    if not scale_lr > 0:
        raise CommandError(f"expected a factor scale_lr above 0, got {scale_lr}")
    read = _read(trainer, checkpoint, before)
    batches = decided_by_rank_0(lambda: _batches_since(trainer, read, until)) if skip == "seen" else skip
    return GoingBack(read, _name(trainer, read.path), batches, scale_lr, stop, reason)


def _read(trainer: SteeredTrainer, checkpoint: str, before: int) -> WasRead:
    """Read and check the checkpoint to go back to; a collective.

    Args:
        checkpoint: its path or name; "" for the newest checkpoint of an earlier iteration than `before`.
        before: a number of iterations; 0, or a number above the current iteration, means that iteration.

    Raises:
        CommandError: there is no such checkpoint, or a run cannot be resumed from it.
    """
    iteration = min(before or trainer.iter, trainer.iter)
    try:
        read = restoring.read(trainer.state, checkpoint or OlderThan(iteration))
        restoring.check(trainer.state, read)
    except FileNotFoundError as error:
        if checkpoint:
            raise CommandError(str(error)) from None
        raise CommandError(f"no checkpoint is older than iteration {iteration}: {error}") from None
    except (CheckpointError, OSError) as error:
        raise CommandError(str(error)) from None
    return read


def _batches_since(trainer: SteeredTrainer, read: WasRead, until: int) -> int:
    """Return the number of batches read since a checkpoint, for `skip="seen"`.

    Batches that the run skips anyway after a load of the checkpoint are not counted.

    Args:
        until: batches of later iterations than this one are not counted; 0 for the current iteration.
    """
    meta: Mapping[str, Any] = read.checkpoint["meta"]
    later_iterations = trainer.iter - min(until or trainer.iter, trainer.iter)
    passed = meta["position"].get("passed")
    if passed is None:  # saved by an earlier version of eventloop
        return max(0, trainer.iter - int(meta["iter"]) - later_iterations)
    skipped = int(meta["position"].get("to_skip", 0))
    later = trainer.position.batches_of(later_iterations)
    return max(0, trainer.position.passed - int(passed) - skipped - later)


def _name(trainer: SteeredTrainer, path: Path) -> str:
    """Return a text by which a repetition of the run finds a checkpoint.

    It is the name of a checkpoint in one of the run's directories, and the absolute path of any other.
    """
    directories = [directory.resolve() for directory in trainer.state.directories]
    return path.name if path.resolve().parent in directories else str(path.absolute())


def go_back(trainer: SteeredTrainer, rollback: GoingBack) -> None:
    """Load the checkpoint of a rollback, between two trainings; a collective.

    Raises:
        Exception: a hook or handler raised it while the checkpoint was loaded. Nothing is loaded then.
    """
    # before the load, so that hooks receive these values as those of the abandoned iterations
    trainer.metrics.read_pending()
    applied_commands = trainer.applied_commands
    restoring.load(trainer.state, rollback.read, by_name=True)
    trainer.applied_commands = applied_commands  # not those of the checkpoint: a rollback undoes no command
    trainer.metrics.losses.reset()
    trainer.batch = trainer.outputs = None
    trainer.position.to_skip += rollback.skip
    if rollback.scale_lr != 1:
        set_values(trainer, {"lr*": rollback.scale_lr})
    trainer.stops.went_back()
    path = rollback.read.path
    trainer.announce(RolledBack, path=str(path), reason=rollback.reason, skipped=rollback.skip)
    _save_state_after(trainer, path)
    if rollback.stop:
        trainer.stops.request(rollback.reason or f"rolled back to {rollback.name}")


def _save_state_after(trainer: SteeredTrainer, path: Path) -> None:
    """Save a checkpoint after a rollback, wait until it is durable, and record the rollback.

    If the process is killed before that, a resume begins at the newest checkpoint from before the rollback.
    If it is killed later, a resume begins at the new checkpoint, skips the same batches as this run, and has
    the applied commands.

    Args:
        path: the checkpoint to which the run went back.
    """
    if not (hooks := savers(trainer.hooks)):
        return
    before: list[Found] = []  # the checkpoints before the save; filled on rank 0
    decided_by_rank_0(lambda: before.append(scan(*trainer.state.directories)))
    saved = hooks[0].save_now(trainer, "_rollback").path
    trainer.state.finish_saves()
    if decided_by_rank_0(lambda: (saved / MANIFEST).exists()):
        decided_by_rank_0(lambda: record_rewind(trainer.state.directories, path, before[0]))
        trainer.state.went_back_to, trainer.state.resumed_from = None, saved.absolute()
