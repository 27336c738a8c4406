"""List the methods of Lightning's callbacks, with the events at which `Foreign` calls them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from eventloop.optim.optimizers import each_optimizer


class Method(NamedTuple):
    """Describe the event at which a callback's method is called, and the arguments of the call."""

    event: str
    arguments: Callable[[Any], tuple[Any, ...]] = lambda trainer: ()
    """A function that returns the arguments of the call that follow the trainer and the module."""


def _batch(trainer: Any) -> tuple[Any, ...]:
    return trainer.batch, trainer.batch_idx


def _outputs(trainer: Any) -> tuple[Any, ...]:
    return trainer.outputs, trainer.batch, trainer.batch_idx


def _optimizer(trainer: Any) -> tuple[Any, ...]:
    return (next(iter(each_optimizer(trainer.optimizer))),)


def _stage(trainer: Any) -> tuple[Any, ...]:
    return ("fit",)


def _checkpoint(trainer: Any) -> tuple[Any, ...]:
    return (trainer.checkpoint,)


METHODS: dict[str, Method] = {
    "setup": Method("before_train", _stage),
    "on_fit_start": Method("before_train"),
    "on_train_start": Method("before_train"),
    "on_train_epoch_start": Method("before_train_epoch"),
    "on_train_batch_start": Method("before_train_iter", _batch),
    "on_after_backward": Method("after_backward"),
    "on_before_optimizer_step": Method("before_optimizer_step", _optimizer),
    "on_train_batch_end": Method("after_train_iter", _outputs),
    "on_validation_start": Method("before_val"),
    "on_validation_epoch_start": Method("before_val_epoch"),
    "on_validation_batch_start": Method("before_val_iter", _batch),
    "on_validation_batch_end": Method("after_val_iter", _outputs),
    "on_validation_epoch_end": Method("after_val_epoch"),
    "on_validation_end": Method("after_val"),
    "on_test_start": Method("before_test"),
    "on_test_epoch_start": Method("before_test_epoch"),
    "on_test_batch_start": Method("before_test_iter", _batch),
    "on_test_batch_end": Method("after_test_iter", _outputs),
    "on_test_epoch_end": Method("after_test_epoch"),
    "on_test_end": Method("after_test"),
    "on_save_checkpoint": Method("before_save_checkpoint", _checkpoint),
    "on_load_checkpoint": Method("after_load_checkpoint", _checkpoint),
    "on_train_end": Method("after_train"),
    "on_fit_end": Method("after_train"),
    "teardown": Method("after_train", _stage),
}
"""The event at which each method is called; `OwnTrainer` handles `on_train_epoch_end` and `on_exception`."""
WITHOUT_EVENT = ("on_before_zero_grad", "on_before_backward")
"""The methods of Lightning's callbacks to which no event of our trainer corresponds."""


def base_of(callback: Any) -> type | None:
    """Return the `Callback` class of Lightning from which a callback derives, or None."""
    for cls in type(callback).__mro__:
        if cls.__name__ == "Callback" and cls.__module__.endswith(".callbacks.callback"):
            return cls
    return None


def package_of(callback: Any) -> str:
    """Return the top-level package of a callback's base class: "lightning", "pytorch_lightning" or ""."""
    base = base_of(callback)
    return "" if base is None else base.__module__.partition(".")[0]


def defines(callback: Any, method: str) -> bool:
    """Return whether a callback overrides a method in its class or on the object."""
    class_method = getattr(type(callback), method, None)
    return method in vars(callback) or class_method is not getattr(base_of(callback), method, None)
