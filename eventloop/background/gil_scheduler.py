"""Turns at the interpreter, for the threads that work behind a training."""

from __future__ import annotations

import threading
from time import perf_counter

HOLD_SECONDS = 0.0006
"""How long a thread may hold the interpreter at a stretch: a part of a short step. With less it is spent on waking up:
after each sleep nothing of its work is in a cache any more, nor, after each turn, of the training's."""
EVERY_SECONDS = 0.004
"""From the begin of one turn to the begin of the next, whosever they are."""


LONGEST_SECONDS = 0.04
"""The longest wait for a turn: with very many subscribers some begin together."""


class Pace:
    """Spreads the turns of the loop and of the subscribers' threads over time.

    What a training emits comes in bursts, when the loop looks, and wakes several threads at once. Each holds the
    interpreter for a fraction of a step; all of them in one step would be another step. So they begin `EVERY_SECONDS`
    apart: a step meets one of them, and the burst is spread over many steps.

    It only says when, and who is in a hurry does not ask. Nobody waits for another's turn to end: a writer that waits for
    its disk holds up no other.
    """

    def __init__(self) -> None:
        self._free = 0.0
        self._lock = threading.Lock()

    def next_turn(self) -> float:
        """Reserve a turn; returns the seconds until it begins."""
        now = perf_counter()
        with self._lock:
            turn = min(max(now, self._free), now + LONGEST_SECONDS)
            self._free = turn + EVERY_SECONDS
        return turn - now
