"""Compile the handlers of one event into a Python function, which is its plan.

`EventSignal` compiles a plan at the first emit after a change. A loop over handlers would check for each
handler how to call it. Straight-line code need not, and its traceback shows the line that raised. For one
background subscriber and two handlers the function is

    def on_after_train_iter(event, trainer):
        nonlocal latest, before, count, due, next_look
        latest = event
        count += 1
        i = -1
        if count < due:
            try:
                hand_over0(event)
                i = 0
                f0(trainer, event)  # 30 OptimizerHook.after_train_iter
                i = 1
                if (event.iter + 1) % 10 == 0: f1(event, trainer)  # 70 step_lr every=10
            except BaseException as error:
                failed(error, i, event, trainer)
                raise
            return
        if count >= next_look:
            before += count
            count = 0
            due, next_look = look(before)
        first = began = now()
        try:
            timed_hand_over0(event)
            i = 0
            began = now()
            f0(trainer, event)  # 30 OptimizerHook.after_train_iter
            took[0](now() - began)
            i = 1
            began = now()
            if (event.iter + 1) % 10 == 0: f1(event, trainer)  # 70 step_lr every=10
        except BaseException as error:
            failed(error, i, event, trainer, now() - began)
            raise
        took_all(now() - first)

In a training loop the second half, which is clocked (measured), handles every event. The first half is for
tight loops, in which the clock would take longer than the handlers. `look` chooses between them, at every
256th event in a training loop, and at each clocked event in a tight one. `count` restarts there, because
Python creates no new object for an int below 257 (`benchmarks.hook_overhead`).
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
        self._on_failure = on_failure
        self._housekeeping = housekeeping
        self._hands_over = bool(hand_overs)
        self._sampling = sampling
        self._records = recorder is not None
        sampling.handlers = len(self.handlers) + len(hand_overs)
        self._added = 0  # clocked events whose durations are not summed up
        self._sum_up()
        namespace: dict[str, Any] = {
            "failed": self._failed,
            "look": self._choose_clocked,
            "now": perf_counter,
            "took": tuple(_adder(handler.timing) for handler in self.handlers),
            "took_all": sampling.durations.append,
            "latest": latest,
            "before": emitted,
            "count": 0,
            "due": 0,
            "next_look": 0,
        }
        namespace |= {f"hand_over{i}": fn for i, fn in enumerate(hand_overs)}
        namespace |= {f"timed_hand_over{i}": fn for i, fn in enumerate(timed_hand_overs)}
        for i, handler in enumerate(self.handlers):
            namespace |= _bindings(i, handler)
        # no handler's binding begins with "on_", whatever the event is called
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

        It also keeps the background queues bounded, and adds recent durations to the sums when many have
        accumulated. With a recorder every event is clocked.

        Returns:
            The numbers of events from this one to the next clocked one, and to the next look.
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
        """Add the handlers' recent durations to their sums, and pass on whether sampling is active."""
        self._added = 0
        for handler in self.handlers:
            handler.timing.begin_sampling(self._sampling.sampled and not handler.filtered)

    def _recorded(
        self, name: str, recorder: SpanRecorder, hand_overs: Sequence[HandOver]
    ) -> Callable[[Event, Any], None]:
        """Return a function that runs the handlers and records a span of each."""
        watched = [
            recorder.watch_handler(name, h.name, h.priority, h.passes, h.clocked) for h in self.handlers
        ]

        def run(event: Event, trainer: Any) -> None:
            index = -1
            try:
                for hand_over in hand_overs:
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
        elif frame.f_code.co_filename.startswith(_PLAN) and "began" in (variables := frame.f_locals):
            plan, index = variables["failed"].__self__, variables["i"]
            if index >= 0 and not plan.handlers[index].filtered:  # else `Handler.clocked` measures the call
                plan.handlers[index].timing.exclude(seconds)


def _adder(timing: Timing) -> Callable[[float], None]:
    """Return the fastest function that adds a call's duration to `timing`.

    It only appends to a list, unless the handler has a budget, which must be checked at each call.
    """
    return timing.recent.append if timing.budget is None else timing.add


def _bindings(i: int, handler: Handler) -> dict[str, Any]:
    """Return the names by which a plan's source calls its handler number `i`."""
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


def _source(name: str, handlers: Sequence[Handler], hand_overs: int, *, recorded: bool) -> str:
    """Return the source code, without its `def` line, of the factory of a plan's `dispatch`.

    With `recorded`, the function of that name runs the handlers of clocked events.
    """
    lines = [f"hand_over{i}(event)" for i in range(hand_overs)]
    for i, handler in enumerate(handlers):
        lines += [f"i = {i}", _call(i, handler)] if i or hand_overs else [_call(i, handler)]
    clocked = "return recorded(event, trainer)" if recorded else _clocked_source(handlers, hand_overs)
    return f"""
    def {name}(event, trainer):
        nonlocal latest, before, count, due, next_look
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
        if count >= next_look:
            before += count
            count = 0
            due, next_look = look(before)
        {clocked}
    return {name}, lambda: latest, lambda: before + count
"""


def _clocked_source(handlers: Sequence[Handler], hand_overs: int) -> str:
    """Return the statements of a dispatch that call all handlers and measure each call."""
    lines = [f"timed_hand_over{i}(event)" for i in range(hand_overs)]
    for i, handler in enumerate(handlers):
        lines += [f"i = {i}", "began = now()", _call(i, handler)] if i or hand_overs else [_call(i, handler)]
        lines += [] if handler.filtered else [f"took[{i}](now() - began)"]
    return f"""first = began = now()
        try:
            {_indented(lines, 12)}
        except BaseException as error:
            failed(error, i, event, trainer, now() - began)
            raise
        took_all(now() - first)"""


def _indented(lines: Sequence[str], spaces: int) -> str:
    return f"\n{' ' * spaces}".join(lines or ["pass"])


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
