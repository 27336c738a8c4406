"""Declare the trainer and the hooks as commands use them, and a result and an error of commands."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, runtime_checkable

import msgspec

from eventloop.resume.protocols import ResumableTrainer
from eventloop.resume.state import TrainerState
from eventloop.stops.stopping import StoppableTrainer

if TYPE_CHECKING:
    from eventloop.commands.messages import Answer, Applied, Command
    from eventloop.resume.choice import WasRead

Skip = int | Literal["seen"]
"""The number of batches to skip, or "seen" for all batches from the checkpoint to the current iteration."""


class SteeredTrainer(StoppableTrainer, ResumableTrainer, Protocol):
    """The attributes of a trainer that commands use; `Trainer` documents them."""

    state: TrainerState
    commands: Any  # `steering.commands.Commands`, which imports this module

    @property
    def in_steps(self) -> bool: ...

    def val_aside(self) -> dict[str, float]: ...


class Saving(NamedTuple):
    """The result of a command that saves a checkpoint; the command is answered once it is durable."""

    path: Path
    durable: bool = False


class GoingBack(NamedTuple):
    """An accepted rollback: the training ends, the checkpoint is loaded, and the training begins again.

    Attributes:
        read: the checkpoint.
        name: its name in the directories of the run, or its path if it is in none of them.
        skip: the number of batches from its position on that are not trained on.
        scale_lr: the factor of the learning rates.
        stop: whether the run stops when the checkpoint is loaded.
        reason: the reason of the rollback.
        answer, record: the answer and the record of commands to write after the rollback.
    """

    read: WasRead
    name: str
    skip: int
    scale_lr: float
    stop: bool
    reason: str
    answer: Answer | None = None
    record: list[Applied] | None = None

    @property
    def result(self) -> dict[str, Any]:
        """The result of the command: the checkpoint, its number of iterations, and the batches to skip."""
        iteration = int(self.read.checkpoint["meta"]["iter"])
        return {"path": str(self.read.path), "from_iteration": iteration, "skip": self.skip}

    def resolved(self, command: Command) -> Command:
        """Return the command with the checkpoint and number of batches that were chosen, for a repetition."""
        arguments: dict[str, Any] = {"checkpoint": self.name, "skip": self.skip}
        if self.scale_lr != 1:
            arguments["scale_lr"] = self.scale_lr
        if self.stop:
            arguments["stop"] = True
        if self.reason:
            arguments["reason"] = self.reason
        return msgspec.structs.replace(command, words=[], arguments=arguments)


class SchedulerStepper(Protocol):
    """An object that steps another engine's schedulers, and keeps the factors of commands in force.

    The command `set`, such as `lr*=0.5`, has a factor for a value that a scheduler writes.
    """

    def steps(self, optimizer: Any, option: str) -> bool:
        """Return whether one of its schedulers writes an option of an optimizer."""

    def follow_factors(self) -> None:
        """From now on, remove the factors set by commands before each step, and apply them after it."""


@runtime_checkable
class CheckpointSaver(Protocol):
    """A hook that saves checkpoints, such as `CheckpointHook`."""

    can_be_resumed: bool

    def save_now(self, trainer: Any, suffix: str = "") -> Saving:
        """Save a checkpoint between two iterations; `suffix` is appended to its name."""

    def known(self) -> list[Path]:
        """Return the paths of the checkpoints of this hook that exist."""

    def directory_for(self, work_dir: Path) -> Path:
        """Return the directory in which a run with this `work_dir` saves its checkpoints."""


@runtime_checkable
class Tracer(Protocol):
    """A hook that records iterations, such as `TraceHook`."""

    def trace_now(self, trainer: Any, iterations: int) -> Path:
        """Start to record the next iterations, and return the path that the file will have."""


@runtime_checkable
class FactorFollower(Protocol):
    """A hook that steps the trainer's schedulers, such as `ParamSchedulerHook`.

    As a `SchedulerStepper` it keeps in force the factors by which commands multiply the schedulers' values.
    """

    def follow_factors(self) -> None:
        """From now on, remove the factors set by commands before each step, and apply them after it."""


def savers(hooks: Iterable[object]) -> list[CheckpointSaver]:
    """Return the hooks that save checkpoints from which a run can be resumed."""
    return [hook for hook in hooks if isinstance(hook, CheckpointSaver) and hook.can_be_resumed]


class CommandError(Exception):
    """Raised by a command that cannot be applied with its arguments or now; the text is the answer."""
