"""Decide in which order subscribers end at a close, and how long each is waited for.

`eventloop.background.draining` makes an `Ending` for each close.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from math import inf
from time import monotonic

from eventloop.background.overtime import Overtime
from eventloop.background.queues.subscriber import Lane

GRACE_SECONDS = 0.5
"""How long a close still waits for a delivery that a flush has waited for as long as the close would."""
SPARE_SECONDS = 0.5
"""Time that a close reserves for ending idle subscribers while another one still delivers.

As much again is reserved for the subscribers to failures. It is at most a quarter of the timeout.
"""


class Ending:
    """One close of the background.

    A subscriber with events left may emit for any other. So all of them end together, when none has events
    left and none are on their way, or shortly before the deadline. Subscribers to failures and drops end
    last: the others may fail when they are closed.

    Args:
        lanes: all queues.
        listening: the queues that end last.
        deadline, timeout: when the close has to be over, and the seconds it had.
        left: returns whether events are on their way to the queues.
        tell_drops: reports drops not yet reported; returns whether there were any.
    """

    def __init__(
        self,
        lanes: list[Lane],
        listening: Collection[Lane],
        deadline: float,
        timeout: float,
        left: Callable[[], bool],
        tell_drops: Callable[[], bool],
    ) -> None:
        first = [lane for lane in lanes if lane not in listening]
        last = [lane for lane in lanes if lane in listening]
        spare = min(SPARE_SECONDS, timeout / 4)
        self.lanes = [*first, *last]
        self.deadline = deadline
        self.held_until = inf
        """When the queues of coroutines are given up because a coroutine blocks the loop."""
        self._groups = ((first, 2 * spare), (last, spare))  # and how long before the deadline they end
        self.overtime: Overtime | None = None
        """Extends the deadline while fewer events are left each time."""
        self._may_end = 0  # how many of the groups
        self.timeout = timeout
        self.blocked_by_caller = {lane for lane in lanes if lane.blocked_by_caller}
        """Queues that deliver nothing while the waiting thread waits."""
        self._left = left
        self._tell_drops = tell_drops
        self._told = False
        self._dropped_by_then: int | None = None  # when the first had to end, whatever was left

    def until(self, lane: Lane) -> float:
        """Return until when a queue is waited for.

        Time that was waited in vain for the delivery still under way counts.
        """
        if lane in self.blocked_by_caller:
            return -inf
        until = self.deadline
        if waited := lane.waited:
            until += max(GRACE_SECONDS, self.timeout - waited) - self.timeout
        if lane.runs_on == "loop":
            until = min(until, self.held_until)
        return min(until, self.deadline)

    def next_look(self) -> float:
        """Return when the next group has to end, whatever is left."""
        return self.deadline - self._groups[self._may_end][1] if self._may_end < len(self._groups) else inf

    def look(self, *, certain: bool, closing: bool = False) -> bool:
        """End the queues that may end; return True when there will be more to look at soon.

        Args:
            certain: whether routing is at rest, which only the loop's thread can know.
            closing: whether this is the closing thread, which alone ends queues because of the deadline.
        """
        stage = self._may_end
        if stage == len(self._groups):
            return False
        group, at, now = self._groups[stage][0], self.next_look(), monotonic()
        if now >= at and not closing:
            return False
        if now >= at:
            if not stage and self.overtime is not None and (more := self.overtime.extension()):
                self.deadline = now + more
                return False
            if self._dropped_by_then is None and not stage:
                self._dropped_by_then = self._dropped()
        elif not (certain and self._ready(stage, now)):
            return False
        if stage and not self._told:
            self._told = True
            if self._tell_drops() and now < at:
                return True  # it is on its way to the last
        self._may_end = stage + 1  # two threads may come here: to do all of it twice does no harm
        for lane in group:
            lane.close_soon()
        return True

    @property
    def cut_short(self) -> bool:
        """Return whether the deadline passed while subscribers emitted, and those events were dropped."""
        return self._dropped_by_then is not None and self._dropped() > self._dropped_by_then

    def _ready(self, stage: int, now: float) -> bool:
        """Return whether nothing is left and the group before has ended.

        Queues that are not waited for any more do not count.
        """
        before = self._groups[0][0] if stage else []
        return all(lane.ended or now >= self.until(lane) for lane in before) and self._quiet(now)

    def _quiet(self, now: float) -> bool:
        """Return whether all queues are idle and nothing is on its way to them.

        Two looks at their accounts show whether a queue was fed in between.
        """
        came = [lane.accepted for lane in self.lanes]
        idle = all(lane.idle or now >= self.until(lane) for lane in self.lanes)
        return idle and not self._left() and came == [lane.accepted for lane in self.lanes]

    def _dropped(self) -> int:
        return sum(lane.dropped for lane in self.lanes)
