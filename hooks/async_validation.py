"""A hook that validates checkpoints in another process while the training goes on."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

import torch

from eventloop.evaluation.schedule import Never
from eventloop.events import AfterTrain, BeforeTrain, CheckpointEvaluated
from eventloop.events.priority import Priority
from eventloop.hooks.checkpoint_options import checkpoint_hooks
from eventloop.hooks.hook import Hook, on
from eventloop.sidecar.building import parse_function
from eventloop.sidecar.child import EvaluatorProcess
from eventloop.state.exchange import decided_by_rank_0
from eventloop.stops.ending import ERROR, LEFT, ends_at_once
from eventloop.util.checks import number, positive

if TYPE_CHECKING:
    from eventloop.training.trainer import Trainer

logger = logging.getLogger("eventloop")

POLL_SECONDS = 0.1
"""Seconds between two looks for results at the end of a run."""


class AsyncValidationHook(Hook):
    """Validate every checkpoint in a child process of rank 0, while the training goes on.

        def build():                                             # in train.py
            ...
            return Trainer(model, ..., val_loader=val, hooks=[
                CheckpointHook(interval=1, save_best="accuracy"), AsyncValidationHook(build="train:build")])

        if __name__ == "__main__":
            build().train()

    The child builds the same trainer, loads each durable checkpoint, the average of an `EMAHook` where there
    is one, and validates with it. Its metrics are logged under "val" at the step of the checkpoint, and
    `CheckpointHook(save_best=...)`, `EarlyStoppingHook` and `ReduceLROnPlateau` get them in the order of the
    checkpoints, at the end of the iteration in which they come. The training validates nothing itself:
    `val_interval` has no effect, and with `val_before_train=True` a checkpoint of iteration 0 is saved, and
    validated. A checkpoint that waits for its metrics is not removed.

    A child that is killed is started again. A child that fails is reported once, and the training goes on.
    Its output is in `evaluator/output.log` in the run's directory.

    Args:
        build: the function that builds the trainer, "module:function" or "path/to/file.py:function"; None if
            `eventloop evaluate RUN ... --follow` runs elsewhere, on another machine for example.
        device: the device of the validations, such as "cuda:1"; by default that of the function's trainer.
        wait: the seconds for which the end of a training waits for the last metrics, unless a signal or an
            error has ended it. `eventloop evaluate` validates the rest.
        max_waiting: the most checkpoints that are kept, beyond `CheckpointHook(max_keep_ckpts=...)`, because
            they wait for their metrics.

    Raises:
        TypeError, ValueError: an argument is of the wrong type, out of range, or no function's place.
    """

    priority = Priority.LOW

    def __init__(
        self, build: str | None, device: str | None = None, *, wait: float = 600.0, max_waiting: int = 20
    ) -> None:
        if build is not None:
            parse_function(build)
        number("wait", wait, least=0)
        positive("max_waiting", max_waiting)
        self._build, self._device = build, None if device is None else str(device)
        self._wait, self._max_waiting = wait, max_waiting
        self._process: EvaluatorProcess | None = None

    def check(self, trainer: Trainer) -> None:
        """Check that there are a validation and checkpoints, and switch off the trainer's own validations.

        The child process makes them.

        Raises:
            ValueError: there is no `val_loader`, no `CheckpointHook` with an interval, or another engine's
                loop drives the trainer.
        """
        if trainer.host:
            raise ValueError(
                f"AsyncValidationHook needs the loop of eventloop's trainer, and {trainer.host} has its own: "
                "use `eventloop evaluate`"
            )
        if trainer.val_loader is None:
            raise ValueError("AsyncValidationHook needs a validation: give the Trainer a val_loader")
        if not any(hook.interval > 0 for hook in checkpoint_hooks(trainer)):
            raise ValueError(
                "AsyncValidationHook validates checkpoints, and no CheckpointHook saves any: give one an "
                "interval, such as CheckpointHook(interval=1)"
            )
        if not trainer.fast_dev_run:  # which validates at its end, and shows that a validation works
            if trainer.schedule.after(0, 0):
                trainer.bus.subscribe(_save_initial_weights, BeforeTrain, priority=Priority.LOWEST)
            trainer.schedule = Never()
            trainer.ownership.each_second.append(self._poll)

    def before_train(self, trainer: Trainer, event: BeforeTrain) -> None:
        """Retain checkpoints until they are validated, and have the child started in the background."""
        for hook in checkpoint_hooks(trainer):
            hook.retention.awaited.limit = self._max_waiting
        if trainer.rank == 0 and self._build is not None:
            threads = torch.get_num_threads()
            self._process = EvaluatorProcess(trainer.work_dir, self._build, self._device, threads)
            trainer.during_run.callback(self._end)

    @on(priority=Priority.LOWEST)
    def checkpoint_evaluated(self, trainer: Trainer, event: CheckpointEvaluated) -> None:
        """Record that the child gets on."""
        if self._process is not None:
            self._process.result_came()

    @on(priority=Priority.LOWEST)
    def after_train(self, trainer: Trainer, event: AfterTrain) -> None:
        """Wait for the metrics of the last checkpoints, and apply them, on all ranks."""
        if event.reason in (ERROR, LEFT) or trainer.stop_signal is not None or ends_at_once(trainer):
            return
        until = time.monotonic() + self._wait
        while decided_by_rank_0(lambda: self._waits(trainer, until)):
            trainer.stops.exchange()
            time.sleep(POLL_SECONDS)
        if trainer.rank == 0 and (left := _waiting(trainer)):
            logger.warning(
                "%d checkpoints of %s are not validated: `eventloop evaluate` validates them, and a resumed "
                "run gets the metrics",
                len(left),
                trainer.work_dir,
            )

    def _waits(self, trainer: Trainer, until: float) -> bool:
        failed = self._process is not None and self._process.failed
        return bool(_waiting(trainer)) and not failed and trainer.bus.overtime and time.monotonic() < until

    def _poll(self) -> None:
        if (process := self._process) is not None:
            process.poll()

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.end()


def _save_initial_weights(trainer: Trainer, event: BeforeTrain) -> None:
    """Save a checkpoint to be validated before the first iteration, unless the run was resumed from it."""
    if trainer.iter == 0 and trainer.state.resumed_from is None:
        next(hook for hook in checkpoint_hooks(trainer) if hook.interval > 0).save_now(trainer)


def _waiting(trainer: Trainer) -> list[str]:
    return [name for hook in checkpoint_hooks(trainer) for name in hook.retention.awaited.names]
