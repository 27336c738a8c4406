"""Compare a batch that is read again after a resume with the batch that was trained on.

`PlainReader` uses it. A checkpoint holds a number that is computed from the last batch, and not the batch.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

import numpy as np
import torch

_BYTES = 1 << 16
"""The bytes that are read of an array, at least one row: a checkpoint is taken on the training thread."""
_LEAVES = 256
"""The most values of a batch that are looked at."""


class GivenBatch:
    """A batch that a loader has given to the training, which may change it in place.

    Changes of tensors are noticed by their version counters, which are read at once.
    """

    def __init__(self, batch: Any) -> None:
        self._batch = batch
        self._versions = _versions(batch)

    def print(self) -> int | None:
        """Return the number of the batch; None if the training has changed it, or nothing in it is known."""
        return None if _versions(self._batch) != self._versions else batch_print(self._batch)


def batch_print(batch: Any) -> int | None:
    """Return a number that differs for other batches, from the first 64 KB of each array, texts and numbers.

    Returns None if the batch has none of these; tensors on other devices are left out, as their values would
    be waited for.
    """
    found, crc = False, 0
    for leaf in _leaves(batch):
        if (data := _bytes(leaf)) is not None:
            found, crc = True, zlib.crc32(data, crc)
    return crc if found else None


def _versions(batch: Any) -> list[int]:
    return [
        leaf._version for leaf in _leaves(batch) if isinstance(leaf, torch.Tensor) and not leaf.is_inference()
    ]


def _leaves(batch: Any) -> Iterator[Any]:
    return islice(_nested(batch), _LEAVES)


def _nested(batch: Any) -> Iterator[Any]:
    if isinstance(batch, Mapping):
        for item in batch.values():
            yield from _nested(item)
    elif isinstance(batch, list | tuple):
        for item in batch:
            yield from _nested(item)
    else:
        yield batch


def _bytes(leaf: Any) -> bytes | None:
    if isinstance(leaf, torch.Tensor):
        if leaf.device.type != "cpu" or leaf.layout != torch.strided or leaf.is_quantized:
            return None
        rows: torch.Tensor = _first_rows(leaf.detach()).resolve_conj().resolve_neg().contiguous()
        return repr(leaf.shape).encode() + rows.reshape(-1).view(torch.uint8).numpy().tobytes()
    if isinstance(leaf, np.ndarray) and not leaf.dtype.hasobject:
        return repr(leaf.shape).encode() + bytes(_first_rows(leaf).tobytes())
    return repr(leaf).encode() if isinstance(leaf, str | bytes | int | float | np.generic) else None


def _first_rows(array: Any) -> Any:
    """Return so many rows of an array or tensor as `_BYTES` hold, at least one."""
    if not array.ndim or not len(array):
        return array
    return array[: max(1, _BYTES * len(array) // max(1, array.nbytes))]
