"""Declare the parts of a trainer that commands need, and what a command may return."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

from eventloop.resume.protocols import ResumableTrainer
from eventloop.resume.state import TrainerState
from eventloop.stops.stopping import StoppableTrainer


class SteeredTrainer(StoppableTrainer, ResumableTrainer, Protocol):
    """A trainer as the commands see it; `Trainer` documents the attributes."""

    state: TrainerState
    commands: Any  # `steering.commands.Commands`, which imports this module

    @property
    def in_steps(self) -> bool: ...

    def val_aside(self) -> dict[str, float]: ...


class Saving(NamedTuple):
    """The result of a command that saves a checkpoint: it is answered once the checkpoint is durable."""

    path: Path
    durable: bool = False


class SchedulerStepper(Protocol):
    """What steps schedulers, and multiplies what they give by the factors of commands."""

    def steps(self, optimizer: Any, option: str) -> bool:
        """Return whether one of its schedulers writes an option of an optimizer."""

    def follow_factors(self) -> None:
        """Step the schedulers without factors from now on, and apply these afterwards."""


@runtime_checkable
class CheckpointSaver(Protocol):
    """A hook that saves checkpoints, such as `CheckpointHook`."""

    can_be_resumed: bool

    def save_now(self, trainer: Any, suffix: str = "") -> Saving:
        """Save a checkpoint between two iterations; the suffix makes its name a new one."""

    def known(self) -> list[Path]:
        """Return the paths of the checkpoints that are kept."""

    def directory_for(self, work_dir: Path) -> Path:
        """Return the directory in which a run with this `work_dir` saves its checkpoints."""


@runtime_checkable
class Tracer(Protocol):
    """A hook that records iterations, such as `TraceHook`."""

    def trace_now(self, trainer: Any, iterations: int) -> Path:
        """Record the next iterations, and return the path of the file."""


@runtime_checkable
class FactorFollower(Protocol):
    """A hook that steps the trainer's schedulers, such as `ParamSchedulerHook`."""

    def follow_factors(self) -> None:
        """Step the schedulers without factors from now on, and apply these afterwards."""


def savers(hooks: Iterable[object]) -> list[CheckpointSaver]:
    """Return the hooks whose checkpoints a run can be resumed from."""
    return [hook for hook in hooks if isinstance(hook, CheckpointSaver) and hook.can_be_resumed]


class CommandError(Exception):
    """Raised by a command that refuses its arguments, or the moment; the text is the answer."""
