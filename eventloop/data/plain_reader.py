"""Resume a pass over any iterable by reading its first batches again.

`readers` chooses it if no better reader fits; `StatefulReader` falls back to it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

from eventloop.data.loader_info import persists
from eventloop.data.loader_state import own_random_state, random_state, set_random_state
from eventloop.util.checks import length_of

logger = logging.getLogger("eventloop")


class PlainReader:
    """The reader of any iterable: it reads the batches that were trained on again, and drops them.

    A list or tuple is sliced instead.

    Args:
        why: why no other reader fits, for the log.
    """

    def __init__(self, why: str) -> None:
        self._why = why

    def open(self, loader: Any, skip: int, opened_with: Mapping[str, Any]) -> Iterator[Any]:
        """Open a pass, and return its batches without the first `skip`, as `Reader.open` describes."""
        iterator: Iterator[Any]
        length = length_of(loader)
        if not skip:
            iterator = iter(loader)
            return iterator
        if isinstance(loader, list | tuple):
            return islice(loader, skip, None)
        if length is not None and skip >= length and not any(own_random_state(loader).values()):
            return iter(())  # no batch is left, and no sampler draws at the end
        logger.warning(
            "the first %d batches of the pass, which were trained on, are read again and dropped: %s",
            skip,
            self._why,
        )
        now = random_state(loader)
        set_random_state(loader, opened_with, opening=True)
        iterator = iter(loader)
        for _ in range(skip):
            next(iterator, None)
        set_random_state(loader, now)
        return iterator

    def state_dict(self, loader: Any, batch_idx: int) -> dict[str, Any]:
        """Return an empty state: the position in the pass is enough."""
        return {}

    def load_state_dict(self, loader: Any, state: Mapping[str, Any]) -> None:
        """Warn if the loader has persistent workers, because no checkpoint holds their random states."""
        if persists(loader):
            logger.warning(
                "the loader's persistent workers start with other random numbers than those of the "
                "interrupted run, because %s: use persistent_workers=False for an exact resume",
                self._why,
            )
