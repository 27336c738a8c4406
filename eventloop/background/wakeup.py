"""How the background's own threads bring the loop to its inbox, which nobody does who emits."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

Newest = tuple[object, int]


class Doorbell:
    """What a subscriber emits lies in the inbox when its delivery is over, and did not when that began.

    So the subscriber's thread looks before and after a delivery, or several short ones, and an emit knows nothing of it.
    Whose an event is that came meanwhile cannot be seen. Where others emit too, and something of theirs lies there
    already, nobody rings: the loop comes as often as it does anyway.

    Args:
        inbox: what the loop looks at.
        ring: has the loop look soon.
    """

    def __init__(self, inbox: deque[Any] | None = None, ring: Callable[[], object] | None = None) -> None:
        self.looks = 0
        """How often the loop has looked."""
        self.noticed = object()
        """Another one whenever something has come during a delivery: threads that count would miss each other."""
        self._inbox: deque[Any] = deque() if inbox is None else inbox
        self._ring = ring

    def newest(self) -> Newest:
        """What to give to `look` when the deliveries that begin now are over."""
        try:
            return (self._inbox[-1] if self._inbox else None), self.looks
        except IndexError:  # the loop has just emptied it
            return None, self.looks

    def look(self, before: Newest) -> None:
        """Ring if something has come since."""
        (then, looks), (now, _) = before, self.newest()
        if now is None or now is then:
            return
        self.noticed = object()
        if then is None or looks != self.looks:
            self.ring()

    def ring(self) -> None:
        """Have the loop look soon."""
        if self._ring is not None:
            self._ring()
