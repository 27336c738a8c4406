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
"""The most unread losses; beyond it the training thread reads the oldest, as the background cannot run."""


class CheckInvalidLossHook(Hook):
    """Raise `FloatingPointError` when the loss of an iteration is NaN or infinite.

        CheckInvalidLossHook(interval=50)

    Every iteration is checked, and no step waits for the check. At the end of an interval its losses are
    copied to the host together, and the background loop reads them. The first iteration after that raises, so
    the error comes an interval and about 0.2 s late. It names the iteration of the invalid loss. The last
    losses are checked when training ends. (MMEngine checks one loss an interval, and waits for the device
    there.)

    A checkpoint is refused if an invalid loss has arrived on the host by then. On a GPU a checkpoint of a
    model that has already diverged may still be saved, so keep more than one.

    Args:
        interval: iterations that are checked together.

    Raises:
        TypeError, ValueError: `interval` is not a positive int.
    """

    def __init__(self, interval: int = 50) -> None:
        positive("interval", interval)
        self._interval = interval
        self._pool = PinnedPool()
        self._reset()

    def _reset(self) -> None:
        self._events: list[AfterTrainIter] = []
        self._losses: list[torch.Tensor] = []
        self._unread: deque[_Interval] = deque()
        self._found = _InvalidLoss()  # a new object: intervals still in flight belong to the former training

    def before_train(self, trainer: Trainer, event: BeforeTrain) -> None:
        """Discard all losses of an earlier training."""
        self._reset()

    def after_train_iter(self, trainer: Trainer, event: AfterTrainIter) -> None:
        """Store the loss of this iteration, and raise if an earlier loss was invalid.

        Raises:
            TypeError: `trainer.outputs` has no loss of one element, or the loss is sharded over ranks.
            FloatingPointError: an earlier loss is NaN or infinite.
        """
        self._events.append(event)
        self._losses.append(_loss_of(trainer.outputs))
        if len(self._losses) >= self._interval:
            self._post_losses(trainer)
        if self._found.loss is not None:
            self._raise_if_invalid(trainer)

    def before_save_checkpoint(self, trainer: Trainer, event: BeforeSaveCheckpoint) -> None:
        """Refuse the checkpoint if a loss that has arrived on the host is invalid.

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
        """Check the remaining losses, waiting for the device if necessary, unless the run goes back.

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
        """Post the losses since the last interval to the background, which reads them."""
        if not self._losses:
            return
        copy = _start_copy(self._losses, self._pool)
        interval = _Interval(self._events, self._losses, copy, self._found)
        self._events, self._losses = [], []
        unread = self._unread
        unread.append(interval)
        if len(unread) * self._interval > UNREAD_LIMIT:
            unread[0].read()
        while unread and not unread[0].losses:
            unread.popleft()
        trainer.bus.post(interval)

    def _raise_if_invalid(self, trainer: Trainer) -> None:
        """Raise for the first invalid loss that was read, if there is one."""
        place, loss = self._found.event, self._found.loss
        if place is None or loss is None:
            return
        self._reset()  # later losses are invalid too, and after_train must not raise again
        number = trainer.counting.batches_per_iter
        first = place.batch_idx * number
        where = f"batch {first}" if number == 1 else f"one of the {number} batches from {first} on"
        raise FloatingPointError(
            f"the loss is {loss} in iteration {place.iter} (epoch {place.epoch}, {where}), "
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

    A `Deferred` of the background loop that emits no event. The losses are read once: by the background loop,
    or by the training thread if it needs the result first.
    """

    def __init__(
        self,
        events: Sequence[AfterTrainIter],
        losses: list[torch.Tensor],
        copy: HostCopy | None,
        found: _InvalidLoss,
    ) -> None:
        self.losses = losses
        """Empty once the losses were read."""
        self._events, self._copy, self._found = events, copy, found
        self._lock = threading.Lock()

    def ready(self) -> bool:
        """Return True when the losses are on the host."""
        return self._copy is None or self._copy.ready()

    def events(self) -> Iterable[Event]:
        """Read the losses and return no event; the training thread raises for an invalid loss."""
        self.read()
        return ()

    def read(self) -> None:
        """Record the first invalid loss unless one is recorded already; may wait for the device."""
        with self._lock:
            if not self.losses:
                return
            values = [loss.item() for loss in self.losses] if self._copy is None else self._copy.values()
            for event, value in zip(self._events, values, strict=True):
                if not isfinite(value) and self._found.loss is None:
                    self._found.event, self._found.loss = event, value
            self.losses, self._copy = [], None


def _start_copy(losses: Sequence[torch.Tensor], pool: PinnedPool) -> HostCopy | None:
    """Start a copy of device losses to the host; return None if all losses are on the host already."""
    return None if all(loss.is_cpu for loss in losses) else HostCopy(losses, pool)


def _loss_of(outputs: Any) -> torch.Tensor:
    known = type(outputs) is dict or isinstance(outputs, Mapping)
    loss = outputs.get("loss") if known else None
    refuse_sharded("CheckInvalidLossHook: trainer.outputs['loss']", loss)
    if isinstance(loss, torch.Tensor) and loss.numel() == 1:
        # as in EventStorage: a new result of the graph cannot be overwritten, other tensors can
        own = not loss.is_leaf and not loss._is_view()
        return loss.detach() if own else loss.detach().clone()
    if isinstance(loss, float | int):
        return torch.tensor(float(loss))
    raise TypeError(
        "CheckInvalidLossHook needs trainer.outputs['loss'] to be a number or a tensor of one element, "
        f"got {outputs!r}"
    )
