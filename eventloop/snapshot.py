"""Copying a training's state to the host without the training thread waiting for it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch


class Snapshot:
    """A copy of nested state on the host, into buffers that are reused from one snapshot to the next.

    A fresh buffer costs seven times a reused one. The tensors under one top-level key share one buffer per type:
    torch writes a state three times faster when it need not write a storage for each tensor. From CUDA the copies
    go to pinned memory on the current stream: `take` returns at once, the state may be changed by later kernels,
    and `wait` is for the thread that writes.

    Args:
        shared: put the buffers where another process can map them; not for states on CUDA devices.
    """

    def __init__(self, *, shared: bool = False) -> None:
        self._shared = shared
        self._layout: list[_Place] = []
        self._buffers: list[Buffer] = []
        self._slots: list[Slot] = []
        self._views: list[torch.Tensor] = []
        self._copied: list[torch.cuda.Event] = []

    def take(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Copy `state`; the result is overwritten by the next `take` or `pack`."""
        return self.pack(state).unpack()

    def pack(self, state: Mapping[str, Any]) -> Packed:
        """Copy `state`; the result can be sent to another process if the snapshot is shared."""
        sources: list[torch.Tensor] = []
        layout: list[_Place] = []
        for key, value in state.items():
            found = list(tensors_of(value))
            sources += found
            layout += [_Place(key, t.dtype, t.shape, t.is_cuda) for t in found]
        if layout != self._layout:
            self._allocate(layout)
        if sources:
            with torch.no_grad():
                torch._foreach_copy_(self._views, sources, non_blocking=True)
        self._copied = []
        for device in {source.device for source in sources if source.is_cuda}:
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(device))
            self._copied.append(event)
        slots = iter(self._slots)
        return Packed({key: _replace(value, slots) for key, value in state.items()}, self._buffers)

    def wait(self) -> None:
        """Wait until the copies are there; not for the training thread."""
        for event in self._copied:
            event.synchronize()

    def _allocate(self, layout: list[_Place]) -> None:
        """One buffer for each key, type and kind of memory, and a place in it for each tensor."""
        groups = list(dict.fromkeys((place.key, place.dtype, place.pinned) for place in layout))
        sizes = [0] * len(groups)
        self._slots = []
        for place in layout:
            group = groups.index((place.key, place.dtype, place.pinned))
            self._slots.append(Slot(group, sizes[group], tuple(place.shape)))
            sizes[group] += place.shape.numel()
        self._buffers = [
            Buffer(size, dtype, pinned=pinned, shared=self._shared)
            for size, (_, dtype, pinned) in zip(sizes, groups, strict=True)
        ]
        self._views = [slot.view(self._buffers) for slot in self._slots]
        self._layout = layout


class Buffer:
    """Flat memory for `size` elements. Pickled, a shared one stands for its memory, not for its contents."""

    def __init__(self, size: int, dtype: torch.dtype, *, pinned: bool = False, shared: bool = False) -> None:
        self.size, self.dtype = size, dtype
        self._file: int | None = None
        if shared and size:
            # memory without a name: it is gone when both processes are, however they end
            self._file = os.memfd_create("eventloop snapshot")
            os.truncate(self._file, size * torch.empty((), dtype=dtype).element_size())
            self.tensor = _map(f"/proc/self/fd/{self._file}", size, dtype)
        else:
            self.tensor = torch.empty(size, dtype=dtype, pin_memory=pinned)

    def __reduce__(self) -> tuple[Any, ...]:
        if self._file is None:
            return Buffer, (self.size, self.dtype)
        return mapped, (f"/proc/{os.getpid()}/fd/{self._file}", self.size, self.dtype)

    def __del__(self) -> None:
        if getattr(self, "_file", None) is not None:
            os.close(self._file)  # type: ignore[arg-type]


def mapped(path: str, size: int, dtype: torch.dtype) -> Buffer:
    """The buffer of another process."""
    buffer = Buffer(0, dtype)
    buffer.tensor = _map(path, size, dtype)
    return buffer


def _map(path: str, size: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.from_file(path, shared=True, size=size, dtype=dtype)


class Slot(NamedTuple):
    """Where a tensor lies: which buffer, from which element on, in which shape."""

    buffer: int
    offset: int
    shape: tuple[int, ...]

    def view(self, buffers: list[Buffer]) -> torch.Tensor:
        """The tensor there."""
        size = torch.Size(self.shape).numel()
        return buffers[self.buffer].tensor[self.offset : self.offset + size].view(self.shape)


class Packed(NamedTuple):
    """Nested state with a `Slot` for each tensor, and the buffers the slots are of."""

    structure: dict[str, Any]
    buffers: list[Buffer]

    def unpack(self) -> dict[str, Any]:
        """The state, its tensors views of the buffers."""
        return {key: _restore(value, self.buffers) for key, value in self.structure.items()}


class _Place(NamedTuple):
    """What decides which buffer a tensor goes to, and how much of it."""

    key: str
    dtype: torch.dtype
    shape: torch.Size
    pinned: bool


def _replace(value: Any, slots: Iterator[Slot]) -> Any:
    """The same nesting with the next slot for each tensor; the order is that of `tensors_of`."""
    if isinstance(value, torch.Tensor):
        return next(slots)
    if isinstance(value, Mapping):
        return {key: _replace(item, slots) for key, item in value.items()}
    if isinstance(value, list | tuple):
        items = [_replace(item, slots) for item in value]
        return items if isinstance(value, list) else tuple(items)
    return value


def _restore(value: Any, buffers: list[Buffer]) -> Any:
    if isinstance(value, Slot):
        return value.view(buffers)
    if isinstance(value, dict):
        return {key: _restore(item, buffers) for key, item in value.items()}
    if isinstance(value, list | tuple):
        items = [_restore(item, buffers) for item in value]
        return items if isinstance(value, list) else tuple(items)
    return value


def tensors_of(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in nested mappings, lists and tuples, in order."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_of(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_of(item)
