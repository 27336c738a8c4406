"""Declare the trainer and the hooks as commands use them, and a result and an error of commands."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

from eventloop.resume.protocols import ResumableTrainer
from eventloop.resume.state import TrainerState
from eventloop.stops.stopping import StoppableTrainer


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


class SchedulerStepper(Protocol):
    """An object that steps schedulers of another engine, and applies the factors of commands after that."""

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
    """A hook that steps the trainer's schedulers, such as `ParamSchedulerHook`."""

    def follow_factors(self) -> None:
        """From now on, remove the factors set by commands before each step, and apply them after it."""


def savers(hooks: Iterable[object]) -> list[CheckpointSaver]:
    """Return the hooks that save checkpoints from which a run can be resumed."""
    return [hook for hook in hooks if isinstance(hook, CheckpointSaver) and hook.can_be_resumed]


class CommandError(Exception):
    """Raised by a command that cannot be applied with its arguments or now; the text is the answer."""
