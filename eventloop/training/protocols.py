"""Declare the attributes and methods of a trainer that the loops and scopes use."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any, Protocol

from eventloop.description.record import Begin
from eventloop.evaluation.evaluation import Evaluator
from eventloop.evaluation.monitored_metrics import MonitoredMetrics
from eventloop.model.training_modes import TrainingModes
from eventloop.steering.commands import Commands
from eventloop.steering.protocols import SteeredTrainer
from eventloop.stops.stopping import Pass


class LoopTrainer(SteeredTrainer, Protocol):
    """A trainer with the attributes and methods that its loops use; `Trainer` documents them."""

    evaluator: dict[str, Evaluator]
    writers: list[Any]
    modes: TrainingModes
    passing: Pass | None
    monitored: MonitoredMetrics
    during_run: ExitStack
    commands: Commands
    begun: Begin | None
    steps_in_hook: bool

    def open_run(self, *, trains: bool) -> None: ...
    def open_epoch(self) -> None: ...
    def begin_iter(self, batch: Any) -> bool: ...
    def end_iter(self, outputs: Any) -> bool: ...
    def skip_iter(self) -> None: ...
    def refuse_within(self, what: str) -> None: ...
    def completed_iteration(self) -> None: ...
    def completed_epoch(self) -> None: ...
