"""The random state of a loader's worker processes: told with every batch, and put back where a run goes on.

Each worker seeds generators of its own when it starts, and random augmentation draws from them. Two resumed runs
read the same samples only if their workers go on where they were.
"""

from __future__ import annotations

import os
import random
import struct
from array import array
from collections.abc import Callable, Mapping
from multiprocessing.util import Finalize
from typing import Any

import numpy as np
import torch

Told = tuple[bytes | None, ...]
"""The states of Python's, NumPy's and torch's generator; None for one that has not moved since it was last told."""
FromWorker = tuple[Any, int, Told]
"""A batch, the worker that read it, and the state it left that worker in. A plain tuple: pinning goes through it."""

_PYTHON = struct.Struct("=B?d")  # version, whether a gauss is kept, and it
_NUMPY = struct.Struct("=iid")  # position, whether a gauss is kept, and it


class InWorker:
    """The `collate_fn` and the `worker_init_fn` of a loader whose workers tell their state.

    One object for both, which a worker gets as a copy: what the one notes the other sees.

    Args:
        collate: the loader's own `collate_fn`.
        init: its own `worker_init_fn`, or None. It is called first.
        states: the state each worker goes on with; one that is not named keeps what it was seeded with.
        idle: so many workers, the first ones, are given an empty list before their first batch. It stands for
            a batch that was read before, so that each worker gets the batches it would have got.
    """

    def __init__(
        self,
        collate: Callable[[Any], Any],
        init: Callable[[int], Any] | None,
        states: Mapping[int, tuple[bytes, ...]],
        idle: int,
    ) -> None:
        self._collate = collate
        self._init = init
        self._states = dict(states)
        self._idle = idle
        self._worker = 0
        self._told: Told = (None, None, None)
        self._is_idle = False

    def init(self, worker: int) -> None:
        """A worker begins."""
        Finalize(None, _end_alone, args=(os.getppid(),), exitpriority=100)
        if self._init is not None:
            self._init(worker)
        self._worker = worker
        self._is_idle = worker < self._idle
        if worker in self._states:
            self._told = self._states[worker]
            unpack(self._states[worker])

    def collate(self, samples: Any) -> FromWorker:
        """Make a batch, and tell the state it left."""
        idle, self._is_idle = self._is_idle, False
        if idle and _is_empty(samples):
            return None, self._worker, (None, None, None)
        batch = self._collate(samples)
        state = pack()
        told = tuple(None if new == old else new for new, old in zip(state, self._told, strict=True))
        self._told = state
        return batch, self._worker, told


def _end_alone(parent: int) -> None:
    """A worker whose parent was killed ends. What it has told of its states may fill the pipe, which nobody reads, and its
    queue would be joined for ever; behind a batch alone, which is a few bytes, there is room."""
    if os.getppid() != parent:
        os._exit(1)


def _is_empty(samples: Any) -> bool:
    """What reading no sample gives: `[]`, or with a dataset's `__getitems__` perhaps columns of no rows."""
    if isinstance(samples, Mapping):
        return all(len(column) == 0 for column in samples.values())
    return len(samples) == 0


def pack() -> tuple[bytes, bytes, bytes]:
    """The states of the three global generators."""
    version, words, gauss = random.getstate()
    python = _PYTHON.pack(version, gauss is not None, gauss or 0.0) + array("I", words).tobytes()
    numpy: Any = np.random.get_state()
    return python, _NUMPY.pack(*numpy[2:]) + numpy[1].tobytes(), torch.get_rng_state().numpy().tobytes()


def unpack(state: tuple[bytes, ...]) -> None:
    """Put the generators into a state that `pack` returned."""
    python, numpy, of_torch = state
    version, has_gauss, gauss = _PYTHON.unpack_from(python)
    words = array("I", python[_PYTHON.size :])
    random.setstate((version, tuple(words), gauss if has_gauss else None))
    key = np.frombuffer(numpy, np.uint32, offset=_NUMPY.size)
    np.random.set_state(("MT19937", key, *_NUMPY.unpack_from(numpy)))
    torch.set_rng_state(torch.frombuffer(bytearray(of_torch), dtype=torch.uint8))


def merge(before: tuple[bytes, ...] | None, told: Told) -> tuple[bytes, ...]:
    """The whole state, from the one before and what has changed since."""
    old = before if before is not None else (b"",) * len(told)
    return tuple(was if new is None else new for was, new in zip(old, told, strict=True))
