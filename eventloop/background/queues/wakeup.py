"""Wake the loop when a subscriber has emitted events; emitting itself never wakes it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

Newest = tuple[object, int]


class Doorbell:
    """Notice events that arrived in the inbox during a delivery, and wake the loop for them.

    The subscriber's thread looks at the inbox before and after a delivery, or several short ones, so that an
    emit costs nothing more. It cannot see which thread emitted what came meanwhile. If other threads emit,
    and one of their events already lies in the inbox, it does not wake the loop, which looks soon anyway.

    Args:
        inbox: the inbox of the loop.
        ring: makes the loop look soon.
    """

    def __init__(self, inbox: deque[Any] | None = None, ring: Callable[[], object] | None = None) -> None:
        self.looks = 0
        """How often the loop has looked."""
        self.noticed = object()
        """A new object whenever events arrived during a delivery.

        A counter could lose updates of several threads.
        """
        self._inbox: deque[Any] = deque() if inbox is None else inbox
        self._ring = ring

    def newest(self) -> Newest:
        """Return the newest event and the number of looks; `look` takes the result after the deliveries."""
        try:
            return (self._inbox[-1] if self._inbox else None), self.looks
        except IndexError:  # the loop has just emptied it
            return None, self.looks

    def look(self, before: Newest) -> None:
        """Wake the loop if events have arrived since `before`."""
        (then, looks), (now, _) = before, self.newest()
        if now is None or now is then:
            return
        self.noticed = object()
        if then is None or looks != self.looks:
            self.ring()

    def ring(self) -> None:
        """Make the loop look soon."""
        if self._ring is not None:
            self._ring()
