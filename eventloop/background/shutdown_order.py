"""The end of a bus's background side: which lanes may end when, and how long each is waited for."""

from __future__ import annotations

from collections.abc import Callable, Collection
from math import inf
from time import monotonic

from eventloop.background.overtime import Overtime
from eventloop.background.queues.subscriber import Lane

GRACE_SECONDS = 0.5
"""How long a close still waits for a delivery that a flush has waited for as long as the close would."""
SPARE_SECONDS = 0.5
"""What of its time, at most, a close keeps for the end of those that have nothing left, beside one that has; and as much
again for those that hear of failures. Of a short time it is a quarter."""


class Ending:
    """One close.

    While a lane has something left its subscriber may emit, and that may be for any other. So all of them end when none
    has anything left, and nothing is on its way to them; or when time is nearly over. Those who hear of failures and drops
    end last: the others may fail when they are closed.

    Args:
        lanes: all there are.
        listening: those of them that end last.
        deadline, timeout: when the close has to be over, and the seconds it had.
        left: whether anything is on its way to the lanes.
        tell_drops: tells of drops nobody was told of; whether there were any.
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
        """When the lanes of coroutines are given up, as one of them holds the loop."""
        self._groups = ((first, 2 * spare), (last, spare))  # and how long before the deadline they end
        self.overtime: Overtime | None = None
        """Extends the deadline while fewer events are left each time."""
        self._may_end = 0  # how many of the groups
        self.timeout = timeout
        self.blocked_by_caller = {lane for lane in lanes if lane.blocked_by_caller}
        """Lanes blocked by the waiting thread."""
        self._left = left
        self._tell_drops = tell_drops
        self._told = False
        self._dropped_by_then: int | None = None  # when the first had to end, whatever was left

    def until(self, lane: Lane) -> float:
        """When a lane is waited for no more. What was waited in vain for the delivery that it is still at counts."""
        if lane in self.blocked_by_caller:
            return -inf
        until = self.deadline
        if waited := lane.waited:
            until += max(GRACE_SECONDS, self.timeout - waited) - self.timeout
        if lane.runs_on == "loop":
            until = min(until, self.held_until)
        return min(until, self.deadline)

    def next_look(self) -> float:
        """When a group has to end, whatever is left."""
        return self.deadline - self._groups[self._may_end][1] if self._may_end < len(self._groups) else inf

    def look(self, *, certain: bool, closing: bool = False) -> bool:
        """Let lanes end that may; True when there will be more to look at soon.

        Args:
            certain: nothing is just being routed, as only the loop's thread can tell.
            closing: on the thread that closes, which alone knows when time is over.
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
        """True when time was over while subscribers emitted, and what they emitted then was dropped."""
        return self._dropped_by_then is not None and self._dropped() > self._dropped_by_then

    def _ready(self, stage: int, now: float) -> bool:
        """Nothing is left, and those before have ended; of lanes that are not waited for any more nobody asks."""
        before = self._groups[0][0] if stage else []
        return all(lane.ended or now >= self.until(lane) for lane in before) and self._quiet(now)

    def _quiet(self, now: float) -> bool:
        """What a lane was given between two looks at it the one at its account tells."""
        came = [lane.accepted for lane in self.lanes]
        idle = all(lane.idle or now >= self.until(lane) for lane in self.lanes)
        return idle and not self._left() and came == [lane.accepted for lane in self.lanes]

    def _dropped(self) -> int:
        return sum(lane.dropped for lane in self.lanes)
