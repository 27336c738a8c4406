"""Measure calls of functions that are not handlers of the bus, such as the callbacks of another engine."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from time import perf_counter
from typing import Any, Literal, NamedTuple

from eventloop.costs.records import HandlerCost
from eventloop.costs.timing import BATCH, Timing
from eventloop.costs.waits import excludes_waits, frames_here

Charge = Callable[[Literal["hooks"], float], None]
"""The type of a function that adds seconds to the phase "hooks" of the current iteration."""


class _Call(NamedTuple):
    """The durations of one callback at one event, and whether the event belongs to a training iteration."""

    timing: Timing
    in_iteration: bool


class ForeignCalls:
    """The durations of another engine's callbacks, by the names of callback and event.

        calls = ForeignCalls(clock.charge)
        callback.on_train_batch_end = calls.measured(
            callback.on_train_batch_end, "Timer.on_train_batch_end", "on_train_batch_end", in_iteration=True
        )

    Every call is measured. All calls come from the training thread.

    Args:
        charge: called with "hooks" and the seconds of each call within an iteration, such as
            `StepClock.charge`.
    """

    def __init__(self, charge: Charge) -> None:
        self._charge = charge
        self._calls: dict[tuple[str, str], _Call] = {}
        self._within_call = False  # whether a measured call is under way, which may make further ones

    def measured(
        self, fn: Callable[..., Any], name: str, event: str, *, in_iteration: bool
    ) -> Callable[..., Any]:
        """Return a function that calls `fn` and measures the call.

        Args:
            name: the name of the callback in the record of costs.
            event: the engine's name of the event at which `fn` is called.
            in_iteration: whether this event belongs to a training iteration.
        """

        timing = self._calls.setdefault((name, event), _Call(Timing(), in_iteration)).timing
        recent, charge = timing.recent, self._charge

        @wraps(fn)
        def call(*args: Any, **kwargs: Any) -> Any:
            """Call the function and measure it; charge its time to "hooks" unless an outer call does."""
            within_call, self._within_call = self._within_call, True
            began = perf_counter()
            try:
                return fn(*args, **kwargs)
            finally:
                seconds = perf_counter() - began
                self._within_call = within_call
                recent.append(seconds)  # `Timing.add` would take 0.1 us longer (`benchmarks.bridges`)
                if len(recent) >= BATCH:
                    timing.sum_up()
                if in_iteration and not within_call:  # an outer call's seconds include those of this call
                    charge("hooks", seconds)

        return call

    def add_row(self, name: str, event: str, timing: Timing, *, in_iteration: bool) -> None:
        """Add a callback whose calls a bridge measures, and adds to the phases, itself.

        Args:
            name, event, in_iteration: as for `measured`.
            timing: the durations of the calls, to which the bridge adds.
        """
        self._calls[name, event] = _Call(timing, in_iteration)

    def include(self, others: ForeignCalls) -> None:
        """Add the callbacks of `others`, and replace those of the same name and event."""
        self._calls |= others._calls

    def costs(self, wall: float) -> list[HandlerCost]:
        """Return one record for each callback and event that was called.

        Args:
            wall: the seconds of all iterations, to which `share` refers.
        """
        return [_cost(*key, *call, wall) for key, call in self._calls.items() if call.timing.clocked]


@excludes_waits
def _exclude_wait(seconds: float) -> None:
    """Exclude a wait from the callbacks that are being called on this thread, and from the hooks phase.

    A callback is found by the frame of the function `call` within `ForeignCalls.measured`.
    """
    for frame in frames_here():
        if frame.f_code.co_filename == __file__ and frame.f_code.co_name == "call":
            variables = frame.f_locals
            variables["timing"].exclude(seconds)
            if variables["in_iteration"] and not variables["within_call"]:
                variables["charge"]("hooks", -seconds)


def _cost(name: str, event: str, timing: Timing, in_iteration: bool, wall: float) -> HandlerCost:
    """Return the record of one callback at one event."""
    calls = timing.clocked
    seconds = timing.estimate(calls)
    return HandlerCost(
        name=name,
        event=event,
        priority=50,  # a callback has none; handlers of the bus have this one by default
        calls=calls,
        seconds=seconds,
        in_iteration=in_iteration,
        share=seconds / wall if wall and in_iteration else 0.0,
        times=timing.times(),
    )
