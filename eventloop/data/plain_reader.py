"""Resume a pass over any iterable by reading again the batches that were trained on.

`readers` chooses `PlainReader` for loaders that no other reader fits. A checkpoint holds a checksum of the
last batch that was trained on, so that a resume notices if the loader yields another batch. It also holds the
states that torch's global generator had when each of the last two batches was requested. They are restored
before these batches are read again, because the training draws from this generator between the batches. There
are two, because the training may have read one batch ahead.
"""

from __future__ import annotations

import logging
import zlib
from collections import deque
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

import numpy as np
import torch

from eventloop.data.limits import first
from eventloop.data.loader_info import persists
from eventloop.data.loader_state import own_random_state, random_state, set_random_state
from eventloop.data.rng import changed_generators, rng_state
from eventloop.util.checks import length_of

logger = logging.getLogger("eventloop")

_END = object()
_BYTES = 1 << 16
"""The number of bytes of an array that a checksum covers, or one row if that is longer.

There is a limit because checkpoints are made on the training thread.
"""
_LEAVES = 256
"""The largest number of values in a batch that a checksum covers."""


class PlainReader:
    """The reader of any iterable: it reads again the batches that were trained on, and drops them.

    A list or tuple is sliced instead. A warning is logged if the last of these batches differs from the
    batch that was trained on, because the loader then has another order than in the interrupted run.

    Args:
        why: the reason why no other reader fits, for the log.
    """

    def __init__(self, why: str) -> None:
        self._why = why
        self._given = 0  # the number of batches of the pass that were yielded
        self._last: GivenBatch | None = None  # the batch that was yielded last
        self._read_with: deque[torch.Tensor] = deque(maxlen=2)  # torch's states before the last two batches
        self._saved: Mapping[str, Any] = {}  # the state in a checkpoint, until the pass is opened

    def open(
        self, loader: Any, skip: int, opened_with: Mapping[str, Any], limit: int | None = None
    ) -> Iterator[Any]:
        """Open a pass, and return its batches without the first `skip`, as `Reader.open` describes."""
        if isinstance(loader, list | tuple):
            return islice(loader, skip, limit)
        saved = self._saved or self.state_dict(loader, skip)
        if persists(loader) or saved.get("batch_idx") != skip:
            saved = {}  # persistent workers have other random numbers, of which `load_state_dict` warns
        self._given, self._last, self._saved = skip, None, {}
        self._read_with.clear()
        if not skip:
            return first(self._batches(iter(loader)), limit)
        length = length_of(loader) if limit is None else limit
        if length is not None and skip >= length and not any(own_random_state(loader).values()):
            return iter(())  # no batch is left, and there is no sampler whose state the end would change
        logger.warning(
            "the first %d batches of the pass, which were trained on, are read again and dropped: %s",
            skip,
            self._why,
        )
        state_before = random_state(loader)
        set_random_state(loader, opened_with, opening=True)
        iterator = iter(loader)
        _drop(iterator, skip, saved, type(loader).__name__)
        set_random_state(loader, state_before)
        return first(self._batches(iterator), limit, skip)

    def state_dict(self, loader: Any, batch_idx: int) -> dict[str, Any]:
        """Return the checksum of the last batch and torch's states; {} if other batches were yielded."""
        if not batch_idx or self._last is None or batch_idx != self._given:
            return {}
        return {"batch_idx": batch_idx, "last_batch": self._last.print(), "read_with": [*self._read_with]}

    def load_state_dict(self, loader: Any, state: Mapping[str, Any]) -> None:
        """Store a state for `open`; warn of persistent workers, whose random states no checkpoint holds."""
        self._saved = state
        if persists(loader):
            logger.warning(
                "the loader's persistent workers start with other random numbers than those of the "
                "interrupted run, because %s: use persistent_workers=False for an exact resume",
                self._why,
            )

    def _batches(self, iterator: Iterator[Any]) -> Iterator[Any]:
        """Yield the batches, and store the random state before each, from which it can be read again."""
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
        kind: the name of the loader's class, for the log.
    """
    read_with, batch, before = saved.get("read_with", []), None, rng_state()
    for number in range(skip):
        if (left := skip - number) <= len(read_with):
            # a copy: of a view into a file's memory torch would read the bytes at the begin of that memory
            torch.set_rng_state(read_with[-left].clone())
        if left == 1:
            before = rng_state()
        if (batch := next(iterator, _END)) is _END:
            logger.warning(
                "the %s gave %d batches where %d of the pass were trained on: the pass ends here; use a "
                "loader that begins again with each pass, or one with state_dict and load_state_dict",
                kind,
                number,
                skip,
            )
            return
    expected = saved.get("last_batch")
    if expected is not None and batch_print(batch) != expected:
        # for the first batch a loader may draw the order of the pass, which is no reason for the difference
        drawn = changed_generators(before, rng_state()) if skip > 1 else []
        logger.warning(_another(skip, kind, drawn))


def _another(number: int, kind: str, drawn: list[str]) -> str:
    """Return the line of the log for a batch that differs from the batch that was trained on.

    Args:
        number: how many batches were trained on.
        kind: the name of the loader's class.
        drawn: the names of the global generators from which it draws while the batch is read.
    """
    begin = f"batch {number} of the pass, read again, differs from the batch that was trained on: the {kind} "
    if drawn:
        return (
            f"{begin}draws from the global generator of {' and of '.join(drawn)} while it is read, and so "
            "does the training, so its order is not that of the interrupted run; read it in a worker, with "
            "num_workers=1, or let it draw from a generator that is an attribute of the data set"
        )
    return (
        f"{begin}gives other batches than in the interrupted run, so samples may be trained on twice or not "
        "at all; shuffle it by a seed that is the same in each process, or use a loader with state_dict and "
        "load_state_dict"
    )


# --- comparing a batch with the one that was trained on -----------------------------------------------------


class GivenBatch:
    """A batch that a loader has yielded, and that the training may since have changed in place.

    Changes of tensors are noticed by their version counters, which are read when this object is made.
    """

    def __init__(self, batch: Any) -> None:
        self._batch = batch
        self._versions = _versions(batch)

    def print(self) -> int | None:
        """Return the checksum of the batch; None if it was changed, or has no value to compute it from."""
        return None if _versions(self._batch) != self._versions else batch_print(self._batch)


def batch_print(batch: Any) -> int | None:
    """Return a checksum of a batch, of the first 64 KB of each array and of texts and numbers.

    Return None if the batch has none of these. Tensors on other devices than the CPU are left out, because
    the training thread would wait for their values.
    """
    is_empty, crc = True, 0
    for leaf in _leaves(batch):
        if (data := _bytes(leaf)) is not None:
            is_empty, crc = False, zlib.crc32(data, crc)
    return None if is_empty else crc


def _versions(batch: Any) -> list[int]:
    """Return the version counters of the tensors in a batch; each change in place increments one."""
    return [
        leaf._version for leaf in _leaves(batch) if isinstance(leaf, torch.Tensor) and not leaf.is_inference()
    ]


def _leaves(batch: Any) -> Iterator[Any]:
    """Return the first values in a nested batch, `_LEAVES` at most."""
    return islice(_nested(batch), _LEAVES)


def _nested(batch: Any) -> Iterator[Any]:
    """Yield the values in nested mappings, lists and tuples, in their order."""
    if isinstance(batch, Mapping):
        for item in batch.values():
            yield from _nested(item)
    elif isinstance(batch, list | tuple):
        for item in batch:
            yield from _nested(item)
    else:
        yield batch


def _bytes(leaf: Any) -> bytes | None:
    """Return the bytes of a value that its checksum covers, with its shape; None for other objects."""
    if isinstance(leaf, torch.Tensor):
        if leaf.device.type != "cpu" or leaf.layout != torch.strided or leaf.is_quantized:
            return None
        rows: torch.Tensor = _first_rows(leaf.detach()).resolve_conj().resolve_neg().contiguous()
        return repr(leaf.shape).encode() + rows.reshape(-1).view(torch.uint8).numpy().tobytes()
    if isinstance(leaf, np.ndarray) and not leaf.dtype.hasobject:
        return repr(leaf.shape).encode() + bytes(_first_rows(leaf).tobytes())
    return repr(leaf).encode() if isinstance(leaf, str | bytes | int | float | np.generic) else None


def _first_rows(array: Any) -> Any:
    """Return the first rows of an array or tensor, at most `_BYTES` bytes of them, but at least one row."""
    if not array.ndim or not len(array):
        return array
    return array[: max(1, _BYTES * len(array) // max(1, array.nbytes))]
