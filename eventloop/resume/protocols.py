"""Declare the parts of a trainer that a resume needs, so that it can be tested without a Trainer."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

import torch

from eventloop.bus import Bus
from eventloop.checkpoint.saving.overlapped_copy import Copying
from eventloop.data.limits import Limits
from eventloop.data.position import LoaderPosition
from eventloop.events import Event
from eventloop.metrics import EventStorage
from eventloop.ownership.run_ownership import RunOwnership


class EvaluationSchedule(Protocol):
    """The schedule of a run's validations."""

    def settings(self) -> dict[str, Any]:
        """Return the settings of the schedule that a resume compares, by name."""


class ResumableTrainer(Protocol):
    """A trainer as a resume sees it: the parts that a checkpoint holds, and those that are compared."""

    model: torch.nn.Module
    optimizer: Any
    loss_fn: Any
    schedulers: list[Any]
    hooks: list[Any]
    bus: Bus
    metrics: EventStorage
    position: LoaderPosition
    copying: Copying
    ownership: RunOwnership
    autocast: Callable[[], AbstractContextManager[Any]]
    iter: int
    epoch: int
    max_iters: int | None
    max_epochs: int | None
    limits: Limits
    loader: Iterable[Any] | None
    checkpoint: dict[str, Any] | None
    checkpoint_dir: Path
    rank: int
    world_size: int

    @property
    def _schedule(self) -> EvaluationSchedule: ...

    @property
    def by_epoch(self) -> bool:
        """Return whether the length of the run is given in epochs."""

    def announce(self, event_type: type[Event], **fields: Any) -> None:
        """Emit an event with the trainer's counters."""
