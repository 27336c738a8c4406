"""Set the counters, stages and metrics of a Lightning trainer that is never run."""

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
        self._epoch = 0  # Lightning counts an epoch after its validation

    def calls(self) -> Iterator[ForeignCall]:
        """Yield the handlers as subscriptions; by their priorities they are the first or last at an event."""
        for event, fn in (
            ("before_train", self._begin),
            ("before_train_epoch", self._next_epoch),
            ("before_train_iter", self._move),
            ("after_train", self._next_epoch),
            ("before_val", partial(self._evaluate, True)),
            ("before_test", partial(self._evaluate, True)),
            ("after_val_epoch", self._results),
            ("after_test_epoch", self._results),
            ("after_optimizer_step", self._stepped),
        ):
            yield ForeignCall(f"counters.{event}", (event,), fn, Priority.HIGHEST)
        # after the optimizer's step
        yield ForeignCall("counters.after_train_iter", ("after_train_iter",), self._after_train_iter, 45)
        for event in ("after_val", "after_test"):
            end = partial(self._evaluate, False)
            yield ForeignCall(f"counters.{event}", (event,), end, Priority.LOWEST)

    def _begin(self, trainer: Any, event: Any) -> None:
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
            config(each, interval="step") for each in trainer.schedulers if hasattr(each, "optimizer")
        ]
        self._steps = max(self._steps, trainer.iter)
        self._epoch = trainer.epoch - resumes_evaluation(trainer)
        self._move(trainer, event)

    def _next_epoch(self, trainer: Any, event: Any) -> None:
        self._epoch = trainer.epoch
        self._move(trainer, event)

    def _move(self, trainer: Any, event: Any) -> None:
        loop = self._native.fit_loop
        epoch, batches = loop.epoch_progress.current, loop.epoch_loop.batch_progress
        epoch.ready = epoch.started = self._epoch + 1
        epoch.processed = epoch.completed = self._epoch
        batches.total.ready, batches.current.ready = trainer.iter + 1, trainer.batch_idx + 1
        batches.total.completed, batches.current.completed = trainer.iter, trainer.batch_idx
        loop.epoch_loop.automatic_optimization.optim_progress.optimizer.step.total.completed = self._steps
        loop.epoch_loop._batches_that_stepped = self._steps
        self._module.training = trainer.model.training

    def _stepped(self, trainer: Any, event: Any) -> None:
        self._steps += 1

    def _after_train_iter(self, trainer: Any, event: Any) -> None:
        """Update Lightning's counters and metrics after an iteration, without waiting for the device.

        A number also has its bare name if no validation reports it.
        """
        self._move(trainer, event)
        outputs = trainer.outputs if isinstance(trainer.outputs, Mapping) else {}
        for name, value in single_numbers(outputs).items():
            number = torch.as_tensor(value)
            self._update_metrics({f"train/{name}": number} | ({} if trainer.val_loader else {name: number}))

    def _results(self, trainer: Any, event: Any) -> None:
        self._update_metrics({name: torch.tensor(value) for name, value in event.metrics.items()})

    def _update_metrics(self, numbers: Mapping[str, torch.Tensor]) -> None:
        for each in ("_callback_metrics", "_logged_metrics"):
            getattr(self._native._logger_connector, each).update(numbers)

    def _evaluate(self, begins: bool, trainer: Any, event: Any) -> None:
        """Set Lightning's stage to that of the evaluation, or back to the training's."""
        self._move(trainer, event)
        stage = "training" if not begins else "validating" if event.mode == "val" else "testing"
        setattr(self._native, stage, True)


def validates_next(trainer: Any) -> bool:
    """Return whether a validation follows the epoch that is ending."""
    due = trainer.by_epoch and not trainer.asked_to_stop
    return bool(due and "val" in trainer.schedule.after(trainer.epoch + 1, trainer.max_epochs))


def validates_every_epoch(trainer: Any) -> bool:
    """Return whether all epochs have a validation, or none has."""
    if not trainer.by_epoch or trainer.val_loader is None:
        return True
    return all("val" in trainer.schedule.after(n + 1, trainer.max_epochs) for n in range(trainer.max_epochs))


def resumes_evaluation(trainer: Any) -> bool:
    """Return whether the run begins with a validation that was due when its checkpoint was saved."""
    if not trainer.by_epoch or not trainer.epoch or trainer.batch_idx:
        return False
    due = trainer.schedule.after(trainer.epoch, trainer.max_epochs)
    return "val" in due[trainer.position.evaluated :]
