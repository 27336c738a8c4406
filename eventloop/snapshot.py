"""Copying a training's state to the host without the training thread waiting for it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch


class Snapshot:
    """A copy of nested state on the host, into buffers that are reused from one snapshot to the next.

    A fresh buffer costs seven times a reused one. The tensors under one top-level key share one buffer per type:
    torch writes a state three times faster when it need not write a storage for each tensor. From CUDA the copies
    go to pinned memory on the current stream: `take` returns at once, the state may be changed by later kernels,
    and `wait` is for the thread that writes.
    """

    def __init__(self) -> None:
        self._layout: list[_Place] = []
        self._views: list[torch.Tensor] = []
        self._copied: list[torch.cuda.Event] = []

    def take(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Copy `state`; the result is overwritten by the next `take`."""
        sources: list[torch.Tensor] = []
        layout: list[_Place] = []
        for key, value in state.items():
            found = list(tensors_of(value))
            sources += found
            layout += [_Place(key, t.dtype, t.shape, t.is_cuda) for t in found]
        if layout != self._layout:
            self._layout, self._views = layout, _allocate(layout)
        if sources:
            with torch.no_grad():
                torch._foreach_copy_(self._views, sources, non_blocking=True)
        self._copied = []
        for device in {source.device for source in sources if source.is_cuda}:
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(device))
            self._copied.append(event)
        views = iter(self._views)
        return {key: _rebuild(value, views) for key, value in state.items()}

    def wait(self) -> None:
        """Wait until the copies are there; not for the training thread."""
        for event in self._copied:
            event.synchronize()


class _Place(NamedTuple):
    """Which buffer a tensor goes to, and what it needs there."""

    key: str
    dtype: torch.dtype
    shape: torch.Size
    pinned: bool


def _allocate(layout: list[_Place]) -> list[torch.Tensor]:
    """One buffer for each key, type and kind of memory, and a view into it for each tensor."""
    sizes: dict[tuple[str, torch.dtype, bool], int] = {}
    offsets = []
    for place in layout:
        group = (place.key, place.dtype, place.pinned)
        offsets.append(sizes.get(group, 0))
        sizes[group] = offsets[-1] + place.shape.numel()
    buffers = {group: torch.empty(size, dtype=group[1], pin_memory=group[2]) for group, size in sizes.items()}
    return [
        buffers[place.key, place.dtype, place.pinned][offset : offset + place.shape.numel()].view(place.shape)
        for place, offset in zip(layout, offsets, strict=True)
    ]


def _rebuild(value: Any, tensors: Iterator[torch.Tensor]) -> Any:
    """The same nesting with the next tensor in place of each; the order is that of `tensors_of`."""
    if isinstance(value, torch.Tensor):
        return next(tensors)
    if isinstance(value, Mapping):
        return {key: _rebuild(item, tensors) for key, item in value.items()}
    if isinstance(value, list | tuple):
        items = [_rebuild(item, tensors) for item in value]
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
