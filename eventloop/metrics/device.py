"""Copy values from a device to the host without blocking the training thread.

`EventStorage.collect` starts a `HostCopy`; the background thread reads its values.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch


class PinnedPool:
    """Keep page-locked ("pinned") host buffers for reuse, because pinning takes far longer than copying."""

    def __init__(self) -> None:
        self._free: dict[tuple[torch.dtype, int], list[torch.Tensor]] = {}

    def acquire(self, dtype: torch.dtype, size: int) -> torch.Tensor:
        """Return a one-dimensional pinned buffer of at least `size` elements, from the pool or a new one.

        Its length is a power of two, so that buffers can be reused for similar sizes.
        """
        capacity = 1 << max(0, size - 1).bit_length()
        free = self._free.get((dtype, capacity))
        if free:
            return free.pop()
        return torch.empty(capacity, dtype=dtype, pin_memory=True)

    def release(self, buffer: torch.Tensor) -> None:
        """Put a buffer back into the pool."""
        self._free.setdefault((buffer.dtype, buffer.numel()), []).append(buffer)


class _Group(NamedTuple):
    """The tensors of one device and dtype among those of a `HostCopy`."""

    indices: list[int]
    """The positions of the tensors in the list of the `HostCopy`."""
    tensors: list[torch.Tensor]
    pinned: torch.Tensor | None
    """The host buffer that receives the values; None if `HostCopy.values` reads the tensors themselves."""
    copied: torch.cuda.Event | None
    """A CUDA event that is complete once the tensors are computed and copied; None on other devices."""


class HostCopy:
    """Copy one-element tensors to the host, with one stack and one copy for each device and dtype.

    On CUDA the constructor starts a copy into a pinned buffer on the current stream. It copies the values
    that the tensors have at this point of the stream; `ready` returns whether the copy is complete. On the
    CPU, `values` reads the tensors. On other accelerators `values` copies them and waits, on the calling
    thread.

    Args:
        tensors: the tensors.
        pool: the pool of pinned buffers.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], pool: PinnedPool) -> None:
        self._size = len(tensors)
        self._pool = pool
        indices_by_kind: dict[tuple[torch.device, torch.dtype], list[int]] = {}
        for i, tensor in enumerate(tensors):
            indices_by_kind.setdefault((tensor.device, tensor.dtype), []).append(i)
        groups = indices_by_kind.values()
        self._groups = [self._start(indices, [tensors[i] for i in indices]) for indices in groups]

    def _start(self, indices: list[int], tensors: list[torch.Tensor]) -> _Group:
        """Start the copy of tensors of one device and dtype, if the device is a CUDA device."""
        device = tensors[0].device
        if device.type != "cuda":
            return _Group(indices, tensors, None, None)
        pinned: torch.Tensor | None
        try:
            stacked = _stack(tensors)
        except RuntimeError:  # a tensor cannot be stacked; `values` raises the error in the background
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
                if group.tensors[0].is_cpu:  # reading one by one takes a twelfth of the time of a stack
                    numbers = [tensor.item() for tensor in group.tensors]
                else:
                    numbers = _stack(group.tensors).tolist()
            else:
                numbers = group.pinned[: len(group.indices)].tolist()
                self._pool.release(group.pinned)
            for i, number in zip(group.indices, numbers, strict=True):
                values[i] = float(number)
        return values


def _stack(tensors: list[torch.Tensor]) -> torch.Tensor:
    """Return one-element tensors as one tensor of one dimension."""
    return torch.stack([tensor.reshape(()) for tensor in tensors])
