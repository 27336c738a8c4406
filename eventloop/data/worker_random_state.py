"""Send the random state of a loader's worker processes with every batch, and restore it at a resume.

`IndexReader` uses it. Each worker process seeds its own generators when it starts, and random augmentation
draws from them. A resumed run reads the same samples only if its workers continue from the saved states.
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
"""A batch, the number of its worker, and the worker's state after it: a tuple, which a loader can pin."""

# both generators draw normal numbers in pairs, and may hold the second number of a pair
_PYTHON = struct.Struct("=B?d")  # version, whether there is a second number, the second number
_NUMPY = struct.Struct("=iid")  # position, whether there is a second number, the second number


class InWorker:
    """Hold the `collate_fn` and the `worker_init_fn` of a loader whose workers return their random state.

    The two are methods of one object because they share attributes; each worker process has a copy of it.

    Args:
        collate: the loader's own `collate_fn`.
        init: the loader's own `worker_init_fn`, or None.
        states: the state with which each worker starts, by its number; a worker without one keeps the state
            that its seed gives.
        idle: the number of workers, from the first on, that get an empty list of samples before their first
            batch. The loader serves the workers in turn. The list stands for a batch that was read before
            the checkpoint, so that each worker gets the same batches as in an uninterrupted run.
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

        For the empty list that an idle worker gets first, return None in place of a batch.
        """
        is_idle, self._is_idle = self._is_idle, False
        if is_idle and _is_empty(samples):
            return None, self._worker, (None, None, None)
        batch = self._collate(samples)
        state = pack()
        changed = tuple(None if new == old else new for new, old in zip(state, self._sent, strict=True))
        self._sent = state
        return batch, self._worker, changed


def _end_alone(parent: int) -> None:
    """End a worker process at once at its exit if its parent, the training process, was killed.

    At a normal exit the worker waits until all it has sent is read from the pipe. Its random states may have
    filled the pipe, from which nothing reads any more, so it would wait forever. Without them this does not
    happen, because batches take few bytes in the pipe.

    Args:
        parent: the process id of the parent when the worker started.
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
    """Return a worker's complete state: its former state, or None, with the changed parts replaced."""
    former = before if before is not None else (b"",) * len(changed)
    return tuple(old if new is None else new for old, new in zip(former, changed, strict=True))
