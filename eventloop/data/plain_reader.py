"""Resume a pass over any iterable by reading the batches that were trained on again.

`readers` chooses it for loaders that no other reader fits. A checkpoint holds a number of the last batch that
was trained on, so that the resume notices if the loader gives another one, and the states of torch's global
generator before the last two batches were asked for. Training draws from it between batches, and one batch
may be read ahead.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

import torch

from eventloop.data.batch_print import GivenBatch, batch_print
from eventloop.data.limits import first
from eventloop.data.loader_info import persists
from eventloop.data.loader_state import own_random_state, random_state, set_random_state
from eventloop.data.rng import changed_generators, rng_state
from eventloop.util.checks import length_of

logger = logging.getLogger("eventloop")

_END = object()


class PlainReader:
    """The reader of any iterable: it reads the batches that were trained on again, and drops them.

    A list or tuple is sliced instead. A warning is logged if the last of these batches differs from the
    batch that was trained on, because the loader then has another order than in the interrupted run.

    Args:
        why: why no other reader fits, for the log.
    """

    def __init__(self, why: str) -> None:
        self._why = why
        self._given = 0  # number of batches of the pass that were given out
        self._last: GivenBatch | None = None  # the last one of these
        self._read_with: deque[torch.Tensor] = deque(maxlen=2)
        self._saved: Mapping[str, Any] = {}  # of a checkpoint, until the pass is opened

    def open(
        self, loader: Any, skip: int, opened_with: Mapping[str, Any], limit: int | None = None
    ) -> Iterator[Any]:
        """Open a pass, and return its batches without the first `skip`, as `Reader.open` describes."""
        if isinstance(loader, list | tuple):
            return islice(loader, skip, limit)
        saved = self._saved or self.state_dict(loader, skip)
        if persists(loader) or saved.get("batch_idx") != skip:
            saved = {}  # workers that persist have other random numbers, of which the log warns
        self._given, self._last, self._saved = skip, None, {}
        self._read_with.clear()
        if not skip:
            return first(self._batches(iter(loader)), limit)
        length = length_of(loader) if limit is None else limit
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
        _drop(iterator, skip, saved, type(loader).__name__)
        set_random_state(loader, now)
        return first(self._batches(iterator), limit, skip)

    def state_dict(self, loader: Any, batch_idx: int) -> dict[str, Any]:
        """Return the print of the last batch and torch's states, if `batch_idx` batches were given out."""
        if not batch_idx or self._last is None or batch_idx != self._given:
            return {}
        return {"batch_idx": batch_idx, "last_batch": self._last.print(), "read_with": [*self._read_with]}

    def load_state_dict(self, loader: Any, state: Mapping[str, Any]) -> None:
        """Keep the state; warn of persistent workers, because no checkpoint holds their random states."""
        self._saved = state
        if persists(loader):
            logger.warning(
                "the loader's persistent workers start with other random numbers than those of the "
                "interrupted run, because %s: use persistent_workers=False for an exact resume",
                self._why,
            )

    def _batches(self, iterator: Iterator[Any]) -> Iterator[Any]:
        while True:
            self._read_with.append(torch.get_rng_state())
            try:
                batch = next(iterator)
            except StopIteration:
                return
            self._given += 1
            self._last = GivenBatch(batch)
            yield batch


def _drop(iterator: Iterator[Any], skip: int, saved: Mapping[str, Any], kind: str) -> None:
    """Read and drop `skip` batches; warn if they are not those that were trained on.

    Args:
        saved: the state of the reader after these batches; {} if it is unknown.
        kind: the loader, for the log.
    """
    read_with, batch, before = saved.get("read_with", []), None, rng_state()
    for number in range(skip):
        if (left := skip - number) <= len(read_with):
            torch.set_rng_state(read_with[-left].clone())  # torch reads a state from the start of its storage
        if left == 1:
            before = rng_state()
        if (batch := next(iterator, _END)) is _END:
            logger.warning(
                "the %s gave %d batches where %d of the pass were trained on: the pass ends here; use a "
                "loader that begins again with each pass, or one with state_dict and load_state_dict",
                kind, number, skip,
            )  # fmt: skip
            return
    expected = saved.get("last_batch")
    if expected is not None and batch_print(batch) != expected:
        drawn = changed_generators(before, rng_state()) if skip > 1 else []  # the first may draw the order
        logger.warning(_another(skip, kind, drawn))


def _another(number: int, kind: str, drawn: list[str]) -> str:
    """Return the line of the log for a batch that differs from the batch that was trained on."""
    found = f"batch {number} of the pass, read again, differs from the batch that was trained on: the {kind} "
    if drawn:
        return (
            f"{found}draws from the global generator of {' and of '.join(drawn)} while it is read, and so "
            "does the training, so its order is not that of the interrupted run; read it in a worker, with "
            "num_workers=1, or let it draw from a generator that is an attribute of the data set"
        )
    return (
        f"{found}gives other batches than in the interrupted run, so samples may be trained on twice or not "
        "at all; shuffle it by a seed that is the same in each process, or use a loader with state_dict and "
        "load_state_dict"
    )
