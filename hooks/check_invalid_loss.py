"""A hook that raises when the loss is NaN or infinite, without a device synchronisation per iteration."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from math import isfinite
from typing import TYPE_CHECKING, Any

import torch

from eventloop.events import AfterTrain, AfterTrainIter, BeforeSaveCheckpoint, BeforeTrain, Event
from eventloop.hooks.hook import Hook
from eventloop.metrics.device import HostCopy, PinnedPool
from eventloop.state.sharded import refuse_sharded
from eventloop.util.checks import positive

if TYPE_CHECKING:
    from eventloop.training.trainer import Trainer

UNREAD_LIMIT = 65_536
"""The most losses that wait for the background thread; beyond it the training thread reads the oldest."""


class CheckInvalidLossHook(Hook):
    """Raise `FloatingPointError` when the loss of an iteration is NaN or infinite.

        CheckInvalidLossHook(interval=50)

    Every loss is checked, and no step waits for the check. Every `interval` iterations the losses since the
    last copy are copied to the host together, and a background thread reads them. The next iteration raises,
    so the error comes up to an interval and about 0.2 s late. It names the iteration of the invalid loss. The
    last losses are checked when training ends. (MMEngine checks one loss an interval, and waits for the
    device there.)

    A checkpoint is refused if an invalid loss has already been copied to the host. On a GPU a checkpoint of
    a model that has diverged a moment ago may still be saved, so keep more than one.

    Args:
        interval: the number of iterations whose losses are copied and checked together.

    Raises:
        TypeError, ValueError: `interval` is not a positive int.
    """

    def __init__(self, interval: int = 50) -> None:
        positive("interval", interval)
        self._interval = interval
        self._pool = PinnedPool()
        self._reset()

    def _reset(self) -> None:
        """Discard all losses, read and unread."""
        self._events: list[AfterTrainIter] = []
        self._losses: list[torch.Tensor] = []
        self._unread: deque[_Interval] = deque()
        # a new object: a background thread may still read losses of an earlier training, and set the old one
        self._invalid = _InvalidLoss()

    def before_train(self, trainer: Trainer, event: BeforeTrain) -> None:
        """Discard all losses of an earlier training."""
        self._reset()

    def after_train_iter(self, trainer: Trainer, event: AfterTrainIter) -> None:
        """Store the loss of this iteration, and raise if a loss that was read is invalid.

        Raises:
            TypeError: `trainer.outputs` has no loss of one element, or the loss is sharded over ranks.
            FloatingPointError: a loss that was read is NaN or infinite.
        """
        self._events.append(event)
        self._losses.append(_loss_of(trainer.outputs))
        if len(self._losses) >= self._interval:
            self._post_losses(trainer)
        if self._invalid.loss is not None:
            self._raise_if_invalid(trainer)

    def before_save_checkpoint(self, trainer: Trainer, event: BeforeSaveCheckpoint) -> None:
        """Refuse the checkpoint if a loss that has been copied to the host is invalid.

        Raises:
            FloatingPointError: a loss is NaN or infinite.
        """
        self._post_losses(trainer)
        for interval in self._unread:
            if not interval.ready():
                break
            interval.read()
        self._raise_if_invalid(trainer)

    def after_train(self, trainer: Trainer, event: AfterTrain) -> None:
        """Check the remaining losses, and wait for the device if necessary.

        If the training ends only to roll back to a checkpoint, nothing is checked.

        Raises:
            FloatingPointError: a loss is NaN or infinite.
        """
        if trainer.stops.goes_back:
            return
        self._post_losses(trainer)
        for interval in self._unread:
            interval.read()
        self._raise_if_invalid(trainer)

    def _post_losses(self, trainer: Trainer) -> None:
        """Start to copy the losses since the last call to the host, for a background thread to read them."""
        if not self._losses:
            return
        copy = _start_copy(self._losses, self._pool)
        interval = _Interval(self._events, self._losses, copy, self._invalid)
        self._events, self._losses = [], []
        self._unread.append(interval)
        if len(self._unread) * self._interval > UNREAD_LIMIT:  # the background thread is far behind
            self._unread[0].read()
        while self._unread and self._unread[0].is_read:
            self._unread.popleft()
        trainer.bus.post(interval)

    def _raise_if_invalid(self, trainer: Trainer) -> None:
        """Raise for the first invalid loss that was read, if there is one."""
        event, loss = self._invalid.event, self._invalid.loss
        if event is None or loss is None:
            return
        self._reset()  # later losses are invalid too, and after_train must not raise again
        batches = trainer.counting.batches_per_iter
        first = event.batch_idx * batches
        batch = f"batch {first}" if batches == 1 else f"one of the {batches} batches from {first} on"
        raise FloatingPointError(
            f"the loss is {loss} in iteration {event.iter} (epoch {event.epoch}, {batch}), "
            f"found in iteration {trainer.iter}: lower the learning rate, clip the gradients "
            "(OptimizerHook(grad_clip=...)), look there, or find the operation with "
            "torch.autograd.set_detect_anomaly(True)"
        )


class _InvalidLoss:
    """Hold the first invalid loss of a training, and the event of its iteration."""

    __slots__ = ("event", "loss")

    def __init__(self) -> None:
        self.event: AfterTrainIter | None = None
        self.loss: float | None = None


class _Interval:
    """Hold the losses of one interval until they are read on the host.

    The hook posts it to the bus as a `Deferred`: a background thread calls `events` once `ready` returns
    True. The losses are read once, by that thread or, if it needs the result earlier, by the training thread.
    """

    def __init__(
        self,
        events: Sequence[AfterTrainIter],
        losses: list[torch.Tensor],
        copy: HostCopy | None,
        invalid: _InvalidLoss,
    ) -> None:
        self._losses = losses  # empty once they were read
        self._events, self._copy, self._invalid = events, copy, invalid
        self._lock = threading.Lock()

    @property
    def is_read(self) -> bool:
        """True once the losses were read."""
        return not self._losses

    def ready(self) -> bool:
        """Return True when the losses are on the host."""
        return self._copy is None or self._copy.ready()

    def events(self) -> Iterable[Event]:
        """Read the losses and return no event; the training thread raises for an invalid loss."""
        self.read()
        return ()

    def read(self) -> None:
        """Read the losses, and record the first invalid one of the training; this may wait for the device."""
        with self._lock:
            if self.is_read:
                return
            values = [loss.item() for loss in self._losses] if self._copy is None else self._copy.values()
            for event, value in zip(self._events, values, strict=True):
                if not isfinite(value) and self._invalid.loss is None:
                    self._invalid.event, self._invalid.loss = event, value
            self._losses, self._copy = [], None


def _start_copy(losses: Sequence[torch.Tensor], pool: PinnedPool) -> HostCopy | None:
    """Start a copy of device losses to the host; return None if all losses are on the host already."""
    return None if all(loss.is_cpu for loss in losses) else HostCopy(losses, pool)


def _loss_of(outputs: Any) -> torch.Tensor:
    """Return a detached tensor with the loss in `trainer.outputs`; raise TypeError if there is no loss."""
    is_mapping = type(outputs) is dict or isinstance(outputs, Mapping)
    loss = outputs.get("loss") if is_mapping else None
    refuse_sharded("CheckInvalidLossHook: trainer.outputs['loss']", loss)
    if isinstance(loss, torch.Tensor) and loss.numel() == 1:
        # the result of an operation is a new tensor; a leaf or a view may be overwritten before it is read
        is_new = not loss.is_leaf and not loss._is_view()
        return loss.detach() if is_new else loss.detach().clone()
    if isinstance(loss, float | int):
        return torch.tensor(float(loss))
    raise TypeError(
        "CheckInvalidLossHook needs trainer.outputs['loss'] to be a number or a tensor of one element, "
        f"got {outputs!r}"
    )
