"""Getting values off a device without the training thread waiting for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch


class PinnedPool:
    """Page-locked host buffers, kept for reuse: pinning memory costs far more than the copy into it."""

    def __init__(self) -> None:
        self._free: dict[tuple[torch.dtype, int], list[torch.Tensor]] = {}

    def take(self, dtype: torch.dtype, size: int) -> torch.Tensor:
        """A flat pinned buffer of at least `size` elements, a power of two of them."""
        capacity = 1 << max(0, size - 1).bit_length()
        free = self._free.get((dtype, capacity))
        if free:
            return free.pop()
        return torch.empty(capacity, dtype=dtype, pin_memory=True)

    def give(self, buffer: torch.Tensor) -> None:
        """Take a buffer back."""
        self._free.setdefault((buffer.dtype, buffer.numel()), []).append(buffer)


class _Group(NamedTuple):
    """Tensors of one device and type: as they are, or on their way into a pinned buffer. `copied` is reached once the
    device has come to them."""

    indices: list[int]
    tensors: list[torch.Tensor]
    pinned: torch.Tensor | None
    copied: torch.cuda.Event | None


class HostCopy:
    """0-dim tensors on their way to the host: one stack and one copy per device and type.

    On CUDA the copy goes into a pinned buffer on the current stream, so it reads the values as they are at this
    point of the program; `ready` asks the event behind it. On the CPU there is nothing to do yet. On other
    accelerators `values` waits, on the thread that calls it.
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
        except (
            RuntimeError
        ):  # of a layout that cannot be stacked, which `values` tells; here a step would fail
            pinned = None
        else:
            pinned = self._pool.take(tensors[0].dtype, len(indices))
            pinned[: len(indices)].copy_(stacked, non_blocking=True)
        copied = torch.cuda.Event(blocking=True)  # who waits sleeps
        copied.record(torch.cuda.current_stream(device))
        return _Group(indices, tensors, pinned, copied)

    def ready(self) -> bool:
        """True when `values` will not wait."""
        return all(group.copied is None or group.copied.query() for group in self._groups)

    def wait(self) -> None:
        """Wait until everything that the tensors are computed from is done."""
        for group in self._groups:
            if group.copied is not None:
                group.copied.synchronize()

    def values(self) -> list[float]:
        """The numbers, in the order of the tensors; waits for the device if need be. Call once.

        Raises:
            Exception: there is one that cannot be read.
        """
        values = [0.0] * self._size
        for group in self._groups:
            if group.copied is not None:
                group.copied.synchronize()
            if group.pinned is None:
                if group.tensors[0].is_cpu:  # a dozen times cheaper than to stack them
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
