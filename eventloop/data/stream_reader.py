"""Resume a pass over a DataLoader of an IterableDataset with persistent workers.

`readers` chooses it for such a loader.
"""

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
    """The reader of a DataLoader over an IterableDataset with persistent workers.

    It resumes by reading again and dropping the batches already trained on. The workers are seeded as in the
    first pass, and restored to the random state they returned with their last batch before the current pass
    was opened.
    """

    def __init__(self) -> None:
        super().__init__()
        self._began: dict[int, tuple[bytes, ...]] = {}  # the workers' states when the pass was opened

    def open(self, loader: DataLoader[Any], skip: int, opened_with: Mapping[str, Any]) -> Iterator[Any]:
        """Open a pass, and return its batches without the first `skip`, as `Reader.open` describes."""
        self._settle(skip)
        if self._rebuilt is not None and not skip:
            self._seeded_here, self._began = False, dict(self._states)
            return self._batches(iter(self._rebuilt), 0)
        return self._batches(self._start(loader, skip, opened_with), skip)

    def load_state_dict(self, loader: DataLoader[Any], state: Mapping[str, Any]) -> None:
        """Restore the states that the workers had when the pass was opened."""
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
        for _, worker, changed in islice(iterator, skip):
            self._states[worker] = merge(self._states.get(worker), changed)
        if skip or begin is not None:
            set_random_state(loader, now)
        return iterator
