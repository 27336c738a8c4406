"""Use the bus in the loop of a Transformers `Trainer`.

    trainer = transformers.Trainer(model, args, train_dataset=data, callbacks=[EventLoopCallback()])

The page "Use it inside Transformers" has the table of its events. All methods run on the training thread.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial, wraps
from pathlib import Path
from time import perf_counter
from typing import Any, Literal
from weakref import ref

from eventloop.bridges.attachment import Attachment, HasAttachment, stop_at_sigterm
from eventloop.bridges.driven import DrivenTrainer
from eventloop.bridges.host import require
from eventloop.bridges.host_numbers import numbers_of, read_numbers
from eventloop.bridges.state_file import read_state, write_state
from eventloop.bus import Bus
from eventloop.costs.foreign_calls import ForeignCalls
from eventloop.evaluation.schedule import Evaluate
from eventloop.events import (
    AfterOptimizerStep,
    BeforeOptimizerStep,
    OptimizerStepSkipped,
)

require("transformers", "transformers", "5.0", extra="transformers")

from transformers import TrainerCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from eventloop.bridges.transformers.commands import HostCommands
from eventloop.bridges.transformers.host import (
    PARTS,
    MeasuredCallbacks,
    announce_in_step,
    find_host,
    measured_part,
    updates,
    waits_for_data,
)

__all__ = ["EventLoopCallback"]

NEVER = {
    "before_val_iter": "Transformers has no callback before a batch of an evaluation: use after_val_iter",
    "before_test_iter": "Transformers has no callback before a batch of a prediction: use after_test_iter",
}
"""The events that Transformers cannot emit, each with the reason."""

EVALUATIONS: dict[str, Evaluate] = {"evaluate": "val", "predict": "test"}
"""The methods of the Transformers trainer that evaluate, and the mode of their evaluation."""


class EventLoopCallback(HasAttachment, TrainerCallback):
    """Emit the events of a training that a Transformers `Trainer` (the host) runs.

        bridge = EventLoopCallback(hooks=[EMAHook()], writers=[JSONLWriter()])

        @bridge.bus.on("after_train_iter", every=100)
        def show(trainer, event):
            print(event.iter, trainer.native.state.epoch)

        transformers.Trainer(model, args, train_dataset=data, callbacks=[bridge]).train()

    An iteration is an update of the optimizer, with one or several batches. Handlers get a `DrivenTrainer`,
    whose `native` is the Transformers trainer. Its `batch` and `outputs` stay None, because Transformers
    passes them to no callback. The host's checkpoints, `checkpoint-N`, contain the states of the hooks in a
    file `eventloop.pt`, and `resume_from_checkpoint` restores them.

    Pass it to the host as `callbacks=[...]`, or to each trainer of a program by
    `transformers.trainer.DEFAULT_CALLBACKS.append(EventLoopCallback)`. Then any error that ends `train()`
    also ends the run. After `trainer.add_callback(...)`, in the first training, only errors of
    `training_step` and of the data loader do.

    Args:
        bus: an existing bus to emit events on.
        hooks, writers: as for `Trainer`. A hook that does a part of the host's loop is refused.
        work_dir: directory of the run's files; by default the host's `output_dir`.
        measure: measure the methods of the host's other callbacks, for a row each in the costs.

    Raises:
        TypeError, ValueError: an argument is invalid. The host's `Trainer(...)` and `add_callback` raise
            ValueError for a second of these callbacks.
    """

    def __init__(
        self,
        bus: Bus | None = None,
        *,
        hooks: Sequence[Any] = (),
        writers: Sequence[Any] = (),
        work_dir: str | Path | None = None,
        measure: bool = True,
    ) -> None:
        self._attachment = Attachment(
            "Transformers", NEVER, bus, hooks=hooks, writers=writers, work_dir=work_dir, measure=measure
        )
        self._commands = HostCommands()
        self._attachment.steer = self._commands.steer
        self._calls = ForeignCalls(self._charge)
        self._callbacks = MeasuredCallbacks(self._calls, self._attachment.methods, EventLoopCallback)
        self._watched: ref[Any] | None = None  # the host whose `train` is wrapped
        self._within_train = False  # whether the wrapped `train` is running
        self._batches_evaluated = 0  # of the data set that is being evaluated
        self._loader = ""  # the name of the data set that is being evaluated; "" if there is only one
        self._prefix = "eval"  # with which the names of the running evaluation's metrics begin
        self._logged: dict[str, Any] = {}  # numbers logged by the host within an evaluation
        self._iterations_before_resume = 0  # completed iterations of the epoch that a resumed run continues
        # when the optimizer's step began, on `perf_counter` without waits, and the phase "hooks" at that time
        self._step_began = self._hooks_before = 0.0

    # --- the host's run ---------------------------------------------------------------------------------

    def on_init_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Wrap the methods of the host that is being created."""
        if (calling := find_host(self)) is not None:
            self._watch(calling.trainer)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Begin a run: emit `before_run` and `before_train`."""
        calling = find_host(self)
        if calling is None:
            raise RuntimeError(
                "EventLoopCallback serves the loop of a transformers.Trainer, got a call from another loop: "
                "drive that loop with eventloop.bridges.DrivenTrainer"
            )
        host, resumed_from = calling
        self._attachment.end_run()  # the former run is open if the host restarts with a smaller batch size
        self._watch(host)
        train_is_wrapped = self._within_train  # not if `add_callback` came after the host's constructor
        if not train_is_wrapped:
            for name in ("training_step", "get_batch_samples"):
                self._attachment.methods.replace(host, name, self._attachment.ending_run)
        if resumed_from is not None:
            self._attachment.load_state_dict(read_state(resumed_from))
        by_epoch, epoch = args.max_steps <= 0, int(state.epoch or 0)
        trainer = self._attachment.begin_run(
            kwargs["model"],
            native=host,
            optimizer=kwargs["optimizer"],
            by_epoch=by_epoch,
            max_epochs=state.num_train_epochs if by_epoch else None,
            max_iters=state.max_steps,
            work_dir=args.output_dir,
            iter=state.global_step,
            epoch=epoch,
        )
        length = updates(args, kwargs["train_dataloader"])
        self._iterations_before_resume = 0 if length is None else state.global_step - epoch * length
        self._measure_phases(host, trainer)

    def _measure_phases(self, host: Any, trainer: DrivenTrainer) -> None:
        """Wrap methods of the host to measure the phases of an iteration, until the run ends."""
        stop_at_sigterm(trainer)
        self._attachment.methods.replace(host, "get_batch_samples", partial(waits_for_data, trainer))
        for name, (phase, event) in PARTS.items():
            self._attachment.methods.replace(
                host.accelerator, name, partial(measured_part, trainer, phase, event)
            )
        self._measure_callbacks_of_run(host, trainer)

    def _measure_callbacks_of_run(self, host: Any, trainer: DrivenTrainer) -> None:
        """Measure the host's present callbacks, and number those of one class anew, as in each run."""
        trainer.foreign_calls = self._calls
        self._callbacks = MeasuredCallbacks(self._calls, self._attachment.methods, EventLoopCallback)
        self._measure_new_callbacks(host)

    def _measure_new_callbacks(self, host: Any) -> None:
        """Measure the host's callbacks that are not measured yet, if the user wants them measured."""
        if self._attachment.measure:
            self._callbacks.measure(host.callback_handler.callbacks)

    def _charge(self, phase: Literal["hooks"], seconds: float) -> None:
        """Charge a callback's time to the phase "hooks" of the iteration, except within an evaluation."""
        trainer = self._attachment.trainer
        if trainer is not None and trainer.metrics.inside.mode == "train":
            trainer.clock.charge(phase, seconds)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """End the run, unless the wrapped `train` of the host will end it, after all callbacks."""
        self._record_early_end(state, control)
        if not self._within_train:
            self._attachment.end_run()

    def _watch(self, host: Any) -> None:
        """Wrap `train` of the host to end the run even after an error, and its evaluations to emit events.

        Raises:
            ValueError: the host has two callbacks of this class.
        """
        _check_single(host.callback_handler.callbacks)
        if self._watched is not None and self._watched() is host:
            return
        self._watched, train = ref(host), self._attachment.ending_run(host.train)

        @wraps(train)
        def train_and_end_run(*args: Any, **kwargs: Any) -> Any:
            """Train, and end the run after all callbacks; after an error `ending_run` has ended it."""
            self._within_train = True
            try:
                result = train(*args, **kwargs)
            finally:
                self._within_train = False
            self._attachment.end_run()
            return result

        host.train = train_and_end_run
        host.add_callback = _checked_add_callback(host)
        for name, mode in EVALUATIONS.items():
            setattr(host, name, self._wrap_evaluation(host, mode, getattr(host, name)))

    # --- its epochs and iterations ------------------------------------------------------------------------

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Begin an epoch: emit `before_train_epoch`."""
        trainer = self._running()
        self._measure_new_callbacks(trainer.native)  # callbacks that the program has added since
        trainer.begin_epoch(updates(args, kwargs["train_dataloader"]))
        trainer.batch_idx, self._iterations_before_resume = self._iterations_before_resume, 0

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """End the epoch: emit `after_train_epoch`."""
        trainer = self._running()
        self._record_early_end(state, control)
        trainer.end_epoch()
        if trainer.stops.edge():  # a collective: every rank gets here at the end of an epoch
            control.should_training_stop = True

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Begin an iteration: emit `before_train_iter`."""
        self._running().begin_iter(None)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Emit `before_optimizer_step`, after the gradients were clipped."""
        trainer = self._running()
        trainer.record_rates(kwargs.get("optimizer"))
        announce_in_step(trainer, BeforeOptimizerStep)
        clock = trainer.clock
        self._step_began, self._hooks_before = perf_counter() - clock.waits.seconds, clock.hooks

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Emit `after_optimizer_step` or `optimizer_step_skipped`."""
        trainer = self._running()
        clock = trainer.clock
        # other callbacks that were called since on_pre_optimizer_step are charged to "hooks" already
        callback_seconds = clock.hooks - self._hooks_before
        seconds = perf_counter() - clock.waits.seconds - self._step_began
        clock.charge("optimizer", seconds - callback_seconds)
        if trainer.native.accelerator.optimizer_step_was_skipped:
            announce_in_step(trainer, OptimizerStepSkipped, reason="non-finite gradients")
        else:
            announce_in_step(trainer, AfterOptimizerStep)
        self._commands.before_schedule()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """End the iteration: emit `after_train_iter`, and count it."""
        self._commands.after_schedule()
        if self._running().end_iter(None):
            control.should_training_stop = True
        if self._commands.saves:
            control.should_save = True

    # --- its evaluations, numbers and checkpoints ---------------------------------------------------------

    def _wrap_evaluation(self, host: Any, mode: Evaluate, call: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap `evaluate` or `predict` of the host to emit events; begin a run if none is under way."""

        @wraps(call)
        def evaluate(*args: Any, **kwargs: Any) -> Any:
            """Evaluate, with events unless this call is a part of an evaluation or of an iteration."""
            trainer, prefix = self._attachment.trainer, kwargs.get("metric_key_prefix", "eval")
            if trainer is None or not trainer.running:  # outside of a training: as a run without a training
                self._prefix = prefix
                return self._evaluate_alone(host, mode, partial(call, *args, **kwargs))
            if trainer.mode != "train":
                # for several data sets, `evaluate` of the host calls itself for each: "eval_" and its name
                self._batches_evaluated, self._loader = 0, prefix.removeprefix(f"{self._prefix}_")
                return call(*args, **kwargs)
            if trainer.metrics.in_iteration:  # called by a callback within a step: emit no events
                return call(*args, **kwargs)
            self._prefix = prefix
            return self._evaluate(trainer, mode, partial(call, *args, **kwargs))

        return evaluate

    def _evaluate_alone(self, host: Any, mode: Evaluate, call: Callable[[], Any]) -> Any:
        """Evaluate in a run without a training, which begins and ends with the evaluation."""
        args, state = host.args, host.state
        trainer = self._attachment.begin_run(
            host.model,
            native=host,
            by_epoch=args.max_steps <= 0,
            work_dir=args.output_dir,
            iter=state.global_step,
            epoch=int(state.epoch or 0),
            training=False,
        )
        self._measure_callbacks_of_run(host, trainer)
        result = self._attachment.ending_run(self._evaluate)(trainer, mode, call)
        self._attachment.end_run()
        return result

    def _evaluate(self, trainer: DrivenTrainer, mode: Evaluate, call: Callable[[], Any]) -> Any:
        """Make an evaluation of the host by `call()` between the events of its begin and its end."""
        self._batches_evaluated, self._loader, self._logged = 0, "", {}
        trainer.begin_val(mode)
        result = call()
        metrics = read_numbers(_without_epoch(result if mode == "val" else result.metrics or {}))
        trainer.end_val(metrics)
        if no_metrics := {name: value for name, value in self._logged.items() if name not in metrics}:
            trainer.log(no_metrics, mode=mode, step=trainer.iter)
        if trainer.stops.edge():  # a collective: every rank evaluates
            trainer.native.control.should_training_stop = True
        return result

    def on_prediction_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Emit `after_val_iter`, or `after_test_iter`."""
        trainer = self._attachment.trainer
        if trainer is not None and trainer.running and trainer.mode != "train":
            trainer.end_val_iter(None, self._batches_evaluated, self._loader)
            self._batches_evaluated += 1

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Emit the numbers that the host logs as `scalars_logged`."""
        if (trainer := self._attachment.trainer) is None or not trainer.running:
            return
        numbers = numbers_of(_without_epoch(kwargs["logs"]))
        if trainer.mode != "train":  # `end_val` logs the metrics, and `_evaluate` logs other numbers after it
            self._logged |= numbers
        else:
            trainer.log(numbers, step=state.global_step)

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Save the states of the hooks in the host's checkpoint, and answer a command `checkpoint`."""
        checkpoint = Path(args.output_dir, f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}")
        if state.is_world_process_zero and checkpoint.is_dir():
            write_state(checkpoint, self._attachment.state_dict())
        if self._commands.saves:
            self._commands.report_saved(self._running())

    # --- parts --------------------------------------------------------------------------------------------

    def _running(self) -> DrivenTrainer:
        """Return the trainer, which exists from the begin of the first run on."""
        if (trainer := self._attachment.trainer) is None:
            raise RuntimeError("EventLoopCallback got the host's event before on_train_begin")
        return trainer

    def _record_early_end(self, state: Any, control: Any) -> None:
        """Stop our trainer if another callback has stopped the host, so that a cut epoch does not count."""
        trainer = self._running()
        stopped_early = control.should_training_stop and state.global_step < state.max_steps
        if stopped_early and trainer.running and trainer.stop_reason is None:
            trainer.stop("a callback of Transformers set control.should_training_stop")


def _checked_add_callback(host: Any) -> Callable[[Any], None]:
    """Return a replacement of the host's `add_callback` that refuses a second EventLoopCallback."""
    add = host.add_callback

    @wraps(add)
    def add_callback(callback: Any) -> None:
        _check_single([*host.callback_handler.callbacks, callback])
        add(callback)

    return add_callback


def _check_single(callbacks: Sequence[Any]) -> None:
    """Raise ValueError if two of a host's callbacks, given as objects or classes, are EventLoopCallbacks."""
    classes = [callback if isinstance(callback, type) else type(callback) for callback in callbacks]
    if sum(issubclass(cls, EventLoopCallback) for cls in classes) > 1:
        raise ValueError(
            "expected one EventLoopCallback in a Trainer, got two, and each would emit the events of its "
            "run: give one of them all hooks, writers and the bus"
        )


def _without_epoch(logs: Mapping[str, Any]) -> dict[str, Any]:
    """Return logged values without `epoch`, which the host adds to each log; our events have that field."""
    return {name: value for name, value in logs.items() if name != "epoch"}
