"""Attach a bus to an engine of pytorch-ignite: `ignite.attach(engine, model=model, optimizer=optimizer)`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial, wraps
from pathlib import Path
from typing import Any, cast

import torch

from eventloop.bridges.driven import DrivenTrainer
from eventloop.bridges.host import require
from eventloop.bridges.host_numbers import numbers_of, read_numbers
from eventloop.bridges.optimizer_steps import announced_steps
from eventloop.bridges.ride import Ride, stop_at_sigterm
from eventloop.bridges.row_names import RowNames
from eventloop.bus import Bus
from eventloop.costs.foreign_calls import ForeignCalls
from eventloop.evaluation.schedule import Evaluate
from eventloop.hooks import CheckpointHook, EMAHook, PreciseBN
from eventloop.metrics.scalar_value import is_single
from eventloop.optim.optimizers import Optimizers, check_optimizer
from eventloop.util.functions import handler_name

require("ignite", "pytorch-ignite", "0.4.13", extra="ignite")

from ignite.engine import Engine, Events  # after the check, which names the extra

NEVER = {
    "after_backward": "backward belongs to the process function of an ignite engine",
    "optimizer_step_skipped": "ignite does not say that a step was skipped",
    "before_save_checkpoint": "ignite's Checkpoint handler saves by itself: attach a handler to it",
    "after_load_checkpoint": "ignite's Checkpoint.load_objects loads by itself",
}
"""The events that no ignite engine can emit, with the reasons."""
IN_ITERATION = ("GET_BATCH_STARTED", "GET_BATCH_COMPLETED", "ITERATION_STARTED", "ITERATION_COMPLETED")
MODES = ("val", "test")
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
    `engine.state.metrics` are logged at the end of each epoch, those of evaluators at the end of their runs.

    Args:
        model: the module that hooks work on, such as `EMAHook`; handlers find it as `trainer.model`.
        optimizer: the engine's optimizer, or several by name. Learning rates are logged, and steps emit
            `before_optimizer_step` and `after_optimizer_step`.
        evaluators: engines by mode. Runs of "val" and "test" emit the events of validations and tests; the
            metrics of other names are logged under that name.
        hooks, writers, work_dir: as for `Trainer`.
        measure: give each handler of the engines a row in the costs.

    Raises:
        TypeError, ValueError: an argument is invalid, the engine has a bridge already, or a hook does a part
            of the loop that the engine does.
    """
    _check_engines(engine, evaluators)
    bridge = bridge_to(
        engine, bus, model=model, optimizer=optimizer, evaluates=bool(evaluators), hooks=hooks,
        writers=writers, work_dir=work_dir, measure=measure,
    )  # fmt: skip
    for mode, evaluator in (evaluators or {}).items():
        bridge.add_evaluator(mode, evaluator)
    return bridge.ride.bus


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
) -> Bridge:
    """Attach a bridge to an engine, and return the bridge. Other arguments are those of `attach`.

    Args:
        evaluates: whether evaluators will be added later.

    Raises:
        TypeError, ValueError: as in `attach`.
    """
    if bridge_of(engine) is not None:
        raise ValueError("the engine has a bridge to a bus already: attach one bus to an engine")
    never = NEVER if optimizer is not None else NEVER | dict.fromkeys(
        ("before_optimizer_step", "after_optimizer_step"), "give attach(engine, optimizer=...) the optimizer"
    )  # fmt: skip
    if not evaluates:
        never = never | dict.fromkeys(
            _EVALUATIONS, 'give attach(engine, evaluators={"val": ...}) the evaluator'
        )
    check_optimizer(optimizer)
    ride = Ride("ignite", never, bus, hooks=hooks, writers=writers, work_dir=work_dir, measure=measure)
    _check_model(model, ride.hooks)
    bridge = Bridge(engine, ride, torch.nn.Module() if model is None else model, optimizer)
    setattr(engine, _ATTACHED, bridge)
    return bridge


def _check_engines(engine: object, evaluators: object) -> None:
    if evaluators is not None and not isinstance(evaluators, Mapping):
        raise TypeError(f'evaluators must be engines by mode, as {{"val": evaluator}}, got {evaluators!r}')
    others = {f"evaluators[{mode!r}]": each for mode, each in (evaluators or {}).items()}
    for name, each in {"engine": engine, **others}.items():
        if not isinstance(each, Engine):
            raise TypeError(f"{name} must be an ignite.engine.Engine, got {each!r}")
    for name, each in others.items():
        if each is engine:
            raise ValueError(f"{name} must be an engine that evaluates, got the engine that trains")


def _check_model(model: object, hooks: Sequence[Any]) -> None:
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
    """The bridge's handlers on one engine, which emit the events of our trainer.

    Args:
        engine: the engine that trains.
        ride: holds the bus and the trainer.
        model, optimizer: as in `attach`.
    """

    def __init__(
        self, engine: Engine, ride: Ride, model: torch.nn.Module, optimizer: Optimizers | None
    ) -> None:
        self.ride = ride
        self._engine, self._model, self._optimizer = engine, model, optimizer
        self._evaluators: list[Engine] = []
        # the handlers of STARTED are measured before there is a trainer
        self._at_start = ForeignCalls(lambda phase, seconds: None)
        engine.add_event_handler(Events.EPOCH_STARTED, self._begin_epoch)
        engine.add_event_handler(Events.ITERATION_STARTED, self._begin_iter)
        engine.add_event_handler(Events.ITERATION_COMPLETED, self._end_iter)
        engine.add_event_handler(Events.EPOCH_COMPLETED, self._end_epoch)
        engine.run = self._riding(engine.run)  # no event has every end of a run

    @property
    def _trainer(self) -> DrivenTrainer:
        return self.ride.trainer  # type: ignore[return-value]  # it exists once a run has begun

    def _riding(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap `engine.run` to begin our run and to end it, even after errors that emit no ignite event."""

        @wraps(run)
        def riding(*args: Any, **kwargs: Any) -> Any:
            engine = self._engine
            self._names = RowNames()
            with ExitStack() as self._during:
                if self.ride.measure:
                    self._during.enter_context(self._measuring(engine, self._at_start, [Events.STARTED]))
                started = engine.add_event_handler(Events.STARTED, self._begin_run)
                self._during.callback(started.remove)
                try:
                    state = run(*args, **kwargs)
                except BaseException as error:
                    self.ride.end_run(error)
                    raise
                if self.ride.trainer is not None and engine.should_terminate:
                    self._trainer.stop_reason = self._trainer.stop_reason or "engine.terminate()"
                self.ride.end_run()
            return state

        return riding

    def _begin_run(self, engine: Engine) -> None:
        state = engine.state
        trainer = self.ride.begin_run(
            self._model, native=engine, optimizer=self._optimizer,
            max_epochs=state.max_epochs, max_iters=_total(state), iter=state.iteration, epoch=state.epoch,
        )  # fmt: skip
        stop_at_sigterm(trainer)
        if self._optimizer is not None:
            self._during.enter_context(announced_steps(trainer))
        if self.ride.measure:
            calls = trainer.foreign_calls
            calls.include(self._at_start)
            others = [event for event in engine._event_handlers if event is not Events.STARTED]
            self._during.enter_context(self._measuring(engine, calls, others))
            for evaluator in self._evaluators:
                self._during.enter_context(self._measuring(evaluator, calls))

    def _begin_epoch(self, engine: Engine) -> None:
        self._trainer.begin_epoch(engine.state.epoch_length)

    def _begin_iter(self, engine: Engine) -> None:
        self._trainer.begin_iter(engine.state.batch)

    def _end_iter(self, engine: Engine) -> None:
        if self._trainer.end_iter(_outputs(engine.state.output)):
            engine.terminate()

    def _end_epoch(self, engine: Engine) -> None:
        trainer = self._trainer
        trainer.log(numbers_of(engine.state.metrics))
        trainer.end_epoch()
        if trainer.stops.edge():  # all ranks are here
            engine.terminate()

    def add_evaluator(self, mode: str, evaluator: Engine) -> None:
        """Emit the events of an evaluator's runs for "val" and "test"; log its metrics for other modes."""
        self._evaluators.append(evaluator)
        if mode in MODES:
            evaluator.add_event_handler(Events.STARTED, partial(self._begin_val, cast(Evaluate, mode)))
            evaluator.add_event_handler(Events.ITERATION_STARTED, self._begin_val_iter)
            evaluator.add_event_handler(Events.ITERATION_COMPLETED, self._end_val_iter)
            evaluator.add_event_handler(Events.COMPLETED, self._end_val)
        else:
            evaluator.add_event_handler(Events.COMPLETED, partial(self._log, mode))
        if self.ride.measure and self._rides():
            self._during.enter_context(self._measuring(evaluator, self._trainer.foreign_calls))

    def _rides(self) -> bool:
        """Return whether the engine is running; its evaluators may also run before or after it."""
        return self.ride.trainer is not None and self.ride.trainer.running

    def _log(self, mode: str, evaluator: Engine) -> None:
        if self._rides():
            self._trainer.log(numbers_of(evaluator.state.metrics), mode=mode)

    def _begin_val(self, mode: Evaluate, _: Engine) -> None:
        if self._rides():
            self._trainer.begin_val(mode)

    def _begin_val_iter(self, evaluator: Engine) -> None:
        if self._rides():
            self._trainer.begin_val_iter(evaluator.state.batch, _batch_idx(evaluator))

    def _end_val_iter(self, evaluator: Engine) -> None:
        if self._rides():
            self._trainer.end_val_iter(_outputs(evaluator.state.output), _batch_idx(evaluator))

    def _end_val(self, evaluator: Engine) -> None:
        if self._rides():
            self._trainer.end_val(read_numbers(evaluator.state.metrics))
            if self._trainer.stopping:  # several ranks agree later: not all of them need evaluate
                self._engine.terminate()

    @contextmanager
    def _measuring(
        self, engine: Engine, calls: ForeignCalls, events: Sequence[Any] | None = None
    ) -> Iterator[None]:
        """Measure each handler that the engine has now for some events, or for all, until the block ends.

        ignite keeps handlers in a private table, and has no public way to wrap a handler in its place.
        """
        chosen = list(engine._event_handlers) if events is None else events
        kept = {event: list(engine._event_handlers[event]) for event in chosen}
        measured = {}
        for event, handlers in kept.items():
            inside = engine is self._engine and getattr(event, "name", "") in IN_ITERATION
            measured[event] = [(self._measured(calls, fn, event, inside), *rest) for fn, *rest in handlers]
        engine._event_handlers.update({event: list(handlers) for event, handlers in measured.items()})
        try:
            yield
        finally:
            for event, handlers in measured.items():  # handlers that were removed meanwhile stay removed
                before = dict(zip(map(id, (h[0] for h in handlers)), kept[event], strict=True))
                engine._event_handlers[event] = [
                    before.get(id(h[0]), h) for h in engine._event_handlers[event]
                ]

    def _measured(
        self, calls: ForeignCalls, fn: Callable[..., Any], event: Any, inside: bool
    ) -> Callable[..., Any]:
        parent = fn._parent() if hasattr(fn, "_parent") else fn
        owner = parent.func if isinstance(parent, partial) else parent
        if getattr(owner, "__self__", None) is self:
            return fn
        name = self._row_name(parent, owner)
        call = calls.measured(fn, name, str(event.value), in_iteration=inside)
        call._parent = lambda: parent  # type: ignore[attr-defined]  # ignite finds a handler to remove by it
        return call

    def _row_name(self, handler: Callable[..., Any], inner: Callable[..., Any]) -> str:
        """Return the name of a handler's row. Handlers that are methods of one object share its number."""
        name = handler_name(handler)
        if not inspect.ismethod(inner):
            return self._names.of(handler, name)
        cls, _, method = name.rpartition(".")
        return f"{self._names.of(inner.__self__, cls)}.{method}"


def _total(state: Any) -> int | None:
    """Return the number of iterations of the engine's run; None if the engine does not know it."""
    if getattr(state, "max_iters", None) is not None:
        return int(state.max_iters)
    if state.max_epochs is None or state.epoch_length is None:
        return None
    return int(state.max_epochs * state.epoch_length)


def _batch_idx(evaluator: Engine) -> int:
    state = evaluator.state
    return int((state.iteration - 1) % state.epoch_length) if state.epoch_length else int(state.iteration - 1)


def _outputs(output: Any) -> Any:
    if isinstance(output, Mapping):
        return output
    return {"loss": output} if is_single(output) else None
