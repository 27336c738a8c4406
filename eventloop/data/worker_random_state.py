"""Send the random state of a loader's worker processes with every batch, and restore it at a resume.

`IndexReader` and `StreamReader` use it. Each worker process seeds its own generators when it starts, and
random augmentation draws from them. A resumed run reads the same samples only if its workers continue from
the saved states.
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

ChangedState = tuple[bytes | None, ...]
"""The states of Python's, NumPy's and torch's generators; None for those unchanged since the last batch."""
FromWorker = tuple[Any, int, ChangedState]
"""A batch, the number of its worker, and the worker's state after it. A plain tuple can be pinned."""

_PYTHON = struct.Struct("=B?d")  # version, whether there is a cached gauss, its value
_NUMPY = struct.Struct("=iid")  # position, whether there is a cached gauss, its value


class InWorker:
    """The `collate_fn` and the `worker_init_fn` of a loader whose workers return their random state.

    They are methods of one object because they share attributes; each worker process has a copy of it.

    Args:
        collate: the loader's own `collate_fn`.
        init: the loader's own `worker_init_fn`, or None. It is called first.
        states: the state with which each worker starts; a worker without one keeps the state from its seed.
        idle: the number of workers, from the first on, that get an empty list before their first batch. The
            list stands for a batch that was read before the checkpoint, so that each worker gets the same
            batches as in an uninterrupted run.
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
        self._sent: ChangedState = (None, None, None)
        self._is_idle = False

    def init(self, worker: int) -> None:
        """Restore the state of a starting worker process, after the loader's own `worker_init_fn`."""
        Finalize(None, _end_alone, args=(os.getppid(),), exitpriority=100)
        if self._init is not None:
            self._init(worker)
        self._worker = worker
        self._is_idle = worker < self._idle
        if worker in self._states:
            self._sent = self._states[worker]
            unpack(self._states[worker])

    def collate(self, samples: Any) -> FromWorker:
        """Make a batch; return it with the worker's number and the changed parts of the worker's state.

        The first list of an idle worker is empty, and stands for a batch before the checkpoint: it gives None
        in place of a batch.
        """
        idle, self._is_idle = self._is_idle, False
        if idle and _is_empty(samples):
            return None, self._worker, (None, None, None)
        batch = self._collate(samples)
        state = pack()
        changed = tuple(None if new == old else new for new, old in zip(state, self._sent, strict=True))
        self._sent = state
        return batch, self._worker, changed


def _end_alone(parent: int) -> None:
    """End a worker process at once if its parent was killed.

    The random states that it sent may have filled the pipe, which nothing reads any more, so that a normal
    exit would wait forever. Batches alone take few bytes of the pipe and do not fill it.
    """
    if os.getppid() != parent:
        os._exit(1)


def _is_empty(samples: Any) -> bool:
    """Return whether samples are empty: `[]`, or columns without rows from a dataset's `__getitems__`."""
    if isinstance(samples, Mapping):
        return all(len(column) == 0 for column in samples.values())
    return len(samples) == 0


def pack() -> tuple[bytes, bytes, bytes]:
    """Return the states of the global generators of Python, NumPy and torch as bytes."""
    version, words, gauss = random.getstate()
    python = _PYTHON.pack(version, gauss is not None, gauss or 0.0) + array("I", words).tobytes()
    numpy: Any = np.random.get_state()
    return python, _NUMPY.pack(*numpy[2:]) + numpy[1].tobytes(), torch.get_rng_state().numpy().tobytes()


def unpack(state: tuple[bytes, ...]) -> None:
    """Restore the global generators of Python, NumPy and torch from the result of `pack`."""
    python, numpy, of_torch = state
    version, has_gauss, gauss = _PYTHON.unpack_from(python)
    words = array("I", python[_PYTHON.size :])
    random.setstate((version, tuple(words), gauss if has_gauss else None))
    key = np.frombuffer(numpy, np.uint32, offset=_NUMPY.size)
    np.random.set_state(("MT19937", key, *_NUMPY.unpack_from(numpy)))
    torch.set_rng_state(torch.frombuffer(bytearray(of_torch), dtype=torch.uint8))


def merge(before: tuple[bytes, ...] | None, changed: ChangedState) -> tuple[bytes, ...]:
    """Return a worker's complete state: the former state with the changed parts replaced."""
    old = before if before is not None else (b"",) * len(changed)
    return tuple(was if new is None else new for was, new in zip(old, changed, strict=True))
