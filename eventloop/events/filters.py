"""Filter the events of a subscription by `every`, `start`, `when` and `once`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any, cast

from eventloop.events.base import Counter, Event
from eventloop.util.checks import at_least, check_bools
from eventloop.util.functions import check_call

Predicate = Callable[[Any], object]
Passes = Callable[[Event], bool]


def check_filter(every: int, start: int, once: bool, when: Predicate | None) -> None:
    """Check the arguments of a filter when it is created, so that no error comes at the first event.

    Raises:
        TypeError: `every` or `start` is not an int, `once` is not a bool, or `when` is not a function of one
            argument.
        ValueError: `every` is below 1, or `start` is below 0.
    """
    at_least("every", every, 1)
    at_least("start", start, 0)
    check_bools(once=once)
    if inspect.iscoroutinefunction(when):
        raise TypeError(f"when must be a plain function of the event, got the coroutine function {when!r}")
    if when is not None:
        check_call("when", when, "event")


def describe_filter(every: int, start: int, once: bool, when: Predicate | None) -> str:
    """Return a filter as `print(bus)` shows it, such as "every=10 once"; "" if every event passes."""
    parts = []
    if every != 1:
        parts.append(f"every={every}")
    if start:
        parts.append(f"start={start}")
    if when is not None:
        parts.append("when=" + " ".join(str(getattr(when, "__name__", repr(when))).split()))
    if once:
        parts.append("once")
    return " ".join(parts)


def make_filter(event_type: type[Event], every: int, start: int, when: Predicate | None) -> Passes | None:
    """Return the filter of one subscription as a function `(event) -> bool`; None if every event passes.

    An event with the counter `c` passes if `c > start`, `(c - start) % every == 0` and `when(event)` is true.
    """
    tests: list[Passes] = []
    if every != 1 or start:
        tests.append(_due(event_type.counter, every, start))
    if when is not None:
        tests.append(cast(Passes, when))
    if len(tests) < 2:
        return tests[0] if tests else None
    first, second = tests
    return lambda event: first(event) and bool(second(event))


def source_of(event_type: type[Event], every: int, start: int, when: Predicate | None) -> str | None:
    """Return the test that `make_filter` makes as Python source about a variable `event`.

    The bus compiles it into the function that calls the handlers, because the call of another function would
    double the cost of the test. Return None for a filter that needs `when` or a counter other than "iter",
    and if every event passes.
    """
    if when is not None or (every == 1 and not start) or event_type.counter != "iter":
        return None
    counted = f"event.iter + 1 - {start}" if start else "event.iter + 1"
    tests = []
    if start:
        tests.append(f"{counted} > 0")
    if every != 1:
        tests.append(f"({counted}) % {every} == 0")
    return " and ".join(tests)


def _due(kind: Counter, every: int, start: int) -> Passes:
    """Return a function that tests `every` and `start` against an event's counter."""
    if kind == "iter":  # reads the counter itself: in each iteration a second call would double the cost
        return lambda event: (past := event.iter + 1 - start) > 0 and past % every == 0  # type: ignore[attr-defined]
    counter = make_counter(kind)

    def due(event: Event) -> bool:
        past = counter(event) - start
        return past > 0 and past % every == 0

    return due


def first_only(passes: Passes | None, firings: Iterator[int]) -> Passes:
    """Return a filter that passes only the first event for which `passes` is true.

    Args:
        passes: the filter without `once`; None if every event passes.
        firings: an iterator that counts from 0. Filters that share it pass one event in total.
    """
    return lambda event: (passes is None or passes(event)) and next(firings) == 0


def make_counter(kind: Counter) -> Callable[[Any], int]:
    """Return a function that reads the counter of an event, counted from 1."""
    if kind == "iter":
        return lambda event: cast(int, event.iter) + 1
    if kind == "epoch":
        return lambda event: cast(int, event.epoch) + 1
    if kind == "batch":
        return lambda event: cast(int, event.batch_idx) + 1
    occurrences = count(1)
    if kind == "val_epoch":
        # If max_iters measures the run, or there is no training, `epoch` stays the same and is no counter.
        def completed_epochs(event: Any) -> int:
            occurrence = next(occurrences)
            return cast(int, event.epoch) if event.max_epochs is not None and event.epoch else occurrence

        return completed_epochs
    return lambda event: next(occurrences)
