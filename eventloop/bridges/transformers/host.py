"""Find the Transformers trainer (the host) that calls a callback; measure its callbacks and the phases."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from functools import wraps
from pathlib import Path
from time import perf_counter
from typing import Any, Literal, NamedTuple

from transformers import Trainer, TrainerCallback

from eventloop.bridges.driven import DrivenTrainer
from eventloop.bridges.replaced_methods import ReplacedMethods
from eventloop.bridges.row_names import RowNames
from eventloop.costs.foreign_calls import ForeignCalls
from eventloop.events import AfterBackward, Event
from eventloop.util.checks import length_of

POINTS = tuple(name for name in dir(TrainerCallback) if name.startswith("on_"))
"""The names of the methods of callbacks."""

IN_ITERATION = frozenset(
    {
        "on_step_begin",
        "on_pre_optimizer_step",
        "on_optimizer_step",
        "on_substep_end",
        "on_step_end",
        "on_log",
        "on_save",
    }
)
"""The methods of callbacks whose time belongs to an iteration, or to the wait between two iterations."""

PARTS: dict[str, tuple[Literal["backward", "optimizer"], type[Event] | None]] = {
    "backward": ("backward", AfterBackward),
    "clip_grad_norm_": ("optimizer", None),
}
"""The measured methods of the host's accelerator: the phase of their time, and the event after them."""


class Host(NamedTuple):
    """Hold the trainer that calls a callback, and the path of the checkpoint from which it has resumed."""

    trainer: Any
    resumed_from: Path | None


def find_host(callback: TrainerCallback) -> Host | None:
    """Return the Transformers trainer that is calling a callback, or None if another loop calls it.

    Transformers passes no trainer to callbacks. So the trainer is searched on the stack, as the `self` of a
    calling method, and the checkpoint as the argument `resume_from_checkpoint` of such a method.
    """
    trainer, frame = None, inspect.currentframe()
    while frame is not None:
        caller = frame.f_locals.get("self")
        if isinstance(caller, Trainer) and callback in caller.callback_handler.callbacks:
            trainer = caller
            if isinstance(path := frame.f_locals.get("resume_from_checkpoint"), str | Path):
                return Host(trainer, Path(path))
        elif trainer is not None and caller is not None:
            break  # the trainer's own calls end here: another object has called it
        frame = frame.f_back
    return None if trainer is None else Host(trainer, None)


class MeasuredCallbacks:
    """Measure each method of a trainer's callbacks during one run, for rows in the costs.

    Args:
        calls: receives the times.
        methods: replaces and restores the methods.
        own: the class of callbacks that are not measured.
    """

    def __init__(self, calls: ForeignCalls, methods: ReplacedMethods, own: type[TrainerCallback]) -> None:
        self._calls, self._methods, self._own = calls, methods, own
        self._measured: dict[int, TrainerCallback] = {}  # by id; it keeps them alive, so that ids are unique
        self._names = RowNames()

    def measure(self, callbacks: Iterable[TrainerCallback]) -> None:
        """Measure callbacks that are not measured yet."""
        for callback in callbacks:
            if isinstance(callback, self._own) or id(callback) in self._measured:
                continue
            self._measured[id(callback)] = callback
            label = self._names.of(callback, type(callback).__name__)
            for point in POINTS:
                if getattr(type(callback), point, None) is not getattr(TrainerCallback, point):
                    self._replace(callback, point, f"{label}.{point}")

    def _replace(self, callback: TrainerCallback, point: str, name: str) -> None:
        """Measure the calls of a callback's method until the run ends."""
        self._methods.replace(
            callback,
            point,
            lambda call: self._calls.measured(call, name, point, in_iteration=point in IN_ITERATION),
        )


def updates(args: Any, loader: Any) -> int | None:
    """Return the number of optimizer updates in an epoch; None if the loader has no length."""
    length = length_of(loader)
    return None if length is None else max(1, -(-length // args.gradient_accumulation_steps))


def waits_for_data(trainer: DrivenTrainer, call: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function that fetches the batches of an iteration, so that the phase `data` begins with it."""
    clock = trainer.clock

    @wraps(call)
    def fetch(*args: Any, **kwargs: Any) -> Any:
        clock.begin_data()
        return call(*args, **kwargs)

    return fetch


def measured_part(
    trainer: DrivenTrainer,
    phase: Literal["backward", "optimizer"],
    event_type: type[Event] | None,
    call: Callable[..., Any],
) -> Callable[..., Any]:
    """Wrap a function so that its time counts in a phase of the iteration, and emit an event after it."""
    charge, waits = trainer.clock.charge, trainer.clock.waits

    @wraps(call)
    def part(*args: Any, **kwargs: Any) -> Any:
        """Call the function, charge its time without waits to the phase, and emit the event."""
        began = perf_counter() - waits.seconds
        result = call(*args, **kwargs)
        charge(phase, perf_counter() - waits.seconds - began)
        if event_type is not None:
            announce_in_step(trainer, event_type)
        return result

    return part


def announce_in_step(trainer: DrivenTrainer, event_type: type[Event], **fields: Any) -> None:
    """Emit an event within the host's step, and count the time of its handlers in the hooks phase."""
    if trainer.bus.wants(event_type):
        waits = trainer.clock.waits
        began = perf_counter() - waits.seconds
        trainer.announce(event_type, **fields)
        trainer.clock.charge("hooks", perf_counter() - waits.seconds - began)
