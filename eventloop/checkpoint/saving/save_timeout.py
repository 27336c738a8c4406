"""Limit how long the process that writes checkpoints may take before a thread writes in its place.

The saver uses it. The process runs at the lowest priority, and may be stopped (SIGSTOP, a frozen container, a
debugger). Its saves must not be lost then, and the run must not wait for it without a limit.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import NamedTuple

from eventloop.checkpoint.saving.saver_client import SaverProcess, Written
from eventloop.util.waiting import Promise

logger = logging.getLogger("eventloop")


class TimeLimit(NamedTuple):
    """A time limit for a save, which depends on its size and on the fastest save of this run.

    Attributes:
        seconds: the limit for a save of any size, to which the rest is added.
        times: factor on the time that the fastest save of this run would have taken for that size.
        bandwidth: bytes a second, assumed while the run has not completed a save.
    """

    seconds: float
    times: float
    bandwidth: float

    def of(self, size: int, fastest: float | None) -> float:
        """Return the limit in seconds for `size` bytes; the fastest save took `fastest` seconds a byte."""
        return self.seconds + size * (1 / self.bandwidth if fastest is None else self.times * fastest)


ALONE = TimeLimit(30.0, times=10.0, bandwidth=10e6)
"""The limit while the training goes on."""
AWAITED = TimeLimit(2.0, times=3.0, bandwidth=50e6)
"""The limit once the training waits: a part of a preemption's grace period."""
SUPERSEDED = TimeLimit(2.0, times=1.0, bandwidth=200e6)
"""The limit for a save while a newer state waits, which needs most of a preemption's grace period."""


class SaveTimeouts:
    """The time limits of a run's saves, which adapt to the fastest save."""

    def __init__(self) -> None:
        self._fastest: float | None = None  # seconds a byte

    def learn(self, size: int, seconds: float) -> None:
        """Record that a save of `size` bytes took that many seconds."""
        took = seconds / max(size, 1)
        self._fastest = took if self._fastest is None else min(self._fastest, took)

    def in_background(self, size: int) -> float:
        """Return the seconds that a save of `size` bytes may take while the training goes on."""
        return ALONE.of(size, self._fastest)

    def awaited(self, size: int, *, superseded: bool = False) -> float:
        """Return the seconds that the training waits for a save of `size` bytes."""
        return (SUPERSEDED if superseded else AWAITED).of(size, self._fastest)


class SavePromise(Promise[Written]):
    """The promise of a save, whose process is killed if a caller waits for too long.

    After `wait` without a timeout has reached the limit, a thread writes the same copy instead of the
    process. A save that is superseded is given up instead.
    """

    def __init__(self, path: Path, timeouts: SaveTimeouts) -> None:
        super().__init__()
        self.path, self._timeouts = path, timeouts
        self.size = 0
        """Bytes of its tensors; 0 until they are counted."""
        self.process: SaverProcess | None = None
        """The process that writes it, if one does."""
        self.hurried = False
        """True once a caller has waited for the limit; from then on the save is not given to a process."""
        self.superseded = False
        """True if a newer state is saved next, and the time is short."""

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the save is done, for at most `timeout` seconds; return whether it is done.

        Without a timeout the writing process is killed at the limit, and the wait goes on.
        """
        if timeout is None and not super().wait(
            self._timeouts.awaited(self.size, superseded=self.superseded)
        ):
            self._hurry()
        return super().wait(timeout)

    def _hurry(self) -> None:
        self.hurried = (
            True  # set before `process` is read; the saver sets `process` before it reads `hurried`
        )
        if (process := self.process) is None or process.left:
            return
        logger.warning(
            "checkpoint %s takes too long in the process that writes it, and the training waits: the process "
            "is ended",
            self.path,
        )
        process.kill()
