"""A pass over a DataLoader of an IterableDataset whose workers persist."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

from torch.utils.data import DataLoader

from eventloop.data.index_reader import IndexReader
from eventloop.data.plain_reader import AGAIN
from eventloop.data.resumable_loader import rebuild_stream
from eventloop.data.rng import random_state, set_random_state
from eventloop.data.worker_random_state import FromWorker, InWorker, merge

logger = logging.getLogger("eventloop")


class StreamReader(IndexReader):
    """A DataLoader over an IterableDataset whose workers persist.

    What was trained on is read again and dropped, by workers that begin with the seed they were given in the first
    pass, and with the random state they had when this one was opened: the one they told with their last batch.
    """

    def __init__(self) -> None:
        super().__init__()
        self._began: dict[int, tuple[bytes, ...]] = {}  # the workers' states when the pass was opened

    def open(self, loader: DataLoader[Any], skip: int, opened_with: Mapping[str, Any]) -> Iterator[Any]:
        """See `Reader`."""
        self._settle(skip)
        if self._rebuilt is not None and not skip:
            self._seeded_here, self._began = False, dict(self._states)
            return self._batches(iter(self._rebuilt), 0)
        return self._batches(self._start(loader, skip, opened_with), skip)

    def load_state_dict(self, loader: DataLoader[Any], state: Mapping[str, Any]) -> None:
        """See `IndexReader`."""
        super().load_state_dict(loader, state)
        self._began = dict(self._states)

    def _states_at(self, loader: DataLoader[Any], batch_idx: int) -> dict[int, tuple[bytes, ...]]:
        return self._began if batch_idx else super()._states_at(loader, 0)

    def _start(
        self, loader: DataLoader[Any], skip: int, opened_with: Mapping[str, Any]
    ) -> Iterator[FromWorker]:
        self._rebuilt = None
        if skip:
            logger.warning(
                AGAIN, skip, "the loader's dataset is an IterableDataset, whose samples have no indices"
            )
        else:
            self._began = dict(self._states) if self._seeded_with is not None else {}
        now = random_state(loader)
        begin = self._seed(loader, skip, opened_with, now)
        inside = InWorker(loader.collate_fn, loader.worker_init_fn, self._began, 0)
        self._rebuilt = rebuild_stream(loader, inside.collate, inside.init)
        self._states = dict(self._began)
        iterator: Iterator[FromWorker] = iter(self._rebuilt)
        for _, worker, told in islice(iterator, skip):
            self._states[worker] = merge(self._states.get(worker), told)
        if skip or begin is not None:
            set_random_state(loader, now)
        return iterator
