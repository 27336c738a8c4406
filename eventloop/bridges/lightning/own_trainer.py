"""Call Lightning's callbacks at our trainer's events, with a Lightning trainer that never runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from importlib import import_module
from typing import Any, cast

import torch

from eventloop.bridges.foreign import ForeignCall
from eventloop.bridges.lightning.counters import Counters, resumes_evaluation, validates_next
from eventloop.bridges.lightning.methods import METHODS, Method, defines
from eventloop.bridges.lightning.objects import make_module, make_trainer
from eventloop.checkpoint.weights import OWN, unwrap
from eventloop.events import COMPLETED, AfterTrainEpoch, BeforeTrain
from eventloop.state.plain_values import plain

AFTER_OTHERS = 51
"""The priority of `on_train_epoch_end`: after `on_validation_end` of all callbacks, as in Lightning."""


class OwnTrainer:
    """Call Lightning callbacks with a Lightning `Trainer` that never runs, and a module of our model's parts.

    Args:
        trainer: our trainer.
        callbacks: all Lightning callbacks of our trainer.
        package: the Lightning package from which they come.
    """

    def __init__(self, trainer: Any, callbacks: Sequence[Any], package: str) -> None:
        self._ours = trainer
        pl = import_module("lightning.pytorch" if package == "lightning" else package)
        self.module = make_module(pl, unwrap(trainer.model))
        self.native = make_trainer(pl, trainer, self.module, callbacks)
        self._counters = Counters(pl, self.native, self.module)
        self._ready: set[int] = set()  # ids of the callbacks that were set up for the run
        for callback in callbacks:
            callback.log, callback.log_dict = self._log, self._log_dict

    def _log(self, name: str, value: Any, *_: Any, **__: Any) -> None:
        self._ours.metrics.put_scalar(name, value)

    def _log_dict(self, values: Mapping[str, Any], *_: Any, **__: Any) -> None:
        self._ours.metrics.put_scalars(values)

    def own_calls(self) -> Iterator[ForeignCall]:
        """Yield the subscriptions that copy our trainer's counters to the Lightning trainer."""
        yield from self._counters.calls()
        yield ForeignCall("counters.end", ("after_train",), lambda trainer, event: self._ready.clear(), 100)

    def calls(self, callback: Any) -> Iterator[ForeignCall]:
        """Yield a subscription for each method that the callback defines."""
        for name, method in METHODS.items():
            if name == "on_train_end" and defines(callback, "on_exception"):
                yield ForeignCall("on_exception", ("after_train",), partial(self._failed, callback))
            if defines(callback, name):
                yield ForeignCall(name, (method.event,), self._caller(callback, name, method))
            if name == "on_validation_end" and defines(callback, "on_train_epoch_end"):
                yield self._epoch_end(callback)

    def _caller(self, callback: Any, name: str, method: Method) -> Callable[[Any, Any], object]:
        """Return the handler that calls a method; two methods need more than their arguments."""
        if name == "setup":
            return partial(self._set_up, callback)
        if name == "on_load_checkpoint":
            return partial(self._load, callback)
        return partial(self._call, callback, name, method)

    def _call(self, callback: Any, name: str, method: Method, trainer: Any, event: Any) -> None:
        """Call a callback's method, and stop our trainer if it has stopped Lightning's."""
        if method.event == "after_train" and trainer.failure is not None:
            return  # after an error Lightning calls on_exception instead of on_train_end and teardown
        getattr(callback, name)(self.native, self.module, *method.arguments(trainer))
        self._apply_stop(callback, trainer)

    def _set_up(self, callback: Any, *_: Any) -> None:
        """Call a callback's `setup` once a run: at its begin, or before the callback loads its state."""
        if id(callback) not in self._ready:
            self._ready.add(id(callback))
            callback.setup(self.native, self.module, "fit")

    def _failed(self, callback: Any, trainer: Any, event: Any) -> None:
        if trainer.failure is not None:
            callback.on_exception(self.native, self.module, trainer.failure)

    def _epoch_end(self, callback: Any) -> ForeignCall:
        """Return the subscription of `on_train_epoch_end`; Lightning calls it after the epoch's validation.

        It is called at the end of an epoch without a validation, and at the end of the training if the last
        epoch's validation did not take place.
        """
        pending = False

        def epoch_end(trainer: Any, event: Any) -> None:
            """Call `on_train_epoch_end` once an epoch, after its validation if one follows."""
            nonlocal pending
            if isinstance(event, BeforeTrain):
                pending = resumes_evaluation(trainer)
                return
            epoch_ends = isinstance(event, AfterTrainEpoch)
            pending = pending or epoch_ends
            validation_follows = epoch_ends and event.reason == COMPLETED and validates_next(trainer)
            if not pending or validation_follows:
                return
            pending = False
            self.native.training = True
            callback.on_train_epoch_end(self.native, self.module)
            self._apply_stop(callback, trainer)

        events = ("before_train", "after_train_epoch", "after_val", "after_train")
        return ForeignCall("on_train_epoch_end", events, epoch_end, AFTER_OTHERS)

    def _apply_stop(self, callback: Any, trainer: Any) -> None:
        """Stop our trainer if the callback has stopped the Lightning trainer."""
        if self.native.should_stop:
            self.native.should_stop = False
            trainer.stop(f"{type(callback).__name__} of Lightning set trainer.should_stop")

    # --- checkpoints ---------------------------------------------------------------------------------------

    def _load(self, callback: Any, trainer: Any, event: Any) -> None:
        """Let a callback load its state from a checkpoint, while the model has the checkpoint's weights.

        Afterwards the model gets its present weights back, because the checkpoint may still be refused.
        """
        checkpoint, module = trainer.checkpoint, self.module
        self._set_up(callback)
        present_weights = _copied(module)
        try:
            module.load_state_dict(checkpoint.get(OWN, checkpoint["state_dict"]), strict=False)
            callback.on_load_checkpoint(self.native, module, checkpoint)
            checkpoint[OWN] = _copied(module)
        finally:
            module.load_state_dict(present_weights)

    def state_dict(self, callback: Any) -> dict[str, Any]:
        """Return the state of a callback."""
        return cast(dict[str, Any], plain(callback.state_dict(), type(callback).__name__))

    def load_state_dict(self, callback: Any, state: Mapping[str, Any]) -> None:
        """Load the state of a callback."""
        callback.load_state_dict(dict(state))
        # with this flag BaseFinetuning would replace the parameter groups that our resume has restored
        if hasattr(callback, "_restarting"):
            callback._restarting = False


def _copied(module: torch.nn.Module) -> dict[str, Any]:
    """Return a copy of the module's state, which later steps do not change."""
    return {
        name: value.clone() if isinstance(value, torch.Tensor) else value
        for name, value in module.state_dict().items()
    }
