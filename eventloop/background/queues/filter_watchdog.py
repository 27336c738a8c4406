"""Call the filters of a subscriber, and notice a filter that does not return.

The queue of a subscriber uses it (`eventloop.background.queues.queue`); a filter is foreign code.
"""

from __future__ import annotations

import threading
from time import perf_counter

from eventloop.events import Event
from eventloop.events.filters import Passes

HANGS_SECONDS = 0.05
"""No other thread calls a filter that has been at one event for so long.

A thread that has a deadline, or a training to continue, would hang in it as well.
"""


class Asking:
    """The calls of one subscriber's filter that are under way: their events, and when they began."""

    def __init__(self) -> None:
        self.asked: dict[object, tuple[float, Event]] = {}
        """One entry for each call; the thread that takes it out accounts for the event."""

    def ask(self, passes: Passes, event: Event) -> bool | BaseException | None:
        """Call the filter; return its answer or its error, None if the call was given up meanwhile.

        In the latter case the event is accounted for.
        """
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
        """Return whether a call has lasted longer than `HANGS_SECONDS`."""
        if not self.asked:
            return False
        now = perf_counter()
        return any(now - began > HANGS_SECONDS for began, _ in self.asked.copy().values())

    def give_up(self, now: float, limit: float) -> list[tuple[float, Event]]:
        """Return the seconds and events of calls that have lasted longer than `limit` seconds, each once."""
        if not self.asked:
            return []
        over = [key for key, (began, _) in self.asked.copy().items() if now - began > limit]
        taken = [self.asked.pop(key, None) for key in over]
        return [(now - entry[0], entry[1]) for entry in taken if entry is not None]


def is_signal(error: BaseException) -> bool:
    """Return whether an error may come from a signal's handler, as Ctrl-C on the main thread does.

    The subscriber whose code it ends has not failed.
    """
    return (
        isinstance(error, KeyboardInterrupt | SystemExit)
        and threading.current_thread() is threading.main_thread()
    )
