"""Say what one background subscriber is doing, to a flush or close that waits for it."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import Any

from eventloop.background.queues.failures import FailingQueue, Report
from eventloop.background.queues.options import LaneOptions
from eventloop.util.functions import awaited_by, untaken_by

STUCK_SECONDS = 1.0
"""The seconds after which a delivery that a flush or close waited for in vain is logged as stuck."""


class AwaitedQueue(FailingQueue):
    """The queue of a subscriber, with what other threads can see of its current delivery or callback."""

    def __init__(self, name: str, fn: Callable[..., Any], options: LaneOptions, report: Report) -> None:
        super().__init__(name, options, report)
        self._fn = fn
        self._calling = ""  # the running callback; "" again once it is reported as stalled
        self.left_in = ""  # what it was doing when a close ended without it
        self._in_vain = 0.0, 0.0  # begin of a delivery, and the seconds that callers waited for it

    def waited_in_vain(self, seconds: float) -> None:
        """Note that a thread waited this many seconds for the current delivery, and has stopped waiting."""
        began, took = self._under_way()
        if began:
            self._in_vain = began, self.waited + min(took, seconds)

    @property
    def waited(self) -> float:
        """Return the seconds that callers have waited in vain for the current delivery."""
        began, _ = self._under_way()
        return self._in_vain[1] if began and began == self._in_vain[0] else 0.0

    @property
    def stuck(self) -> str:
        """Describe the delivery or callback in which the subscriber is stuck; "" if it is not stuck."""
        if not self.waited or self.ended_by == "stalled":  # then it is reported already
            return ""
        _, took = self._under_way()
        return f"stuck for {took:.1f} s in {self._call}" if took >= STUCK_SECONDS else ""

    @property
    def doing(self) -> str:
        """Describe the delivery or callback that is under way; "" without one."""
        began, took = self._under_way()
        return f"in {self._call} for {took:.1f} s" if began else ""

    @property
    def in_a_call(self) -> bool:
        """Return whether a delivery or a callback is under way."""
        return bool(self._began)

    @property
    def at_work(self) -> str:
        """Describe what a subscriber does that computes, and has delivered nothing meanwhile."""
        _, took = self._under_way()
        return f"has been in {self._call} for {took:.0f} s"

    def cpu_time(self) -> float:
        """Return the CPU time in seconds that it has used so far; 0.0 if that is unknown, as of a task."""
        return 0.0

    @property
    def _call(self) -> str:
        return (self._callback or "one delivery") + (self._awaited or awaited_by(self._fn))

    @property
    def _callback(self) -> str:
        """Return the name of the callback that is running; "" without one."""
        return self._calling

    def _under_way(self) -> tuple[float, float]:
        """Return the begin and the seconds of the current delivery or callback; zeros without one."""
        began = self._began
        return (began, perf_counter() - began) if began else (0.0, 0.0)

    def _still_untaken(self) -> int:
        """Return how many of the delivered events the destination has not taken, as the subscriber says."""
        return min(self.delivered, untaken_by(self._fn))

    def _call_back(self, callback: Callable[[], object] | None, what: str) -> None:
        if callback is None:
            return
        failure: BaseException | None = None
        with self._lock:
            self._began, self._calling = perf_counter(), what
        try:
            callback()
        except BaseException as error:  # a SystemExit in a subscriber ends nothing else
            failure = error
        with self._lock:
            stalled = not self._calling
            self._began, self._calling = 0.0, ""
        self.untaken = self._still_untaken()
        if failure is not None and not stalled:  # else it was reported when it stalled
            self.complain(failure, what)
