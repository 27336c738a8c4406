"""Compile the handlers of one event into a Python function, the plan of the event.

`EventSignal` compiles a plan at the first emit after a change. A loop over the handlers would have to find
out for each handler how to call it. The compiled function need not, and a traceback shows the line of the
handler that raised an error. For one background subscriber and two handlers the function is

    def on_after_train_iter(event, trainer):
        nonlocal latest, before, count, due, next_choice
        latest = event
        count += 1
        i = -1
        if count < due:
            try:
                enqueue0(event)
                i = 0
                f0(trainer, event)  # 30 OptimizerHook.after_train_iter
                i = 1
                if (event.iter + 1) % 10 == 0: f1(event, trainer)  # 70 step_lr every=10
            except BaseException as error:
                failed(error, i, event, trainer)
                raise
            return
        if count >= next_choice:
            before += count
            count = 0
            due, next_choice = choose_clocked(before)
        first = began = now()
        try:
            enqueue_timed0(event)
            i = 0
            began = now()
            f0(trainer, event)  # 30 OptimizerHook.after_train_iter
            add_seconds[0](now() - began)
            i = 1
            began = now()
            if (event.iter + 1) % 10 == 0: f1(event, trainer)  # 70 step_lr every=10
        except BaseException as error:
            failed(error, i, event, trainer, now() - began)
            raise
        add_total(now() - first)

In a training loop the second half, which is clocked (measured), handles every event. The first half is for
tight loops, in which the clock would take longer than the handlers. `choose_clocked` chooses between them, at
every 256th event in a training loop, and at each clocked event in a tight one. `count` then restarts from 0,
because Python creates no new object for an int below 257 (`benchmarks.hook_overhead`).
"""

from __future__ import annotations

import linecache
from collections.abc import Callable, Sequence
from functools import lru_cache
from time import perf_counter
from typing import Any, cast

from eventloop.bus.handler import Handler
from eventloop.costs.sampling import Sampling
from eventloop.costs.spans import SpanRecorder
from eventloop.costs.timing import BATCH, Timing
from eventloop.costs.waits import excludes_waits, frames_here
from eventloop.events import Event

_PLAN = "<plan of "
"""The begin of the file names of compiled functions, by which `exclude_wait` finds their frames."""
Dispatch = Callable[[Event, Any], object]
HandOver = Callable[[Event], object]
"""The type of a function that appends an event to the queue of a background subscriber."""
OnFailure = Callable[[BaseException, tuple[Handler, ...], int, Event, Any], bool]
"""The type of a function that reacts to a handler's error; it returns whether it has run the later handlers.

Its arguments are the error, the handlers of the plan, the index of the failed handler (-1 if the error came
before them, as from a background queue's filter), the event and the trainer.
"""


class Plan:
    """The compiled handlers of one event: `dispatch(event, trainer)` calls them in order.

    `latest()` returns the last event, and `count()` the number of events so far.

    Args:
        name: the name of the event.
        handlers: the synchronous handlers in their order.
        hand_overs: the functions that append the event to the queues of background subscribers.
        timed_hand_overs: functions that do the same and store the time of the emit, for clocked events.
        on_failure: called for an error of a handler.
        housekeeping: called now and then if there are background subscribers, to keep their queues bounded.
        sampling: chooses the events that are clocked.
        latest, emitted: the last event and the number of events of earlier plans.
        recorder: records a span of each event and handler; None records nothing.
    """

    def __init__(
        self,
        name: str,
        handlers: Sequence[Handler],
        hand_overs: Sequence[HandOver],
        timed_hand_overs: Sequence[HandOver],
        on_failure: OnFailure,
        housekeeping: Callable[[], None],
        sampling: Sampling,
        latest: Event | None = None,
        emitted: int = 0,
        recorder: SpanRecorder | None = None,
    ) -> None:
        self.handlers = tuple(handlers)
        self._on_failure = on_failure
        self._housekeeping = housekeeping
        self._hands_over = bool(hand_overs)
        self._sampling = sampling
        self._records = recorder is not None
        sampling.handlers = len(self.handlers) + len(hand_overs)
        self._added = 0  # the number of clocked events whose durations are not in the sums yet
        self._sum_up()
        namespace: dict[str, Any] = {
            "failed": self._failed,
            "choose_clocked": self._choose_clocked,
            "now": perf_counter,
            "add_seconds": tuple(_adder(handler.timing) for handler in self.handlers),
            "add_total": sampling.durations.append,
            "latest": latest,
            "before": emitted,
            "count": 0,
            "due": 0,
            "next_choice": 0,
        }
        namespace |= {f"enqueue{i}": fn for i, fn in enumerate(hand_overs)}
        namespace |= {f"enqueue_timed{i}": fn for i, fn in enumerate(timed_hand_overs)}
        for i, handler in enumerate(self.handlers):
            namespace |= _bindings(i, handler)
        # the prefix keeps an event's name apart from the names in `namespace`
        function = f"on_{name}" if name.isidentifier() else "on_event"
        if recorder is not None:
            namespace["recorded"] = recorder.watch_event(
                name, self._recorded(name, recorder, timed_hand_overs)
            )
        source = _source(function, self.handlers, len(hand_overs), recorded=recorder is not None)
        self.dispatch: Dispatch
        self.latest: Callable[[], Event | None]
        self.count: Callable[[], int]
        self.dispatch, self.latest, self.count = _factory(function, source, tuple(namespace))(**namespace)

    def _choose_clocked(self, count: int) -> tuple[int, int]:
        """Choose the events after event number `count` that are clocked (measured).

        This method also keeps the background queues bounded, and adds the recent durations to the sums when
        there are many. With a recorder every event is clocked.

        Returns:
            the number of events from this one to the next clocked event, and to the next call of this method.
        """
        if self._hands_over:
            self._housekeeping()
        sampled = self._sampling.sampled
        events = self._sampling.update(count, perf_counter())
        if self._added >= BATCH or self._sampling.sampled is not sampled:
            self._sum_up()
        if self._records or self._sampling.clocks_all:
            self._added += events
            return 1, events
        self._added += 1
        return events, events

    def _sum_up(self) -> None:
        """Add the handlers' recent durations to their sums, and tell them if only some calls are measured."""
        self._added = 0
        for handler in self.handlers:
            handler.timing.begin_sampling(self._sampling.sampled and not handler.filtered)

    def _recorded(
        self, name: str, recorder: SpanRecorder, hand_overs: Sequence[HandOver]
    ) -> Callable[[Event, Any], None]:
        """Return a function that dispatches an event and records a span of each handler's call."""
        watched = [
            recorder.watch_handler(name, handler.name, handler.priority, handler.passes, handler.clocked)
            for handler in self.handlers
        ]

        def run(event: Event, trainer: Any) -> None:
            """Append the event to the background queues, and then call the handlers in their order."""
            index = -1
            try:
                for enqueue in hand_overs:
                    enqueue(event)
                for index, handler in enumerate(watched):  # noqa: B007  # the `except` block uses the index
                    handler(event, trainer)
            except BaseException as error:
                self._failed(error, index, event, trainer)
                raise

        return run

    def _failed(
        self, error: BaseException, index: int, event: Event, trainer: Any, seconds: float | None = None
    ) -> None:
        """Correct the counts of calls and the durations after an error of a handler.

        The handler's duration is added if the event was clocked. The later handlers are not counted as called
        unless `on_failure` has run them.

        Args:
            error: the error.
            index: the failed handler; -1 if a background queue's filter raised the error.
            event, trainer: the arguments of the emit.
            seconds: the duration of the failed call; None if the event was not clocked.

        Raises:
            RuntimeError: the error is a StopIteration, which would end the generator of a training loop
                without a message.
        """
        if seconds is not None and index >= 0 and not self.handlers[index].filtered:
            self.handlers[index].timing.add(seconds)
        if not self._on_failure(error, self.handlers, index, event, trainer):
            # `EventSignal` counts each event as a call of every handler without a filter, also of these
            for handler in self.handlers[index + 1 :]:
                if not handler.filtered:
                    handler.calls -= 1
        if isinstance(error, StopIteration) and index >= 0:
            raise RuntimeError(
                f"handler {self.handlers[index].name} raised StopIteration: to end the run, call "
                "trainer.stop(reason); next(...) with a default does not raise it"
            ) from error


@excludes_waits
def exclude_wait(seconds: float) -> None:
    """Exclude a wait from the times of the handlers that are being called on this thread."""
    for frame in frames_here():
        if frame.f_code is Handler.clocked.__code__:
            frame.f_locals["self"].timing.exclude(seconds)
        elif frame.f_code.co_filename.startswith(_PLAN) and "began" in (variables := frame.f_locals):
            plan, index = variables["failed"].__self__, variables["i"]
            # the plan does not measure a handler with a filter: `Handler.clocked` does
            if index >= 0 and not plan.handlers[index].filtered:
                plan.handlers[index].timing.exclude(seconds)


def _adder(timing: Timing) -> Callable[[float], None]:
    """Return the fastest function that adds a call's duration to `timing`.

    Without a budget this is the `append` method of a list. A budget must be checked at each call.
    """
    return timing.recent.append if timing.budget is None else timing.add


def _bindings(i: int, handler: Handler) -> dict[str, Any]:
    """Return the objects, by name, that the source of a plan needs to call its handler number `i`."""
    if not handler.filtered:
        return {f"f{i}": handler.fn}
    bindings: dict[str, Any] = {f"f{i}": handler.clocked}
    if handler.passes is not None and handler.test is None:
        bindings[f"p{i}"] = handler.passes
    return bindings


def _call(i: int, handler: Handler) -> str:
    """Return the line of source that calls handler number `i`, with a comment that names the handler."""
    arguments = {"event": "event", "trainer": "trainer, event", "blinker": "trainer, event=event"}
    call = f"f{i}(event, trainer)" if handler.filtered else f"f{i}({arguments[handler.takes]})"
    if handler.filtered and handler.passes is not None:
        test = handler.test or f"p{i}(event)"
        call = f"if {test}: {call}"
    return f"{call}  # {handler.priority} {handler.name!r} {handler.filter}".rstrip()


def _source(name: str, handlers: Sequence[Handler], hand_overs: int, *, recorded: bool) -> str:
    """Return the source of a factory function, without its `def` line, that returns a plan's functions.

    Args:
        name: the name of the compiled function that dispatches events.
        handlers: the handlers in their order.
        hand_overs: the number of background queues.
        recorded: whether the function `recorded`, which records spans, dispatches the clocked events.
    """
    lines = [f"enqueue{i}(event)" for i in range(hand_overs)]
    for i, handler in enumerate(handlers):
        lines += [f"i = {i}", _call(i, handler)] if i or hand_overs else [_call(i, handler)]
    clocked = "return recorded(event, trainer)" if recorded else _clocked_source(handlers, hand_overs)
    return f"""
    def {name}(event, trainer):
        nonlocal latest, before, count, due, next_choice
        latest = event
        count += 1
        i = {-1 if hand_overs or not handlers else 0}
        if count < due:
            try:
                {_indented(lines, 16)}
            except BaseException as error:
                failed(error, i, event, trainer)
                raise
            return
        if count >= next_choice:
            before += count
            count = 0
            due, next_choice = choose_clocked(before)
        {clocked}
    return {name}, lambda: latest, lambda: before + count
"""


def _clocked_source(handlers: Sequence[Handler], hand_overs: int) -> str:
    """Return the statements of a compiled function that call all handlers and measure each call."""
    lines = [f"enqueue_timed{i}(event)" for i in range(hand_overs)]
    for i, handler in enumerate(handlers):
        lines += [f"i = {i}", "began = now()", _call(i, handler)] if i or hand_overs else [_call(i, handler)]
        lines += [] if handler.filtered else [f"add_seconds[{i}](now() - began)"]
    return f"""first = began = now()
        try:
            {_indented(lines, 12)}
        except BaseException as error:
            failed(error, i, event, trainer, now() - began)
            raise
        add_total(now() - first)"""


def _indented(lines: Sequence[str], spaces: int) -> str:
    """Return lines of source as one text, the later ones indented; "pass" without any line."""
    return f"\n{' ' * spaces}".join(lines or ["pass"])


@lru_cache(maxsize=1024)
def _factory(name: str, body: str, closed_over: tuple[str, ...]) -> Callable[..., Any]:
    """Compile a factory function from source, or return it from the cache, in a few microseconds.

    Args:
        name: the name of the function that the factory returns, for tracebacks.
        body: the source of the factory without its `def` line.
        closed_over: the factory's parameters, which are variables of the returned function.
    """
    source = f"def make({', '.join(closed_over)}):{body}"
    filename = f"{_PLAN}{name} {hash(source) & 0xFFFF:04x}>"
    namespace: dict[str, Any] = {}
    exec(compile(source, filename, "exec"), namespace)
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    return cast(Callable[..., Any], namespace["make"])
