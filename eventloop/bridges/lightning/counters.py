"""Copy our trainer's counters and metrics to the Lightning trainer that callbacks receive. It never runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from importlib import import_module
from typing import Any

import torch

from eventloop.bridges.foreign import ForeignCall
from eventloop.data.loader_info import named_loaders
from eventloop.events.priority import Priority
from eventloop.metrics.scalar_value import single_numbers


class Counters:
    """Handlers that copy our trainer's counters and metrics to a Lightning trainer.

    Args:
        pl: Lightning's package.
        native: the Lightning trainer.
        module: the LightningModule.
    """

    def __init__(self, pl: Any, native: Any, module: Any) -> None:
        self._pl, self._native, self._module = pl, native, module
        self._steps = 0  # number of optimizer steps
        self._epoch = 0  # completed epochs; Lightning completes an epoch after the validation that follows it

    def calls(self) -> Iterator[ForeignCall]:
        """Yield the subscriptions that copy; their priorities put them before or after all callbacks."""
        for event, fn in (
            ("before_train", self._begin),
            ("before_train_epoch", self._next_epoch),
            ("before_train_iter", self._copy_counters),
            ("after_train", self._next_epoch),
            ("before_val", partial(self._evaluate, True)),
            ("before_test", partial(self._evaluate, True)),
            ("after_val_epoch", self._copy_metrics),
            ("after_test_epoch", self._copy_metrics),
            ("after_optimizer_step", self._count_step),
        ):
            yield ForeignCall(f"counters.{event}", (event,), fn, Priority.HIGHEST)
        # priority 45: after the optimizer hook has made its step
        yield ForeignCall("counters.after_train_iter", ("after_train_iter",), self._after_train_iter, 45)
        for event in ("after_val", "after_test"):
            end = partial(self._evaluate, False)
            yield ForeignCall(f"counters.{event}", (event,), end, Priority.LOWEST)

    def _begin(self, trainer: Any, event: Any) -> None:
        """Set the Lightning trainer's lengths, schedulers and counters when our trainer begins to train."""
        native = self._native
        native.should_stop = False
        length = trainer.limits.length("train", trainer.train_loader)
        native.fit_loop.max_batches = float("inf") if length is None else length
        loaders = named_loaders(trainer.val_loader).values()
        lengths = [trainer.limits.length("val", loader) for loader in loaders] or [None]
        native.fit_loop.epoch_loop.val_loop._max_batches = [
            float("inf") if length is None else length for length in lengths
        ]
        config = import_module(f"{self._pl.__name__}.utilities.types").LRSchedulerConfig
        native.strategy.lr_scheduler_configs = [
            config(scheduler, interval="step")
            for scheduler in trainer.schedulers
            if hasattr(scheduler, "optimizer")
        ]
        self._steps = max(self._steps, trainer.iter)  # the steps before a resume are not known
        # for Lightning, an epoch whose validation is still due has not ended
        self._epoch = trainer.epoch - resumes_evaluation(trainer)
        self._copy_counters(trainer, event)

    def _next_epoch(self, trainer: Any, event: Any) -> None:
        self._epoch = trainer.epoch
        self._copy_counters(trainer, event)

    def _copy_counters(self, trainer: Any, event: Any) -> None:
        """Set the counters of Lightning's loop (epochs, batches, optimizer steps) to those of our trainer."""
        loop = self._native.fit_loop
        epoch, batches = loop.epoch_progress.current, loop.epoch_loop.batch_progress
        epoch.ready = epoch.started = self._epoch + 1
        epoch.processed = epoch.completed = self._epoch
        batches.total.ready, batches.current.ready = trainer.iter + 1, trainer.batch_idx + 1
        batches.total.completed, batches.current.completed = trainer.iter, trainer.batch_idx
        loop.epoch_loop.automatic_optimization.optim_progress.optimizer.step.total.completed = self._steps
        loop.epoch_loop._batches_that_stepped = self._steps
        self._module.training = trainer.model.training

    def _count_step(self, trainer: Any, event: Any) -> None:
        self._steps += 1

    def _after_train_iter(self, trainer: Any, event: Any) -> None:
        """Copy the counters, and the step's outputs as metrics `train/NAME`, without waiting for the device.

        Without a validation loader, each output is also copied as `NAME`.
        """
        self._copy_counters(trainer, event)
        outputs = trainer.outputs if isinstance(trainer.outputs, Mapping) else {}
        numbers = {name: torch.as_tensor(value) for name, value in single_numbers(outputs).items()}
        self._update_metrics({f"train/{name}": number for name, number in numbers.items()})
        if not trainer.val_loader:
            self._update_metrics(numbers)

    def _copy_metrics(self, trainer: Any, event: Any) -> None:
        self._update_metrics({name: torch.tensor(value) for name, value in event.metrics.items()})

    def _update_metrics(self, numbers: Mapping[str, torch.Tensor]) -> None:
        for attribute in ("_callback_metrics", "_logged_metrics"):
            getattr(self._native._logger_connector, attribute).update(numbers)

    def _evaluate(self, begins: bool, trainer: Any, event: Any) -> None:
        """Set Lightning's stage to that of the evaluation, or back to the training's."""
        self._copy_counters(trainer, event)
        stage = "training"
        if begins:
            stage = "validating" if event.mode == "val" else "testing"
        setattr(self._native, stage, True)


def validates_next(trainer: Any) -> bool:
    """Return whether a validation follows the epoch that is ending."""
    due = trainer.by_epoch and not trainer.asked_to_stop
    return bool(due and "val" in trainer.schedule.after(trainer.epoch + 1, trainer.max_epochs))


def validates_every_epoch(trainer: Any) -> bool:
    """Return whether every epoch is followed by a validation, or none is."""
    if not trainer.by_epoch or trainer.val_loader is None:
        return True
    return all("val" in trainer.schedule.after(n + 1, trainer.max_epochs) for n in range(trainer.max_epochs))


def resumes_evaluation(trainer: Any) -> bool:
    """Return whether the run begins with a validation that was due when its checkpoint was saved."""
    if not trainer.by_epoch or not trainer.epoch or trainer.batch_idx:
        return False
    due = trainer.schedule.after(trainer.epoch, trainer.max_epochs)
    return "val" in due[trainer.position.evaluated :]
