"""Use the bus in a runner of MMEngine: `Runner(..., custom_hooks=[EventLoopHook(writers=[...])])`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial, wraps
from pathlib import Path
from time import perf_counter
from typing import Any

from eventloop.bridges.attachment import Attachment, HasAttachment, stop_at_sigterm
from eventloop.bridges.driven import name_of_host
from eventloop.bridges.host import require
from eventloop.bridges.host_numbers import read_numbers
from eventloop.bridges.optimizer_steps import announced_steps
from eventloop.bridges.row_names import RowNames
from eventloop.bridges.unmeasured import measuring_only
from eventloop.bus import Bus
from eventloop.events import AfterBackward
from eventloop.optim.optimizers import named_optimizers
from eventloop.util.checks import length_of

require("mmengine", "mmengine", "0.10.6", extra="mmengine")

import mmengine.hooks
from mmengine.optim import OptimWrapperDict
from mmengine.registry import HOOKS
from mmengine.runner import BaseLoop, EpochBasedTrainLoop, Runner

from eventloop.bridges.mmengine.commands import steer

NEVER = {"optimizer_step_skipped": "MMEngine's optim wrappers do not say that a step was skipped"}
"""The events that no runner of MMEngine can emit, each with the reason."""
IN_ITERATION = ("before_train_iter", "after_train_iter")
_STATE = "eventloop"
"""The key of the hooks' states in the runner's checkpoints."""


@HOOKS.register_module(force=True)
class EventLoopHook(HasAttachment, mmengine.hooks.Hook):  # type: ignore[misc]  # MMEngine is not typed
    """Emit the events of a runner's trainings, validations and tests on a bus.

        bridge = EventLoopHook(writers=[JSONLWriter()])

        @bridge.bus.on("after_train_iter", priority=70)
        def show(trainer, event):
            print(event.iter, trainer.outputs["loss"])

        Runner(..., custom_hooks=[bridge]).train()

    Its priority is VERY_LOW, so that almost all other hooks of the runner are called before it. Numbers that
    they put into the runner's message hub are logged at each iteration; those named `val/...` and `test/...`
    are logged with the metrics of the evaluation. The runner's checkpoints contain the states of `hooks`.

    Args:
        bus: an existing bus; by default a new one, the attribute `bus`.
        hooks, writers: as for `Trainer`.
        work_dir: directory of the files; by default the runner's.
        measure: measure the time of each hook of the runner, for a row of its own in the costs.

    Raises:
        TypeError, ValueError: an argument is invalid, or a hook does a part of the loop that the runner does.
    """

    priority = "VERY_LOW"

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
            "MMEngine", NEVER, bus, hooks=hooks, writers=writers, work_dir=work_dir, measure=measure
        )
        self._attachment.steer = partial(steer, methods=self._attachment.methods)
        self._trains = False  # whether the run trains, or only evaluates
        self._wrappers: list[Any] = []  # optim wrappers whose `backward` is measured
        # the values of evaluations in the message hub, as they were when the last evaluation ended
        self._hub_values: dict[str, Any] = {}

    # --- the run -------------------------------------------------------------------------------------------

    def before_run(self, runner: Runner) -> None:
        """Wrap the runner's loops (training, validation, test), so that an error in a loop ends our run.

        MMEngine calls this before each loop, and calls no hook after an error.

        Raises:
            ValueError: the runner has another `EventLoopHook`.
        """
        if sum(isinstance(hook, EventLoopHook) for hook in runner.hooks) > 1:
            raise ValueError(
                "expected one EventLoopHook in the hooks of a Runner, got two: give one of them all hooks "
                "and writers"
            )
        if self._attachment.within_call:
            return  # a hook has called runner.val() or runner.test() in a training, whose run goes on
        self._attachment.end_unfinished_run()
        self._attachment.methods.restore()
        for loop in (runner._train_loop, runner._val_loop, runner._test_loop):
            is_built = callable(getattr(loop, "run", None))  # a loop that is not used stays a config or None
            if is_built:
                self._attachment.methods.replace(loop, "run", self._attachment.ending_run)

    def _begin_run(self, runner: Runner, *, training: bool) -> None:
        """Begin a run of our trainer with the runner's model, optimizers and counters; measure its hooks."""
        self._trains = training
        loop = _train_loop(runner)
        by_epoch = not training or isinstance(loop, EpochBasedTrainLoop)
        wrappers = runner.optim_wrapper if training else None
        trainer = self._attachment.begin_run(
            runner.model,
            native=runner,
            optimizer=_optimizers(wrappers),
            by_epoch=by_epoch,
            max_epochs=getattr(loop, "max_epochs", None) if training and by_epoch else None,
            max_iters=getattr(loop, "max_iters", None) if training else None,
            work_dir=runner.work_dir,
            iter=getattr(loop, "iter", 0),
            epoch=getattr(loop, "epoch", 0),
            training=training,
        )
        self._hub_values = _evaluation_values(runner)  # not empty if the runner has resumed a checkpoint
        stop_at_sigterm(trainer)
        self._follow_steps = trainer.during_run.enter_context(announced_steps(trainer))
        self._wrappers = []
        self._measure_backward(wrappers)
        if self._attachment.measure:
            names = RowNames()
            for hook in runner.hooks:
                self._measure(hook, names)

    def after_run(self, runner: Runner) -> None:
        """End the run, unless a hook has only validated or tested within a training."""
        if self._attachment.within_call:
            return
        loop = _train_loop(runner)
        if self._runs and self._trains and self.trainer.stop_reason is None and _ended_early(loop):
            self.trainer.stop_reason = "runner.train_loop.stop_training"
        self._attachment.end_run()

    def before_train(self, runner: Runner) -> None:
        """Begin a run that trains."""
        if self._runs:
            self._attachment.end_run()  # a run that another hook began by validating before the training
        self._begin_run(runner, training=True)

    @property
    def _runs(self) -> bool:
        """Whether a run is under way. A loop that the program has written may call hooks outside of a run."""
        return self._attachment.trainer is not None and self._attachment.trainer.running

    # --- the training --------------------------------------------------------------------------------------

    def before_train_epoch(self, runner: Runner) -> None:
        """Begin an epoch; a run that counts iterations has one epoch."""
        if self._runs:
            loader = getattr(_train_loop(runner), "dataloader", None)
            self.trainer.begin_epoch(length_of(loader) if self.trainer.by_epoch else None)

    def before_train_iter(self, runner: Runner, batch_idx: int, data_batch: Any = None) -> None:
        """Begin an iteration; first take the runner's present optimizers if the program has changed them."""
        if not self._runs:
            return
        trainer, wrappers = self.trainer, runner.optim_wrapper
        if (optimizers := _optimizers(wrappers)) != trainer.optimizer:
            trainer.optimizer = optimizers
            self._follow_steps()
            self._measure_backward(wrappers)
        trainer.begin_iter(data_batch)

    def after_train_iter(
        self, runner: Runner, batch_idx: int, data_batch: Any = None, outputs: dict[str, Any] | None = None
    ) -> None:
        """End an iteration, and stop the runner if a handler has requested it."""
        if not self._runs:
            return
        trainer = self.trainer
        outputs = outputs or {}
        for name, buffer in runner.message_hub.log_scalars.items():
            short = _train_name(name)
            if short is not None and short not in outputs and buffer.data[1].size:
                trainer.metrics.put_scalar(short, float(buffer.current()))
        if trainer.end_iter(outputs):
            if (loop := _train_loop(runner)) is not None:
                loop.stop_training = True
            if trainer.stop_signal is not None:  # end the program now, not after the runner's epoch
                self._attachment.end_run()

    def after_train_epoch(self, runner: Runner) -> None:
        """End the epoch."""
        if self._runs:
            self.trainer.end_epoch()
            self._stop_host(runner)

    def _stop_host(self, runner: Runner) -> None:
        """Stop the runner if a handler on any rank has requested a stop; all ranks call this together."""
        if self.trainer.stops.edge() and (loop := _train_loop(runner)) is not None:
            loop.stop_training = True

    def _measure_backward(self, wrappers: Any) -> None:
        """Wrap `backward` of each optimizer wrapper, once even if a hook has replaced some."""
        for wrapper in named_optimizers(wrappers).values():
            if not any(known is wrapper for known in self._wrappers):
                self._wrappers.append(wrapper)
                self._attachment.methods.replace(wrapper, "backward", self._wrap_backward)

    def _wrap_backward(self, backward: Callable[..., Any]) -> Callable[..., Any]:
        """Charge the time of `backward` to the phase of that name, and emit `after_backward`."""
        trainer, waits = self.trainer, self.trainer.clock.waits

        @wraps(backward)
        def measured(*args: Any, **kwargs: Any) -> Any:
            """Call `backward`, charge its time without waits, and emit the event."""
            began = perf_counter() - waits.seconds
            result = backward(*args, **kwargs)
            trainer.clock.charge("backward", perf_counter() - waits.seconds - began)
            trainer.announce(AfterBackward)
            return result

        return measured

    # --- validations and tests -----------------------------------------------------------------------------

    def before_val(self, runner: Runner) -> None:
        """Begin a validation, and a run if none is under way."""
        self._begin_evaluation(runner, "val")

    def before_test(self, runner: Runner) -> None:
        """Begin a test, and a run if none is under way."""
        self._begin_evaluation(runner, "test")

    def _begin_evaluation(self, runner: Runner, mode: Any) -> None:
        if self._attachment.trainer is None or not self._attachment.trainer.running:
            self._begin_run(runner, training=False)
        self.trainer.begin_val(mode)

    def before_val_iter(self, runner: Runner, batch_idx: int, data_batch: Any = None) -> None:
        """Begin an iteration of the validation."""
        if self._runs:
            self.trainer.begin_val_iter(data_batch, batch_idx)

    def after_val_iter(
        self, runner: Runner, batch_idx: int, data_batch: Any = None, outputs: Any = None
    ) -> None:
        """End an iteration of the validation."""
        if self._runs:
            self.trainer.end_val_iter(outputs, batch_idx)

    before_test_iter = before_val_iter
    after_test_iter = after_val_iter

    def after_val_epoch(self, runner: Runner, metrics: dict[str, float] | None = None) -> None:
        """End the validation with its metrics and the numbers put into the message hub since the last one."""
        if not self._runs:
            return
        former, self._hub_values = self._hub_values, _evaluation_values(runner)
        new_values = {
            name: values for name, values in self._hub_values.items() if values is not former.get(name)
        }
        in_hub = {
            short: values[-1]
            for name, values in new_values.items()
            if values.size and (short := _without_prefix(self.trainer.mode, name))
        }
        self.trainer.end_val(read_numbers(in_hub | (metrics or {})))
        self._stop_host(runner)

    after_test_epoch = after_val_epoch

    # --- checkpoints, costs --------------------------------------------------------------------------------

    def before_save_checkpoint(self, runner: Runner, checkpoint: dict[str, Any]) -> None:
        """Add the states of the hooks to the runner's checkpoint."""
        checkpoint[_STATE] = self._attachment.state_dict()

    def after_load_checkpoint(self, runner: Runner, checkpoint: dict[str, Any]) -> None:
        """Load the states of the hooks from the runner's checkpoint."""
        self._attachment.load_state_dict(checkpoint.get(_STATE, {}))

    def _measure(self, hook: Any, names: RowNames) -> None:
        """Measure the methods of one of the runner's hooks until the run ends."""
        if hook is self:
            return
        cls = type(hook)
        # MMEngine and eventloop both have a LoggerHook
        suffix = " (mmengine)" if cls.__module__.startswith("mmengine.") else ""
        label = names.of(hook, cls.__name__, suffix)
        with measuring_only(f"a {cls.__name__} of MMEngine"):
            for stage in hook.get_triggered_stages():
                self._attachment.methods.replace(
                    hook, stage, partial(self._measured, f"{label}.{stage}{suffix}", stage)
                )

    def _measured(self, name: str, stage: str, method: Callable[..., Any]) -> Callable[..., Any]:
        in_iteration = stage in IN_ITERATION
        return self.trainer.foreign_calls.measured(method, name, stage, in_iteration=in_iteration)


def _train_loop(runner: Runner) -> Any:
    """Return the runner's training loop; None if the runner has not built one.

    Never read the runner's `train_loop`, `iter`, `epoch`, `max_iters`, `max_epochs` or `train_dataloader` in
    its place: they build the loop with its data set, which a program that only tests may not have.
    """
    return runner._train_loop if isinstance(runner._train_loop, BaseLoop) else None


def _ended_early(loop: Any) -> bool:
    """Return whether a loop of training was stopped before its last iteration."""
    stopped = getattr(loop, "stop_training", False)
    return bool(stopped and getattr(loop, "iter", 0) < (getattr(loop, "max_iters", None) or float("inf")))


_OWN = ("lr", "momentum", "time", "data_time", "memory")
"""The numbers in MMEngine's message hub that the bridge does not log: eventloop logs these itself."""
_EVALUATIONS = ("val/", "test/")


@cache  # called for each name at each iteration
def _train_name(name: str) -> str | None:
    """Return the name under which a number of the message hub is logged at an iteration, or None.

    Numbers named `train/...`, and those whose names have no such prefix, are logged; those in `_OWN` are not.
    """
    if name.startswith(_EVALUATIONS):
        return None
    short = name.removeprefix("train/")
    return None if short in _OWN else name_of_host(short)


def _without_prefix(mode: str, name: str) -> str | None:
    """Return a name of the message hub without the prefix of a mode; None if the bridge does not log it."""
    prefix, _, short = name.partition("/")
    return short if prefix == mode and short not in _OWN else None


def _evaluation_values(runner: Runner) -> dict[str, Any]:
    """Return the message hub's values, each an array, whose names begin with "val/" or "test/".

    A new value makes the hub create a new array, so a number has changed if its array is another object.
    """
    scalars = runner.message_hub.log_scalars.items()
    return {name: buffer.data[0] for name, buffer in scalars if name.startswith(_EVALUATIONS)}


def _optimizers(wrappers: Any) -> Any:
    """Return PyTorch's optimizer, or several by name, out of MMEngine's wrappers; None without any."""
    if wrappers is None:
        return None
    if isinstance(wrappers, OptimWrapperDict):
        return {name: wrapper.optimizer for name, wrapper in wrappers.items()}
    return wrappers.optimizer
