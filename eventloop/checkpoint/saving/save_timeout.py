"""How long a process that writes checkpoints may take before a thread writes in its place.

The process takes only time that nobody wants, and somebody may stop it (SIGSTOP, a frozen container, a debugger). What
it has not written must not be lost for that, nor may a run wait for it for ever.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import NamedTuple

from eventloop.checkpoint.saving.saver_client import SaverProcess, Written
from eventloop.util.waiting import Promise

logger = logging.getLogger("eventloop")


class Allowance(NamedTuple):
    """Seconds for a save of any size, and besides so many times as long as the fastest one of this run would have
    taken; or, where there was none, what a disk of so many bytes a second takes."""

    seconds: float
    times: float
    bandwidth: float

    def of(self, size: int, fastest: float | None) -> float:
        """Seconds for so many bytes, where the fastest save took `fastest` a byte."""
        return self.seconds + size * (1 / self.bandwidth if fastest is None else self.times * fastest)


ALONE = Allowance(30.0, times=10.0, bandwidth=10e6)
"""While the training goes on."""
AWAITED = Allowance(2.0, times=3.0, bandwidth=50e6)
"""From when the training stands still for it: of a preemption's grace a part, and on an idle machine never reached."""
SUPERSEDED = Allowance(2.0, times=1.0, bandwidth=200e6)
"""As long as a newer state that is to be saved in a hurry takes: of a preemption's grace the larger part is for that."""


class Patience:
    """Remembers how fast saves were, and says how long one may take."""

    def __init__(self) -> None:
        self._fastest: float | None = None  # seconds a byte

    def learn(self, size: int, seconds: float) -> None:
        """A save of `size` bytes took so long."""
        took = seconds / max(size, 1)
        self._fastest = took if self._fastest is None else min(self._fastest, took)

    def alone(self, size: int) -> float:
        """Seconds that a save may take while nobody waits for it."""
        return ALONE.of(size, self._fastest)

    def awaited(self, size: int, *, superseded: bool = False) -> float:
        """Seconds that a save is waited for."""
        return (SUPERSEDED if superseded else AWAITED).of(size, self._fastest)


class Owed(Promise[Written]):
    """The promise of a save. Who waits for it without a bound does so for a while; then the process that has it is ended,
    and a thread writes: both read the same copy. But one that is superseded is given up then."""

    def __init__(self, path: Path, patience: Patience) -> None:
        super().__init__()
        self.path, self._patience = path, patience
        self.size = 0
        """Bytes of its tensors, once they are known."""
        self.process: SaverProcess | None = None
        """The one that writes it."""
        self.hurried = False
        """Set once somebody has waited for long enough: no process is given it any more."""
        self.superseded = False
        """Set where a newer state is saved next, and the time is short."""

    def wait(self, timeout: float | None = None) -> bool:
        """As any promise's; see there."""
        if timeout is None and not super().wait(
            self._patience.awaited(self.size, superseded=self.superseded)
        ):
            self._hurry()
        return super().wait(timeout)

    def _hurry(self) -> None:
        self.hurried = True  # before the look: who gives it to a process looks in the other order
        if (process := self.process) is None or process.left:
            return
        logger.warning(
            "checkpoint %s is waited for, and the process that writes it takes too long: it is ended",
            self.path,
        )
        process.kill()
