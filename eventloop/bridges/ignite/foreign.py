"""Run handlers of pytorch-ignite in this engine's `Trainer`, attached to an ignite engine that is never run.

    engine = Engine(lambda engine, batch: None)
    ProgressBar().attach(engine)
    engine.add_event_handler(Events.ITERATION_COMPLETED(every=100), show)
    Trainer(..., hooks=[Foreign(engine)])

Our trainer sets the engine's counters and calls its handlers.
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
"""Each ignite event, in ignite's order, with the event of our trainer at which its handlers run."""
EVALUATION = {
    Events.STARTED: "before_{}",
    Events.EPOCH_STARTED: "before_{}_epoch",
    Events.GET_BATCH_COMPLETED: "before_{}_iter",
    Events.ITERATION_STARTED: "before_{}_iter",
    Events.ITERATION_COMPLETED: "after_{}_iter",
    Events.EPOCH_COMPLETED: "after_{}_epoch",
    Events.COMPLETED: "after_{}",
}
"""The events of our trainer at which an evaluator's handlers run; `{}` is the mode, "val" or "test"."""
_LATE = "attaches its handlers when an engine runs"  # here the engine never runs
REFUSED = {
    "BasicTimeProfiler": f"{_LATE}: `eventloop report` has the times of the phases",
    "HandlersTimeProfiler": f"{_LATE}: `eventloop report` has the time of each handler",
    "FastaiLRFinder": f"{_LATE}: trainer.find_lr() makes the same test",
    "FBResearchLogger": "measures how an engine loads batches, and this trainer loads them itself: "
    "`eventloop report` has that time, and ConsoleWriter prints the numbers",
    "BatchSizeScheduler": "changes the batches of an epoch that keeps its number of iterations, and an epoch "
    "of this trainer ends with its loader: give the loader a batch_sampler of your own",
}
"""The handlers of ignite that would have no or a wrong effect here; the text is the rest of the error."""
IGNORED_FLAGS = {"should_terminate_single_epoch": "terminate_epoch()", "should_interrupt": "interrupt()"}
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
    """Refuse an object that is not an engine, an engine with a bridge, and handlers that cannot work here.

    Raises:
        TypeError: the object is not an engine.
        ValueError: the engine has a bridge, or a handler that is in `REFUSED` or would never be called.
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
        if handlers and not _our_event(callback, event)
    ]:
        raise ValueError(
            f"the engine has a handler of {unknown[0]}, which this trainer never has: its loader and its "
            "stops are its own"
        )


def stateful(callback: Any) -> bool:
    """Return True: the user's keys of `engine.state_dict()` are saved."""
    return True


def build(trainer: Any, callbacks: Sequence[Any]) -> _Engines:
    """Return the object that sets the counters and calls the handlers of all ignite engines of a trainer."""
    return _Engines(trainer, callbacks)


class _Terminated(NamedTuple):
    """Record the event at which a handler called `terminate()` of an engine."""

    event: Any
    trainer_event: Any
    skip_completed: bool

    def still_calls(self, event: Any, trainer_event: Any) -> bool:
        """Return whether ignite would still call the handlers of an event after `terminate()`.

        ignite calls the other handlers of the same event, and the handlers of the run's end. Our trainer
        continues to the end of the iteration, and emits events on the way that ignite would not have.
        """
        if event == Events.COMPLETED and self.skip_completed:
            return False
        return event in _END or (event == self.event and trainer_event is self.trainer_event)


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
        """Return one subscription, which forgets calls of `terminate()` when a run begins.

        The counters need none: they are set before each call of a handler.
        """
        return (ForeignCall("begin_run", ("before_run",), lambda *_: self._terminated.clear(), "HIGHEST"),)

    def calls(self, callback: Engine) -> Iterable[ForeignCall]:
        """Yield a subscription for each handler of an engine, in the order in which ignite calls them."""
        for event in TRAINING:
            for entry in callback._event_handlers.get(event, ()):
                yield self._call(callback, event, entry)

    def _call(self, engine: Engine, event: Any, entry: tuple[Any, ...]) -> ForeignCall:
        """Return the subscription that calls one handler of an engine, an entry of ignite's table."""
        fn, args, kwargs = entry
        parent = _parent(fn)
        evaluates = hasattr(engine, _MODE)

        def call(trainer: Any, trainer_event: Any) -> None:
            """Call the handler as ignite would, with the engine's state set to the trainer's event."""
            if entry not in engine._event_handlers[event] or not self._happens(engine, event, trainer_event):
                return  # the handler was removed, or ignite has no such event here
            set_state = _set_evaluator_state if evaluates else _set_state
            set_state(engine.state, trainer, trainer_event)
            if event == Events.GET_BATCH_COMPLETED:
                engine.state.iteration -= 1  # ignite counts the iteration after this event
            engine.last_event_name = event
            error = (RuntimeError(trainer_event.reason),) if event == Events.EXCEPTION_RAISED else ()
            # for a handler that takes the engine, ignite stores a weak reference to it as the first argument
            engine_argument = (engine,) if args and isinstance(args[0], ref) else ()
            fn(*engine_argument, *error, *args[len(engine_argument) :], **kwargs)
            self._apply_stop(trainer, handler_name(parent), event, trainer_event)

        return ForeignCall(
            f"{handler_name(parent)} at {getattr(event, 'name', event)}",
            (cast(str, _our_event(engine, event)),),
            call,
        )

    def _happens(self, engine: Engine, event: Any, trainer_event: Any) -> bool:
        """Return whether ignite has the event here, after `terminate` only if it still calls its handlers."""
        terminated = self._terminated.get(engine)
        return _happens(event, trainer_event) and (
            terminated is None or terminated.still_calls(event, trainer_event)
        )

    def _apply_stop(self, trainer: Any, name: str, event: Any, trainer_event: Any) -> None:
        """Stop this trainer if a handler has called `terminate()` of any engine that is in a `Foreign`.

        Raises:
            RuntimeError: the handler has called a method that has no effect here.
        """
        for engine in self._engines:
            _refuse_ignored_flags(engine, name)
            if not engine.should_terminate:
                continue
            skip_completed, engine.should_terminate = engine.should_terminate == "skip_completed", False
            is_over = isinstance(trainer_event, AfterTrain)  # a stop would then end the next run
            if not is_over:
                self._terminated.setdefault(engine, _Terminated(event, trainer_event, skip_completed))
                trainer.stop(f"{name} of an ignite engine called terminate()")

    def state_dict(self, callback: Engine) -> dict[str, Any]:
        """Return the attributes of an engine's state that the program lists in `state_dict_user_keys`.

        The counters are not saved, because they are copied from our trainer.
        """
        return {name: getattr(callback.state, name) for name in callback.state_dict_user_keys}

    def load_state_dict(self, callback: Engine, state: Mapping[str, Any]) -> None:
        """Set the attributes of an engine's state to the values that `state_dict` returned, by name."""
        for name, value in state.items():
            setattr(callback.state, name, value)


def _refuse_ignored_flags(engine: Engine, name: str) -> None:
    """Refuse a call of an engine's `terminate_epoch()` or `interrupt()`, which have no effect here.

    Raises:
        RuntimeError: a handler has called one of them; the text names both.
    """
    for flag, method in IGNORED_FLAGS.items():
        if getattr(engine, flag, False):
            raise RuntimeError(
                f"{name} of an ignite engine called {method}, which has no effect here: use "
                "engine.terminate(), which stops this trainer"
            )


def _check_targets(engine: Engine, engines: Sequence[Engine]) -> None:
    """Refuse a handler, such as EarlyStopping, that controls an engine which is in no `Foreign`.

    Raises:
        ValueError: there is such a handler; the text names it.
    """
    for fn, *_ in (entry for handlers in engine._event_handlers.values() for entry in handlers):
        owner = getattr(_parent(fn), "__self__", _parent(fn))
        target = getattr(owner, "trainer", None)
        if isinstance(target, Engine) and not any(target is known for known in engines):
            raise ValueError(
                f"{type(owner).__name__} controls an ignite engine that is in no Foreign, and would have no "
                "effect: add Foreign(engine) of its `trainer` to hooks"
            )


def _parent(fn: Any) -> Any:
    """Return the user's handler, which ignite wraps for filters such as `Events.STARTED(every=2)`."""
    return fn._parent() if hasattr(fn, "_parent") else fn


def _our_event(engine: Engine, event: Any) -> str | None:
    """Return the event of this trainer that corresponds to an ignite event of the engine, or None."""
    if (mode := getattr(engine, _MODE, None)) is not None:
        pattern = EVALUATION.get(event)
        return None if pattern is None else pattern.format(mode)
    return TRAINING.get(event)


def _happens(event: Any, trainer_event: Any) -> bool:
    """Return whether ignite would fire its `event` at an event of our trainer.

    The reason of `after_train` decides between COMPLETED, TERMINATE and EXCEPTION_RAISED, and an epoch that
    is cut short has no EPOCH_COMPLETED.
    """
    if event == Events.EPOCH_COMPLETED:
        return bool(trainer_event.reason == COMPLETED)
    if event == Events.EXCEPTION_RAISED:
        return bool(trainer_event.reason == "error")
    if event == Events.TERMINATE:
        return trainer_event.reason not in (COMPLETED, "error")
    return not (event == Events.COMPLETED and getattr(trainer_event, "reason", "") == "error")


def _set_state(state: State, trainer: Any, trainer_event: Any) -> None:
    """Set the counters, batch and output of a training engine; ignite counts from 1."""
    in_iteration = hasattr(trainer_event, "batch_idx")
    state.iteration = trainer_event.iter + in_iteration
    in_epoch = in_iteration or isinstance(trainer_event, BeforeTrainEpoch | AfterTrainEpoch)
    if isinstance(trainer_event, AfterTrain):
        in_epoch = trainer.batch_idx > 0  # ignite counts an epoch that was cut short
    state.epoch = trainer_event.epoch + in_epoch
    state.batch, state.output = trainer.batch, _output(trainer.outputs)


def _set_evaluator_state(state: State, trainer: Any, trainer_event: Any) -> None:
    """Set the counters, batch, output and metrics of an evaluator, whose run is one epoch of the loader."""
    loader = named_loaders(trainer.val_loader).get(getattr(trainer_event, "loader", ""))
    state.epoch, state.max_epochs = 1, 1
    state.epoch_length = trainer.limits.length("val", loader)
    in_iteration = hasattr(trainer_event, "batch_idx")
    state.iteration = trainer_event.batch_idx + 1 if in_iteration else state.epoch_length or 0
    state.batch, state.output = trainer.batch, trainer.outputs
    state.metrics.update(getattr(trainer_event, "metrics", {}))


def _output(outputs: Any) -> Any:
    """Return the loss alone if a step returns nothing else, as ignite's supervised trainers do."""
    if isinstance(outputs, Mapping) and outputs.keys() == {"loss"}:
        loss = outputs["loss"]
        return loss.detach() if isinstance(loss, torch.Tensor) else loss
    return outputs
