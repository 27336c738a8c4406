"""Retain checkpoints until another process has validated them.

`Retention` uses it to decide which checkpoints a save must not remove yet.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

logger = logging.getLogger("eventloop")


class Awaited:
    """Track the regular checkpoints of a hook that wait for their validation, oldest first."""

    def __init__(self) -> None:
        self.limit = 0
        """The most checkpoints that are retained while they wait; 0 if no validation is awaited."""
        self._iterations: dict[str, int] = {}  # of each checkpoint that waits, by its name
        self._given_up = False  # whether the warning about slow validations was logged

    @property
    def names(self) -> list[str]:
        """The names of the checkpoints that wait."""
        return [*self._iterations]

    def add(self, name: str, iteration: int) -> None:
        """Add a checkpoint; if too many wait, the oldest one is not retained any more."""
        if not self.limit:
            return
        self._iterations.pop(name, None)
        self._iterations[name] = iteration
        if len(self._iterations) > self.limit:
            oldest = next(iter(self._iterations))
            del self._iterations[oldest]
            if not self._given_up:
                self._given_up = True
                logger.warning(
                    "%s may be removed before it is validated, because %d newer checkpoints wait, too: the "
                    "validations are slower than the saves",
                    oldest,
                    self.limit,
                )

    def remove(self, name: str) -> None:
        """Remove a checkpoint whose save has failed."""
        self._iterations.pop(name, None)

    def validated(self, iteration: int) -> None:
        """Remove the checkpoint of an iteration and earlier ones, whose results would have come before."""
        self._iterations = {name: saved for name, saved in self._iterations.items() if saved > iteration}

    def removable(self, older: Sequence[str], spares: int) -> tuple[str, ...]:
        """Return the checkpoints that a new one may replace, without those that wait for their validation.

        The newest `spares` checkpoints are always in the result, because the save keeps the last `spares` of
        it.

        Args:
            older: the names of the checkpoints, oldest first.
            spares: the number of checkpoints that the save keeps.
        """
        newest = older[-spares:] if spares else ()
        return tuple(name for name in older if name not in self._iterations or name in newest)
