"""Resume a pass over any iterable by reading its first batches again.

`readers` chooses it if no better reader fits; other readers fall back to it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from eventloop.data.loader_info import has_states, persists
from eventloop.data.rng import changed_generators, generators_of, random_state, rng_state, set_random_state
from eventloop.util.checks import length_of

logger = logging.getLogger("eventloop")

AGAIN = "the first %d batches of the pass, which were trained on, are read again and dropped: %s"
MAY_DIFFER = (
    "the samples from here on may differ from those of the interrupted run: reading draws from the global "
    "generator of %s during the pass, and so does the training; let the data draw from a generator that is "
    "an attribute of the data set or of the loader"
)


class PlainReader:
    """The reader of any iterable: it reads the batches that were trained on again, and drops them.

    A list or tuple is sliced instead.

    Args:
        why: why no other reader fits, for the log.
    """

    def __init__(self, why: str) -> None:
        self._why = why
        self._opened = 0  # number of passes
        self._seeded_earlier = (
            False  # True if persistent workers of the resumed run were seeded by an earlier pass
        )
        self.left: dict[str, Any] | None = None
        """The global random state after the batches were read again; None if they were not."""

    def open(self, loader: Any, skip: int, opened_with: Mapping[str, Any]) -> Iterator[Any]:
        """Open a pass, and return its batches without the first `skip`, as `Reader.open` describes."""
        iterator: Iterator[Any]
        if self._seeded_earlier and persists(loader):
            logger.warning(
                "the loader's persistent workers were started in an earlier pass, which cannot be resumed "
                "(%s): their random numbers differ from here on; use persistent_workers=False for an exact "
                "resume",
                self._why,
            )
        self._opened, self._seeded_earlier = self._opened + (not skip or not self._opened), False
        if not skip:
            iterator = iter(loader)
            return iterator
        if isinstance(loader, list | tuple):
            return islice(loader, skip, None)
        length = length_of(loader)
        if length is not None and skip >= length and not (generators_of(loader) or has_states(loader)):
            return iter(())  # no batch is left, and no sampler draws anything at the end
        logger.warning(AGAIN, skip, self._why)
        now = random_state(loader)
        set_random_state(loader, opened_with, opening=True)
        iterator = iter(loader)
        next(iterator, None)
        opened = rng_state()
        for _ in range(skip - 1):
            next(iterator, None)
        self.left = rng_state()
        _warn_inexact(loader, opened, self.left, now["rng"])
        set_random_state(loader, now)
        return iterator

    def state_dict(self, loader: Any, batch_idx: int) -> dict[str, Any]:
        """Return whether an earlier pass than the current one seeded the persistent workers."""
        return {"seeded_earlier": self._opened > bool(batch_idx)}

    def load_state_dict(self, loader: Any, state: Mapping[str, Any]) -> None:
        """Restore whether an earlier pass seeded the persistent workers."""
        self._seeded_earlier = bool(state.get("seeded_earlier"))
        self._opened = 2 if self._seeded_earlier else 0


def _warn_inexact(
    loader: Any, opened: Mapping[str, Any], left: Mapping[str, Any], now: Mapping[str, Any]
) -> None:
    """Warn if reading and training draw from one global generator during the pass.

    The order is drawn with the first batch, so only later reads count. Nothing is logged for a map-style data
    set, whose order its sampler decides; `IndexReader` warns about that.

    Args:
        opened: the global random state after the first batch.
        left: that after the last batch that was read again.
        now: that of the checkpoint.
    """
    if isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset):
        return
    elsewhere = changed_generators(left, now)
    if shared := [name for name in changed_generators(opened, left) if name in elsewhere]:
        logger.warning(MAY_DIFFER, " and of ".join(shared))
