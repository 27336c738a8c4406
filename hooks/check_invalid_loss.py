"""Ends a training whose loss is no number any more."""

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
"""Losses that may wait for a background that cannot run, before the training thread reads the oldest itself."""


class CheckInvalidLossHook(Hook):
    """Raises `FloatingPointError` when the loss of an iteration is NaN or infinite.

        CheckInvalidLossHook(interval=50)

    Every iteration is checked, and no step waits for it: at the interval the losses of the interval start their way
    to the host together, the background reads them, and the next iteration after that raises. So the error comes
    an interval and a fifth of a second late or so, and names the iteration it is about; nothing is left unchecked at
    the end. (MMEngine looks at one loss an interval, and waits for the device there.) A checkpoint is refused when what
    has arrived by then is invalid; on a GPU one may still be taken of a model that is lost, so keep more than one.

    Args:
        interval: iterations that are checked together.

    Raises:
        TypeError, ValueError: `interval` is no positive int.
    """

    def __init__(self, interval: int = 50) -> None:
        positive("interval", interval)
        self._interval = interval
        self._pool = PinnedPool()
        self._begin()

    def _begin(self) -> None:
        self._events: list[AfterTrainIter] = []
        self._losses: list[torch.Tensor] = []
        self._unread: deque[_Interval] = deque()
        self._found = _Found()  # a new one: what is still on its way belongs to what was before

    def before_train(self, trainer: Trainer, event: BeforeTrain) -> None:
        """Start with nothing to check."""
        self._begin()

    def after_train_iter(self, trainer: Trainer, event: AfterTrainIter) -> None:
        """Remember the loss, and look whether an earlier one was found to be invalid.

        Raises:
            TypeError: `trainer.outputs` has no loss of one element, or one that is sharded over ranks.
            FloatingPointError: one of them is NaN or infinite.
        """
        self._events.append(event)
        self._losses.append(_loss_of(trainer.outputs))
        if len(self._losses) >= self._interval:
            self._send(trainer)
        if self._found.loss is not None:
            self._fail(trainer)

    def before_save_checkpoint(self, trainer: Trainer, event: BeforeSaveCheckpoint) -> None:
        """Save no model that is known to be lost.

        Raises:
            FloatingPointError: a loss is NaN or infinite.
        """
        self._send(trainer)
        for interval in self._unread:
            if not interval.ready():
                break
            interval.read()
        self._fail(trainer)

    def after_train(self, trainer: Trainer, event: AfterTrain) -> None:
        """Look at the rest; the device may be waited for here.

        Raises:
            FloatingPointError: a loss is NaN or infinite.
        """
        self._send(trainer)
        for interval in self._unread:
            interval.read()
        self._fail(trainer)

    def _send(self, trainer: Trainer) -> None:
        """Let the losses since the last time be read in the background."""
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

    def _fail(self, trainer: Trainer) -> None:
        """Raise what was found, if anything was."""
        place, loss = self._found.event, self._found.loss
        if place is None or loss is None:
            return
        self._begin()  # what came after it is lost too, and is not told once more by after_train
        raise FloatingPointError(
            f"the loss is {loss} in iteration {place.iter} (epoch {place.epoch}, batch {place.batch_idx}), found in "
            f"iteration {trainer.iter}: lower the learning rate, clip the gradients (OptimizerHook(grad_clip=...)), "
            "look at that batch, or find the operation with torch.autograd.set_detect_anomaly(True)"
        )


class _Found:
    """The first invalid loss of a training, once somebody has read it."""

    __slots__ = ("event", "loss")

    def __init__(self) -> None:
        self.event: AfterTrainIter | None = None
        self.loss: float | None = None


class _Interval:
    """The losses of an interval on their way to the host; a `Deferred` of the background loop that becomes no event.
    Whoever needs them first reads them, once: the loop, or the training thread where it has to know."""

    def __init__(
        self, events: Sequence[AfterTrainIter], losses: list[torch.Tensor], copy: HostCopy | None, found: _Found
    ) -> None:  # fmt: skip
        self.losses = losses
        """Empty once they were read."""
        self._events, self._copy, self._found = events, copy, found
        self._lock = threading.Lock()

    def ready(self) -> bool:
        """True when the losses are on the host."""
        return self._copy is None or self._copy.ready()

    def events(self) -> Iterable[Event]:
        """Read, and say nothing: the training thread looks at what was found."""
        self.read()
        return ()

    def read(self) -> None:
        """Note the first loss that is invalid, unless an earlier one was; waits for the device if need be."""
        with self._lock:
            if not self.losses:
                return
            values = [loss.item() for loss in self.losses] if self._copy is None else self._copy.values()
            for event, value in zip(self._events, values, strict=True):
                if not isfinite(value) and self._found.loss is None:
                    self._found.event, self._found.loss = event, value
            self.losses, self._copy = [], None


def _start_copy(losses: Sequence[torch.Tensor], pool: PinnedPool) -> HostCopy | None:
    """None where they are on the host already."""
    return None if all(loss.is_cpu for loss in losses) else HostCopy(losses, pool)


def _loss_of(outputs: Any) -> torch.Tensor:
    known = type(outputs) is dict or isinstance(outputs, Mapping)
    loss = outputs.get("loss") if known else None
    refuse_sharded("CheckInvalidLossHook: trainer.outputs['loss']", loss)
    if isinstance(loss, torch.Tensor) and loss.numel() == 1:
        # as in EventStorage: a result of the graph is nobody else's, any other tensor may be a buffer that is used again
        own = not loss.is_leaf and not loss._is_view()
        return loss.detach() if own else loss.detach().clone()
    if isinstance(loss, float | int):
        return torch.tensor(float(loss))
    raise TypeError(
        f"CheckInvalidLossHook needs trainer.outputs['loss'], a number or a tensor of one element; got {outputs!r}"
    )
