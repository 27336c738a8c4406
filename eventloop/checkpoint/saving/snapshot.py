"""Copy a training's state to host memory, partly without blocking the training thread.

The saver uses it. The copy may be read only after `Rest.wait`, which returns when it is complete.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Collection, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch

from eventloop.checkpoint.saving.buffers import Buffer
from eventloop.costs.waits import waiting
from eventloop.processes.shared_memory import Mapped
from eventloop.state.containers import MAPPINGS, SEQUENCES
from eventloop.util.waiting import Latch


class ChangedWhileCopiedError(RuntimeError):
    """A tensor was changed while it was being copied, so the copy mixes old and new values."""


_NONE: Mapping[int, torch.Tensor] = {}


class Snapshot:
    """A set of host buffers into which nested states are copied, one after the other.

    A fresh buffer costs seven times as much as a reused one. The tensors under one top-level key share one
    buffer for each type, because torch writes a state three times faster if tensors share a storage.

    `pack` copies all values that may change at any time before it returns. Values that change only in an
    optimizer's step may be copied later, during the next forward and backward pass: CPU tensors by the thread
    that calls `Rest.copy`, CUDA tensors on a separate stream, after the work queued on the device so far. On
    other accelerators everything is copied at once.

    Args:
        shared: allocate the buffers in memory that another process can map.
    """

    def __init__(self, *, shared: bool = False) -> None:
        self.shared = shared
        self._specs: list[_Spec] = []
        self._layout = Layout([], [])
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def pack(
        self,
        state: Mapping[str, Any],
        later: Collection[int] = (),
        watched: Mapping[int, torch.Tensor] = _NONE,
    ) -> Packed:
        """Copy a state, except the tensors that `Packed.rest` copies later.

        The next `pack` overwrites the result.

        Args:
            state: nested mappings, lists and tuples with tensors.
            later: the `data_ptr` of tensors that do not change before `Rest.join` is called.
            watched: by the `id` of a tensor, another one whose version counts changes, too: an optimizer's
                step raises the version of a DTensor, and not that of its local tensor.
        """
        sources: list[torch.Tensor] = []
        known: dict[int, int] = {}
        structure: dict[str, Any] = {}
        specs: list[_Spec] = []
        for key, value in state.items():
            first = len(sources)
            structure[key] = _strip(value, sources, known)
            specs += [(key, t.dtype, t.shape, t.is_cuda) for t in sources[first:]]
        if specs != self._specs:
            with _first_device(sources):
                self._layout, self._specs = self._allocate(specs), specs
        now, rest = _Pairs(), _Pairs()
        for source, view in zip(sources, self._layout.views, strict=True):
            late = source.data_ptr() in later and (source.is_cpu or source.is_cuda)
            (rest if late else now).append(source, view)
        now.copy()
        copied = [event_after(torch.cuda.current_stream(device)) for device in now.devices()]
        return Packed(structure, self._layout, self._rest(rest, copied, watched))

    def _rest(
        self, pairs: _Pairs, copied: list[torch.cuda.Event], watched: Mapping[int, torch.Tensor]
    ) -> Rest:
        streamed = []
        also = (watched[id(source)] for source in pairs.sources if id(source) in watched)
        versions = _Versions([*pairs.sources, *also])
        for device in pairs.devices():
            if device not in self._streams:
                self._streams[device] = torch.cuda.Stream(device)
            stream = self._streams[device]
            stream.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.stream(stream):
                own = pairs.pop_device(device)
                own.copy()
                for source in own.sources:
                    source.record_stream(stream)  # the allocator must not reuse its memory before it is read
                streamed.append((device, event_after(stream)))
        return Rest(pairs, copied, streamed, versions)

    def _allocate(self, specs: list[_Spec]) -> Layout:
        """Allocate a buffer for each key, type and kind of memory, with a view for each tensor."""
        sizes: dict[tuple[str, torch.dtype, bool], int] = {}
        places = []
        for key, dtype, shape, pinned in specs:
            group = key, dtype, pinned
            start = sizes.get(group, 0)
            sizes[group] = start + shape.numel()
            places.append((group, slice(start, sizes[group]), shape))
        buffers = {
            group: Buffer(size, group[1], pinned=group[2], shared=self.shared)
            for group, size in sizes.items()
        }
        views = [buffers[group].tensor[place].view(shape) for group, place, shape in places]
        return Layout(views, [*buffers.values()])


class _Pairs:
    """Tensors, each paired with the view of a buffer into which it is copied."""

    def __init__(self) -> None:
        self.sources: list[torch.Tensor] = []
        self.views: list[torch.Tensor] = []

    def append(self, source: torch.Tensor, view: torch.Tensor) -> None:
        self.sources.append(source)
        self.views.append(view)

    def devices(self) -> set[torch.device]:
        """Return the CUDA devices of the tensors."""
        return {source.device for source in self.sources if source.is_cuda}

    def pop_device(self, device: torch.device) -> _Pairs:
        """Remove the pairs whose tensor is on `device`, and return them."""
        taken, kept = _Pairs(), _Pairs()
        for source, view in zip(self.sources, self.views, strict=True):
            (taken if source.device == device else kept).append(source, view)
        self.sources, self.views = kept.sources, kept.views
        return taken

    def move(self) -> None:
        """Copy CPU tensors on the calling thread only, as torch's threads are busy with the training."""
        apart = _Pairs()
        for source, view in zip(self.sources, self.views, strict=True):
            if source.is_contiguous() and not source.is_conj() and not source.is_neg():
                ctypes.memmove(view.data_ptr(), source.data_ptr(), source.nbytes)  # releases the GIL
            else:
                apart.append(source, view)
        apart.copy()

    def copy(self) -> None:
        """Copy all pairs, CUDA tensors asynchronously on the current stream.

        From other accelerators the copy is synchronous, because no memory is pinned and no event is recorded
        for them.
        """
        if self.sources:
            at_once = any(not (source.is_cpu or source.is_cuda) for source in self.sources)
            sources = [_resolved(source) if source.is_cuda else source for source in self.sources]
            with torch.no_grad():
                torch._foreach_copy_(self.views, sources, non_blocking=not at_once)


class _Versions:
    """The version counters of tensors, which show whether the tensors have been changed in the meantime.

    PyTorch does not count changes through `.data`, by another process, or by a replayed CUDA graph.
    """

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        self._seen = [(tensor, tensor._version) for tensor in tensors]
        self._lock = threading.Lock()
        self._changed = 0

    def changed(self) -> int:
        """Return the number of tensors that had changed at the first call; later changes do not count."""
        with self._lock:
            seen, self._seen = self._seen, []
            self._changed += sum(tensor._version != version for tensor, version in seen)
            return self._changed


class Rest:
    """The part of a snapshot that is copied after `Snapshot.pack` has returned.

    Any thread may call `copy`, once. The training thread calls `join` before it changes the tensors.
    """

    def __init__(
        self,
        pairs: _Pairs,
        copied: list[torch.cuda.Event],
        streamed: list[tuple[torch.device, torch.cuda.Event]],
        versions: _Versions,
    ) -> None:
        self._pairs, self._streamed, self._versions = pairs, streamed, versions
        self._events = [*copied, *(event for _, event in streamed)]
        self._done = Latch()
        if not pairs.sources:
            self._done.set()

    @property
    def unfinished(self) -> bool:
        """Return whether CPU tensors are left for `copy`."""
        return not self._done.is_set()

    def copy(self) -> None:
        """Copy the CPU tensors.

        Raises:
            ChangedWhileCopiedError: a tensor was changed before `join`, so the copy cannot be used.
        """
        try:
            self._pairs.move()
            changed = self._versions.changed()
        finally:
            self._pairs = _Pairs()
            self._done.set()
        _refuse(changed)

    def join(self) -> None:
        """Wait until the training thread may change the tensors.

        It waits for the copies of CPU tensors. It does not wait for tensors on a CUDA device, because work
        that is queued on the device later begins after the copies.
        """
        with nullcontext() if self._done.is_set() else waiting("checkpoint", "the copy of the state"):
            self._done.wait()
        self._versions.changed()  # counts the changes so far; later ones are allowed
        for device, event in self._streamed:
            torch.cuda.current_stream(device).wait_event(event)

    def wait(self) -> None:
        """Wait until the whole snapshot is copied; never called on the training thread.

        Raises:
            ChangedWhileCopiedError: a tensor was changed before `join`, so the copy cannot be used.
        """
        self._done.wait()
        for event in self._events:
            event.synchronize()
        _refuse(self._versions.changed())


def _refuse(changed: int) -> None:
    if changed:
        raise ChangedWhileCopiedError(
            f"{changed} tensors of the parameters or of the optimizer's state were changed while they were "
            "copied, by something else than the optimizer's step: change them in a handler that runs before "
            "CheckpointHook, or use CheckpointHook(overlap=False)"
        )


class Layout:
    """The buffers of a state, and a view of a buffer for each of its tensors.

    A snapshot keeps its layout while the types and shapes of the tensors do not change.

    Attributes:
        views: the tensors, as views of the buffers.
        rebuilt: the result of each view's `__reduce_ex__`, by `id`; torch takes 20 us for each call.
    """

    def __init__(self, views: list[torch.Tensor], buffers: list[Buffer]) -> None:
        self.views, self._buffers = views, buffers
        self.rebuilt = {id(view): view.__reduce_ex__(2) for view in views}

    def memory(self) -> dict[int, Mapped]:
        """Return the description by which another process maps a shared buffer, for each one's address."""
        found = ((buffer.tensor.data_ptr(), buffer.memory) for buffer in self._buffers if buffer.size)
        return {address: memory for address, memory in found if memory is not None}

    @property
    def shared(self) -> bool:
        """Return whether another process can map all buffers."""
        return all(buffer.shared for buffer in self._buffers)


class Ref(NamedTuple):
    """A placeholder for the tensor that has this number in a layout."""

    number: int


class Packed(NamedTuple):
    """A copied state.

    Attributes:
        structure: the nested state, with a `Ref` in place of each tensor in the layout. It also holds copies
            of tensors that do not fit into a buffer, such as sparse ones.
        layout: the buffers that hold the tensors, and their views.
        rest: the tensors that are copied after `Snapshot.pack` has returned.
    """

    structure: dict[str, Any]
    layout: Layout
    rest: Rest

    def unpack(self) -> dict[str, Any]:
        """Return the state, with tensors that are views of the layout's buffers."""
        return {key: _restore(value, self.layout.views) for key, value in self.structure.items()}


def event_after(stream: torch.cuda.Stream) -> torch.cuda.Event:
    """Record an event after all work that is queued on a stream so far, and return it.

    A thread that waits for it sleeps. An event of CUDA's default kind would keep a CPU of the training busy
    instead.
    """
    event = torch.cuda.Event(blocking=True)
    event.record(stream)
    return event


def _first_device(tensors: Iterable[torch.Tensor]) -> AbstractContextManager[Any]:
    """Return a context in which memory is pinned on the first CUDA device of the tensors.

    On another device, pinning might create a CUDA context of hundreds of MB that the training does not need.
    """
    first = next((tensor for tensor in tensors if tensor.is_cuda), None)
    return nullcontext() if first is None else torch.cuda.device_of(first)


def _resolved(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor without conjugate or negative flags.

    An asynchronous copy to the host would apply such a flag before the numbers have arrived (PyTorch's issue
    146286).
    """
    return tensor.resolve_conj().resolve_neg() if tensor.is_conj() or tensor.is_neg() else tensor


_Spec = tuple[str, torch.dtype, torch.Size, bool]
"""The top-level key, type and shape of a tensor, and whether it is on CUDA, which determine its buffer."""
_ATOMS = frozenset({str, int, float, bool, type(None)})


def _strip(value: Any, tensors: list[torch.Tensor], known: dict[int, int]) -> Any:
    """Return a nested state with a `Ref` in place of each tensor, and append the tensors to `tensors`.

    Tied tensors are appended once. A tensor that does not fit into a buffer is replaced by a copy.

    Args:
        value: the nested state.
        tensors: gets the tensors.
        known: the number of the first of `tensors` at each `data_ptr`.
    """
    if isinstance(value, torch.Tensor):
        if value.layout is not torch.strided or value.is_quantized or value.is_meta or value.is_nested:
            copy = value.detach().clone()
            return copy if value.is_meta else copy.cpu()
        number = known.setdefault(value.data_ptr(), len(tensors))
        if number < len(tensors) and _is_same(tensors[number], value):
            return Ref(number)
        tensors.append(value)
        return Ref(len(tensors) - 1)
    if isinstance(value, MAPPINGS):
        return {
            key: item if type(item) in _ATOMS else _strip(item, tensors, known) for key, item in value.items()
        }
    if isinstance(value, SEQUENCES):
        items = [item if type(item) in _ATOMS else _strip(item, tensors, known) for item in value]
        return items if isinstance(value, list) else tuple(items)
    if isinstance(value, set):
        return set(value)  # the set may change, its elements cannot
    return value


def _is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors with the same first element share all their elements."""
    return (
        (one.dtype, one.shape, one.stride()) == (other.dtype, other.shape, other.stride())
        and one.device == other.device
        and (one.is_conj(), one.is_neg()) == (other.is_conj(), other.is_neg())
    )


def _restore(value: Any, views: list[torch.Tensor]) -> Any:
    if isinstance(value, Ref):
        return views[value.number]
    if isinstance(value, dict):
        return {key: item if type(item) in _ATOMS else _restore(item, views) for key, item in value.items()}
    if isinstance(value, list | tuple):
        items = [item if type(item) in _ATOMS else _restore(item, views) for item in value]
        return items if isinstance(value, list) else tuple(items)
    return value
