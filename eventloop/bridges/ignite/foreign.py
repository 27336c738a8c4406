"""Run handlers of pytorch-ignite in this engine's `Trainer`, attached to an ignite engine that is never run.

    engine = Engine(lambda engine, batch: None)
    ProgressBar().attach(engine)
    engine.add_event_handler(Events.ITERATION_COMPLETED(every=100), show)
    Trainer(..., hooks=[Foreign(engine)])

This trainer sets the engine's counters and calls its handlers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, cast
from weakref import ref

import torch
from ignite.engine import Engine, Events, State

from eventloop.bridges.foreign import ForeignCall
from eventloop.bridges.ignite.attaching import bridge_of
from eventloop.data.loader_info import named_loaders
from eventloop.events import COMPLETED, AfterTrain, AfterTrainEpoch, BeforeTrainEpoch
from eventloop.util.functions import handler_name

SYSTEM = "ignite"
TRAINING = {
    Events.STARTED: "before_train",
    Events.EPOCH_STARTED: "before_train_epoch",
    Events.GET_BATCH_COMPLETED: "before_train_iter",
    Events.ITERATION_STARTED: "before_train_iter",
    Events.ITERATION_COMPLETED: "after_train_iter",
    Events.EPOCH_COMPLETED: "after_train_epoch",
    Events.TERMINATE: "after_train",
    Events.COMPLETED: "after_train",
    Events.EXCEPTION_RAISED: "after_train",
}
"""The event of this trainer at which the handlers of an ignite event run, in the order of ignite."""
EVALUATION = {
    Events.STARTED: "before_{}",
    Events.EPOCH_STARTED: "before_{}_epoch",
    Events.GET_BATCH_COMPLETED: "before_{}_iter",
    Events.ITERATION_STARTED: "before_{}_iter",
    Events.ITERATION_COMPLETED: "after_{}_iter",
    Events.EPOCH_COMPLETED: "after_{}_epoch",
    Events.COMPLETED: "after_{}",
}
"""The same mapping for an engine that evaluates; `{}` stands for the mode, "val" or "test"."""
_LATE = "attaches its handlers when an engine runs"  # which the engine never does here
REFUSED = {
    "BasicTimeProfiler": f"{_LATE}: `eventloop report` has the times of the phases",
    "HandlersTimeProfiler": f"{_LATE}: `eventloop report` has the time of each handler",
    "FastaiLRFinder": f"{_LATE}: trainer.find_lr() makes the same test",
    "FBResearchLogger": "measures how an engine loads batches, and this trainer loads them itself: "
    "`eventloop report` has that time, and ConsoleWriter prints the numbers",
    "BatchSizeScheduler": "changes the batches of an epoch that keeps its number of iterations, and an epoch "
    "of this trainer ends with its loader: give the loader a batch_sampler of your own",
}
"""The handlers of ignite that would have no effect in our trainer or another one, with the substitutes."""
UNHEARD = {"should_terminate_single_epoch": "terminate_epoch()", "should_interrupt": "interrupt()"}
"""The flags of an engine that have no effect in our trainer, with the methods that set them."""
_END = (Events.TERMINATE, Events.COMPLETED, Events.EXCEPTION_RAISED)
_MODE = "_eventloop_mode"


def evaluates(engine: Engine, mode: str = "val") -> Engine:
    """Mark an engine as an evaluator, so that its handlers run in validations, and return it.

        evaluator = evaluates(Engine(lambda engine, batch: None))
        evaluator.add_event_handler(Events.COMPLETED, EarlyStopping(3, score, engine))
        Trainer(..., hooks=[Foreign(engine), Foreign(evaluator, name="evaluator")])

    Args:
        mode: "val" or "test".

    Raises:
        ValueError: `mode` is neither.
    """
    if mode not in ("val", "test"):
        raise ValueError(f'mode must be "val" or "test", got {mode!r}')
    setattr(engine, _MODE, mode)
    return engine


def check(callback: Any) -> None:
    """Refuse an object that is not an engine, and handlers of events that this trainer never has.

    Raises:
        TypeError: it is not an engine.
        ValueError: a handler would never be called.
    """
    if not isinstance(callback, Engine):
        raise TypeError(
            "Foreign takes an ignite Engine with its handlers, got "
            f"{type(callback).__name__}: attach it to engine = Engine(lambda engine, batch: None), as "
            "ignite's documentation shows, and give Foreign(engine)"
        )
    if bridge_of(callback) is not None:
        raise ValueError(
            "the engine has a bridge by attach(), which serves an engine that runs: give Foreign an engine "
            "without one, and the hooks and writers to this Trainer"
        )
    for fn, *_ in (entry for handlers in callback._event_handlers.values() for entry in handlers):
        parent = _parent(fn)
        for cls in type(getattr(parent, "__self__", parent)).__mro__:
            if cls.__name__ in REFUSED:
                raise ValueError(f"{cls.__name__} {REFUSED[cls.__name__]}")
    if unknown := [
        event
        for event, handlers in callback._event_handlers.items()
        if handlers and not _name(callback, event)
    ]:
        raise ValueError(
            f"the engine has a handler of {unknown[0]}, which this trainer never has: its loader and its "
            "stops are its own"
        )


def stateful(callback: Any) -> bool:
    """Return True: the user's keys of `engine.state_dict()` are saved."""
    return True


def build(trainer: Any, callbacks: Sequence[Any]) -> _Engines:
    """Return the object that drives all ignite engines of a trainer."""
    return _Engines(trainer, callbacks)


class _Terminated(NamedTuple):
    """The event at which a handler has called `terminate()` of an engine."""

    event: Any
    ours: Any
    skip_completed: bool

    def still_calls(self, event: Any, ours: Any) -> bool:
        """Return whether ignite calls the handlers of an event after the call of `terminate()`.

        It calls the other handlers of the same event, and those of the end. This trainer goes on to the end
        of the iteration, and has events there that ignite does not have.
        """
        if event == Events.COMPLETED and self.skip_completed:
            return False
        return event in _END or (event == self.event and ours is self.ours)


class _Engines:
    """Set the counters of ignite engines, and call their handlers."""

    def __init__(self, trainer: Any, engines: Sequence[Engine]) -> None:
        self._trainer = ref(trainer)
        self._engines = engines
        self._terminated: dict[Engine, _Terminated] = {}
        for engine in engines:
            _check_targets(engine, engines)
            engine.state.max_epochs, engine.state.epoch_length = (
                trainer.max_epochs,
                trainer.limits.length("train", trainer.train_loader),
            )

    def own_calls(self) -> Iterable[ForeignCall]:
        """Return the subscription that begins a run; the counters are set before each call of a handler."""
        return (ForeignCall("begin_run", ("before_run",), lambda *_: self._terminated.clear(), "HIGHEST"),)

    def calls(self, callback: Engine) -> Iterable[ForeignCall]:
        """Yield a subscription for each handler of an engine, in the order in which ignite calls them."""
        for event in TRAINING:
            for entry in callback._event_handlers.get(event, ()):
                yield self._call(callback, event, entry)

    def _call(self, engine: Engine, event: Any, entry: tuple[Any, ...]) -> ForeignCall:
        fn, args, kwargs = entry
        parent = _parent(fn)
        evaluates = hasattr(engine, _MODE)

        def call(trainer: Any, ours: Any) -> None:
            if entry not in engine._event_handlers[event] or not self._happens(engine, event, ours):
                return  # the handler was removed, or ignite has no such event here
            (_move_evaluator if evaluates else _move)(engine.state, trainer, ours)
            if event == Events.GET_BATCH_COMPLETED:
                engine.state.iteration -= 1  # ignite counts the iteration after this event
            engine.last_event_name = event
            extra = (RuntimeError(ours.reason),) if event == Events.EXCEPTION_RAISED else ()
            first = (engine,) if args and isinstance(args[0], ref) else ()
            fn(*first, *extra, *args[len(first) :], **kwargs)
            self._apply_stop(trainer, handler_name(parent), event, ours)

        return ForeignCall(
            f"{handler_name(parent)} at {getattr(event, 'name', event)}",
            (cast(str, _name(engine, event)),),
            call,
        )

    def _happens(self, engine: Engine, event: Any, ours: Any) -> bool:
        terminated = self._terminated.get(engine)
        return _happens(event, ours) and (terminated is None or terminated.still_calls(event, ours))

    def _apply_stop(self, trainer: Any, name: str, event: Any, ours: Any) -> None:
        """Stop this trainer if a handler has called `terminate()`, of its own engine or of another one.

        Raises:
            RuntimeError: the handler has called a method that has no effect here.
        """
        for engine in self._engines:
            _refuse_unheard(engine, name)
            if not engine.should_terminate:
                continue
            skip, engine.should_terminate = engine.should_terminate == "skip_completed", False
            if not isinstance(ours, AfterTrain):  # the run has ended: the request would stop the next one
                self._terminated.setdefault(engine, _Terminated(event, ours, skip))
                trainer.stop(f"{name} of an ignite engine called terminate()")

    def state_dict(self, callback: Engine) -> dict[str, Any]:
        """Return the user's keys of an engine's state, without the counters, which follow the trainer's."""
        return {key: getattr(callback.state, key) for key in callback.state_dict_user_keys}

    def load_state_dict(self, callback: Engine, state: Mapping[str, Any]) -> None:
        """Load the user's keys of an engine's state."""
        for key, value in state.items():
            setattr(callback.state, key, value)


def _refuse_unheard(engine: Engine, name: str) -> None:
    """Refuse a call of a method of an engine that has no effect here.

    Raises:
        RuntimeError: naming the handler and the method.
    """
    for flag, method in UNHEARD.items():
        if getattr(engine, flag, False):
            raise RuntimeError(
                f"{name} of an ignite engine called {method}, which has no effect here: use "
                "engine.terminate(), which stops this trainer"
            )


def _check_targets(engine: Engine, engines: Sequence[Engine]) -> None:
    """Refuse a handler that controls an engine of which our trainer knows nothing, such as EarlyStopping.

    Raises:
        ValueError: naming the handler.
    """
    for fn, *_ in (entry for handlers in engine._event_handlers.values() for entry in handlers):
        owner = getattr(_parent(fn), "__self__", _parent(fn))
        target = getattr(owner, "trainer", None)
        if isinstance(target, Engine) and not any(target is each for each in engines):
            raise ValueError(
                f"{type(owner).__name__} controls an ignite engine that is in no Foreign, and would have no "
                "effect: add Foreign(engine) of its `trainer` to hooks"
            )


def _parent(fn: Any) -> Any:
    """Return the user's handler, which ignite wraps in another function for `Events.STARTED(every=2)`."""
    return fn._parent() if hasattr(fn, "_parent") else fn


def _name(engine: Engine, event: Any) -> str | None:
    """Return the event of this trainer that corresponds to an ignite event of the engine, or None."""
    if (mode := getattr(engine, _MODE, None)) is not None:
        found = EVALUATION.get(event)
        return None if found is None else found.format(mode)
    return TRAINING.get(event)


def _happens(event: Any, ours: Any) -> bool:
    """Return whether an ignite event happens at this event of our trainer.

    COMPLETED, TERMINATE and EXCEPTION_RAISED correspond to one event, `after_train`, and differ in its
    reason. An epoch that is cut short has no EPOCH_COMPLETED.
    """
    if event == Events.EPOCH_COMPLETED:
        return bool(ours.reason == COMPLETED)
    if event == Events.EXCEPTION_RAISED:
        return bool(ours.reason == "error")
    if event == Events.TERMINATE:
        return ours.reason not in (COMPLETED, "error")
    return not (event == Events.COMPLETED and getattr(ours, "reason", "") == "error")


def _move(state: State, trainer: Any, ours: Any) -> None:
    """Set the counters of a training engine; ignite counts from 1."""
    in_iteration = hasattr(ours, "batch_idx")
    state.iteration = ours.iter + in_iteration
    within = in_iteration or isinstance(ours, BeforeTrainEpoch | AfterTrainEpoch)
    if isinstance(ours, AfterTrain):
        within = trainer.batch_idx > 0  # an epoch that was cut short counts for ignite
    state.epoch = ours.epoch + within
    state.batch, state.output = trainer.batch, _output(trainer.outputs)


def _move_evaluator(state: State, trainer: Any, ours: Any) -> None:
    loader = named_loaders(trainer.val_loader).get(getattr(ours, "loader", ""))
    state.epoch, state.max_epochs = 1, 1
    state.epoch_length = trainer.limits.length("val", loader)
    state.iteration = ours.batch_idx + 1 if hasattr(ours, "batch_idx") else state.epoch_length or 0
    state.batch, state.output = trainer.batch, trainer.outputs
    state.metrics.update(getattr(ours, "metrics", {}))


def _output(outputs: Any) -> Any:
    """Return the loss alone if a step returns nothing else, as ignite's supervised trainers do."""
    if isinstance(outputs, Mapping) and outputs.keys() == {"loss"}:
        loss = outputs["loss"]
        return loss.detach() if isinstance(loss, torch.Tensor) else loss
    return outputs
