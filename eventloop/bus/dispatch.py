"""Compile the handlers of one event into one Python function, its plan.

`EventSignal` compiles a plan at the first emit after a change. A loop over handlers would check for each
handler how to call it. Straight-line code need not, and its traceback shows the line that raised. For three
handlers the function is

    def on_after_train_iter(event, trainer):
        nonlocal latest, count, due
        latest = event
        count += 1
        if count >= due:
            due = clocked(event, trainer, count)
            return
        i = -1
        try:
            hand_over0(event)
            i = 0; f0(trainer, event)  # 30 OptimizerHook.after_train_iter
            i = 1; f1(event)  # 50 my_handler
            i = 2
            if (event.iter + 1) % 10 == 0: f2(event, trainer)  # 70 step_lr every=10
        except BaseException as error:
            failed(error, i, event, trainer)
            raise

In a training loop each event is clocked, by a plain loop over the handlers (`Plan._clocked`). The compiled
lines are for tight loops, in which the clock would take longer than the handlers
(`benchmarks.hook_overhead`).
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
from eventloop.events import Event

Dispatch = Callable[[Event, Any], object]
HandOver = Callable[[Event], object]
Measure = Callable[[Event, Any, bool], None]
"""Runs a handler and clocks it. The last argument tells whether it stands for calls that were not clocked."""
OnFailure = Callable[[BaseException, tuple[Handler, ...], int, Event, Any], bool]
"""Called with the error, the handlers of the plan, the index of the failed handler (-1 if no handler failed),
the event and the trainer. Returns whether the handlers after it have run.
"""


class Plan:
    """The compiled handlers of one event: `dispatch(event, trainer)` calls them in order.

    `latest()` returns the last event, and `count()` the number of events so far, which begins at `emitted`.
    With a `recorder` every event leaves spans.
    """

    def __init__(
        self,
        name: str,
        handlers: Sequence[Handler],
        hand_overs: Sequence[HandOver],
        stamped_hand_overs: Sequence[HandOver],
        on_failure: OnFailure,
        housekeeping: Callable[[], None],
        sampling: Sampling,
        latest: Event | None = None,
        emitted: int = 0,
        recorder: SpanRecorder | None = None,
    ) -> None:
        self.handlers = tuple(handlers)
        self.hand_overs = tuple(hand_overs)
        self._stamped_hand_overs = tuple(stamped_hand_overs)
        self._on_failure = on_failure
        self._housekeeping = housekeeping
        self._sampling = sampling
        sampling.handlers = len(self.handlers) + len(self.hand_overs)
        clocked: Callable[[Event, Any, int], int] = self._clocked
        self._measures: list[Measure] = [handler.measure for handler in self.handlers]
        if recorder is not None:
            clocked = _watched(recorder.watch_event(name, self._measured))
            self._measures = [
                recorder.watch_handler(name, h.name, h.priority, h.passes, h.clocked) for h in self.handlers
            ]
        # no handler's binding begins with "on_", whatever the event is called
        name = f"on_{name}" if name.isidentifier() else "on_event"
        make = _factory(name, *_source(name, self.handlers, len(self.hand_overs)))
        namespace: dict[str, Any] = {
            "clocked": clocked, "failed": self._failed, "latest": latest, "count": emitted, "due": 0,
        }  # fmt: skip
        namespace |= {f"hand_over{i}": fn for i, fn in enumerate(self.hand_overs)}
        for i, handler in enumerate(self.handlers):
            namespace |= _bindings(i, handler)
        dispatch, latest_of, count_of = make(**namespace)
        self.dispatch: Dispatch = dispatch
        self.latest = cast(Callable[[], Event | None], latest_of)
        self.count = cast(Callable[[], int], count_of)

    def _clocked(self, event: Event, trainer: Any, count: int) -> int:
        """Dispatch an event, clock each handler, and return the number of the next event to be clocked."""
        began = perf_counter()
        due = self._sampling.next_due(count, began)
        self._measured(event, trainer)
        self._sampling.took(perf_counter() - began)
        return due

    def _measured(self, event: Event, trainer: Any) -> None:
        sampled, stamps = self._sampling.sampled, self._sampling.stamps  # a handler may emit the same event
        self._housekeeping()
        index = -1
        try:
            for hand_over in self._stamped_hand_overs if stamps else self.hand_overs:
                hand_over(event)
            for index, measure in enumerate(self._measures):  # noqa: B007 - the index of the one that raised
                measure(event, trainer, sampled)
        except BaseException as error:
            self._failed(error, index, event, trainer)
            raise

    def _failed(self, error: BaseException, index: int, event: Event, trainer: Any) -> None:
        if self._on_failure(error, self.handlers, index, event, trainer):
            return
        for handler in self.handlers[index + 1 :]:
            if not handler.filtered:  # counted once per run of the plan, but not reached
                handler.calls -= 1


def _watched(run: Callable[[Event, Any], None]) -> Callable[[Event, Any, int], int]:
    """Return `run` for each event, as a recorder leaves none out."""

    def watched(event: Event, trainer: Any, count: int) -> int:
        run(event, trainer)
        return count + 1

    return watched


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
        return f"{test}f{i}(event, trainer)"
    arguments = {"event": "event", "trainer": "trainer, event", "blinker": "trainer, event=event"}
    return f"f{i}({arguments[handler.takes]})"


def _source(name: str, handlers: Sequence[Handler], hand_overs: int) -> tuple[str, tuple[str, ...]]:
    """Return the source of the function that builds the plan, and the names it closes over."""
    closed_over = [
        "clocked",
        "failed",
        "latest",
        "count",
        "due",
        *(f"hand_over{i}" for i in range(hand_overs)),
    ]
    for i, handler in enumerate(handlers):
        closed_over += _bindings(i, handler)
    lines = [f"hand_over{i}(event)" for i in range(hand_overs)]
    for i, handler in enumerate(handlers):
        call = f"{_call(i, handler)}  # {handler.priority} {handler.name!r} {handler.filter}".rstrip()
        lines += [f"i = {i}", call] if handler.filtered else [f"i = {i}; {call}"]
    source = "\n".join(
        [
            f"def make({', '.join(closed_over)}):",
            f"    def {name}(event, trainer):",
            "        nonlocal latest, count, due",
            "        latest = event",
            "        count += 1",
            "        if count >= due:",
            "            due = clocked(event, trainer, count)",
            "            return",
            "        i = -1",
            "        try:",
            *(f"            {line}" for line in lines or ["pass"]),
            "        except BaseException as error:",
            "            failed(error, i, event, trainer)",
            "            raise",
            f"    return {name}, lambda: latest, lambda: count",
        ]
    )
    return source, tuple(closed_over)


@lru_cache(maxsize=1024)
def _factory(
    name: str, source: str, closed_over: tuple[str, ...]
) -> Callable[..., tuple[Dispatch, Any, Any]]:
    """Compile the source of a plan, or return the cached function, which takes a few microseconds."""
    filename = f"<plan of {name} {hash(source) & 0xFFFF:04x}>"
    namespace: dict[str, Any] = {}
    exec(compile(source, filename, "exec"), namespace)
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    return cast(Callable[..., tuple[Dispatch, Any, Any]], namespace["make"])
