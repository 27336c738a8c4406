"""Declare the event methods that a hook may override, and find the events of each method."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from eventloop.events import types as e
from eventloop.events.base import ALIASES, known_events

if TYPE_CHECKING:
    from eventloop.training.trainer import Trainer

EpochEvent = (
    e.BeforeTrainEpoch
    | e.AfterTrainEpoch
    | e.BeforeValEpoch
    | e.AfterValEpoch
    | e.BeforeTestEpoch
    | e.AfterTestEpoch
)
IterEvent = (
    e.BeforeTrainIter
    | e.AfterTrainIter
    | e.BeforeValIter
    | e.AfterValIter
    | e.BeforeTestIter
    | e.AfterTestIter
)

MODES = ("train", "val", "test")

GENERIC: dict[str, tuple[str, ...]] = {
    f"{when}_{unit}": tuple(f"{when}_{mode}_{unit}" for mode in MODES)
    for when in ("before", "after")
    for unit in ("epoch", "iter")
}
"""The names of event methods for all modes, such as "after_iter", each with its events in every mode."""


class Points:
    """Declare one method per event of the loop, with its signature, for editors and type checkers.

    A method that a hook does not override is never called.
    """

    def before_run(self, trainer: Trainer, event: e.BeforeRun) -> Any: ...
    def after_run(self, trainer: Trainer, event: e.AfterRun) -> Any: ...
    def before_train(self, trainer: Trainer, event: e.BeforeTrain) -> Any: ...
    def after_train(self, trainer: Trainer, event: e.AfterTrain) -> Any: ...
    def before_val(self, trainer: Trainer, event: e.BeforeVal) -> Any: ...
    def after_val(self, trainer: Trainer, event: e.AfterVal) -> Any: ...
    def before_test(self, trainer: Trainer, event: e.BeforeTest) -> Any: ...
    def after_test(self, trainer: Trainer, event: e.AfterTest) -> Any: ...
    def before_predict(self, trainer: Trainer, event: e.BeforePredict) -> Any: ...
    def after_predict(self, trainer: Trainer, event: e.AfterPredict) -> Any: ...
    def before_train_epoch(self, trainer: Trainer, event: e.BeforeTrainEpoch) -> Any: ...
    def after_train_epoch(self, trainer: Trainer, event: e.AfterTrainEpoch) -> Any: ...
    def before_val_epoch(self, trainer: Trainer, event: e.BeforeValEpoch) -> Any: ...
    def after_val_epoch(self, trainer: Trainer, event: e.AfterValEpoch) -> Any: ...
    def before_test_epoch(self, trainer: Trainer, event: e.BeforeTestEpoch) -> Any: ...
    def after_test_epoch(self, trainer: Trainer, event: e.AfterTestEpoch) -> Any: ...
    def before_train_iter(self, trainer: Trainer, event: e.BeforeTrainIter) -> Any: ...
    def after_train_iter(self, trainer: Trainer, event: e.AfterTrainIter) -> Any: ...
    def before_val_iter(self, trainer: Trainer, event: e.BeforeValIter) -> Any: ...
    def after_val_iter(self, trainer: Trainer, event: e.AfterValIter) -> Any: ...
    def before_test_iter(self, trainer: Trainer, event: e.BeforeTestIter) -> Any: ...
    def after_test_iter(self, trainer: Trainer, event: e.AfterTestIter) -> Any: ...
    def before_predict_iter(self, trainer: Trainer, event: e.BeforePredictIter) -> Any: ...
    def after_predict_iter(self, trainer: Trainer, event: e.AfterPredictIter) -> Any: ...
    def after_backward(self, trainer: Trainer, event: e.AfterBackward) -> Any: ...
    def before_optimizer_step(self, trainer: Trainer, event: e.BeforeOptimizerStep) -> Any: ...
    def after_optimizer_step(self, trainer: Trainer, event: e.AfterOptimizerStep) -> Any: ...
    def before_save_checkpoint(self, trainer: Trainer, event: e.BeforeSaveCheckpoint) -> Any: ...
    def after_load_checkpoint(self, trainer: Trainer, event: e.AfterLoadCheckpoint) -> Any: ...

    def before_epoch(self, trainer: Trainer, event: EpochEvent) -> Any: ...
    def after_epoch(self, trainer: Trainer, event: EpochEvent) -> Any: ...
    def before_iter(self, trainer: Trainer, event: IterEvent) -> Any: ...
    def after_iter(self, trainer: Trainer, event: IterEvent) -> Any: ...


def events_of(points: Iterable[str], owner: str) -> dict[str, list[str]]:
    """Return the given names of event methods, each with the names of the events that the method handles.

    Of `after_val_iter` and `after_iter`, the first handles the event `after_val_iter`.

    Args:
        points: names of events, aliases of these, or methods for all modes, such as `after_iter`.
        owner: the name of the class that has the methods, for the error message.

    Raises:
        TypeError: two of the names mean one event.
    """
    method_of: dict[str, str] = {}
    for point in points:
        for event in GENERIC.get(point, (ALIASES.get(point, point),)):
            other = method_of.setdefault(event, point)
            if point in GENERIC or other == point:
                continue
            if other not in GENERIC:
                raise TypeError(
                    f"{owner} has both {other} and {point}, two names of one event: keep one of them"
                )
            method_of[event] = point
    events_of_method: dict[str, list[str]] = {}
    for event in known_events():
        if event in method_of:
            events_of_method.setdefault(method_of[event], []).append(event)
    return events_of_method
