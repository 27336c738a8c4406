"""Declare the parts of a trainer that the loops and scopes need."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from typing import Any, Protocol

import torch

from eventloop.bus import Bus
from eventloop.costs.step_clock import StepClock
from eventloop.data.limits import Limits
from eventloop.data.position import LoaderPosition, Within
from eventloop.evaluation.evaluation import Evaluator
from eventloop.evaluation.monitored_metrics import MonitoredMetrics
from eventloop.events import Event
from eventloop.events.run import CurrentRun
from eventloop.metrics import EventStorage
from eventloop.model.training_modes import TrainingModes
from eventloop.ownership.run_ownership import RunOwnership
from eventloop.stops.stopping import Pass, Stopping


class LoopTrainer(Protocol):
    """A trainer as its loops see it; `Trainer` documents the attributes."""

    model: torch.nn.Module
    evaluator: dict[str, Evaluator]
    device: torch.device | None
    train_loader: Iterable[Any] | None
    val_loader: Iterable[Any] | None
    test_loader: Iterable[Any] | None
    loader: Iterable[Any] | None
    max_epochs: int | None
    max_iters: int | None
    limits: Limits
    data_ranks: int
    world_size: int

    bus: Bus
    facts: CurrentRun
    writers: list[Any]
    clock: StepClock
    metrics: EventStorage
    position: LoaderPosition
    stops: Stopping
    modes: TrainingModes
    passing: Pass | None
    monitored: MonitoredMetrics
    during_run: ExitStack
    ownership: RunOwnership

    iter: int
    epoch: int
    batch_idx: int
    batch: Any
    outputs: Any
    within: Within
    steps_in_hook: bool
    ignored_outputs: set[str]
    running: bool
    asked_to_stop: bool
    ends_program: bool
    delivering: bool
    stop_reason: str | None
    stop_signal: int | None
    failure: BaseException | None
    where_to_resume: str

    @property
    def by_epoch(self) -> bool: ...
    @property
    def stopping(self) -> bool: ...
    @property
    def mode(self) -> str: ...
    @mode.setter
    def mode(self, mode: str) -> None: ...

    def val_step(self, batch: Any) -> Mapping[str, Any]: ...
    def announce(self, event_type: type[Event], **fields: Any) -> None: ...
    def open_run(self, *, trains: bool) -> None: ...
    def open_epoch(self) -> None: ...
    def begin_iter(self, batch: Any) -> bool: ...
    def end_iter(self, outputs: Any) -> bool: ...
    def refuse_within(self, what: str) -> None: ...
    def completed_iteration(self) -> None: ...
    def completed_epoch(self) -> None: ...
