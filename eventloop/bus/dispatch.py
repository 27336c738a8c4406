"""Compile the handlers of one event into Python functions, which are its plan.

`EventSignal` compiles a plan at the first emit after a change. A loop over handlers would check for each
handler how to call it. Straight-line code need not, and its traceback shows the line that raised. For two
handlers the functions are

    def on_after_train_iter(event, trainer):
        nonlocal latest, before, count, due, next_look
        latest = event
        count += 1
        if count >= due:
            if count >= next_look:
                before += count
                count = 0
                due, next_look = look(before)
            return clocked(event, trainer)
        i = -1
        try:
            hand_over0(event)
            i = 0
            f0(trainer, event)  # 30 OptimizerHook.after_train_iter
            i = 1
            if (event.iter + 1) % 10 == 0: f1(event, trainer)  # 70 step_lr every=10
        except BaseException as error:
            failed(error, i, event, trainer)
            raise

and `clocked`, in which each call is measured:

            i = 0
            began = now()
            f0(trainer, event)  # 30 OptimizerHook.after_train_iter
            took0(now() - began)

In a training loop `clocked` handles every event. The lines that do not measure are for tight loops, in which
the clock would take longer than the handlers. `look` chooses between them, at every 256th event in a training
loop, and at each clocked event in a tight one. `count` restarts there, because Python creates no new object
for an int below 257 (`benchmarks.hook_overhead`).
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
"""The begin of the file names of compiled plans, by which their frames are found."""
Dispatch = Callable[[Event, Any], object]
HandOver = Callable[[Event], object]
OnFailure = Callable[[BaseException, tuple[Handler, ...], int, Event, Any], bool]
"""The type of a function that handles a handler's error; it returns whether the later handlers ran.

Its arguments are the error, the handlers of the plan, the index of the failed handler (-1 if no handler
failed), the event and the trainer.
"""


class Plan:
    """The compiled handlers of one event: `dispatch(event, trainer)` calls them in order.

    `latest()` returns the last event. `count()` returns the number of events so far, including the `emitted`
    ones of former plans. With a `recorder` every event leaves spans.
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
        self.hand_overs = tuple(hand_overs)
        self._timed_hand_overs = tuple(timed_hand_overs)
        self._on_failure = on_failure
        self._housekeeping = housekeeping
        self._sampling = sampling
        self._records = recorder is not None
        sampling.handlers = len(self.handlers) + len(self.hand_overs)
        self._added = 0  # clocked events whose durations are not summed up
        self._sum_up()
        namespace: dict[str, Any] = {"failed": self._failed}
        for i, handler in enumerate(self.handlers):
            namespace |= _bindings(i, handler)
        # no handler's binding begins with "on_", whatever the event is called
        function = f"on_{name}" if name.isidentifier() else "on_event"
        if recorder is None:
            clocked = self._compile_clocked(function, namespace)
        else:
            clocked = recorder.watch_event(name, self._recorded(name, recorder))
        namespace |= {
            "clocked": clocked,
            "look": self._choose_clocked,
            "latest": latest,
            "before": emitted,
            "count": 0,
            "due": 0,
            "next_look": 0,
        }
        namespace |= {f"hand_over{i}": fn for i, fn in enumerate(self.hand_overs)}
        source = _bare_source(function, self.handlers, len(self.hand_overs))
        self.dispatch: Dispatch
        self.latest: Callable[[], Event | None]
        self.count: Callable[[], int]
        self.dispatch, self.latest, self.count = _factory(function, source, tuple(namespace))(**namespace)

    def _compile_clocked(self, function: str, namespace: dict[str, Any]) -> Callable[[Event, Any], None]:
        namespace = namespace | {
            "hand_over": self._hand_over,
            "took": self._sampling.durations.append,
            "now": perf_counter,
            **{f"took{i}": _adder(h.timing) for i, h in enumerate(self.handlers) if not h.filtered},
        }
        source = _clocked_source(function, self.handlers, hands_over=bool(self.hand_overs))
        return cast(
            Callable[..., Callable[[Event, Any], None]], _factory(function, source, tuple(namespace))
        )(**namespace)

    def _choose_clocked(self, count: int) -> tuple[int, int]:
        """Choose the events after event number `count` that are clocked (measured).

        It also adds recent durations to the sums when many have accumulated. With a recorder every event is
        clocked.

        Returns:
            The numbers of events from this one to the next clocked one, and to the next look.
        """
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
        """Add the handlers' recent durations to their sums, and pass on whether sampling is active."""
        self._added = 0
        for handler in self.handlers:
            handler.timing.begin_sampling(self._sampling.sampled and not handler.filtered)

    def _hand_over(self, event: Event, now: float) -> None:
        self._housekeeping()
        for hand_over in self._timed_hand_overs if self._sampling.measures_wait(now) else self.hand_overs:
            hand_over(event)

    def _recorded(self, name: str, recorder: SpanRecorder) -> Callable[[Event, Any], None]:
        """Return a function that runs the handlers and records a span of each."""
        watched = [
            recorder.watch_handler(name, h.name, h.priority, h.passes, h.clocked) for h in self.handlers
        ]

        def run(event: Event, trainer: Any) -> None:
            index = -1
            try:
                if self.hand_overs:
                    self._housekeeping()
                for hand_over in self._timed_hand_overs:
                    hand_over(event)
                for index, handler in enumerate(watched):  # noqa: B007 - the index of the one that raised
                    handler(event, trainer)
            except BaseException as error:
                self._failed(error, index, event, trainer)
                raise

        return run

    def _failed(
        self, error: BaseException, index: int, event: Event, trainer: Any, seconds: float | None = None
    ) -> None:
        """Correct the accounts after handler number `index` has raised.

        Its duration is added if the event was clocked. Later handlers are not counted as called, unless they
        ran after the error, as those of an `after_*` event do.

        Args:
            error: the error.
            index: the failed handler, or -1 if handing over to the background failed.
            event, trainer: the arguments of the emit.
            seconds: the duration of the failed call; None if the event was not clocked.

        Raises:
            RuntimeError: the error is a StopIteration.
        """
        if seconds is not None and index >= 0 and not self.handlers[index].filtered:
            self.handlers[index].timing.add(seconds)
        if not self._on_failure(error, self.handlers, index, event, trainer):
            for handler in self.handlers[index + 1 :]:
                if not handler.filtered:  # counted once per run of the plan, but not reached
                    handler.calls -= 1
        if isinstance(error, StopIteration) and index >= 0:  # it would end the generator of a training loop
            raise RuntimeError(
                f"handler {self.handlers[index].name} raised StopIteration: to end the run, call "
                "trainer.stop(reason); next(...) with a default does not raise it"
            ) from error


@excludes_waits
def exclude_wait(seconds: float) -> None:
    """Leave a wait out of the times of the handlers that are being called on this thread."""
    for frame in frames_here():
        if frame.f_code is Handler.clocked.__code__:
            frame.f_locals["self"].timing.exclude(seconds)
        elif frame.f_code.co_filename.startswith(_PLAN) and "began" in frame.f_code.co_varnames:
            plan, index = frame.f_locals["failed"].__self__, frame.f_locals["i"]
            if index >= 0 and not plan.handlers[index].filtered:  # else `Handler.clocked` measures the call
                plan.handlers[index].timing.exclude(seconds)


def _adder(timing: Timing) -> Callable[[float], None]:
    """Return the fastest function that adds a call's duration to `timing`.

    It only appends to a list, unless the handler has a budget, which must be checked at each call.
    """
    return timing.recent.append if timing.budget is None else timing.add


def _bindings(i: int, handler: Handler) -> dict[str, Any]:
    if not handler.filtered:
        return {f"f{i}": handler.fn}
    bindings: dict[str, Any] = {f"f{i}": handler.clocked}
    if handler.passes is not None and handler.test is None:
        bindings[f"p{i}"] = handler.passes
    return bindings


def _call(i: int, handler: Handler) -> str:
    if handler.filtered:
        test = f"if {handler.test or f'p{i}(event)'}: " if handler.passes is not None else ""
        call = f"{test}f{i}(event, trainer)"
    else:
        arguments = {"event": "event", "trainer": "trainer, event", "blinker": "trainer, event=event"}
        call = f"f{i}({arguments[handler.takes]})"
    return f"{call}  # {handler.priority} {handler.name!r} {handler.filter}".rstrip()


def _bare_source(name: str, handlers: Sequence[Handler], hand_overs: int) -> str:
    """Return the source code, without its `def` line, of the factory of a plan's `dispatch`.

    The dispatch does not measure handlers, except at the events for which it calls `clocked`.
    """
    lines = [f"hand_over{i}(event)" for i in range(hand_overs)]
    for i, handler in enumerate(handlers):
        lines += [f"i = {i}", _call(i, handler)] if i or hand_overs else [_call(i, handler)]
    return f"""
    def {name}(event, trainer):
        nonlocal latest, before, count, due, next_look
        latest = event
        count += 1
        if count >= due:
            if count >= next_look:
                before += count
                count = 0
                due, next_look = look(before)
            return clocked(event, trainer)
        i = {-1 if hand_overs or not handlers else 0}
        try:
            {_indented(lines)}
        except BaseException as error:
            failed(error, i, event, trainer)
            raise
    return {name}, lambda: latest, lambda: before + count
"""


def _clocked_source(name: str, handlers: Sequence[Handler], *, hands_over: bool) -> str:
    """Return the source code, without its `def` line, of the factory of a plan's `clocked` dispatch."""
    lines = ["hand_over(event, first)"] if hands_over else []
    for i, handler in enumerate(handlers):
        lines += [f"i = {i}", "began = now()", _call(i, handler)]
        lines += [] if handler.filtered else [f"took{i}(now() - began)"]
    return f"""
    def {name}(event, trainer):
        i = -1
        first = began = now()
        try:
            {_indented(lines)}
        except BaseException as error:
            failed(error, i, event, trainer, now() - began)
            raise
        took(now() - first)
    return {name}
"""


def _indented(lines: Sequence[str]) -> str:
    return f"\n{' ' * 12}".join(lines or ["pass"])


@lru_cache(maxsize=1024)
def _factory(name: str, body: str, closed_over: tuple[str, ...]) -> Callable[..., Any]:
    """Compile the factory `make` from source code, or return it from a cache.

    A look-up in the cache takes a few microseconds.

    Args:
        name: the name of the compiled function, for tracebacks.
        body: the source code of the factory.
        closed_over: the factory's parameters, which the compiled function closes over.
    """
    source = f"def make({', '.join(closed_over)}):{body}"
    filename = f"{_PLAN}{name} {hash(source) & 0xFFFF:04x}>"
    namespace: dict[str, Any] = {}
    exec(compile(source, filename, "exec"), namespace)
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    return cast(Callable[..., Any], namespace["make"])
