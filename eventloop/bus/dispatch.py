"""Compile the handlers of one event into one Python function, its plan.

`EventSignal` compiles a plan at the first emit after a change. A loop over handlers would check for each
handler how to call it. Straight-line code need not, and its traceback shows the line that raised. For three
handlers the function is

    def on_after_train_iter(event, trainer):
        nonlocal latest
        latest = event
        if next(ticks): return measured(event, trainer)
        try:
            hand_over(event)
            f0(trainer, event)  # 30 OptimizerHook.after_train_iter
            f1(event)  # 50 my_handler
            if (event.iter + 1) % 10 == 0: f2(event, trainer)  # 70 step_lr every=10
        except BaseException as error:
            failed(error, event, trainer)
            raise

The line number of an error identifies the handler that failed, so a successful emit keeps no index.
"""

from __future__ import annotations

import linecache
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, cast

from eventloop.bus.handler import Handler
from eventloop.costs.counting import Ticker
from eventloop.costs.spans import SpanRecorder
from eventloop.events import Event

Dispatch = Callable[[Event, Any], object]
HandOver = Callable[[Event], object]
Measure = Callable[[Event, Any, int], None]
"""Runs a handler and measures its time. The last argument is the number of events it stands for."""
OnFailure = Callable[[BaseException, tuple[Handler, ...], int, Event, Any], bool]
"""Called with the error, the handlers of the plan, the index of the failed handler (-1 if no handler failed),
the event and the trainer. Returns whether the handlers after it have run.
"""

_FIRST_HANDLER_LINE = 8


class Plan:
    """The compiled handlers of one event: `dispatch(event, trainer)` calls them in order.

    `latest()` returns the last event. `Ticker` selects the events for which a second, slower path measures
    each handler. With a `recorder` every event takes that path and leaves spans.
    """

    def __init__(
        self,
        name: str,
        handlers: Sequence[Handler],
        hand_overs: Sequence[HandOver],
        sampled_hand_overs: Sequence[HandOver],
        on_failure: OnFailure,
        housekeeping: Callable[[], None],
        latest: Event | None = None,
        measured_before: int = 0,
        since_measured: int = 0,
        recorder: SpanRecorder | None = None,
    ) -> None:
        self.handlers = tuple(handlers)
        self.hand_overs = tuple(hand_overs)
        self._sampled_hand_overs = tuple(sampled_hand_overs)
        self._on_failure = on_failure
        self._housekeeping = housekeeping
        self._ticker = Ticker(measured_before, since_measured, always=recorder is not None)
        measured: Callable[[Event, Any], None] = self._measured
        self._measures: list[Measure] = [handler.measure for handler in self.handlers]
        if recorder is not None:
            measured = recorder.watch_event(name, measured)
            self._measures = [
                recorder.watch_handler(name, h.name, h.priority, h.passes, h.clocked) for h in self.handlers
            ]
        # no handler's binding begins with "on_", whatever the event is called
        name = f"on_{name}" if name.isidentifier() else "on_event"
        make = _factory(name, *_source(name, self.handlers, len(self.hand_overs)))
        namespace: dict[str, Any] = {
            "ticks": self._ticker.ticks,
            "next": next,  # a closure variable is found faster than a builtin
            "measured": measured,
            "failed": self._failed,
            "latest": latest,
        }
        namespace |= {f"hand_over{i}": fn for i, fn in enumerate(self.hand_overs)}
        for i, handler in enumerate(self.handlers):
            namespace |= _bindings(i, handler)
        dispatch, latest_of = make(**namespace)
        self.dispatch: Dispatch = dispatch
        self.latest = cast(Callable[[], Event | None], latest_of)

    @property
    def measured(self) -> int:
        """Number of measured events."""
        return self._ticker.measured

    @property
    def untouched(self) -> bool:
        """True if the plan has certainly not run yet."""
        return self._ticker.untouched

    def settle(self) -> tuple[int, int]:
        """Return how often the plan ran, in all and since it was last measured.

        Call this once, after `dispatch` was replaced.
        """
        return self._ticker.settle()

    def _measured(self, event: Event, trainer: Any) -> None:
        self._ticker.measured += 1
        weight = self._ticker.weight  # read now: a handler may emit the same event
        self._housekeeping()
        index = -1
        try:
            for hand_over in self._sampled_hand_overs:
                hand_over(event)
            for index, measure in enumerate(self._measures):  # noqa: B007 - the index of the one that raised
                measure(event, trainer, weight)
        except BaseException as error:
            self._failed_at(index, error, event, trainer)
            raise

    def _failed(self, error: BaseException, event: Event, trainer: Any) -> None:
        traceback = error.__traceback__
        line = traceback.tb_lineno if traceback is not None else 0
        index = line - _FIRST_HANDLER_LINE - len(self.hand_overs)
        self._failed_at(max(-1, index), error, event, trainer)

    def _failed_at(self, index: int, error: BaseException, event: Event, trainer: Any) -> None:
        if self._on_failure(error, self.handlers, index, event, trainer):
            return
        for handler in self.handlers[index + 1 :]:
            if not handler.filtered:  # counted once per run of the plan, but not reached
                handler.calls -= 1


def _bindings(i: int, handler: Handler) -> dict[str, Any]:
    if not handler.filtered:
        return {f"f{i}": handler.fn}
    bindings: dict[str, Any] = {f"f{i}": handler.clocked if handler.rare else handler.fire}
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
        "ticks",
        "next",
        "measured",
        "failed",
        "latest",
        *(f"hand_over{i}" for i in range(hand_overs)),
    ]
    for i, handler in enumerate(handlers):
        closed_over += _bindings(i, handler)
    calls = [f"            hand_over{i}(event)" for i in range(hand_overs)]
    calls += [
        f"            {_call(i, handler)}  # {handler.priority} {handler.name!r} {handler.filter}".rstrip()
        for i, handler in enumerate(handlers)
    ]
    source = "\n".join(
        [
            f"def make({', '.join(closed_over)}):",
            f"    def {name}(event, trainer):",
            "        nonlocal latest",
            "        latest = event",
            "        if next(ticks):",
            "            return measured(event, trainer)",
            "        try:",
            *(calls or ["            pass"]),
            "        except BaseException as error:",
            "            failed(error, event, trainer)",
            "            raise",
            f"    return {name}, lambda: latest",
        ]
    )
    return source, tuple(closed_over)


@lru_cache(maxsize=1024)
def _factory(name: str, source: str, closed_over: tuple[str, ...]) -> Callable[..., tuple[Dispatch, Any]]:
    """Compile the source of a plan, or return the cached function, which takes a few microseconds."""
    filename = f"<plan of {name} {hash(source) & 0xFFFF:04x}>"
    namespace: dict[str, Any] = {}
    exec(compile(source, filename, "exec"), namespace)
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    return cast(Callable[..., tuple[Dispatch, Any]], namespace["make"])
