"""Define the trainer: it moves batches, runs steps, counts and emits events; hooks do the rest."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from eventloop.assembly.argument_checks import (
    check_bus,
    check_default_hooks,
    check_lists,
    check_signatures,
    check_step,
    check_trainer,
)
from eventloop.assembly.attach import attach_all, facts_of, make_work_dir
from eventloop.assembly.data_ranks import find_ranks
from eventloop.assembly.description import check_config, record_begin
from eventloop.assembly.dev_run import batches_of, is_omitted, make_temporary_dir, shorten
from eventloop.assembly.evaluator_run import builds_evaluator, device_to_use
from eventloop.assembly.hook_owner import check_hooks_owned
from eventloop.assembly.trainer_text import trainer_text
from eventloop.bus import Bus
from eventloop.bus.dry_run import stop_at_run
from eventloop.checkpoint.saving.overlapped_copy import Copying
from eventloop.commands.messages import Applied
from eventloop.costs.foreign_calls import ForeignCalls
from eventloop.costs.records import RunCosts
from eventloop.costs.step_clock import StepClock
from eventloop.data.limits import Counting, LimitBatches, Limits, Unit
from eventloop.data.loader_info import Loaders, refuse_samples, refuse_tensors
from eventloop.data.position import LoaderPosition
from eventloop.data.seeding import choose_device
from eventloop.data.trainer_parts import Within
from eventloop.evaluation.evaluation import Evaluators, name_evaluators
from eventloop.evaluation.monitored_metrics import MonitoredMetrics
from eventloop.evaluation.schedule import Schedule, Workflow, WorkflowSchedule, schedule_of
from eventloop.events import Event
from eventloop.events.run import CurrentRun
from eventloop.metrics.rows import RunLimits
from eventloop.migration.names import knowing_attributes, knowing_calls, knowing_others
from eventloop.model.device_clock import device_clock
from eventloop.model.forward import LossFn, predict, train_outputs
from eventloop.model.summary import model_summary
from eventloop.model.training_modes import TrainingModes
from eventloop.optim.optimizers import Optimizers, check_parameters
from eventloop.reporting.summary import run_costs, summarize
from eventloop.resume.methods import Resumable
from eventloop.resume.state import TrainerState
from eventloop.state.remembered import Remembered
from eventloop.steering.commands import Commands
from eventloop.steering.methods import Steered
from eventloop.stops.held_loops import HeldLoops
from eventloop.stops.stopping import Stopping
from eventloop.training.compiled import Compile, compile_parts
from eventloop.training.evaluation_loop import Evaluations, check_loaders
from eventloop.training.heartbeat import own_directories
from eventloop.training.loop_steps import LoopSteps
from eventloop.training.loops import TrainLoop
from eventloop.training.scopes import EpochScope, run_scope, trainings
from eventloop.util.anchored_path import AnchoredPath

if TYPE_CHECKING:
    from eventloop.tuning.curve import LRCurve

logger = logging.getLogger("eventloop")

Step = Callable[["Trainer", Any], Any]


@knowing_attributes
class Trainer(Steered, LoopSteps, Evaluations, Resumable):
    """Train a model, and emit events on `trainer.bus` at each point of the training.

    trainer = Trainer(model, optimizer=opt, loss_fn=F.cross_entropy, train_loader=train, val_loader=val,
                      max_epochs=10, hooks=[CheckpointHook(interval=1, save_best="accuracy")],
                      writers=[ConsoleWriter(), JSONLWriter()], work_dir="runs/digits")
    trainer.train()

    Or with a loop of your own, and the same events in the same order:

    for epoch in trainer.epochs():
        for inputs, target in trainer.batches(loader):
            trainer.outputs = {"loss": F.cross_entropy(model(inputs), target)}

    Args:
        model: the module to train; modules within it that are in eval mode before the training stay in it.
        optimizer: one, or several by name as `dict(gen=..., critic=...)`; the optimizer hook steps them.
        loss_fn: `(model(inputs), target) -> loss`, for batches `(inputs, target)`.
        train_step: `(trainer, batch) -> loss | {"loss": loss, ...}`, in place of `loss_fn`.
        val_step: `(trainer, batch) -> mapping`: 0-dim values are averaged over samples, `preds` and `target`
            go to the evaluator, and `num_samples` (samples, or tokens) weights the batch. By default the
            loss, and the accuracy where targets are class indices.
        predict_step: `(trainer, batch) -> outputs` of `predict`; by default `model(inputs)`.
        evaluator: a metric `(preds, target) -> number`, a torchmetrics metric, or several (list or mapping).
        train_loader, val_loader, test_loader: iterables of batches. The last two may be several by name, as
            in `val_loader=dict(clean=..., noisy=...)`, whose metrics are "clean/accuracy", "noisy/accuracy".
        schedulers: PyTorch's learning rate schedulers, stepped by the param_scheduler hook.
        max_epochs, max_iters: the length of the run; exactly one, which is also the run's unit. A trainer
            that only tests takes `max_epochs=1`.
        unit: what an iteration is: a "batch", or an "update", an optimizer step over the `cumulative_iters`
            batches of the optimizer hook. Events, intervals, schedulers and `max_iters` count iterations.
        val_interval, val_begin, dynamic_intervals: when to validate, in the run's unit, as in MMEngine; by
            default every epoch, or every 1000 iterations; `val_before_train` validates at step 0 as well.
        sanity_val: batches to validate before the first iteration, without events and effects on the run, so
            that errors are found early; `sanity_checking` is True then. 0 skips it. By default 1 batch, if
            only a batch can show that a monitored metric exists, or that a `val_step` is missing.
        limit_batches: the most batches of a pass: a number (int), a share (float up to 1.0), or a mapping of
            these, `dict(train=100, val=0.1)`, by "train", "val" and "test".
        fast_dev_run: True, or a number of batches, proves in seconds that a script runs: train on so many
            batches, validate and test on as many, in a temporary `work_dir`, without checkpoints, early
            stopping and writers, except a `ConsoleWriter`. `max_epochs`, `max_iters` and limits are ignored.
        hooks, writers: objects, or configs `dict(type="EMAHook", ...)`. A hook of a default hook's class
            takes its place. `writers=None` shows progress (a `ConsoleWriter`) where standard error is a
            terminal, or in a notebook, and nothing elsewhere; `writers=[]` shows nothing.
        custom_hooks: MMEngine's name for `hooks`.
        default_hooks: by name `runtime_info, optimizer, timer, sampler_seed, logger, param_scheduler,
            checkpoint, garbage_collection, preemption, costs, trace`: a hook or config in its place, or None.
        work_dir: directory of the run's files, which one live run owns; by default a new one under runs/. A
            relative path stays the same if the program changes the current directory later.
        device: device to which the model and the batches are moved, as well as a `loss_fn` and metrics that
            are modules; by default all stay there. "auto" is `cuda:LOCAL_RANK`, else mps, else the CPU.
        data_ranks: the number of ranks with different data, such as `data_ranks=2` on a mesh of 2 data by 4
            tensor ranks; by default that of the train loader's DistributedSampler, or of the model's meshes.
        bus: an existing bus to emit events on.
        commands: the `commands.jsonl` of a run that was steered; its commands are applied again, each after
            the same iteration, so that the run is the same to the bit.
        compile: compile the "model" or the whole "step" by `torch.compile`; options as
            `dict(step=dict(mode=...))`.
        config: settings of the program, such as `vars(args)`, for `run.json`, the report and the trackers.

    Raises:
        TypeError, ValueError: an argument is invalid, or contradicts another one.
        OSError: `work_dir` cannot be created or written.
    """

    work_dir = AnchoredPath()
    """Directory of the run's files; it stays the same if the program changes its current directory."""
    checkpoint_dir = AnchoredPath()
    """Directory in which the checkpoint hook saves; with several such hooks, that of the first one."""
    host = ""
    """Name of the other engine whose loop drives this trainer; "" if this trainer's own loop does."""

    @knowing_others
    def __init__(
        self,
        model: torch.nn.Module,
        *,
        optimizer: Optimizers | None = None,
        loss_fn: LossFn | None = None,
        train_step: Step | None = None,
        val_step: Step | None = None,
        predict_step: Step | None = None,
        evaluator: Evaluators | None = None,
        train_loader: Iterable[Any] | None = None,
        val_loader: Loaders | None = None,
        test_loader: Loaders | None = None,
        schedulers: Sequence[Any] | Any = (),
        max_epochs: int | None = None,
        max_iters: int | None = None,
        unit: Unit = "batch",
        val_interval: int | None = None,
        val_begin: int = 1,
        dynamic_intervals: Sequence[tuple[int, int]] | None = None,
        val_before_train: bool = False,
        sanity_val: int | None = None,
        limit_batches: LimitBatches | None = None,
        fast_dev_run: bool | int = False,
        hooks: Sequence[Any] = (),
        writers: Sequence[Any] | None = None,
        custom_hooks: Sequence[Any] = (),
        default_hooks: Mapping[str, Any] | None = None,
        work_dir: str | Path | None = None,
        device: str | torch.device | None = None,
        data_ranks: int | None = None,
        bus: Bus | None = None,
        commands: str | Path | None = None,
        compile: Compile | None = None,
        config: Mapping[str, Any] | None = None,
    ) -> None:
        loaders = (train_loader, val_loader, test_loader)
        check_lists(hooks=hooks, custom_hooks=custom_hooks, writers=() if writers is None else writers)
        check_default_hooks(default_hooks)
        check_bus(bus)
        self.config = check_config(config)
        check_signatures(train_step=train_step, val_step=val_step, predict_step=predict_step)
        check_trainer(model, optimizer, loss_fn, train_step, max_epochs, max_iters, *loaders)
        own_val_step = val_step is not None or bool(self.host) or type(self).val_step is not Trainer.val_step
        if loss_fn is not None and type(self).train_step is Trainer.train_step:
            refuse_tensors(train_loader=train_loader)
        if loss_fn is not None and not own_val_step:
            refuse_tensors(val_loader=val_loader, test_loader=test_loader)
        self.limits, self.fast_dev_run = Limits(limit_batches), batches_of(fast_dev_run)
        self.counting = Counting(unit)
        self.limits.check(train=train_loader, val=val_loader, test=test_loader)
        validates, by_epoch, dev_run = val_loader is not None, max_epochs is not None, self.fast_dev_run
        self.schedule: Schedule = schedule_of(
            validates, by_epoch, val_interval, val_begin, dynamic_intervals, val_before_train, dev_run
        )
        self.device = choose_device(device_to_use(device))
        self.model = model if self.device is None else model.to(self.device)
        if self.device is not None and isinstance(loss_fn, torch.nn.Module):
            loss_fn.to(self.device)
        self._hook_steps = (default_hooks or {}).get("optimizer", "by default") is not None
        check_parameters(self.model, optimizer, loss_fn, refuses=self._hook_steps)
        self.optimizer: Any = optimizer  # one, or a mapping of them
        self.autocast: Callable[[], AbstractContextManager[Any]] = nullcontext
        self.schedulers: list[Any] = [*schedulers] if isinstance(schedulers, list | tuple) else [schedulers]
        self.steps_itself = "optimizer" in (default_hooks or {})
        parts = compile_parts(compile, self.model, optimizer, train_step)
        self.compiled, self.compile_options, self.metrics, self._forward, self.custom_step = parts
        self.loss_fn, self._val_step, self._predict_step = loss_fn, val_step, predict_step
        self.evaluator = name_evaluators(evaluator)
        self.train_loader, self.val_loader, self.test_loader = loaders
        self.monitored = MonitoredMetrics(self, sanity_val, own_val_step=own_val_step)
        self.max_epochs, self.max_iters = max_epochs, max_iters
        if max_epochs is not None and (length := self.limits.length("train", train_loader)) is not None:
            self.max_iters = max_epochs * length
        self.rank, self.world_size, self.data_ranks = find_ranks(data_ranks, self.model, train_loader)
        self.iter = self.epoch = 0
        self.batch: Any = None
        self.outputs: Any = None
        self.checkpoint: dict[str, Any] | None = None
        self.stop_reason: str | None = None
        self.stop_signal: int | None = None
        self.failure: BaseException | None = None
        self.where_to_resume = ""  # after a run, a sentence that says how to continue it
        self.asked_to_stop = self.running = self.ends_program = self.delivering = False
        self.within: Within = ""  # done but not counted yet: "iter" after its step, "epoch" in its last event
        self.ignored_outputs: set[str] = set()  # values of `val_step` that the log has reported
        self.sanity_checking = False  # True within the sanity validation before the first iteration
        self.steps_in_hook = False  # whether a hook makes the optimizer's step, and sets `within` then
        self.stops, self.modes, self.clock = Stopping(self), TrainingModes(), StepClock()
        self.passing, self._open, self._held = None, [], HeldLoops()
        self.during_run = ExitStack()  # contexts that are exited when a run has delivered all events
        self.loader: Iterable[Any] | None = train_loader
        self.foreign_calls, self.remembered = ForeignCalls(self.clock.charge), Remembered()
        self.position, self.state = LoaderPosition(self), TrainerState(self)
        self.ownership, self.copying = own_directories(self), Copying(lambda: self.optimizer)
        self.bus: Bus = bus if bus is not None else Bus()
        self.applied_commands: list[Applied] = []
        self.commands = Commands(self, commands)
        is_temporary = self.fast_dev_run or builds_evaluator()
        make_dir = partial(make_temporary_dir, self) if is_temporary else make_work_dir
        self.work_dir = self.checkpoint_dir = make_dir(work_dir)
        self.facts = CurrentRun(facts_of(self))
        self.hooks, self.writers = attach_all(self, [*hooks, *custom_hooks], writers, default_hooks or {})
        if self.fast_dev_run:
            self.limits, self.max_epochs, self.max_iters = shorten(
                self.fast_dev_run, by_epoch, train_loader, self.counting
            )
            self.monitored.shorten(self.fast_dev_run)

    def __repr__(self) -> str:
        return trainer_text(self)

    # --- running -------------------------------------------------------------------------------------------

    @knowing_calls
    def train(self) -> None:
        """Train until `max_epochs` or `max_iters`, with the scheduled validations.

        A second call, after a stop, Ctrl-C or an error, continues after the last iteration whose optimizer
        step was made. Writers append to their files, and the counts of subscribers' events continue.

        Raises:
            ValueError: there is no train loader, no step or no optimizer, or the loader is empty.
            WorkDirInUseError: another live run owns `work_dir`, or the directory of a checkpoint hook.
                Nothing was written there.
        """
        self._train(self.schedule)

    @knowing_calls
    def run(self, workflow: Workflow | None = None) -> None:
        """Train and evaluate by a workflow, repeated until the end of the run; without one, call `train`.

        Args:
            workflow: mmcv's list of modes and numbers of epochs, such as `[("train", 2), ("val", 1)]`.

        Raises:
            TypeError, ValueError: the workflow is not a list of such pairs, or the trainer lacks a loader
                for it.
        """
        if workflow is None:
            return self.train()
        schedule = WorkflowSchedule(workflow)
        for mode in schedule.modes:
            check_loaders(self, mode)
        self._train(schedule)

    def find_lr(
        self,
        start_lr: float = 1e-7,
        end_lr: float = 10.0,
        iterations: int = 100,
        *,
        smoothing: float = 0.05,
        divergence: float = 5.0,
    ) -> LRCurve:
        """Run the learning rate range test: train on rising learning rates, and return the losses.

            print(trainer.find_lr().suggestion)

        Afterwards model, optimizer, random states and metrics are restored to the bit, and the loader begins
        again. No event is emitted, and of the hooks only the optimizer hook acts.

        Args:
            start_lr, end_lr: the first and last rate of all param groups; successive rates have equal ratios.
            iterations: the number of rates, in as many passes over the train loader as are needed.
            smoothing: the weight of a new loss in the exponential average.
            divergence: end early if the loss is this many times the lowest loss.

        Raises:
            TypeError, ValueError: an argument is invalid, there are several optimizers, or the train loader
                cannot be read twice.
        """
        from eventloop.tuning.range_test import find_lr  # here, because most programs never call it

        self.refuse_within("find_lr")
        return find_lr(self, start_lr, end_lr, iterations, smoothing, divergence)

    def epochs(self) -> Iterator[int]:
        """Yield the index of each remaining epoch to a hand-written loop, and validate between epochs.

        Raises:
            RuntimeError: the trainer is already in a run.
        """
        loop = self._epochs()
        if not self.running:
            self._held.begin(loop)
        return loop

    def _epochs(self) -> Generator[int]:
        """Yield the epochs of `epochs()`, also those of a training that begins again after a rollback."""
        self.refuse_within("epochs")
        scope, undo = run_scope(self, grad_mode=False)
        with undo, undo, scope:  # undo twice: an interrupt may skip one of the two exits
            for training in trainings(self):
                with training:
                    yield from self._inner_epochs()

    def _inner_epochs(self) -> Generator[int]:
        """Yield the epochs of one training, and close a batch generator that the program has left."""
        try:
            yield from TrainLoop(self, self.schedule).epochs()
        finally:  # a batch generator that stays open would continue in the next run
            self._held.close_inner()

    def batches(self, loader: Iterable[Any]) -> Iterator[Any]:
        """Yield the batches of an epoch to a hand-written loop, which sets `trainer.outputs` for each.

        Each call is one epoch. Set `trainer.outputs = {"loss": ...}`. The optimizer makes its step when the
        loop asks for the next batch. If `break`, `return` or an exception leaves the body, the optimizer
        makes no step, and the iteration is not counted. To end the loop after an iteration, call `stop`.

        Raises:
            RuntimeError: the call is not inside `trainer.epochs()`.
            TypeError: `loader` holds samples, not batches.
        """
        refuse_samples("loader", loader)
        loop = self._batches(loader)
        self._held.add(loop)
        return loop

    def _batches(self, loader: Iterable[Any]) -> Generator[Any]:
        """Yield the batches of one epoch of a hand-written loop; none if the run has ended."""
        loop = TrainLoop(self, self.schedule)
        if not loop.has_pass():
            return
        self.loader = loader
        with EpochScope(self, "train"):
            self._compare_loader(loader)
            yield from loop.iterations(loader)

    def _train(self, schedule: Schedule) -> None:
        """Check the parts of the training, and train; after a rollback, train again."""
        self.refuse_within("train")
        self.loader = loader = check_loaders(self, "train")[""]
        loop = TrainLoop(self, schedule)
        check_step(self.custom_step, self.loss_fn, self.optimizer, steps_itself=self.steps_itself)
        check_parameters(self.model, self.optimizer, self.loss_fn, refuses=self._hook_steps, logs=False)
        self._compare_loader(loader)
        scope, undo = run_scope(self)
        with undo, undo, scope:  # undo twice: an interrupt may skip one of the two exits
            for training in trainings(self):
                with training:
                    self._train_epochs(loop, loader)

    def _train_epochs(self, loop: TrainLoop, loader: Iterable[Any]) -> None:
        for _ in loop.epochs():
            with EpochScope(self, "train"):
                for batch in loop.iterations(loader):
                    self.outputs = self.train_step(batch)

    def train_step(self, batch: Any) -> dict[str, Any]:
        """Run the forward pass of one batch, and return its outputs, including `loss`.

        Raises:
            TypeError: the step returned neither a tensor nor a mapping with `loss`.
        """
        if self.custom_step is not None:
            return train_outputs(self.custom_step(self, batch))
        assert self.loss_fn is not None
        return train_outputs(self._forward(self.model, self.loss_fn, batch))

    def val_step(self, batch: Any) -> Mapping[str, Any]:
        """Evaluate one batch, and return the values from which metrics are computed."""
        with self.autocast():
            if self._val_step is not None:
                outputs: Mapping[str, Any] = self._val_step(self, batch)  # the evaluation checks its type
                return outputs
            mode = "test" if self.mode == "test" else "val"
            return predict(self.model, self.loss_fn, batch, mode)

    def model_summary(self, batch: Any = None, *, depth: int = 3) -> str:
        """Return a table of the model's layers and parameters; a batch adds shapes and multiply-adds.

            print(trainer.model_summary(next(iter(loader))))

        Args:
            batch: a batch `(inputs, target)`, inputs, or a mapping of the model's arguments.
            depth: the number of levels of nested modules to show.
        """
        return model_summary(self.model, batch, depth, self.device, self.autocast)

    def summary(self) -> str:
        """Return a text with the times of phases and handlers, and the counts of each subscriber's events."""
        return summarize(self)

    def costs(self) -> RunCosts:
        """Return the costs of the run as a record. Call it on the training thread, at any time."""
        return run_costs(self)

    # --- what loops, scopes and hooks call -----------------------------------------------------------------

    def announce(self, event_type: type[Event], **fields: Any) -> None:
        """Emit an event of the loop with the current counters, if it has a subscriber."""
        if not self.bus.wants(event_type):
            return
        event = event_type(
            iter=self.iter, epoch=self.epoch, max_iters=self.max_iters, max_epochs=self.max_epochs, **fields
        )
        self.bus.emit(event, self)

    @property
    def mode(self) -> str:
        """The current phase: "train", "val", "test" or "predict". Metrics are recorded for it."""
        return self.metrics.mode

    @mode.setter
    def mode(self, mode: str) -> None:
        self.metrics.stepped = self.within == "iter"
        self.metrics.mode = mode

    @property
    def place(self) -> RunLimits:
        """The run's `max_iters` and `max_epochs`, for events that are created later."""
        return RunLimits(self.max_iters, self.max_epochs)

    @property
    def by_epoch(self) -> bool:
        """True if `max_epochs` gives the length of the run."""
        return self.max_epochs is not None

    def refuse_within(self, what: str) -> None:
        """Raise RuntimeError during a run; `what` is the called method, which would begin another run."""
        if self.running:
            raise RuntimeError(
                f"trainer.{what}() was called in the middle of a run of this trainer; a handler may call "
                "val() and test(). A hand-written loop is in its run as long as its generator is held, as "
                "by a progress bar around trainer.epochs() in a notebook: call trainer.close() to end it"
            )

    def open_run(self, *, trains: bool) -> None:
        """Prepare a run that trains, or with `trains=False` only evaluates.

        The steps that may raise an error come first, because after an error the run must not have begun.

        Raises:
            WorkDirInUseError: another live run owns a directory in which this one would write.
        """
        check_hooks_owned(self)
        stop_at_run(self.bus, self.max_epochs, self.max_iters)
        self.begun = record_begin(self, self.state.settings, trains=trains) or self.begun
        facts = facts_of(self)
        device = self.clock.device or device_clock(self.model, self.bus.post)
        self.stops.await_ranks()  # first, because other exchanges wait for a late rank without a message
        if not self.fast_dev_run:  # such a run has a new directory of its own
            self.ownership.begin(trains=trains, writes=any(map(is_omitted, self.writers)))
        if trains:
            self.commands.begin_run()
        self.bus.reopen()  # in case an error or a signal has closed it
        self.stops.begin_run()
        self.metrics.in_iteration = self.ends_program = False
        self.within, self.failure, self.where_to_resume = "", None, "" if trains else self.where_to_resume
        self.position.go_on()
        self.facts.run = facts
        self.clock.begin_run(self.iter, device, self.bus.signal)
        self.during_run = ExitStack()
        self._held.thread, self.running = threading.current_thread(), True

    def open_epoch(self) -> None:
        """Prepare the trainer for a training epoch."""
        if not self.position.resuming:
            self.batch_idx = 0
        self.metrics.epoch = self.epoch
        self.modes.set(self.model)

    def close(self) -> None:
        """End a hand-written loop whose generator still exists, then deliver all events and close the bus.

        The bus is also closed when the interpreter exits. Another run opens it again.

        Raises:
            RuntimeError: a handler or another thread calls this during a run.
        """
        if self.running and not (self.mode == "train" and self._held.may_be_closed()):
            raise RuntimeError(
                "trainer.close() was called in the middle of a run of this trainer, by a handler or on "
                f"another thread ({threading.current_thread().name!r}; the run is on "
                f"{self._held.thread.name!r}): call trainer.stop(reason), which ends the run after the "
                "iteration, and close the trainer after the run"
            )
        self._held.close()
        self.bus.close()
