"""Copy values from a device to the host without blocking the training thread.

`EventStorage.collect` starts a `HostCopy`; the background thread reads its values.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch


class PinnedPool:
    """A pool of page-locked host buffers, which are reused because pinning costs far more than copying."""

    def __init__(self) -> None:
        self._free: dict[tuple[torch.dtype, int], list[torch.Tensor]] = {}

    def acquire(self, dtype: torch.dtype, size: int) -> torch.Tensor:
        """Return a flat pinned buffer of at least `size` elements; its length is a power of two."""
        capacity = 1 << max(0, size - 1).bit_length()
        free = self._free.get((dtype, capacity))
        if free:
            return free.pop()
        return torch.empty(capacity, dtype=dtype, pin_memory=True)

    def give(self, buffer: torch.Tensor) -> None:
        """Return a buffer to the pool."""
        self._free.setdefault((buffer.dtype, buffer.numel()), []).append(buffer)


class _Group(NamedTuple):
    """Tensors of one device and dtype, with the pinned buffer into which they are copied, if there is one.

    `copied` is a CUDA event, recorded after the computation of the tensors and after the copy; None on other
    devices.
    """

    indices: list[int]
    tensors: list[torch.Tensor]
    pinned: torch.Tensor | None
    copied: torch.cuda.Event | None


class HostCopy:
    """A copy of one-element tensors to the host, with one stack and one copy per device and dtype.

    On CUDA the constructor starts a copy into a pinned buffer on the current stream, which gets the values
    of the tensors at this point of the program; `ready` queries the CUDA event after the copy. On the CPU,
    `values` reads the tensors. On other accelerators `values` copies them and waits, on the calling thread.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], pool: PinnedPool) -> None:
        self._size = len(tensors)
        self._pool = pool
        by_kind: dict[tuple[torch.device, torch.dtype], list[int]] = {}
        for i, tensor in enumerate(tensors):
            by_kind.setdefault((tensor.device, tensor.dtype), []).append(i)
        self._groups = [self._start(indices, [tensors[i] for i in indices]) for indices in by_kind.values()]

    def _start(self, indices: list[int], tensors: list[torch.Tensor]) -> _Group:
        device = tensors[0].device
        if device.type != "cuda":
            return _Group(indices, tensors, None, None)
        pinned: torch.Tensor | None
        try:
            stacked = _stack(tensors)
        except RuntimeError:  # the layout cannot be stacked: raise in `values`, not within a training step
            pinned = None
        else:
            pinned = self._pool.acquire(tensors[0].dtype, len(indices))
            pinned[: len(indices)].copy_(stacked, non_blocking=True)
        copied = torch.cuda.Event(blocking=True)  # a waiting thread sleeps instead of spinning
        copied.record(torch.cuda.current_stream(device))
        return _Group(indices, tensors, pinned, copied)

    def ready(self) -> bool:
        """Return whether `values` would not wait for a CUDA device."""
        return all(group.copied is None or group.copied.query() for group in self._groups)

    def wait(self) -> None:
        """Wait until the CUDA devices have computed the tensors."""
        for group in self._groups:
            if group.copied is not None:
                group.copied.synchronize()

    def values(self) -> list[float]:
        """Return the numbers in the order of the tensors, after waiting for the device; call it once.

        Raises:
            Exception: torch's error for a tensor that cannot be read.
        """
        values = [0.0] * self._size
        for group in self._groups:
            if group.copied is not None:
                group.copied.synchronize()
            if group.pinned is None:
                if group.tensors[0].is_cpu:  # a dozen times cheaper than stacking
                    numbers = [tensor.item() for tensor in group.tensors]
                else:
                    numbers = _stack(group.tensors).tolist()
            else:
                numbers = group.pinned[: len(group.indices)].tolist()
                self._pool.give(group.pinned)
            for i, number in zip(group.indices, numbers, strict=True):
                values[i] = float(number)
        return values


def _stack(tensors: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack([tensor.reshape(()) for tensor in tensors])
