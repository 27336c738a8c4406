"""A filter that is asked on behalf of a subscriber: foreign code, which may never return."""

from __future__ import annotations

import threading
from time import perf_counter

from eventloop.events import Event
from eventloop.events.filters import Passes

HANGS_SECONDS = 0.05
"""A filter that has been at one event for so long is asked by no other thread: a thread that has a deadline, or a
training to go on with, would hang in it as well."""


class Asking:
    """Who is inside one subscriber's filters, about what, and since when."""

    def __init__(self) -> None:
        self.asked: dict[object, tuple[float, Event]] = {}
        """One entry a call, which whoever takes it out accounts for."""

    def ask(self, passes: Passes, event: Event) -> bool | BaseException | None:
        """What the filter says, or raises; None when it was given up meanwhile, and the event is accounted for."""
        key = object()  # not the thread: a filter may emit what it is asked about
        self.asked[key] = perf_counter(), event
        answer: bool | BaseException
        try:
            answer = bool(passes(event))
        except BaseException as error:
            if is_signal(error):
                self.asked.pop(key, None)
                raise
            answer = error
        return answer if self.asked.pop(key, None) is not None else None

    def hangs(self) -> bool:
        """True when a thread is in there that may never come back."""
        if not self.asked:
            return False
        now = perf_counter()
        return any(now - began > HANGS_SECONDS for began, _ in self.asked.copy().values())

    def give_up(self, now: float, limit: float) -> list[tuple[float, Event]]:
        """Those that have taken longer than `limit` seconds: their seconds and events, each told once."""
        if not self.asked:
            return []
        over = [key for key, (began, _) in self.asked.copy().items() if now - began > limit]
        taken = [self.asked.pop(key, None) for key in over]
        return [(now - entry[0], entry[1]) for entry in taken if entry is not None]


def is_signal(error: BaseException) -> bool:
    """True for what may come from a signal's handler: on the main thread a Ctrl-C is not the fault of the subscriber
    whose code it ends."""
    return (
        isinstance(error, KeyboardInterrupt | SystemExit)
        and threading.current_thread() is threading.main_thread()
    )
