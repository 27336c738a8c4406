"""Run callbacks of Transformers in this engine's `Trainer`, with a `state` and `control` copied from ours."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from math import ceil
from typing import Any, NamedTuple

import torch

from eventloop.bridges.foreign import ForeignCall
from eventloop.bridges.host import require
from eventloop.events import ScalarsLogged
from eventloop.events.priority import Priority
from eventloop.hooks.checkpoint import CheckpointHook
from eventloop.optim.optimizers import each_optimizer
from eventloop.state.plain_values import plain

require("transformers", "transformers", "5.0", extra="transformers")

from transformers import EarlyStoppingCallback, TrainerCallback, TrainingArguments
from transformers.trainer_callback import ExportableState, TrainerControl, TrainerState

SYSTEM = "transformers"

REFUSED = {
    "DefaultFlowCallback": "val_interval=, the interval of the default hook logger, and CheckpointHook",
    "JITCheckpointCallback": "this trainer, which saves at SIGTERM by CheckpointHook and PreemptionHook",
    "EventLoopCallback": "its hooks and writers in the arguments of this Trainer",
}
"""The callbacks of Transformers that are refused because they act on its loop, with our alternatives."""

FLAGS = {
    "should_epoch_stop": "trainer.stop(reason) in a hook, which ends the run",
    "should_save": "CheckpointHook(interval=...)",
    "should_evaluate": "val_interval=...",
    "should_log": "default_hooks=dict(logger=dict(interval=...))",
}
"""The flags of Transformers' `control` that have no effect in our trainer, each with the alternative."""

NAMES = {"lr": "learning_rate"}
"""Our names of numbers that Transformers logs under another name, each with the name in Transformers."""

LOGS = 95
"""The priority of `on_log`: after our logger, and before `on_train_end`."""


def check(callback: Any) -> None:
    """Refuse an object that is not a callback of Transformers, or that would have no effect in our trainer.

    Raises:
        TypeError: the object is not a callback of Transformers.
        ValueError: the callback would have no effect here.
    """
    name = type(callback).__name__
    if not isinstance(callback, TrainerCallback):
        raise TypeError(
            f"Foreign takes a callback of Transformers, got {name}, which does not derive from "
            "TrainerCallback"
        )
    for cls in type(callback).__mro__:
        if cls.__name__ in REFUSED:
            raise ValueError(
                f"{name} needs the loop of Transformers, and would have no effect here: use "
                f"{REFUSED[cls.__name__]}"
            )
    if _defines(callback, "on_push_begin"):
        raise ValueError(f"{name} defines on_push_begin, which would never be called: nothing is pushed here")


def stateful(callback: Any) -> bool:
    """Return whether the callback has a state to save."""
    return isinstance(callback, ExportableState)


def build(trainer: Any, callbacks: Sequence[Any]) -> OwnTrainer:
    """Return the object that calls all Transformers callbacks of one of our trainers.

    Raises:
        ValueError: an EarlyStoppingCallback watches a metric that the validation does not report.
    """
    return OwnTrainer(trainer, callbacks)


class _Entry(NamedTuple):
    """Hold logged numbers with the host's step and epoch at which they were logged."""

    logs: dict[str, float]
    step: int
    epoch: float


class OwnTrainer:
    """Call callbacks of Transformers with the arguments, state and control that describe our trainer.

    Logged numbers are read from the device in the background. So `on_log` is called some iterations later,
    and for the call the state's counters are set back to the iteration that logged the numbers.
    """

    def __init__(self, trainer: Any, callbacks: Sequence[Any]) -> None:
        self._ours = trainer
        self.control = TrainerControl()
        self.args = _arguments(trainer)
        self.state = TrainerState(
            is_local_process_zero=trainer.rank == 0,
            is_world_process_zero=trainer.rank == 0,
            num_train_epochs=self.args.num_train_epochs,
        )
        self._received_logs: deque[ScalarsLogged] = deque()  # filled by a background subscriber's thread
        self._pending_logs: list[_Entry] = []  # for which `on_log` of each callback is called next
        self._updates_at: dict[int, int] = {}  # optimizer updates by our step, for logs yet to be received
        self._begins_update = True  # whether the next iteration is the first of an optimizer update
        self._stepped = True  # whether the optimizer has made its step in this iteration
        self._ends_update = True  # whether the last iteration has ended an optimizer update
        self._updates_each_iteration = True  # because no hook steps an optimizer
        self._collects_logs = any(_defines(callback, "on_log") for callback in callbacks)
        early_stopping = [callback for callback in callbacks if isinstance(callback, EarlyStoppingCallback)]
        if early_stopping:
            option = f"Foreign({type(early_stopping[0]).__name__}(...))"
            if trainer.val_loader is None:
                raise ValueError(f"{option} needs a validation: give the Trainer a val_loader")
            trainer.monitored.require(self.args.metric_for_best_model, option)

    # --- counters ------------------------------------------------------------------------------------------

    def own_calls(self) -> Iterator[ForeignCall]:
        """Yield the subscriptions that set the counters and collect logged numbers."""
        yield ForeignCall("counters.before_train", ("before_train",), self._begin, Priority.HIGHEST)
        yield ForeignCall(
            "counters.before_train_iter", ("before_train_iter",), self._begin_iteration, Priority.HIGHEST
        )
        events = ("after_optimizer_step", "optimizer_step_skipped")
        yield ForeignCall("counters.after_optimizer_step", events, self._step, Priority.HIGHEST)
        yield ForeignCall("counters.after_train_iter", ("after_train_iter",), self._end_iteration, 45)
        yield ForeignCall(
            "counters.after_val_epoch", ("after_val_epoch",), self._record_best, Priority.LOWEST
        )
        if self._collects_logs:
            self._ours.bus.subscribe(
                self._received_logs.append, ScalarsLogged, offload="thread", name=f"logs ({SYSTEM})"
            )
            events = ("after_train_iter", "after_train")
            yield ForeignCall("counters.logs", events, self._collect_logs, LOGS - 1)

    def _begin(self, trainer: Any, event: Any) -> None:
        """Set lengths and counters of the state, and a new `control`, when our trainer begins to train."""
        state = self.state
        self.control = TrainerControl()
        self._updates_each_iteration = not any("optimizer" in hook.runs_phases for hook in trainer.hooks)
        state.max_steps = ceil((trainer.max_iters or 0) / self.args.gradient_accumulation_steps)
        state.logging_steps = self.args.logging_steps
        self._begins_update = True
        if self._updates_each_iteration:
            state.global_step = trainer.iter
        state.epoch = float(trainer.epoch)

    def _begin_iteration(self, trainer: Any, event: Any) -> None:
        """Begin an iteration; reset the flags of `control` if it is the first of an optimizer update."""
        self._stepped = self._updates_each_iteration
        if self._begins_update:
            self.control.should_log = self.control.should_evaluate = self.control.should_save = False

    def _step(self, trainer: Any, event: Any) -> None:
        self._stepped = True

    def _end_iteration(self, trainer: Any, event: Any) -> None:
        """Count an optimizer update if the optimizer has made its step, and set the epoch as a fraction."""
        self._ends_update = self._begins_update = self._stepped
        self.state.global_step += self._ends_update
        length = trainer.limits.length("train", trainer.loader)
        self.state.epoch = event.epoch + ((event.batch_idx + 1) / length if length else 0.0)
        if self._collects_logs:
            self._updates_at[event.iter + 1] = self.state.global_step

    def _record_best(self, trainer: Any, event: Any) -> None:
        """Record a better metric as the best, after the callbacks have compared it with the former best."""
        score = event.metrics.get(self.args.metric_for_best_model)
        if score is None:
            return
        best, sign = self.state.best_metric, 1 if self.args.greater_is_better else -1
        if best is None or sign * score > sign * best:
            self.state.best_metric, self.state.best_global_step = score, self.state.global_step

    def _collect_logs(self, trainer: Any, event: Any) -> None:
        """Make entries of the logged numbers that were received; at the end of a training, wait for all."""
        if type(event).__name__ == "AfterTrain" and trainer.failure is None:
            trainer.bus.flush()
        self._pending_logs = [
            self._entry(self._received_logs.popleft()) for _ in range(len(self._received_logs))
        ]

    def _entry(self, event: ScalarsLogged) -> _Entry:
        """Return logged numbers with Transformers' names, step and epoch, and add them to `log_history`."""
        prefix = {"val": "eval_", "test": "test_"}.get(event.mode, "")
        step = self._updates_at.get(
            event.step, event.step if self._updates_each_iteration else self.state.global_step
        )
        self._updates_at = {
            logged: count for logged, count in self._updates_at.items() if logged >= event.step
        }
        length = self._ours.limits.length("train", self._ours.loader)
        epoch = event.step / length if length else float(event.epoch)
        logs = {prefix + NAMES.get(name, name): value for name, value in event.scalars.items()}
        self.state.log_history.append({**logs, "epoch": epoch, "step": step})
        return _Entry({**logs, "epoch": epoch}, step, epoch)

    # --- callbacks -----------------------------------------------------------------------------------------

    def calls(self, callback: Any) -> Iterator[ForeignCall]:
        """Yield a subscription for each method that the callback defines."""
        for method, (events, condition) in CALLS.items():
            if _defines(callback, method):
                yield ForeignCall(method, events, self._conditional_handler(callback, method, condition))
        for method, prefix in (("on_evaluate", "eval_"), ("on_predict", "test_")):
            if _defines(callback, method):
                ends = "after_val_epoch" if method == "on_evaluate" else "after_test_epoch"
                yield ForeignCall(method, (ends,), self._evaluation_handler(callback, method, prefix))
        if _defines(callback, "on_log"):
            yield ForeignCall(
                "on_log", ("after_train_iter", "after_train"), self._log_handler(callback), LOGS
            )
        if _defines(callback, "on_train_end"):
            fn = self._conditional_handler(callback, "on_train_end", lambda own: own._ours.failure is None)
            yield ForeignCall("on_train_end", ("after_train",), fn, Priority.LOWEST)

    def _conditional_handler(
        self, callback: Any, method: str, condition: Condition
    ) -> Callable[[Any, Any], None]:
        """Return a handler that calls a method of a callback if the condition is met."""

        def call(trainer: Any, event: Any) -> None:
            if condition(self):
                self._call(callback, method)

        return call

    def _evaluation_handler(self, callback: Any, method: str, prefix: str) -> Callable[[Any, Any], None]:
        """Return a handler that calls a method with the metrics, whose names get a prefix such as "eval_"."""

        def call(trainer: Any, event: Any) -> None:
            metrics = {prefix + name: value for name, value in event.metrics.items()}
            self._call(callback, method, metrics={**metrics, "epoch": self.state.epoch})

        return call

    def _log_handler(self, callback: Any) -> Callable[[Any, Any], None]:
        """Return a handler that calls `on_log` for each entry, with the state's counters of that entry."""

        def call(trainer: Any, event: Any) -> None:
            """Call `on_log` for each pending entry, and then restore the present counters."""
            state = self.state
            present = state.global_step, state.epoch
            for logs, state.global_step, state.epoch in self._pending_logs:
                self._call(callback, "on_log", logs=dict(logs))
            state.global_step, state.epoch = present

        return call

    def _call(self, callback: Any, method: str, **arguments: Any) -> None:
        """Call a method of a callback, and stop our trainer if it has requested that.

        Raises:
            RuntimeError: the method has set a flag that has no effect here.
        """
        trainer = self._ours
        was_set = {flag: getattr(self.control, flag) for flag in FLAGS}
        control = getattr(callback, method)(
            self._args_for(callback, method),
            self.state,
            self.control,
            model=trainer.model,
            processing_class=None,
            optimizer=next(iter(each_optimizer(trainer.optimizer)), None),
            lr_scheduler=next(iter(trainer.schedulers), None),
            train_dataloader=trainer.train_loader,
            eval_dataloader=trainer.val_loader,
            **arguments,
        )
        self.control = self.control if control is None else control
        name = type(callback).__name__
        for flag, instead in FLAGS.items():
            if getattr(self.control, flag) and not was_set[flag]:
                raise RuntimeError(
                    f"{name}.{method} of Transformers set control.{flag}, which has no effect here: use "
                    f"{instead}"
                )
        if self.control.should_training_stop:
            self.control.should_training_stop = False
            trainer.stop(f"{name} of Transformers set control.should_training_stop")

    def _args_for(self, callback: Any, method: str) -> TrainingArguments:
        """Return the `args` of a call, with `load_best_model_at_end` where EarlyStoppingCallback warns of it.

        It warns when a training begins without that option, which our trainer does not have.
        """
        if method != "on_train_begin" or not isinstance(callback, EarlyStoppingCallback):
            return self.args
        args = copy(self.args)
        args.load_best_model_at_end = True
        return args

    def state_dict(self, callback: Any) -> dict[str, Any]:
        """Return a callback's attributes, with the best metric and the number of optimizer updates."""
        attributes = callback.state()["attributes"]
        state = {
            "attributes": attributes,
            "best_metric": self.state.best_metric,
            "best_global_step": self.state.best_global_step,
            "global_step": self.state.global_step,
        }
        return dict(plain(state, type(callback).__name__))

    def load_state_dict(self, callback: Any, state: Mapping[str, Any]) -> None:
        """Load the state of a callback."""
        for name, value in state["attributes"].items():
            setattr(callback, name, value)
        self.state.best_metric, self.state.best_global_step = state["best_metric"], state["best_global_step"]
        self.state.global_step = state["global_step"]


Condition = Callable[[OwnTrainer], bool]

CALLS: dict[str, tuple[tuple[str, ...], Condition]] = {
    "on_init_end": (("before_run",), lambda own: own.state.global_step == 0),
    "on_train_begin": (("before_train",), lambda own: True),
    "on_epoch_begin": (("before_train_epoch",), lambda own: True),
    "on_step_begin": (("before_train_iter",), lambda own: own._begins_update),
    "on_pre_optimizer_step": (("before_optimizer_step",), lambda own: True),
    "on_optimizer_step": (("after_optimizer_step",), lambda own: True),
    "on_substep_end": (("after_train_iter",), lambda own: not own._ends_update),
    "on_step_end": (("after_train_iter",), lambda own: own._ends_update),
    "on_epoch_end": (("after_train_epoch",), lambda own: True),
    "on_prediction_step": (("after_val_iter", "after_test_iter"), lambda own: True),
    "on_save": (("checkpoint_saved",), lambda own: True),
}
"""For each method of callbacks, the events at which it is called, and the condition of the call."""


def _defines(callback: Any, method: str) -> bool:
    return getattr(type(callback), method) is not getattr(TrainerCallback, method)


def _arguments(trainer: Any) -> TrainingArguments:
    """Return Transformers' `TrainingArguments` that describe our trainer."""
    metric, greater = "loss", False
    for hook in trainer.hooks:
        if isinstance(hook, CheckpointHook) and hook.best_metrics and "auto" not in hook.best_metrics.metrics:
            metric = hook.best_metrics.metrics[0]
            greater = hook.best_metrics.rule_of(metric) == "greater"
            break
    device = next((parameter.device for parameter in trainer.model.parameters()), torch.device("cpu"))
    accumulated = max((getattr(hook, "cumulative_iters", 1) for hook in trainer.hooks), default=1)
    evaluation_unit = "epoch" if trainer.by_epoch else "steps"
    arguments = TrainingArguments(
        str(trainer.work_dir),
        num_train_epochs=trainer.max_epochs or 1,
        max_steps=-1 if trainer.by_epoch else trainer.max_iters,
        logging_strategy="steps",
        save_strategy="no",
        eval_strategy="no" if trainer.val_loader is None else evaluation_unit,
        eval_steps=1,
        report_to=[],
        use_cpu=device.type == "cpu",
        gradient_accumulation_steps=accumulated,
    )
    arguments.metric_for_best_model, arguments.greater_is_better = metric, greater
    return arguments
