"""Spread the work of background threads over time, because only one thread can run Python code at a time.

The event loop and the subscribers' threads ask for a turn, so that a training step is delayed by at most one
of them.
"""

from __future__ import annotations

import threading
from time import perf_counter

HOLD_SECONDS = 0.0006
"""The seconds that a background thread works before it lets the training run: a part of a short step.

With shorter turns most time would be lost refilling the processor's caches after each switch of threads.
"""
EVERY_SECONDS = 0.004
"""The seconds from the begin of one turn to the begin of the next turn of any thread."""


LONGEST_SECONDS = 0.04
"""The longest wait for a turn in seconds; with very many subscribers some turns therefore begin together."""


class Pace:
    """Reserve turns, `EVERY_SECONDS` apart, for the event loop and for the threads of subscribers.

    The keeper wakes several threads at once. Each holds the interpreter for a fraction of a training step; if
    all ran in the same step, that step would take twice as long. So a thread waits for its turn before it
    begins to work.

    Only the begins of turns are spread: no thread waits for the end of another thread's turn, so a writer
    that waits for its disk delays no other writer. A thread that has to catch up, as in a flush, begins
    without a turn.
    """

    def __init__(self) -> None:
        self._free = 0.0
        self._lock = threading.Lock()

    def next_turn(self) -> float:
        """Reserve a turn and return the seconds until it begins."""
        now = perf_counter()
        with self._lock:
            turn = min(max(now, self._free), now + LONGEST_SECONDS)
            self._free = turn + EVERY_SECONDS
        return turn - now
