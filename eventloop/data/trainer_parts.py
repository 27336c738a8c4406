"""Describe the trainer to the packages below its loops, which cannot import its class.

The Protocols of `checkpoint`, `resume`, `stops` and `training` add the parts that only these packages use.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, Protocol

import torch

from eventloop.bus import Bus
from eventloop.costs.foreign_calls import ForeignCalls
from eventloop.costs.step_clock import StepClock
from eventloop.data.limits import Counting, Limits
from eventloop.events import Event
from eventloop.events.run import CurrentRun
from eventloop.metrics import EventStorage
from eventloop.ownership.run_ownership import RunOwnership
from eventloop.state.remembered import Remembered

Within = Literal["", "iter", "epoch"]
"""Whether a handler runs at the end of an iteration ("iter") or epoch ("epoch") that is not counted yet."""


class TrainerParts(Protocol):
    """The parts of a trainer that packages below its loops use; `Trainer` documents them."""

    model: torch.nn.Module
    optimizer: Any
    loss_fn: Any
    custom_step: Callable[..., Any] | None
    evaluator: dict[str, Any]
    device: torch.device | None
    hooks: list[Any]
    bus: Bus
    facts: CurrentRun
    clock: StepClock
    metrics: EventStorage
    ownership: RunOwnership
    foreign_calls: ForeignCalls
    remembered: Remembered
    limits: Limits
    counting: Counting
    loader: Iterable[Any] | None
    train_loader: Iterable[Any] | None
    val_loader: Iterable[Any] | None
    test_loader: Iterable[Any] | None
    iter: int
    epoch: int
    batch: Any
    outputs: Any
    passing: Any
    within: Within
    mode: str
    sanity_checking: bool
    compiled: bool
    ignored_outputs: set[str]
    steps_itself: bool
    max_iters: int | None
    max_epochs: int | None
    fast_dev_run: int
    work_dir: Path
    host: str
    rank: int
    world_size: int
    data_ranks: int

    @property
    def by_epoch(self) -> bool: ...
    @property
    def stopping(self) -> bool: ...

    def train_step(self, batch: Any) -> dict[str, Any]: ...
    def val_step(self, batch: Any) -> Mapping[str, Any]: ...
    def announce(self, event_type: type[Event], **fields: Any) -> None: ...
