"""The adapter of `Foreign` for callbacks of Lightning."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from typing import Any, NamedTuple, cast

import torch

from eventloop.bridges.foreign import ForeignCall
from eventloop.bridges.host import require
from eventloop.bridges.lightning_objects import make_logger, make_module
from eventloop.checkpoint.weights import unwrap
from eventloop.data.plain_values import plain
from eventloop.events import COMPLETED
from eventloop.events.priority import Priority
from eventloop.optim.optimizers import each_optimizer
from eventloop.util.checks import length_of

SYSTEM = "lightning"
LEAST = "2.4"
REFUSED = {
    "GradientAccumulationScheduler": "hooks=[GradientCumulativeOptimizerHook(cumulative_iters=...)]",
    "LearningRateFinder": "a loop over rates by hand, or Lightning itself",
    "BatchSizeFinder": "a loop over batch sizes by hand, or Lightning itself",
    "StochasticWeightAveraging": 'hooks=[EMAHook(ema_type="StochasticWeightAverage")]',
    "Checkpoint": "hooks=[CheckpointHook(...)]",
    "BasePredictionWriter": "a loop over the batches to predict",
    "ThroughputMonitor": "the phases and times in eventloop report",
    "EventLoopCallback": "its hooks and writers in the arguments of this Trainer",
}
"""Classes whose effect is on Lightning's own loop, or needs it, and what serves here in their place."""
WITHOUT_EVENT = ("on_before_zero_grad", "on_before_backward")
"""Methods that no event here corresponds to."""


class Call(NamedTuple):
    """How a method of a callback is called."""

    event: str
    arguments: Callable[[Any], tuple[Any, ...]] = lambda trainer: ()
    """The arguments after the trainer and the module."""


def _batch(trainer: Any) -> tuple[Any, ...]:
    return trainer.batch, trainer.batch_idx


def _outputs(trainer: Any) -> tuple[Any, ...]:
    return trainer.outputs, trainer.batch, trainer.batch_idx


def _optimizer(trainer: Any) -> tuple[Any, ...]:
    return (next(iter(each_optimizer(trainer.optimizer))),)


CALLS: dict[str, Call] = {
    "setup": Call("before_train", lambda _: ("fit",)),
    "on_fit_start": Call("before_train"),
    "on_train_start": Call("before_train"),
    "on_train_epoch_start": Call("before_train_epoch"),
    "on_train_batch_start": Call("before_train_iter", _batch),
    "on_after_backward": Call("after_backward"),
    "on_before_optimizer_step": Call("before_optimizer_step", _optimizer),
    "on_train_batch_end": Call("after_train_iter", _outputs),
    "on_validation_start": Call("before_val"),
    "on_validation_epoch_start": Call("before_val_epoch"),
    "on_validation_batch_start": Call("before_val_iter", _batch),
    "on_validation_batch_end": Call("after_val_iter", _outputs),
    "on_validation_epoch_end": Call("after_val_epoch"),
    "on_validation_end": Call("after_val"),
    "on_test_start": Call("before_test"),
    "on_test_epoch_start": Call("before_test_epoch"),
    "on_test_batch_start": Call("before_test_iter", _batch),
    "on_test_batch_end": Call("after_test_iter", _outputs),
    "on_test_epoch_end": Call("after_test_epoch"),
    "on_test_end": Call("after_test"),
    "on_save_checkpoint": Call("before_save_checkpoint", lambda t: (t.checkpoint,)),
    "on_load_checkpoint": Call("after_load_checkpoint", lambda t: (t.checkpoint,)),
    "on_train_end": Call("after_train"),
    "on_fit_end": Call("after_train"),
    "teardown": Call("after_train", lambda _: ("fit",)),
}  # fmt: skip
"""The event of each method. `on_train_epoch_end` and `on_exception` have handlers of their own."""


def check(callback: Any) -> None:
    """Refuse an object that is no callback, or steers Lightning's own loop.

    Raises:
        TypeError, ValueError: see the message.
    """
    base = _base(callback)
    if base is None:
        raise TypeError(f"Foreign takes a callback of Lightning, a Callback, got {callback!r}")
    name = type(callback).__name__
    for cls in type(callback).__mro__:
        if cls.__name__ in REFUSED:
            raise ValueError(
                f"{name} needs Lightning's own loop, and would have no effect here: use "
                f"{REFUSED[cls.__name__]}"
            )
    for method in WITHOUT_EVENT:
        if _defines(callback, method):
            raise ValueError(
                f"{name} defines {method}, which would never be called: no event of this trainer corresponds "
                "to it"
            )
    package = _package(base)
    require(package, package.replace("_", "-"), LEAST, extra="lightning")


def stateful(callback: Any) -> bool:
    """Return whether the callback's class has a state to save."""
    return type(callback).state_dict is not cast(Any, _base(callback)).state_dict


def build(trainer: Any, callbacks: Sequence[Any]) -> OwnTrainer:
    """Return Lightning's own trainer object for our trainer.

    Raises:
        ValueError: the callbacks come from both of Lightning's packages.
    """
    packages = {_package(cast(type, _base(each))) for each in callbacks}
    if len(packages) > 1:
        raise ValueError(
            f"expected callbacks of one package, got some of {' and some of '.join(sorted(packages))}: "
            "import all from one of them"
        )
    return OwnTrainer(trainer, callbacks, packages.pop())


class OwnTrainer:
    """A Lightning `Trainer` that is never run, and a module with the model's parts.

    Args:
        trainer: ours.
        callbacks: all of Lightning's callbacks that it has.
        package: Lightning's package from which they come.
    """

    def __init__(self, trainer: Any, callbacks: Sequence[Any], package: str) -> None:
        self._ours = trainer
        self._pl = import_module("lightning.pytorch" if package == "lightning" else package)
        model = unwrap(trainer.model)
        self.module = make_module(self._pl, model)
        self._steps = 0  # of the optimizer
        self._epoch = 0  # Lightning counts an epoch after its validation
        with _quiet(package):
            self.native = self._make(callbacks, model)
        for callback in callbacks:
            callback.log, callback.log_dict = self._log, self._log_dict

    def _make(self, callbacks: Sequence[Any], model: torch.nn.Module) -> Any:
        pl, trainer = self._pl, self._ours
        device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
        bar = any(isinstance(each, pl.callbacks.ProgressBar) for each in callbacks)
        native = pl.Trainer(
            max_epochs=trainer.max_epochs or -1, max_steps=-1 if trainer.by_epoch else trainer.max_iters,
            logger=make_logger(pl, trainer), callbacks=list(callbacks), enable_checkpointing=False,
            enable_progress_bar=bar, enable_model_summary=False, use_distributed_sampler=False,
            check_val_every_n_epoch=1 if _validates_every_epoch(trainer) else 2, log_every_n_steps=10,
            strategy=pl.strategies.SingleDeviceStrategy(str(device)), default_root_dir=str(trainer.work_dir),
            accelerator="cuda" if device.type == "cuda" else "cpu", devices=1,
        )  # fmt: skip
        native.strategy._lightning_module = native.strategy.model = self.module
        native.strategy.optimizers = list(each_optimizer(trainer.optimizer))
        self.module._trainer = native
        native.state.fn, native.state.status = "fit", "running"
        native.training = True
        native.fit_loop.min_epochs, native.fit_loop.max_epochs = 0, trainer.max_epochs or -1
        return native

    # --- counters ------------------------------------------------------------------------------------------

    def own_calls(self) -> Iterator[ForeignCall]:
        """Return the handlers that move the counters, and that stop our trainer."""
        for event, fn in (
            ("before_train", self._begin), ("before_train_epoch", self._next_epoch),
            ("before_train_iter", self._move), ("after_train", self._next_epoch),
            ("before_val", partial(self._evaluate, True)), ("before_test", partial(self._evaluate, True)),
        ):  # fmt: skip
            yield ForeignCall(f"counters.{event}", (event,), fn, Priority.HIGHEST)
        yield ForeignCall("counters.after_optimizer_step", ("after_optimizer_step",), self._stepped)
        yield ForeignCall("counters.after_train_iter", ("after_train_iter",), self._iterated, 45)
        for event in ("after_val_epoch", "after_test_epoch"):
            yield ForeignCall(f"counters.{event}", (event,), self._results, Priority.HIGHEST)
        for event in ("after_val", "after_test"):
            yield ForeignCall(
                f"counters.end.{event}", (event,), partial(self._evaluate, False), Priority.LOWEST
            )

    def _begin(self, trainer: Any, event: Any) -> None:
        native = self.native
        native.should_stop = False
        loader = trainer.train_loader
        length = None if loader is None else length_of(loader)
        native.fit_loop.max_batches = float("inf") if length is None else length
        val = None if trainer.val_loader is None else length_of(trainer.val_loader)
        native.fit_loop.epoch_loop.val_loop._max_batches = [val if val is not None else float("inf")]
        configs = import_module(f"{self._pl.__name__}.utilities.types").LRSchedulerConfig
        native.strategy.lr_scheduler_configs = [
            configs(each, interval="step") for each in trainer.schedulers if hasattr(each, "optimizer")
        ]
        self._steps = max(self._steps, trainer.iter)
        self._next_epoch(trainer, event)

    def _next_epoch(self, trainer: Any, event: Any) -> None:
        self._epoch = trainer.epoch
        self._move(trainer, event)

    def _move(self, trainer: Any, event: Any) -> None:
        """Give Lightning's trainer our counters."""
        loop = self.native.fit_loop
        epoch, batches = loop.epoch_progress.current, loop.epoch_loop.batch_progress
        epoch.ready = epoch.started = self._epoch + 1
        epoch.processed = epoch.completed = self._epoch
        batches.total.ready = trainer.iter + 1
        batches.current.ready = trainer.batch_idx + 1
        batches.total.completed, batches.current.completed = trainer.iter, trainer.batch_idx
        loop.epoch_loop.automatic_optimization.optim_progress.optimizer.step.total.completed = self._steps
        loop.epoch_loop._batches_that_stepped = self._steps
        self.module.training = trainer.model.training

    def _stepped(self, trainer: Any, event: Any) -> None:
        self._steps += 1

    def _iterated(self, trainer: Any, event: Any) -> None:
        """Count the optimizer's steps, and pass on the iteration's numbers."""
        self._move(trainer, event)
        outputs = trainer.outputs if isinstance(trainer.outputs, Mapping) else {}
        numbers = {name: value for name, value in outputs.items() if _is_number(value)}
        names = ("{}", "train/{}") if trainer.val_loader is None else ("train/{}",)
        self._metrics(
            {
                form.format(name): torch.as_tensor(value).detach()
                for name, value in numbers.items()
                for form in names
            }
        )

    def _results(self, trainer: Any, event: Any) -> None:
        self._metrics({name: torch.tensor(value) for name, value in event.metrics.items()})

    def _metrics(self, numbers: dict[str, torch.Tensor]) -> None:
        for each in ("_callback_metrics", "_logged_metrics"):
            getattr(self.native._logger_connector, each).update(numbers)

    def _evaluate(self, begins: bool, trainer: Any, event: Any) -> None:
        """Set Lightning's stage to the evaluation's, or back to the training's."""
        self._move(trainer, event)
        if not begins:
            self.native.training = True
        elif event.mode == "val":
            self.native.validating = True
        else:
            self.native.testing = True

    def _log(self, name: str, value: Any, *_: Any, **__: Any) -> None:
        self._ours.metrics.put_scalar(name, value)

    def _log_dict(self, values: Mapping[str, Any], *_: Any, **__: Any) -> None:
        self._ours.metrics.put_scalars(values)

    # --- callbacks -----------------------------------------------------------------------------------------

    def calls(self, callback: Any) -> Iterator[ForeignCall]:
        """Return a subscription for each method that the callback defines."""
        for method, call in CALLS.items():
            if method == "on_train_end" and _defines(callback, "on_exception"):
                yield ForeignCall("on_exception", ("after_train",), partial(self._failed, callback))
            if _defines(callback, method):
                yield ForeignCall(
                    method, (call.event,), partial(self._call, callback, method, call.arguments)
                )
            if method == "on_validation_end" and _defines(callback, "on_train_epoch_end"):
                yield self._epoch_end(callback)

    def _call(
        self,
        callback: Any,
        method: str,
        arguments: Callable[[Any], tuple[Any, ...]],
        trainer: Any,
        event: Any,
    ) -> None:
        if CALLS[method].event == "after_train" and trainer.failure is not None:
            return  # Lightning calls on_exception alone
        getattr(callback, method)(self.native, self.module, *arguments(trainer))
        self._obey(callback, trainer)

    def _failed(self, callback: Any, trainer: Any, event: Any) -> None:
        if trainer.failure is not None:
            callback.on_exception(self.native, self.module, trainer.failure)

    def _epoch_end(self, callback: Any) -> ForeignCall:
        """Return the subscription of `on_train_epoch_end`, which in Lightning follows the validation."""
        waits = False

        def epoch_end(trainer: Any, event: Any) -> None:
            nonlocal waits
            ends = type(event).__name__ == "AfterTrainEpoch"
            waits = waits or ends
            if not waits or (ends and event.reason == COMPLETED and _validates_next(trainer)):
                return
            waits = False
            callback.on_train_epoch_end(self.native, self.module)
            self._obey(callback, trainer)

        return ForeignCall("on_train_epoch_end", ("after_train_epoch", "after_val", "after_train"), epoch_end)

    def _obey(self, callback: Any, trainer: Any) -> None:
        """Stop our trainer if the callback has stopped Lightning's."""
        if self.native.should_stop:
            self.native.should_stop = False
            trainer.stop(f"{type(callback).__name__} of Lightning set trainer.should_stop")

    def state_dict(self, callback: Any) -> dict[str, Any]:
        """Return the state of a callback."""
        return cast(dict[str, Any], plain(callback.state_dict(), type(callback).__name__))

    def load_state_dict(self, callback: Any, state: Mapping[str, Any]) -> None:
        """Load the state of a callback."""
        callback.load_state_dict(dict(state))


def _base(callback: Any) -> type | None:
    """Return the `Callback` class of the package that a callback is of."""
    for cls in type(callback).__mro__:
        if cls.__name__ == "Callback" and cls.__module__.endswith("pytorch.callbacks.callback"):
            return cls
        if cls.__name__ == "Callback" and cls.__module__ == "pytorch_lightning.callbacks.callback":
            return cls
    return None


def _package(base: type) -> str:
    return base.__module__.partition(".")[0]


def _defines(callback: Any, method: str) -> bool:
    own = getattr(type(callback), method, None)
    return method in vars(callback) or own is not getattr(_base(callback), method, None)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) or (isinstance(value, torch.Tensor) and value.numel() == 1)


def _validates_next(trainer: Any) -> bool:
    """Return whether a validation follows the epoch that ends now."""
    done = trainer.epoch + 1
    due = trainer.by_epoch and not trainer.asked_to_stop
    return bool(due and "val" in trainer._schedule.after(done, trainer.max_epochs))


def _validates_every_epoch(trainer: Any) -> bool:
    """Return True if each epoch has a validation, or none has."""
    if not trainer.by_epoch or trainer.val_loader is None:
        return True
    return all("val" in trainer._schedule.after(n + 1, trainer.max_epochs) for n in range(trainer.max_epochs))


@contextmanager
def _quiet(package: str) -> Iterator[None]:
    """Keep Lightning from telling about its trainer's devices, which are ours."""
    loggers = [
        logging.getLogger(name)
        for name in (package, f"{package}.pytorch", f"{package}.pytorch.utilities.rank_zero")
    ]
    levels = [each.level for each in loggers]
    for each in loggers:
        each.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for each, level in zip(loggers, levels, strict=True):
            each.setLevel(level)
