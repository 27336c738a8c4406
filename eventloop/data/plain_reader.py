"""A pass over any iterable."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from eventloop.data.loader_info import has_states, persists
from eventloop.data.rng import generators_of, moved, random_state, rng_state, set_random_state
from eventloop.util.checks import length_of

logger = logging.getLogger("eventloop")

AGAIN = "the first %d batches of the pass, which were trained on, are read again and dropped: %s"
MAY_DIFFER = (
    "what is read from here on may not be what the run that was interrupted would have read: reading draws from the global "
    "generator of %s as the pass goes, and so does the training; let the data draw from a generator that is an "
    "attribute of the data set or of the loader"
)


class PlainReader:
    """Any iterable: what was trained on is read again and dropped, but for lists, which are cut.

    Args:
        why: the reason, for the log.
    """

    def __init__(self, why: str) -> None:
        self._why = why
        self._opened = 0  # passes
        self._seeded_earlier = False  # workers that persist, in a run that is gone on with
        self.left: dict[str, Any] | None = None
        """The global random state that reading again has left."""

    def open(self, loader: Any, skip: int, opened_with: Mapping[str, Any]) -> Iterator[Any]:
        """See `Reader`."""
        iterator: Iterator[Any]
        if self._seeded_earlier and persists(loader):
            logger.warning(
                "the loader's workers persist since an earlier pass, and this one is not rebuilt (%s): what they draw at "
                "random differs from here on; persistent_workers=False would be exact",
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
            return iter(())  # nothing is left, and no sampler has anything to draw at the end
        logger.warning(AGAIN, skip, self._why)
        now = random_state(loader)
        set_random_state(loader, opened_with, opening=True)
        iterator = iter(loader)
        next(iterator, None)
        opened = rng_state()
        for _ in range(skip - 1):
            next(iterator, None)
        self.left = rng_state()
        _tell_inexact(loader, opened, self.left, now["rng"])
        set_random_state(loader, now)
        return iterator

    def state_dict(self, loader: Any, batch_idx: int) -> dict[str, Any]:
        """Whether workers that persist were seeded by another pass than the one that is gone on with."""
        return {"seeded_earlier": self._opened > bool(batch_idx)}

    def load_state_dict(self, loader: Any, state: Mapping[str, Any]) -> None:
        """Take that."""
        self._seeded_earlier = bool(state.get("seeded_earlier"))
        self._opened = 2 if self._seeded_earlier else 0


def _tell_inexact(
    loader: Any, opened: Mapping[str, Any], left: Mapping[str, Any], now: Mapping[str, Any]
) -> None:
    """Reading after the first batch, by which an order is drawn, has moved a global generator that is not there where the
    reading alone brings it. The order of a map-style data set is its sampler's, of which others tell."""
    if isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset):
        return
    elsewhere = moved(left, now)
    if shared := [name for name in moved(opened, left) if name in elsewhere]:
        logger.warning(MAY_DIFFER, " and of ".join(shared))
