"""Hold the bus, and the trainer that a host drives, for the bridge of one engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from eventloop.assembly.argument_checks import check_bus, check_lists
from eventloop.assembly.attach import check_owner
from eventloop.bridges.driven import DrivenTrainer
from eventloop.bus import Bus
from eventloop.optim.optimizers import Optimizers
from eventloop.registry import HOOKS, build
from eventloop.util.checks import check_bools, check_path


class Ride:
    """A bridge's bus, from the line that makes the bridge, and its trainer, from the host's first run.

    Args:
        host: the engine's name, for errors.
        never: events that this host cannot emit, and why.
        bus, hooks, writers, work_dir, measure: arguments of the bridge.

    Raises:
        TypeError, ValueError: an argument is invalid, or a hook does a part of the loop that the host does.
    """

    def __init__(
        self,
        host: str,
        never: Mapping[str, str],
        bus: Bus | None,
        *,
        hooks: Sequence[Any],
        writers: Sequence[Any],
        work_dir: str | Path | None,
        measure: bool,
    ) -> None:
        check_bus(bus)
        check_lists(hooks=hooks, writers=writers)
        check_bools(measure=measure)
        if work_dir is not None:
            check_path("work_dir", work_dir)
        self.host, self.measure = host, measure
        self.bus = bus if bus is not None else Bus()
        for event, reason in never.items():
            self.bus.exclude([event], reason)
        self._hooks = [build(hook, HOOKS) if isinstance(hook, Mapping) else hook for hook in hooks]
        for hook in self._hooks:
            check_owner(hook, host)
        self._writers, self._work_dir = writers, work_dir
        self.trainer: DrivenTrainer | None = None

    def begin_run(
        self,
        model: torch.nn.Module,
        *,
        native: Any,
        optimizer: Optimizers | None = None,
        max_epochs: int | None = None,
        max_iters: int | None = None,
        by_epoch: bool = True,
        work_dir: str | Path | None = None,
        iter: int = 0,
        epoch: int = 0,
    ) -> DrivenTrainer:
        """Begin a run of the host, and return the trainer, which is built at the first run.

        Args:
            native: the host's own trainer.
            work_dir: the host's directory, used if the bridge was given none.
            iter, epoch: completed iterations and epochs, not 0 if the host has resumed.

        Raises:
            ValueError: the model is another one than in the first run.
        """
        trainer = self.trainer
        if trainer is None:
            trainer = self.trainer = DrivenTrainer(
                model, optimizer=optimizer, max_epochs=max_epochs, max_iters=max_iters, by_epoch=by_epoch,
                hooks=self._hooks, writers=self._writers, bus=self.bus, native=native, host=self.host,
                work_dir=self._work_dir if self._work_dir is not None else work_dir,
            )  # fmt: skip
        elif trainer.model is not model:
            raise ValueError(
                f"this bridge to {self.host} serves the model of its first run, and its hooks hold that "
                f"model's state; got another {type(model).__name__}: make a bridge for each model"
            )
        trainer.native, trainer.optimizer = native, optimizer
        trainer.max_epochs, trainer.max_iters = max_epochs, max_iters
        trainer.iter = trainer.metrics.iter = iter
        trainer.epoch = trainer.metrics.epoch = epoch
        trainer.begin_run()
        return trainer

    def end_run(self, error: BaseException | None = None) -> None:
        """End the host's run: closing events, costs and writers are complete, and no thread is left."""
        if self.trainer is not None and self.trainer.running:
            try:
                self.trainer.end_run(error)
            finally:
                self.bus.close()
