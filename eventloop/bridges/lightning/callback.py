"""Attach a bus to a Lightning training: `Trainer(callbacks=[EventLoopCallback(...)])`.

It serves both packages of Lightning, `lightning.pytorch` and `pytorch_lightning`, and imports them only when
an `EventLoopCallback` is created.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, cast

from eventloop.bridges.attachment import Attachment, HasAttachment
from eventloop.bridges.driven import DrivenTrainer
from eventloop.bridges.host_numbers import read_numbers
from eventloop.bridges.lightning.commands import steer
from eventloop.bridges.lightning.costs import HostCosts, followed_by, replaced
from eventloop.bridges.lightning.directory import directory_of
from eventloop.bridges.lightning.loaders import loader_names
from eventloop.bridges.lightning.packages import packages_in_use, public_class, with_bases
from eventloop.bridges.lightning.run_facts import logged_of, loop_of, optimizers_of, total_of, whole_loss
from eventloop.bus import Bus
from eventloop.events import AfterBackward, AfterOptimizerStep, BeforeOptimizerStep

if TYPE_CHECKING:
    from lightning.pytorch import Callback as Base
else:
    Base = object

NEVER = {"optimizer_step_skipped": "Lightning does not say that a step was skipped"}
"""The events that no Lightning trainer can emit, each with the reason."""


class EventLoopCallback(HasAttachment, Base):  # type: ignore[misc]
    """Emit the events of a Lightning training on a bus.

        bridge = EventLoopCallback(hooks=[EMAHook()], writers=[JSONLWriter()])

        @bridge.bus.on("after_train_iter", every=100)
        def show(trainer, event):
            print(event.iter, trainer.outputs["loss"])

        Trainer(max_epochs=3, callbacks=[bridge]).fit(module, loader)

    An iteration is a batch, even if gradients are accumulated. Handlers find Lightning's own trainer as
    `trainer.native`, and the LightningModule as `trainer.model`; `trainer.stop(reason)` sets
    `trainer.native.should_stop`. Numbers logged by `self.log` become `scalars_logged`. Lightning's
    checkpoints contain the states of the hooks.

    Args:
        bus: an existing bus to emit events on.
        hooks, writers: as for `eventloop.Trainer`.
        work_dir: directory of the files; by default `eventloop` in the trainer's `log_dir`. If `log_dir` is
            the current directory, as with `logger=False`, it is a new directory under runs/.
        measure: measure the time of each callback, LightningModule hook and logger, for rows in the costs.

    Raises:
        ImportError: Lightning is not installed, or too old.
        TypeError, ValueError: an argument is invalid, or a hook does a part of the loop that Lightning does.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        return cast(Self, object.__new__(with_bases(cast(type, cls), packages_in_use())))

    def __init__(
        self,
        bus: Bus | None = None,
        *,
        hooks: Sequence[Any] = (),
        writers: Sequence[Any] = (),
        work_dir: str | Path | None = None,
        measure: bool = True,
    ) -> None:
        self._options: dict[str, Any] = {
            "hooks": hooks,
            "writers": writers,
            "work_dir": work_dir,
            "measure": measure,
        }
        self._own_bus = bus is None
        self._begin(bus)

    def _begin(self, bus: Bus | None) -> None:
        """Create the attachment and the other attributes that a copy of the callback does not copy."""
        copied_names = {*vars(self)}
        self._attachment = Attachment("Lightning", NEVER, bus, steer=steer, **self._options)
        self._costs = HostCosts()
        self._installed = ExitStack()  # undoes the changes to Lightning's objects from `setup` to `teardown`
        self._during = ExitStack()  # undoes the changes that last for a run of our trainer
        self._watching = ExitStack()  # removes the hooks from the optimizers
        self._watches_steps = False
        self._optimizers: Any = None  # Lightning's list, which it replaces if the program changes optimizers
        self._trains = False  # whether the run trains, or only evaluates
        self._metrics_before: dict[str, Any] = {}  # Lightning's metrics when the running evaluation began
        self._loaders: list[str] = []  # the names of the loaders of the running evaluation
        self._not_copied = {"_not_copied", *vars(self).keys() - copied_names}

    @property
    def _driven(self) -> DrivenTrainer:
        return self._attachment.trainer  # type: ignore[return-value]  # it exists once a run has begun

    @property
    def _running(self) -> bool:
        return self._attachment.trainer is not None and self._attachment.trainer.running

    # --- the run -------------------------------------------------------------------------------------------

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Begin to measure the other callbacks and the loggers, and wrap the loop so that errors end the run.

        Raises:
            ValueError: the trainer has two of these callbacks.
        """
        bridges = [callback for callback in trainer.callbacks if isinstance(callback, EventLoopCallback)]
        if len(bridges) > 1:
            raise ValueError(
                f"expected one EventLoopCallback in the callbacks of a Trainer, got {len(bridges)}: give one "
                "of them all hooks and writers"
            )
        if self._attachment.within_call:
            return  # a callback evaluates within the run under way
        self._installed.close()
        ending = partial(self._attachment.ending_run, end=self._end_run)
        self._installed.enter_context(replaced(loop_of(trainer, stage), "run", ending))
        if self._attachment.measure:
            self._installed.enter_context(self._costs.installed(trainer, self))

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """End the run if it is still under way, and stop measuring."""
        if not self._attachment.within_call:
            self._end_run()
            self._installed.close()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """End the run with an error, which Lightning raises afterwards."""
        if not self._attachment.within_call:
            self._end_run(exception)
            self._installed.close()

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Begin a run that trains."""
        self._begin_run(trainer, training=True)
        self._driven.loader = trainer.train_dataloader
        self._watches_steps = False
        self._stop_host()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """End the run once all `on_train_end` methods have been called, so that their times are recorded."""
        if not self._running:
            return
        driven = self._driven
        if trainer.should_stop and driven.stop_reason is None:
            driven.stop_reason = "trainer.should_stop of Lightning"
        # Lightning calls `on_train_end` of the strategy last; its teardown then moves the model to the CPU
        ending = replaced(trainer.strategy, "on_train_end", followed_by(self._end_run))
        self._during.enter_context(ending)

    def _begin_run(self, trainer: Any, *, training: bool) -> None:
        """Begin our trainer's run, and wrap the methods of Lightning that log numbers, until the run ends."""
        if self._running:
            self._during.close()
            self._attachment.end_unfinished_run()
        self._trains, self._optimizers = training, trainer.optimizers
        epochs, steps = trainer.max_epochs, trainer.max_steps
        max_epochs = epochs if training and epochs and epochs > 0 else None
        driven = self._attachment.begin_run(
            trainer.lightning_module,
            native=trainer,
            optimizer=optimizers_of(trainer) if training else None,
            max_epochs=max_epochs,
            max_iters=total_of(trainer, max_epochs) if training else None,
            by_epoch=max_epochs is not None or steps is None or steps < 0,
            work_dir=directory_of(trainer),
            iter=trainer.fit_loop.total_batch_idx + 1,
            epoch=trainer.current_epoch,
            training=training,
        )
        connector = trainer._logger_connector  # receives all logged numbers, even if there are no loggers
        self._during.enter_context(replaced(connector, "log_metrics", self._wrap_log_metrics))
        # Ranks agree on a stop after this method, not before: until then rank 0 may wait for the others in a
        # progress bar that reads metrics
        agreeing = replaced(connector, "update_train_epoch_metrics", followed_by(self._stop_host))
        self._during.enter_context(agreeing)
        self._costs.attach(driven)

    def _end_run(self, error: BaseException | None = None) -> None:
        """Undo the changes to the trainer, and then end the run, with the error that has ended it."""
        self._during.close()
        self._watching.close()
        self._optimizers = None
        self._costs.detach()
        self._attachment.end_run(error)

    def _stop_host(self) -> None:
        """Stop the Lightning trainer if a handler has requested a stop, on this rank or another one."""
        if self._driven.stops.edge():
            self._driven.native.should_stop = True

    # --- the training --------------------------------------------------------------------------------------

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        """Begin an epoch."""
        if not self._running:
            return
        batch_count = trainer.num_training_batches
        if not self._watches_steps and self.bus.wants(AfterOptimizerStep):
            self._watch_steps(trainer)
        self._driven.begin_epoch(int(batch_count) if batch_count != float("inf") else None)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Begin an iteration."""
        if not self._running:
            return  # within this training the bridge was added, or another Lightning trainer has used it
        driven = self._driven
        if driven.passing is None:  # Lightning calls no on_train_epoch_start when it resumes within an epoch
            self.on_train_epoch_start(trainer, pl_module)
        if trainer.optimizers is not self._optimizers:
            self._follow_optimizers(trainer)
        driven.batch_idx = batch_idx
        driven.begin_iter(batch)

    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        """Emit `after_backward`."""
        if self._running:
            self._driven.announce(AfterBackward)

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        """Emit `before_optimizer_step`."""
        if self._running:
            self._driven.record_rates(optimizer)
            self._driven.announce(BeforeOptimizerStep)

    def _follow_optimizers(self, trainer: Any) -> None:
        """Use the optimizers that have replaced the former ones: log their rates and emit their steps."""
        self._optimizers, self._driven.optimizer = trainer.optimizers, optimizers_of(trainer)
        if self._watches_steps:
            self._watch_steps(trainer)

    def _watch_steps(self, trainer: Any) -> None:
        """Emit `after_optimizer_step` by PyTorch hooks on the optimizers, which cost microseconds a step."""
        self._watches_steps = True
        self._watching.close()
        for optimizer in trainer.optimizers:
            handle = optimizer.register_step_post_hook(self._optimizer_stepped)
            self._watching.callback(handle.remove)

    def _optimizer_stepped(self, *_: Any) -> None:
        self._driven.announce(AfterOptimizerStep)

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """End the iteration, and stop the Lightning trainer if a handler has requested it."""
        if not self._running:
            return
        driven = self._driven
        if driven.passing is None or not driven.metrics.in_iteration:
            # Lightning does not call on_train_batch_start for a batch that is None
            self.on_train_batch_start(trainer, pl_module, batch, batch_idx)
        driven.logged_by_host = logged_of(trainer)
        if driven.end_iter(whole_loss(trainer, outputs)):
            trainer.should_stop = True
        driven.batch = driven.outputs = None  # so that they can be freed, as Lightning does here too

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """End the epoch."""
        if not self._running or (driven := self._driven).passing is None:
            return
        if driven.metrics.in_iteration:  # the LightningModule ended the epoch without on_train_batch_end
            driven.drop_iter()
        driven.end_epoch()

    def _wrap_log_metrics(self, log_metrics: Any) -> Any:
        """Wrap Lightning's `log_metrics` to emit `scalars_logged` for numbers logged in the training.

        Numbers of an evaluation are left out, because `after_val_epoch` contains its metrics.
        """

        def log_and_emit(metrics: Mapping[str, Any], step: int | None = None) -> Any:
            """Emit the numbers of a training, not those of a validation, and call the logger as before."""
            driven = self._driven
            if metrics and driven.mode == "train" and not driven.native.sanity_checking:
                driven.log(metrics)
            return log_metrics(metrics, step)

        return log_and_emit

    # --- validations and tests -----------------------------------------------------------------------------

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        """Begin a validation, and a run if none is under way."""
        self._begin_evaluation(trainer, "val")

    def on_test_start(self, trainer: Any, pl_module: Any) -> None:
        """Begin a test, and a run if none is under way."""
        self._begin_evaluation(trainer, "test")

    def _begin_evaluation(self, trainer: Any, mode: Any) -> None:
        """Begin an evaluation, in a run of its own if none is under way; ignore the sanity check."""
        if trainer.sanity_checking:
            return
        if not self._running:
            self._begin_run(trainer, training=False)
        self._metrics_before = dict(trainer._logger_connector._callback_metrics)
        self._loaders = loader_names(trainer, mode)
        self._driven.begin_val(mode)

    def on_validation_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Begin an iteration of the validation."""
        if self._running and not trainer.sanity_checking:
            self._driven.begin_val_iter(batch, batch_idx, self._loaders[dataloader_idx])

    def on_validation_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """End an iteration of the validation."""
        if self._running and not trainer.sanity_checking:
            self._driven.end_val_iter(outputs, batch_idx, self._loaders[dataloader_idx])
            self._driven.batch = self._driven.outputs = None

    on_test_batch_start = on_validation_batch_start
    on_test_batch_end = on_validation_batch_end

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """End the validation with its metrics; end the run too unless it trains."""
        if trainer.sanity_checking or not self._running:
            return
        former, present = self._metrics_before, trainer._logger_connector._callback_metrics
        of_evaluation = {name: value for name, value in present.items() if value is not former.get(name)}
        self._driven.end_val(read_numbers(of_evaluation))
        self._metrics_before = {}
        self._stop_host()
        if not self._trains:
            self._end_run()

    on_test_end = on_validation_end

    # --- checkpoints and copies ----------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the states of the hooks, for Lightning's checkpoint; {} if all hooks are stateless."""
        state = self._attachment.state_dict()
        return state if state.get("hooks") else {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the states of the hooks from Lightning's checkpoint."""
        self._attachment.load_state_dict(state_dict)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Copy or pickle the callback with its options, as it was before its first run.

        Raises:
            TypeError: the bus has handlers, or the program has added commands, which the copy would lack.
        """
        name = self._attachment.given_name()
        # once there is a trainer, the hooks are handlers too, and those are copied by the options
        has_handlers = self._attachment.trainer is None and bool(name)
        if not self._own_bus or self._attachment.commands or has_handlers:
            raise TypeError(
                "an EventLoopCallback is copied, or sent to a process, without the handlers of its bus, and "
                f"{name or 'this bus'} was given to it: let a Hook in hooks=[...] handle and add commands"
            )
        state = {name: value for name, value in vars(self).items() if name not in self._not_copied}
        return _restored, (public_class(type(self)),), state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._begin(None)


def _restored(cls: Any) -> Any:
    return cls.__new__(cls)
