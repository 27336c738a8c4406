"""Share what the bridges have in common: a bus, and the trainer that another engine, the host, drives."""

from __future__ import annotations

import logging
import signal
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from pathlib import Path
from typing import Any, TypeVar

import torch

from eventloop.assembly.argument_checks import check_bus, check_lists
from eventloop.assembly.attach import (
    DEFAULT_HOOKS,
    check_attachable,
    check_bus_owners,
    check_owner,
    check_writers,
    free_directory,
)
from eventloop.bridges.driven import DrivenTrainer
from eventloop.bridges.foreign import Foreign
from eventloop.bridges.host_commands import refuse_loop_commands
from eventloop.bridges.hosted import HostedTrainer
from eventloop.bridges.replaced_methods import ReplacedMethods
from eventloop.bus import Bus
from eventloop.checkpoint.weights import unwrap
from eventloop.events import AfterLoadCheckpoint, BeforeSaveCheckpoint, Event
from eventloop.events.catalogue import find_event
from eventloop.hooks.checkpoint import CheckpointHook
from eventloop.hooks.hook import check_events
from eventloop.model import average_checkpoint
from eventloop.optim.optimizers import Optimizers
from eventloop.registry import HOOKS, WRITERS, build, find_class
from eventloop.resume.gathering import as_saved
from eventloop.resume.loading import load_hooks
from eventloop.resume.state import TrainerState
from eventloop.state.rollback import Rollback
from eventloop.stops.signals import StopSignals
from eventloop.util.checks import check_bools, check_path
from eventloop.util.errors import WorkDirInUseError

logger = logging.getLogger("eventloop")
F = TypeVar("F", bound=Callable[..., Any])


class HasAttachment:
    """A bridge with the public attributes `bus` and `trainer`, which it takes from its attachment."""

    _attachment: Attachment

    @property
    def bus(self) -> Bus:
        """The bus to which handlers subscribe, before the host's first run or later.

        `print(bridge.bus)` lists the bridge's hooks and writers from `before_run` of that run on: they need
        its model, rank and directory.
        """
        return self._attachment.bus

    @property
    def trainer(self) -> DrivenTrainer:
        """The trainer that handlers get; the first run of the host creates it.

        Raises:
            RuntimeError: the host has not begun a run yet.
        """
        if (trainer := self._attachment.trainer) is None:
            raise RuntimeError(f"the bridge has no trainer before the first run of {self._attachment.host}")
        return trainer

    def command(self, function: F) -> F:
        """Make a function `(trainer, **parameters)` a command of the runs, as `Trainer.command` does.

            @bridge.command
            def prune(trainer, amount: float):
                "Set the smallest weights to zero."

        Raises:
            TypeError, ValueError: as `Trainer.command`, here or at the begin of the host's first run.
        """
        self._attachment.add_command(function)
        return function


class Attachment:
    """The bus and the trainer of a bridge.

    The bus exists from the creation of the bridge, the trainer from the host's first run.

    Args:
        host: the engine's name, for errors.
        never: the events that this host cannot emit, with the reasons.
        bus, hooks, writers, work_dir, measure: arguments of the bridge.
        followed: a function that is called with this attachment, and so with that of each copy of the bridge.
        steer: a function that gives the new trainer the commands that the host applies itself.

    Raises:
        TypeError, ValueError: an argument is invalid, or a hook does a part of the loop that the host does,
            or subscribes to an event that the host cannot emit.
    """

    def __init__(
        self,
        host: str,
        never: Mapping[str, str],
        bus: Bus | None,
        *,
        hooks: Sequence[Any],
        writers: Sequence[Any],
        work_dir: str | Path | None,
        measure: bool,
        followed: Callable[[Attachment], None] | None = None,
        steer: Callable[[HostedTrainer], None] = lambda trainer: None,
    ) -> None:
        check_bus(bus)
        check_lists(hooks=hooks, writers=writers)
        check_bools(measure=measure)
        if work_dir is not None:
            check_path("work_dir", work_dir)
        self.host, self.measure = host, measure
        self.bus = bus if bus is not None else Bus()
        check_bus_owners(self.bus, host)
        self.bus.begins_in_forks = True  # ranks that the host forks run with the handlers of this bus
        for event, reason in never.items():
            self.bus.exclude([event], reason)
        self.hooks = [build(hook, HOOKS) if isinstance(hook, Mapping) else hook for hook in hooks]
        """The hooks that were given."""
        excluded = {find_event(event): reason for event, reason in never.items()}
        for hook in self.hooks:
            check_attachable(hook, "hook")
            check_owner(hook, host)
            _refuse_hosts_own(hook, host)
            check_events(hook, self.bus, excluded)
        self._writers = [build(each, WRITERS) if isinstance(each, Mapping) else each for each in writers]
        check_writers(self._writers)
        self._work_dir = work_dir
        for name in DEFAULT_HOOKS.values():
            find_class(name)  # imported now, and not in the host's first step
        self.trainer: HostedTrainer | None = None
        self.methods = ReplacedMethods()
        """Methods of the host's objects that the bridge replaces until the run ends."""
        self.place: Callable[[Path | None], Path | None] = lambda work_dir: work_dir
        """A function that returns the trainer's directory, given that of the bridge or of the host."""
        self.ended: Callable[[DrivenTrainer], None] = lambda trainer: None
        """A function that is called with the trainer after each run."""
        self.steer = steer
        self.commands: list[Callable[..., Any]] = []
        """The commands that the program has added."""
        self._loaded: Mapping[str, Any] = {}  # a state that waits for the trainer
        self._calls = 0
        if followed is not None:
            followed(self)

    def begin_run(
        self,
        model: torch.nn.Module,
        *,
        native: Any,
        optimizer: Optimizers | None = None,
        max_epochs: int | None = None,
        max_iters: int | None = None,
        by_epoch: bool = True,
        work_dir: str | Path | None = None,
        iter: int = 0,
        epoch: int = 0,
        training: bool = True,
    ) -> HostedTrainer:
        """Begin a run of the host, and return the trainer, which is created at the first run.

        Args:
            model: the module that the host trains.
            native: the host's own trainer object.
            optimizer, max_epochs, max_iters, by_epoch: as for `DrivenTrainer`.
            work_dir: the host's directory, used if the bridge was given none.
            iter, epoch: completed iterations and epochs, not 0 if the host has resumed.
            training: False for a run that only evaluates.

        Raises:
            ValueError: the model differs from that of the first run, and the bridge has hooks.
        """
        trainer = self.trainer
        if trainer is None:
            wanted = self._work_dir if self._work_dir is not None else work_dir
            trainer = self.trainer = HostedTrainer(
                model,
                optimizer=optimizer,
                max_epochs=max_epochs,
                max_iters=max_iters,
                by_epoch=by_epoch,
                hooks=self.hooks,
                writers=self._writers,
                bus=self.bus,
                native=native,
                host=self.host,
                work_dir=self.place(None if wanted is None else Path(wanted)),
            )
            self._add_commands(trainer)
        elif trainer.model is not model and self.hooks:
            raise ValueError(
                f"this bridge to {self.host} serves the model of its first run, and its hooks hold that "
                f"model's state; got another {type(model).__name__}: make a bridge for each model"
            )
        trainer.model, trainer.native, trainer.optimizer = model, native, optimizer
        trainer.max_epochs, trainer.max_iters = max_epochs, max_iters
        trainer.iter = trainer.metrics.iter = iter
        trainer.epoch = trainer.metrics.epoch = epoch
        self._load_states(trainer)
        try:
            trainer.begin_run(training=training)
        except WorkDirInUseError as error:
            _move(trainer, error)
            trainer.begin_run(training=training)
        for stepper in trainer.commands.steppers:
            stepper.follow_factors()  # those of a checkpoint
        return trainer

    def add_command(self, function: Callable[..., Any]) -> None:
        """Add a command to the trainer, now or once the host's first run creates it."""
        self.commands.append(function)
        if self.trainer is not None:
            self.trainer.command(function)

    def given_name(self) -> str:
        """Return the name of an added command, or else of a handler of the bus, or ""."""
        names = [*(each.__name__ for each in self.commands), *(each.name for each in self.bus.stats())]
        return names[0] if names else ""

    def _add_commands(self, trainer: HostedTrainer) -> None:
        refuse_loop_commands(trainer)
        self.steer(trainer)
        for function in self.commands:
            trainer.command(function)

    def state_dict(self) -> dict[str, Any]:
        """Return the states of the bridge's hooks, for the host's checkpoint, as plain values.

        An average of the weights is included. The weights themselves are not, because the host saves them.
        """
        if self.trainer is None:
            return {}
        hooks = {hook.name: hook.state_dict() for hook in self.trainer.hooks if hook.stateful}
        weights = unwrap(self.trainer.model).state_dict()
        checkpoint: dict[str, Any] = {"meta": {}, "state_dict": weights, "hooks": hooks}
        self._announce(self.trainer, BeforeSaveCheckpoint, checkpoint)
        averaged = {"state_dict": checkpoint["state_dict"]} if average_checkpoint.KEY in checkpoint else {}
        saved = as_saved({"meta": {}, "hooks": checkpoint["hooks"]} | averaged)
        return saved if saved["meta"] else {key: value for key, value in saved.items() if key != "meta"}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load states that `state_dict` returned; without a trainer they wait until it is created."""
        self._loaded = dict(state)
        if self.trainer is not None:
            self._load_states(self.trainer)

    def _load_states(self, trainer: DrivenTrainer) -> None:
        state, self._loaded = self._loaded, {}
        if not state:
            return
        source, weights = f"the checkpoint of {self.host}", unwrap(trainer.model).state_dict()
        checkpoint = {"meta": {}, "state_dict": weights, **state}
        if "state_dict" in state:
            checkpoint[average_checkpoint.KEY] = average_checkpoint.own_state(weights)
        self._announce(trainer, AfterLoadCheckpoint, checkpoint)
        rollback = Rollback(source)
        with rollback, rollback:
            lines = load_hooks(trainer.hooks, checkpoint, rollback)
        for line in lines:
            logger.warning("%s", line)

    def _announce(self, trainer: DrivenTrainer, event_type: type[Event], checkpoint: dict[str, Any]) -> None:
        """Emit an event whose handlers may change the checkpoint."""
        trainer.checkpoint = checkpoint
        try:
            trainer.announce(event_type, path=f"the checkpoint of {self.host}")
        finally:
            trainer.checkpoint = None

    @property
    def within_call(self) -> bool:
        """Whether a call that `ending_run` has wrapped is under way."""
        return self._calls > 0

    def ending_run(
        self, call: Callable[..., Any], end: Callable[[BaseException], None] | None = None
    ) -> Callable[..., Any]:
        """Return a function that makes a call of the host, and ends the run with an error that it raises.

        An error of a call within such a call does not end the run, because the host's user may catch it.

        Args:
            call: the call.
            end: the function that ends the run; by default `end_run`.
        """

        @wraps(call)
        def ending_run(*args: Any, **kwargs: Any) -> Any:
            self._calls += 1
            try:
                return call(*args, **kwargs)
            except BaseException as error:
                if self._calls == 1:
                    (end or self.end_run)(error)
                raise
            finally:
                self._calls -= 1

        return ending_run

    def end_unfinished_run(self) -> None:
        """End a run whose end an error of another callback has hidden."""
        if self.trainer is not None and self.trainer.running:
            logger.warning(
                "%s begins a run without the end of the last one, which the bridge ends", self.host
            )
            self.end_run(GeneratorExit())

    def end_run(self, error: BaseException | None = None) -> None:
        """End the host's run: closing events, costs and writers are complete, and no thread is left.

        The host's objects get their own methods back before the closing events, also without a run.
        """
        self.methods.restore()
        if self.trainer is not None and self.trainer.running:
            try:
                self.trainer.end_run(error)
            finally:
                self.bus.close()
                self.ended(self.trainer)


def _move(trainer: DrivenTrainer, error: WorkDirInUseError) -> None:
    """Give a trainer a new directory beside its own, which another live run owns, and log that."""
    own = trainer.work_dir
    try:
        trainer.work_dir = free_directory(own)  # which exists, so the new one has a number
    except OSError:
        trainer.work_dir = Path(tempfile.mkdtemp(prefix="eventloop-"))
    trainer.checkpoint_dir = trainer.work_dir
    trainer.state = TrainerState(trainer)
    for hook in trainer.hooks:
        if isinstance(hook, CheckpointHook):
            hook.check(trainer)
    logger.error("%s; this run of %s writes in %s instead", error, trainer.host, trainer.work_dir)


def stop_at_sigterm(trainer: DrivenTrainer) -> None:
    """Stop the host's run at a SIGTERM, and end the program after it as the signal would have ended it.

    A handler that the program or the host has installed stays the only one.
    """
    if signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
        StopSignals(trainer, [signal.SIGTERM], exits=True).install_until(trainer.during_run)


def _refuse_hosts_own(hook: Any, host: str) -> None:
    """Raise ValueError for a `Foreign` hook around a callback that the host itself can run."""
    if isinstance(hook, Foreign) and hook.system == host.lower():
        raise ValueError(
            f"Foreign({type(hook.callback).__name__}(...)) runs a callback of {host} without {host}, which "
            f"itself trains here: give the callback to {host}"
        )
