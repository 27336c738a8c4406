"""Ends a training whose loss is no number any more."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from eventloop.device import HostCopy, PinnedPool
from eventloop.events import AfterTrain, AfterTrainIter, BeforeSaveCheckpoint, BeforeTrain
from eventloop.hooks.hook import Hook
from eventloop.schedule import positive

if TYPE_CHECKING:
    from eventloop.trainer import Trainer


class _Place(NamedTuple):
    """Where in the run a loss was put out."""

    iteration: int
    epoch: int
    batch_idx: int


class CheckInvalidLossHook(Hook):
    """Raises `FloatingPointError` when the loss of an iteration is NaN or infinite.

        CheckInvalidLossHook(interval=50)

    Every iteration is checked, and no step waits for it: at the interval the losses of the interval start their way
    to the host together, and the first iteration that finds them there looks at them. So the error comes up to an
    interval and a little late, and names the iteration it is about; nothing is left unchecked at the end. (MMEngine
    looks at one loss an interval, and waits for the device there.) A checkpoint is refused when what has
    arrived by then is invalid; on a GPU one may still be taken of a model that is lost, so keep more than one.

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
        self._places: list[_Place] = []
        self._losses: list[torch.Tensor] = []
        self._copies: list[tuple[list[_Place], HostCopy]] = []

    def before_train(self, trainer: Trainer, event: BeforeTrain) -> None:
        """Start with nothing to check."""
        self._begin()

    def after_train_iter(self, trainer: Trainer, event: AfterTrainIter) -> None:
        """Remember the loss; look at those that have arrived.

        Raises:
            TypeError: `trainer.outputs` has no loss of one element.
            FloatingPointError: one of them is NaN or infinite.
        """
        self._places.append(_Place(event.iter, event.epoch, event.batch_idx))
        self._losses.append(_loss_of(trainer.outputs))
        if len(self._losses) >= self._interval:
            self._start_copy()
        if self._copies:
            self._look(trainer)

    def before_save_checkpoint(self, trainer: Trainer, event: BeforeSaveCheckpoint) -> None:
        """Save no model that is known to be lost.

        Raises:
            FloatingPointError: a loss is NaN or infinite.
        """
        self._start_copy()
        self._look(trainer)

    def after_train(self, trainer: Trainer, event: AfterTrain) -> None:
        """Look at the rest; the device may be waited for here.

        Raises:
            FloatingPointError: a loss is NaN or infinite.
        """
        self._start_copy()
        self._look(trainer, wait=True)

    def _start_copy(self) -> None:
        if self._losses:
            self._copies.append((self._places, HostCopy(self._losses, self._pool)))
            self._places, self._losses = [], []

    def _look(self, trainer: Trainer, *, wait: bool = False) -> None:
        while self._copies and (wait or self._copies[0][1].ready()):
            places, copy = self._copies.pop(0)
            for place, loss in zip(places, copy.values(), strict=True):
                if not math.isfinite(loss):
                    self._begin()  # what came after it is lost too, and is not told once more by after_train
                    raise FloatingPointError(_text(place, loss, trainer))


def _loss_of(outputs: Any) -> torch.Tensor:
    loss = outputs.get("loss") if isinstance(outputs, Mapping) else None
    if isinstance(loss, float | int):
        return torch.tensor(float(loss))
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        raise TypeError(
            f"CheckInvalidLossHook needs trainer.outputs['loss'], a number or a tensor of one element; got {outputs!r}"
        )
    # as in EventStorage: a result of the graph is nobody else's, any other tensor may be a buffer that is used again
    own = not loss.is_leaf and not loss._is_view()
    return loss.detach() if own else loss.detach().clone()


def _text(place: _Place, loss: float, trainer: Trainer) -> str:
    return (
        f"the loss is {loss} in iteration {place.iteration} (epoch {place.epoch}, batch {place.batch_idx}), found in "
        f"iteration {trainer.iter}: lower the learning rate, clip the gradients (OptimizerHook(grad_clip=...)), look "
        "at that batch, or find the operation with torch.autograd.set_detect_anomaly(True)"
    )
