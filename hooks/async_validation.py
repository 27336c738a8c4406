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
"""Seconds between two checks for new metrics, while the end of a training waits for the last ones."""


class AsyncValidationHook(Hook):
    """Validate every checkpoint in a child process of rank 0, while the training goes on.

        def build():                                             # in train.py
            ...
            return Trainer(model, ..., val_loader=val, hooks=[
                CheckpointHook(interval=1, save_best="accuracy"), AsyncValidationHook(build="train:build")])

        if __name__ == "__main__":
            build().train()

    The child builds the same trainer, loads each durable checkpoint and validates it, with the average of an
    `EMAHook` if the checkpoint has one. The metrics are logged under "val" at the step of the checkpoint.
    `CheckpointHook(save_best=...)`, `EarlyStoppingHook` and `ReduceLROnPlateau` receive them in the order of
    the checkpoints, at the end of the iteration in which they arrive. The training process validates nothing:
    `val_interval` has no effect, and with `val_before_train=True` a checkpoint of iteration 0 is saved and
    validated. A checkpoint is not removed before its metrics have arrived.

    A child that is killed is started again. If the child fails, one error is logged, and the training goes
    on. The output of the child is in `evaluator/output.log` in the run's directory.

    Args:
        build: the function that builds the trainer, "module:function" or "path/to/file.py:function"; None if
            `eventloop evaluate RUN ... --follow` runs elsewhere, on another machine for example.
        device: the device of the validations, such as "cuda:1"; by default that of the function's trainer.
        wait: the seconds for which the end of a training waits for the last metrics, unless a signal or an
            error has ended it. `eventloop evaluate` validates the remaining checkpoints.
        max_waiting: the most checkpoints that are kept, beyond `CheckpointHook(max_keep_ckpts=...)`, because
            their metrics have not arrived.

    Raises:
        TypeError, ValueError: an argument is of the wrong type or out of range, or `build` names no function.
    """

    priority = Priority.LOW

    def __init__(
        self, build: str | None, device: str | None = None, *, wait: float = 600.0, max_waiting: int = 20
    ) -> None:
        if build is not None:
            parse_function(build)  # raises an error if it has not the form "module:function"
        number("wait", wait, least=0)
        positive("max_waiting", max_waiting)
        self._build, self._device = build, None if device is None else str(device)
        self._wait, self._max_waiting = wait, max_waiting
        self._process: EvaluatorProcess | None = None

    def check(self, trainer: Trainer) -> None:
        """Check that checkpoints can be validated, and switch off the validations by the training process.

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
        if not trainer.fast_dev_run:  # a fast_dev_run tries a validation in its own process
            validates_before_train = trainer.schedule.after(0, 0)
            if validates_before_train:
                trainer.bus.subscribe(_save_initial_weights, BeforeTrain, priority=Priority.LOWEST)
            trainer.schedule = Never()
            trainer.ownership.each_second.append(self._poll)

    def before_train(self, trainer: Trainer, event: BeforeTrain) -> None:
        """Retain checkpoints until they are validated, and create the child, which starts within a second."""
        for hook in checkpoint_hooks(trainer):
            hook.retention.awaited.limit = self._max_waiting
        if trainer.rank == 0 and self._build is not None:
            threads = torch.get_num_threads()
            self._process = EvaluatorProcess(trainer.work_dir, self._build, self._device, threads)
            trainer.during_run.callback(self._end)

    @on(priority=Priority.LOWEST)
    def checkpoint_evaluated(self, trainer: Trainer, event: CheckpointEvaluated) -> None:
        """Reset the count of the child's restarts, because the child has validated a checkpoint."""
        if self._process is not None:
            self._process.result_came()

    @on(priority=Priority.LOWEST)
    def after_train(self, trainer: Trainer, event: AfterTrain) -> None:
        """Wait on all ranks for the metrics of the last checkpoints, and pass them to the hooks."""
        if event.reason in (ERROR, LEFT) or trainer.stop_signal is not None or ends_at_once(trainer):
            return
        deadline = time.monotonic() + self._wait
        while decided_by_rank_0(lambda: self._must_wait(trainer, deadline)):
            trainer.stops.exchange()  # emits `checkpoint_evaluated` for metrics that have arrived
            time.sleep(POLL_SECONDS)
        if trainer.rank == 0 and (unvalidated := _unvalidated_checkpoints(trainer)):
            logger.warning(
                "%d checkpoints of %s are not validated: `eventloop evaluate` validates them, and a resumed "
                "run gets the metrics",
                len(unvalidated),
                trainer.work_dir,
            )

    def _must_wait(self, trainer: Trainer, deadline: float) -> bool:
        """Return whether the metrics of a checkpoint are missing and may still arrive before `deadline`."""
        failed = self._process is not None and self._process.failed
        # a signal sets `overtime` to False, because a kill may follow soon
        may_wait = trainer.bus.overtime and time.monotonic() < deadline
        return bool(_unvalidated_checkpoints(trainer)) and not failed and may_wait

    def _poll(self) -> None:
        """Start the child if it does not run; called every second on a background thread."""
        if (process := self._process) is not None:
            process.poll()

    def _end(self) -> None:
        """Kill the child, if there is one."""
        process, self._process = self._process, None
        if process is not None:
            process.end()


def _save_initial_weights(trainer: Trainer, event: BeforeTrain) -> None:
    """Save the weights before the first iteration, to be validated, unless the run was resumed."""
    if trainer.iter == 0 and trainer.state.resumed_from is None:
        next(hook for hook in checkpoint_hooks(trainer) if hook.interval > 0).save_now(trainer)


def _unvalidated_checkpoints(trainer: Trainer) -> list[str]:
    """Return the names of the saved checkpoints whose metrics have not arrived."""
    return [name for hook in checkpoint_hooks(trainer) for name in hook.retention.awaited.names]
