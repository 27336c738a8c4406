"""Hold what every bridge to another engine (the host) has: a bus, and the trainer that the host drives."""

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
    """Give a bridge its public `bus`, `trainer` and `command`, which the bridge's `Attachment` implements."""

    _attachment: Attachment

    @property
    def bus(self) -> Bus:
        """The bus to which handlers subscribe, before the host's first run or later.

        `print(bridge.bus)` lists the bridge's hooks and writers only once the host's first run has begun,
        because they need the model, rank and directory of the run.
        """
        return self._attachment.bus

    @property
    def trainer(self) -> DrivenTrainer:
        """The trainer that handlers receive. It is created when the first run of the host begins.

        Raises:
            RuntimeError: the host has not begun a run yet.
        """
        if (trainer := self._attachment.trainer) is None:
            raise RuntimeError(f"the bridge has no trainer before the first run of {self._attachment.host}")
        return trainer

    def command(self, function: F) -> F:
        """Register a function `(trainer, **parameters)` as a command to the host's runs; return the function.

            @bridge.command
            def prune(trainer, amount: float):
                "Set the smallest weights to zero."

        Raises:
            TypeError, ValueError: `Trainer.command` refuses the function. Raised here if the trainer exists,
                else when the host's first run begins.
        """
        self._attachment.add_command(function)
        return function


class Attachment:
    """Own the bus and the trainer of a bridge.

    The bus exists once the bridge is created, the trainer once the host's first run has begun.

    Args:
        host: the engine's name, for errors.
        never: the events that this host cannot emit, each with the reason.
        bus, hooks, writers, work_dir, measure: arguments of the bridge.
        followed: a function that is called with the new attachment. A copy of the bridge, which has an
            attachment of its own, calls it again.
        steer: a function that is called with the new trainer, and replaces commands by those for this host.

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
        """The hooks that the bridge was given, as objects."""
        excluded = {find_event(event): reason for event, reason in never.items()}
        for hook in self.hooks:
            check_attachable(hook, "hook")
            check_owner(hook, host)
            _refuse_hosts_own(hook, host)
            check_events(hook, self.bus, excluded)
        self._writers = [
            build(writer, WRITERS) if isinstance(writer, Mapping) else writer for writer in writers
        ]
        check_writers(self._writers)
        self._work_dir = work_dir
        for name in DEFAULT_HOOKS.values():
            find_class(name)  # imports the module now, so that the host's first step does not take that time
        self.trainer: HostedTrainer | None = None
        self.methods = ReplacedMethods()
        """Methods of the host's objects that the bridge has replaced until the run ends."""
        self.choose_directory: Callable[[Path | None], Path | None] = lambda work_dir: work_dir
        """A function from the directory of the bridge, or else of the host, to that of the new trainer."""
        self.after_run: Callable[[DrivenTrainer], None] = lambda trainer: None
        """A function that is called with the trainer after each run."""
        self.steer = steer
        self.commands: list[Callable[..., Any]] = []
        """The functions that the program has added as commands."""
        self._pending_state: Mapping[str, Any] = {}  # to be loaded when a run begins
        self._call_depth = 0  # how many calls wrapped by `ending_run` are under way, one within another
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
        """Begin a run of the host, and return the trainer, which the first run creates.

        Args:
            model: the module that the host trains.
            native: the host's own trainer object.
            optimizer, max_epochs, max_iters, by_epoch: as for `DrivenTrainer`.
            work_dir: the host's directory, used if the bridge was given none.
            iter, epoch: completed iterations and epochs; above 0 if the host resumes a training.
            training: False for a run that only evaluates.

        Raises:
            ValueError: the model is not the one of the first run, and the bridge has hooks.
        """
        trainer = self.trainer
        if trainer is None:
            directory = self._work_dir if self._work_dir is not None else work_dir
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
                work_dir=self.choose_directory(None if directory is None else Path(directory)),
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
            _move_to_free_directory(trainer, error)
            trainer.begin_run(training=training)
        # the host may have loaded optimizers whose values an earlier `set`, such as `lr*=0.5`, multiplies
        for schedules in trainer.commands.steppers:
            schedules.follow_factors()
        return trainer

    def add_command(self, function: Callable[..., Any]) -> None:
        """Add a command to the trainer, now or once the host's first run creates it."""
        self.commands.append(function)
        if self.trainer is not None:
            self.trainer.command(function)

    def given_name(self) -> str:
        """Return the name of the first command that was added, else of the bus's first handler, else ""."""
        names = [function.__name__ for function in self.commands]
        names += [handler.name for handler in self.bus.stats()]
        return names[0] if names else ""

    def _add_commands(self, trainer: HostedTrainer) -> None:
        """Let commands use the host's methods, refuse those of our loop, and add those of the program."""
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
        if saved["meta"]:  # it says which of the hooks' tensors are NumPy arrays
            return saved
        return {key: value for key, value in saved.items() if key != "meta"}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load states that `state_dict` returned: now, or when the host's first run begins."""
        self._pending_state = dict(state)
        if self.trainer is not None:
            self._load_states(self.trainer)

    def _load_states(self, trainer: DrivenTrainer) -> None:
        """Load the pending state into the trainer's hooks; undo that if a hook refuses its part."""
        state, self._pending_state = self._pending_state, {}
        if not state:
            return
        source, weights = f"the checkpoint of {self.host}", unwrap(trainer.model).state_dict()
        checkpoint = {"meta": {}, "state_dict": weights, **state}
        if "state_dict" in state:
            checkpoint[average_checkpoint.KEY] = average_checkpoint.own_state(weights)
        self._announce(trainer, AfterLoadCheckpoint, checkpoint)
        rollback = Rollback(source)
        with rollback, rollback:  # twice: an interrupt may skip one of the two exits
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
        """True while a function that `ending_run` has wrapped is being called."""
        return self._call_depth > 0

    def ending_run(
        self, call: Callable[..., Any], end: Callable[[BaseException], None] | None = None
    ) -> Callable[..., Any]:
        """Wrap a function of the host, so that an error that it raises also ends the run of the bridge.

        If one wrapped function calls another, only the outer one ends the run, because the host's user may
        catch an error of the inner one.

        Args:
            call: the function of the host.
            end: the function that ends the run, called with the error; by default `end_run`.
        """

        @wraps(call)
        def ending_run(*args: Any, **kwargs: Any) -> Any:
            """Call the function; after an error end the run, unless an outer wrapped call will do so."""
            self._call_depth += 1
            try:
                return call(*args, **kwargs)
            except BaseException as error:
                if self._call_depth == 1:
                    (end or self.end_run)(error)
                raise
            finally:
                self._call_depth -= 1

        return ending_run

    def end_unfinished_run(self) -> None:
        """End the last run if it is still open, as after an error that the host did not report."""
        if self.trainer is not None and self.trainer.running:
            logger.warning(
                "%s begins a run, and the bridge has seen no end of the last one: it ends that one now",
                self.host,
            )
            self.end_run(GeneratorExit())

    def end_run(self, error: BaseException | None = None) -> None:
        """End the run: emit its closing events, write its costs, close its writers and end its threads.

        Before that, restore the replaced methods of the host's objects, even if no run is under way.
        """
        self.methods.restore()
        if self.trainer is not None and self.trainer.running:
            try:
                self.trainer.end_run(error)
            finally:
                self.bus.close()
                self.after_run(self.trainer)


def _move_to_free_directory(trainer: DrivenTrainer, error: WorkDirInUseError) -> None:
    """Give a trainer a new directory, because another live run owns its present one; log that as an error."""
    owned = trainer.work_dir
    try:
        trainer.work_dir = free_directory(owned)  # appends a number, because the directory exists
    except OSError:
        trainer.work_dir = Path(tempfile.mkdtemp(prefix="eventloop-"))
    trainer.checkpoint_dir = trainer.work_dir
    trainer.state = TrainerState(trainer)
    for hook in trainer.hooks:
        if isinstance(hook, CheckpointHook):
            hook.check(trainer)
    logger.error("%s; this run of %s writes in %s instead", error, trainer.host, trainer.work_dir)


def stop_at_sigterm(trainer: DrivenTrainer) -> None:
    """Let a SIGTERM stop the host's run, and then end the program as the signal ends it by default.

    Do nothing if the program or the host has installed a SIGTERM handler of its own.
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
