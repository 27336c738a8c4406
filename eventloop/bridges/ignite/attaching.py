"""Attach a bus to an engine of pytorch-ignite: `ignite.attach(engine, model=model, optimizer=optimizer)`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial, wraps
from pathlib import Path
from typing import Any, cast
from weakref import ref

import torch

from eventloop.bridges.attachment import Attachment, stop_at_sigterm
from eventloop.bridges.host import require
from eventloop.bridges.host_numbers import numbers_of
from eventloop.bridges.hosted import HostedTrainer
from eventloop.bridges.optimizer_steps import announced_steps
from eventloop.bridges.replaced_methods import ReplacedMethods
from eventloop.bridges.row_names import RowNames
from eventloop.bus import Bus
from eventloop.costs.foreign_calls import ForeignCalls
from eventloop.hooks import CheckpointHook, EMAHook, PreciseBN
from eventloop.optim.optimizers import Optimizers, check_optimizer

require("ignite", "pytorch-ignite", "0.4.13", extra="ignite")

from ignite.engine import Engine, Events  # after the check, which names the extra

from eventloop.bridges.ignite.commands import steer
from eventloop.bridges.ignite.evaluations import MODES, EvaluatorHandlers, outputs_of, without_collisions
from eventloop.bridges.ignite.handler_costs import measuring

NEVER = {
    "after_backward": "backward belongs to the process function of an ignite engine",
    "optimizer_step_skipped": "ignite does not say that a step was skipped",
    "before_save_checkpoint": "ignite's Checkpoint handler saves by itself: attach a handler to it",
    "after_load_checkpoint": "ignite's Checkpoint.load_objects loads by itself",
}
"""The events that no ignite engine can emit, each with the reason."""
_ATTACHED = "_eventloop_bridge"


def attach(
    engine: Engine,
    bus: Bus | None = None,
    *,
    model: torch.nn.Module | None = None,
    optimizer: Optimizers | None = None,
    evaluators: Mapping[str, Engine] | None = None,
    hooks: Sequence[Any] = (),
    writers: Sequence[Any] = (),
    work_dir: str | Path | None = None,
    measure: bool = True,
) -> Bus:
    """Emit the events of an ignite engine's runs on a bus, and return the bus.

        bus = attach(trainer, model=model, optimizer=optimizer, evaluators={"val": evaluator},
                     writers=[JSONLWriter()])

        @bus.on("after_train_iter", priority=70)
        def show(trainer, event):
            print(event.iter, trainer.outputs)

        trainer.run(loader, max_epochs=3)

    An iteration is an iteration of the engine. `trainer.outputs` is the engine's output if it is a mapping,
    and `{"loss": output}` if it is a number, or a tensor or array of one element. Numbers in
    `engine.state.metrics` are logged at the end of each epoch, and for evaluators at the end of their runs.

    Args:
        model: the module that hooks work on, such as `EMAHook`; handlers find it as `trainer.model`.
        optimizer: the engine's optimizer, or several by name. Learning rates are logged, and steps emit
            `before_optimizer_step` and `after_optimizer_step`.
        evaluators: engines by mode. Runs of "val" and "test" emit the events of validations and tests; the
            metrics of an engine of another name are logged under that name.
        hooks, writers, work_dir: as for `Trainer`.
        measure: measure the time of each handler of the engines, for a row of its own in the costs.

    Raises:
        TypeError, ValueError: an argument is invalid, the engine has a bridge already, or a hook does a part
            of the loop that the engine does.
    """
    _check_engines(engine, evaluators)
    bridge = bridge_to(
        engine,
        bus,
        model=model,
        optimizer=optimizer,
        evaluates=bool(evaluators),
        hooks=hooks,
        writers=writers,
        work_dir=work_dir,
        measure=measure,
    )
    for mode, evaluator in (evaluators or {}).items():
        bridge.add_evaluator(mode, evaluator)
    return bridge.attachment.bus


def bridge_to(
    engine: Engine,
    bus: Bus | None = None,
    *,
    model: torch.nn.Module | None = None,
    optimizer: Optimizers | None = None,
    evaluates: bool = True,
    hooks: Sequence[Any] = (),
    writers: Sequence[Any] = (),
    work_dir: str | Path | None = None,
    measure: bool = True,
    hidden: bool = False,
) -> Bridge:
    """Attach a bridge to an engine, and return the bridge.

    Args:
        evaluates: whether evaluators will be added later.
        hidden: emit each event after all handlers of the engine, without adding handlers to the engine. The
            caller must then replace the engine's `run` by `Bridge.wrap_run(engine.run)`.
        bus, model, optimizer, hooks, writers, work_dir, measure: as in `attach`.

    Raises:
        TypeError, ValueError: as in `attach`.
    """
    if bridge_of(engine) is not None:
        raise ValueError("the engine has a bridge to a bus already: attach one bus to an engine")
    never = NEVER
    if optimizer is None:
        steps = "before_optimizer_step", "after_optimizer_step"
        never = never | dict.fromkeys(steps, "give attach(engine, optimizer=...) the optimizer")
    if not evaluates:
        remedy = 'give attach(engine, evaluators={"val": ...}) the evaluator'
        never = never | dict.fromkeys(_EVALUATIONS, remedy)
    check_optimizer(optimizer)
    attachment = Attachment(
        "ignite", never, bus, hooks=hooks, writers=writers, work_dir=work_dir, measure=measure
    )
    _check_model(model, attachment.hooks)
    module = torch.nn.Module() if model is None else model
    bridge = Bridge(engine, attachment, module, optimizer, hidden=hidden)
    setattr(engine, _ATTACHED, bridge)
    return bridge


def _check_engines(engine: object, evaluators: object) -> None:
    """Raise an error unless the engines are ignite's, and no evaluator is the engine that trains."""
    if evaluators is not None and not isinstance(evaluators, Mapping):
        raise TypeError(f'evaluators must be engines by mode, as {{"val": evaluator}}, got {evaluators!r}')
    named_evaluators = {f"evaluators[{mode!r}]": evaluator for mode, evaluator in (evaluators or {}).items()}
    for name, candidate in {"engine": engine, **named_evaluators}.items():
        if not isinstance(candidate, Engine):
            raise TypeError(f"{name} must be an ignite.engine.Engine, got {candidate!r}")
    for name, evaluator in named_evaluators.items():
        if evaluator is engine:
            raise ValueError(f"{name} must be an engine that evaluates, got the engine that trains")


def _check_model(model: object, hooks: Sequence[Any]) -> None:
    """Raise an error for a model of a wrong type, or without a model that a hook needs."""
    if model is not None and not isinstance(model, torch.nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {model!r}")
    for hook in hooks:
        if model is None and isinstance(hook, CheckpointHook | EMAHook | PreciseBN):
            raise ValueError(
                f"{type(hook).__name__} needs a model, and ignite does not say which: give "
                "attach(engine, model=...) the module that the engine trains"
            )


def bridge_of(engine: Engine) -> Bridge | None:
    """Return the bridge that is attached to an engine, or None."""
    return getattr(engine, _ATTACHED, None)


_EVALUATIONS = tuple(
    f"{when}_{mode}{part}"
    for mode in MODES
    for when in ("before", "after")
    for part in ("", "_epoch", "_iter")
)


class Bridge:
    """Emit the events of our trainer at the events of one ignite engine.

    The engine refers to the bridge, and the bridge to the engine only weakly. So a hidden bridge makes no
    reference cycle, and the engine is freed with the last reference to it. A bridge that is not hidden makes
    a cycle, because it replaces `engine.run`.

    Args:
        engine: the engine that trains.
        attachment: holds the bus and the trainer.
        model, optimizer, hidden: as in `attach` and `bridge_to`.
    """

    def __init__(
        self,
        engine: Engine,
        attachment: Attachment,
        model: torch.nn.Module,
        optimizer: Optimizers | None,
        *,
        hidden: bool,
    ) -> None:
        self.attachment = attachment
        self._engine, self._model, self._optimizer = ref(engine), model, optimizer
        self._evaluators: list[tuple[str, ref[Engine]]] = []
        attachment.steer = partial(steer, evaluators=self._evaluators)
        self._costs_at_start = ForeignCalls(lambda phase, seconds: None)  # of the handlers of STARTED
        self._names = RowNames()
        self._begin_error: BaseException | None = None  # raised while our trainer's run began
        self._called = False  # whether `engine.run` is under way
        self._hidden = hidden
        self._handlers: dict[Any, Callable[[Engine], None]] = {
            Events.EPOCH_STARTED: self._begin_epoch,
            Events.ITERATION_STARTED: self._begin_iter,
            Events.ITERATION_COMPLETED: self._end_iter,
            Events.EPOCH_COMPLETED: self._end_epoch,
        }
        if not hidden:
            for event, handler in self._handlers.items():
                engine.add_event_handler(event, handler)
            engine.run = self.wrap_run(engine.run)  # ignite has no event that is fired at every end of a run

    @property
    def _trainer(self) -> HostedTrainer:
        return self.attachment.trainer  # type: ignore[return-value]  # it exists once a run has begun

    def wrap_run(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap the bound method `engine.run` to begin and end our trainer's run, also after any error."""

        @wraps(run)
        def run_with_bridge(*args: Any, **kwargs: Any) -> Any:
            """Run the engine, and end our trainer's run also after an error; first end a run under way."""
            engine = cast(Engine, self._engine())
            if self._called:
                self._exit_run(engine)
            with ExitStack() as self._during:
                self._called = True
                self._during.callback(self._reset)
                if self.attachment.measure:
                    costs = measuring(engine, self._costs_at_start, self._names, events=[Events.STARTED])
                    self._during.enter_context(costs)
                self._during.enter_context(self._handle_events(engine))
                try:
                    state = run(*args, **kwargs)
                    if self._begin_error is not None:  # an EXCEPTION_RAISED handler or a profiler caught it
                        raise self._begin_error
                except BaseException as error:
                    self._begin_error = None
                    self.attachment.end_run(error)
                    raise
                self._end(engine)
            return state

        return run_with_bridge

    def _end(self, engine: Engine) -> None:
        """End our trainer's run; its reason is the call that ended the engine's run early, if one did."""
        if self._in_run() and self._trainer.stop_reason is None:
            self._trainer.stop_reason = _reason(engine)
        self.attachment.end_run()

    def _exit_run(self, engine: Engine) -> None:
        """End the run under way, because a handler calls `engine.run` again within it."""
        self._during.close()
        if engine.last_event_name == Events.COMPLETED:  # one of its handlers has called `engine.run`
            self._end(engine)
        else:
            self.attachment.end_unfinished_run()

    @contextmanager
    def _handle_events(self, engine: Engine) -> Iterator[None]:
        """Until the block ends, begin our trainer's run at `STARTED`.

        A hidden bridge handles all events here, each after the engine's own handlers of the event.
        """
        if not self._hidden:
            with engine.add_event_handler(Events.STARTED, self._begin_run):
                yield
            return
        handlers, fire_event = {Events.STARTED: self._begin_run, **self._handlers}, engine._fire_event

        @wraps(fire_event)
        def fire_and_handle(event_name: Any, *args: Any, **kwargs: Any) -> None:
            fire_event(event_name, *args, **kwargs)
            if (handler := handlers.get(event_name)) is not None:
                handler(engine)

        methods = ReplacedMethods()
        methods.replace(engine, "_fire_event", lambda _: fire_and_handle)
        try:
            yield
        finally:
            methods.restore()

    def _reset(self) -> None:
        self._called, self._names = False, RowNames()  # the old RowNames would keep the handlers alive

    def _in_run(self) -> bool:
        """Return whether a run of the bridge's trainer is under way."""
        return self.attachment.trainer is not None and self.attachment.trainer.running

    def _begin_run(self, engine: Engine, iteration: int | None = None, epoch: int | None = None) -> None:
        """Begin our trainer's run, and store an error, because ignite's handlers may catch it."""
        try:
            self._begin(engine, iteration, epoch)
        except BaseException as error:
            self._begin_error = error
            raise

    def _begin(self, engine: Engine, iteration: int | None, epoch: int | None) -> None:
        """Begin our trainer's run at completed iterations and epochs; None takes them from the engine."""
        state = engine.state
        trainer = self.attachment.begin_run(
            self._model,
            native=engine,
            optimizer=self._optimizer,
            max_epochs=state.max_epochs,
            max_iters=_total(state),
            iter=state.iteration if iteration is None else iteration,
            epoch=state.epoch if epoch is None else epoch,
        )
        stop_at_sigterm(trainer)
        if self._optimizer is not None:
            self._during.enter_context(announced_steps(trainer))
        if self.attachment.measure:
            calls = trainer.foreign_calls
            calls.include(self._costs_at_start)
            later_events = [event for event in engine._event_handlers if event is not Events.STARTED]
            measured = measuring(engine, calls, self._names, trains=True, events=later_events)
            self._during.enter_context(measured)
            for _, reference in self._evaluators:
                if (evaluator := reference()) is not None:
                    self._during.enter_context(measuring(evaluator, calls, self._names))

    def _ensure_run(self, engine: Engine, completed_iterations: int) -> bool:
        """Ensure that our trainer's run has begun; return False outside of `engine.run`.

        ignite continues an interrupted run without firing `STARTED`, so the run is begun here. A program may
        fire the engine's events itself, outside of `engine.run`, and then there is no run.
        """
        if self._called and not self._in_run():
            completed_epochs = max(engine.state.epoch - 1, 0)  # ignite counts the interrupted epoch, too
            self._begin_run(engine, completed_iterations, completed_epochs)
        return self._in_run()

    def _begin_epoch(self, engine: Engine) -> None:
        if self._ensure_run(engine, engine.state.iteration):
            self._trainer.begin_epoch(engine.state.epoch_length)

    def _begin_iter(self, engine: Engine) -> None:
        """Begin an iteration of our trainer; ignite has counted it before it has ended."""
        completed = max(engine.state.iteration - 1, 0)
        if self._ensure_run(engine, completed):
            trainer, state = self._trainer, engine.state
            if trainer.passing is None:
                trainer.resume_epoch(state.epoch_length)
            trainer.follow(iter=completed)
            trainer.begin_iter(state.batch)

    def _end_iter(self, engine: Engine) -> None:
        if self._in_run() and self._trainer.end_iter(outputs_of(engine.state.output)):
            engine.terminate()

    def _end_epoch(self, engine: Engine) -> None:
        """Log the engine's metrics, end the epoch, and terminate the engine if our trainer stops."""
        if not self._in_run():
            return
        trainer = self._trainer
        trainer.log(without_collisions(numbers_of(engine.state.metrics), trainer, "epoch"))
        trainer.end_epoch()
        if trainer.stops.edge():  # a collective: every rank gets here at the end of an epoch
            engine.terminate()

    def add_evaluator(self, mode: str, evaluator: Engine) -> None:
        """Emit events for the runs of an evaluator ("val" or "test"), or log its metrics (other modes)."""
        self._evaluators.append((mode, ref(evaluator)))
        EvaluatorHandlers(evaluator, mode, cast(Engine, self._engine()), self.attachment)
        if self.attachment.measure and self._in_run():
            self._during.enter_context(measuring(evaluator, self._trainer.foreign_calls, self._names))


def _reason(engine: Engine) -> str | None:
    """Return the call that ended the engine's run early, such as "engine.terminate()", or None."""
    if engine.last_event_name == Events.INTERRUPT:
        return "engine.interrupt()"
    max_iters = getattr(engine.state, "max_iters", None)
    if max_iters is not None and engine.state.iteration >= max_iters:
        return None  # ignite itself calls terminate() at max_iters
    return "engine.terminate()" if engine.should_terminate else None


def _total(state: Any) -> int | None:
    """Return the number of iterations of the engine's run; None if the engine does not know it."""
    if getattr(state, "max_iters", None) is not None:
        return int(state.max_iters)
    if state.max_epochs is None or state.epoch_length is None:
        return None
    return int(state.max_epochs * state.epoch_length)
