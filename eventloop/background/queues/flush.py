"""A request to flush one background subscriber."""

from __future__ import annotations

from eventloop.util.waiting import Latch


class Flush:
    """A request to flush a subscriber once it has handled the first `after` events.

    With `calls` it then calls `on_flush`.
    """

    def __init__(self, after: int, *, calls: bool) -> None:
        self.after = after
        self.calls = calls
        self.made = Latch()
