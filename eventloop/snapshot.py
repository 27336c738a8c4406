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
        self._places: list[_Place] = []
        self._layout = Layout([], [])
        self._copied: list[torch.cuda.Event] = []

    def take(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Copy `state`; the result is overwritten by the next `take` or `pack`."""
        return self.pack(state).unpack()

    def pack(self, state: Mapping[str, Any]) -> Packed:
        """Copy `state`; the result can be sent to another process if the snapshot is shared."""
        sources: list[torch.Tensor] = []
        structure: dict[str, Any] = {}
        places: list[_Place] = []
        for key, value in state.items():
            first = len(sources)
            structure[key] = _strip(value, sources)
            places += [(key, t.dtype, t.shape, t.is_cuda) for t in sources[first:]]
        if places != self._places:
            self._layout, self._places = self._allocate(places), places
        if sources:
            with torch.no_grad():
                torch._foreach_copy_(self._layout.views, sources, non_blocking=True)
        self._copied = []
        for device in {source.device for source in sources if source.is_cuda}:
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(device))
            self._copied.append(event)
        return Packed(structure, self._layout)

    def wait(self) -> None:
        """Wait until the copies are there; not for the training thread."""
        for event in self._copied:
            event.synchronize()

    def _allocate(self, places: list[_Place]) -> Layout:
        """One buffer for each key, type and kind of memory, and a slot in it for each tensor."""
        groups = list(dict.fromkeys((key, dtype, pinned) for key, dtype, _, pinned in places))
        sizes = [0] * len(groups)
        slots = []
        for key, dtype, shape, pinned in places:
            group = groups.index((key, dtype, pinned))
            slots.append(Slot(group, sizes[group], tuple(shape)))
            sizes[group] += shape.numel()
        buffers = [
            Buffer(size, dtype, pinned=pinned, shared=self._shared)
            for size, (_, dtype, pinned) in zip(sizes, groups, strict=True)
        ]
        return Layout(slots, buffers)


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


class Layout:
    """Where the tensors of a state lie. It stays the same while their names, types and shapes do, so it is sent to
    another process once; pickled, its buffers stand for their memory."""

    def __init__(self, slots: list[Slot], buffers: list[Buffer]) -> None:
        self._slots, self._buffers = slots, buffers
        self.views = [slot.view(buffers) for slot in slots]

    def __reduce__(self) -> tuple[Any, ...]:
        return Layout, (self._slots, self._buffers)


class Ref(NamedTuple):
    """Stands for the tensor with this number in a layout."""

    number: int


class Packed(NamedTuple):
    """Nested state with a `Ref` for each tensor, and the layout that has them."""

    structure: dict[str, Any]
    layout: Layout

    def unpack(self) -> dict[str, Any]:
        """The state, its tensors views of the layout's buffers."""
        return {key: _restore(value, self.layout.views) for key, value in self.structure.items()}


_Place = tuple[str, torch.dtype, torch.Size, bool]
"""What decides which buffer a tensor goes to, and how much of it: its top-level key, type, shape, whether on CUDA."""
_ATOMS = frozenset({str, int, float, bool, type(None)})


def _strip(value: Any, tensors: list[torch.Tensor]) -> Any:
    """The same nesting with a `Ref` for each tensor, which is appended to `tensors`."""
    if type(value) in _ATOMS:
        return value
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        return Ref(len(tensors) - 1)
    if isinstance(value, Mapping):
        return {key: _strip(item, tensors) for key, item in value.items()}
    if isinstance(value, list | tuple):
        items = [_strip(item, tensors) for item in value]
        return items if isinstance(value, list) else tuple(items)
    return value


def _restore(value: Any, views: list[torch.Tensor]) -> Any:
    if type(value) in _ATOMS:
        return value
    if isinstance(value, Ref):
        return views[value.number]
    if isinstance(value, dict):
        return {key: _restore(item, views) for key, item in value.items()}
    if isinstance(value, list | tuple):
        items = [_restore(item, views) for item in value]
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
