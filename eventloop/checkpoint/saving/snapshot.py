"""Copying a training's state to the host without the training thread waiting for it."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Collection, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch

from eventloop.checkpoint.saving.buffers import Buffer
from eventloop.util.waiting import Latch


class ChangedWhileCopiedError(RuntimeError):
    """A tensor was changed while it was being copied: the copy is neither of what was before nor of what is now."""


class Snapshot:
    """A copy of nested state on the host, into buffers that are reused from one snapshot to the next.

    A fresh buffer costs seven times a reused one. The tensors under one top-level key share one buffer per type:
    torch writes a state three times faster when it need not write a storage for each tensor.

    What may change at any time is copied by `pack`, before it returns. What changes only in an optimizer's step may
    be copied later, beside the forward and backward pass that come first: on a CPU by whatever thread calls
    `Rest.copy`, from CUDA by a stream of its own, ordered after what the device has been given to do so far. On other
    accelerators everything is copied at once.

    Args:
        shared: put the buffers where another process can map them.
    """

    def __init__(self, *, shared: bool = False) -> None:
        self._shared = shared
        self._places: list[_Place] = []
        self._layout = Layout([], [])
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def take(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Copy `state`; the result is overwritten by the next `take` or `pack`."""
        return self.pack(state).unpack()

    def pack(self, state: Mapping[str, Any], later: Collection[int] = ()) -> Packed:
        """Copy `state`, but for what its `rest` is to copy; the result is overwritten by the next one.

        Args:
            later: the `data_ptr` of tensors that may be copied until somebody calls `Rest.join`.
        """
        sources: list[torch.Tensor] = []
        known: dict[int, int] = {}
        structure: dict[str, Any] = {}
        places: list[_Place] = []
        for key, value in state.items():
            first = len(sources)
            structure[key] = _strip(value, sources, known)
            places += [(key, t.dtype, t.shape, t.is_cuda) for t in sources[first:]]
        if places != self._places:
            with _first_device(sources):
                self._layout, self._places = self._allocate(places), places
        now, rest = _Pairs(), _Pairs()
        for source, view in zip(sources, self._layout.views, strict=True):
            late = source.data_ptr() in later and (source.is_cpu or source.is_cuda)
            (rest if late else now).append(source, view)
        now.copy()
        copied = [passed(torch.cuda.current_stream(device)) for device in now.devices()]
        return Packed(structure, self._layout, self._rest(rest, copied))

    def _rest(self, pairs: _Pairs, copied: list[torch.cuda.Event]) -> Rest:
        beside = []
        versions = _Versions(pairs.sources)
        for device in pairs.devices():
            if device not in self._streams:
                self._streams[device] = torch.cuda.Stream(device)
            stream = self._streams[device]
            stream.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.stream(stream):
                own = pairs.take(device)
                own.copy()
                for source in own.sources:
                    source.record_stream(stream)  # its memory is not to be given away before it is read
                beside.append((device, passed(stream)))
        return Rest(pairs, copied, beside, versions)

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


class _Pairs:
    """Tensors and where they are to be copied to."""

    def __init__(self) -> None:
        self.sources: list[torch.Tensor] = []
        self.views: list[torch.Tensor] = []

    def append(self, source: torch.Tensor, view: torch.Tensor) -> None:
        self.sources.append(source)
        self.views.append(view)

    def devices(self) -> set[torch.device]:
        """The CUDA devices among them."""
        return {source.device for source in self.sources if source.is_cuda}

    def take(self, device: torch.device) -> _Pairs:
        """Those of a device, which are no longer here."""
        taken, kept = _Pairs(), _Pairs()
        for source, view in zip(self.sources, self.views, strict=True):
            (taken if source.device == device else kept).append(source, view)
        self.sources, self.views = kept.sources, kept.views
        return taken

    def move(self) -> None:
        """Copy them, on a CPU, with this one thread: torch would take as many as it trains with, which are busy."""
        apart = _Pairs()
        for source, view in zip(self.sources, self.views, strict=True):
            if source.is_contiguous() and not source.is_conj() and not source.is_neg():
                ctypes.memmove(
                    view.data_ptr(), source.data_ptr(), source.nbytes
                )  # lets go of the interpreter
            else:
                apart.append(source, view)
        apart.copy()

    def copy(self) -> None:
        """Copy them; from CUDA on the current stream, without waiting, and from other accelerators with, for there no
        memory is pinned and no event recorded."""
        if self.sources:
            at_once = any(not (source.is_cpu or source.is_cuda) for source in self.sources)
            sources = [_resolved(source) if source.is_cuda else source for source in self.sources]
            with torch.no_grad():
                torch._foreach_copy_(self.views, sources, non_blocking=not at_once)


class _Versions:
    """Tells whether tensors were changed since; through `.data`, by another process or by a graph that a device
    replays, PyTorch does not count it."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        self._seen = [(tensor, tensor._version) for tensor in tensors]
        self._lock = threading.Lock()
        self._changed = 0

    def changed(self) -> int:
        """How many were, by the first time that somebody asks: afterwards they may be. Who asks meanwhile waits."""
        with self._lock:
            seen, self._seen = self._seen, []
            self._changed += sum(tensor._version != version for tensor, version in seen)
            return self._changed


class Rest:
    """What of a snapshot is still being copied.

    Any thread may call `copy`, once; the thread that trains calls `join` before it changes what is copied.
    """

    def __init__(
        self,
        pairs: _Pairs,
        copied: list[torch.cuda.Event],
        beside: list[tuple[torch.device, torch.cuda.Event]],
        versions: _Versions,
    ) -> None:
        self._pairs, self._beside, self._versions = pairs, beside, versions
        self._events = [*copied, *(event for _, event in beside)]
        self._done = Latch()
        if not pairs.sources:
            self._done.set()

    @property
    def left(self) -> bool:
        """True when there is something for `copy` to do."""
        return not self._done.is_set()

    def copy(self) -> None:
        """Copy what is left of it on the CPU.

        Raises:
            ChangedWhileCopiedError: somebody changed a tensor without `join`, so the copy is of no use.
        """
        try:
            self._pairs.move()
            changed = self._versions.changed()
        finally:
            self._pairs = _Pairs()
            self._done.set()
        _refuse(changed)

    def join(self) -> None:
        """Return once what is copied may be changed: on a CPU now, on a device by what it is given from now on."""
        self._done.wait()
        self._versions.changed()  # so far; from here on they may be
        for device, event in self._beside:
            torch.cuda.current_stream(device).wait_event(event)

    def wait(self) -> None:
        """Wait until all of the snapshot is there; not for the training thread.

        Raises:
            ChangedWhileCopiedError: as `copy` does, of what a device copied.
        """
        self._done.wait()
        for event in self._events:
            event.synchronize()
        _refuse(self._versions.changed())


def _refuse(changed: int) -> None:
    if changed:
        raise ChangedWhileCopiedError(
            f"{changed} tensors of the parameters or of the optimizer's state were changed while they were "
            "copied, by something else than the optimizer's step: change them in a handler before the "
            "checkpoint's, or use CheckpointHook(overlap=False)"
        )


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
        self.shared = all(buffer.shared for buffer in buffers)
        """Another process can see them."""

    def __reduce__(self) -> tuple[Any, ...]:
        return Layout, (self._slots, self._buffers)


class Ref(NamedTuple):
    """Stands for the tensor with this number in a layout."""

    number: int


class Packed(NamedTuple):
    """Nested state with a `Ref` for each tensor but the sparse ones, which are copies in it; the layout that has them,
    and what of them is still to come."""

    structure: dict[str, Any]
    layout: Layout
    rest: Rest | None = None

    def unpack(self) -> dict[str, Any]:
        """The state, its tensors views of the layout's buffers."""
        return {key: _restore(value, self.layout.views) for key, value in self.structure.items()}


def passed(stream: torch.cuda.Stream) -> torch.cuda.Event:
    """An event behind what a stream has so far. Who waits for it sleeps; for one of CUDA's default kind it would keep
    a CPU busy that the training wants."""
    event = torch.cuda.Event(blocking=True)
    event.record(stream)
    return event


def _first_device(tensors: Iterable[torch.Tensor]) -> AbstractContextManager[Any]:
    """What is pinned is pinned on a device the state is on: on the current one it might take a context, hundreds of
    MB, where the training has nothing."""
    first = next((tensor for tensor in tensors if tensor.is_cuda), None)
    return nullcontext() if first is None else torch.cuda.device_of(first)


def _resolved(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, with what is conjugated or negated only by a flag made so: a copy to the host that nobody waits for
    applies the flag before the numbers are there (PyTorch's issue 146286)."""
    return tensor.resolve_conj().resolve_neg() if tensor.is_conj() or tensor.is_neg() else tensor


_Place = tuple[str, torch.dtype, torch.Size, bool]
"""What decides which buffer a tensor goes to, and how much of it: its top-level key, type, shape, whether on CUDA."""
_ATOMS = frozenset({str, int, float, bool, type(None)})


def _strip(value: Any, tensors: list[torch.Tensor], known: dict[int, int]) -> Any:
    """The same nesting with a `Ref` for each tensor, which is appended to `tensors`, tied ones once; a copy of each that
    does not fit a slot of a buffer.

    Args:
        known: the first of `tensors` at each `data_ptr`.
    """
    if type(value) in _ATOMS:
        return value
    if isinstance(value, torch.Tensor):
        if value.layout is not torch.strided or value.is_quantized or value.is_meta or value.is_nested:
            copy = value.detach().clone()
            return copy if value.is_meta else copy.cpu()
        number = known.setdefault(value.data_ptr(), len(tensors))
        if number < len(tensors) and _is_same(tensors[number], value):
            return Ref(number)
        tensors.append(value)
        return Ref(len(tensors) - 1)
    if isinstance(value, Mapping):
        return {key: _strip(item, tensors, known) for key, item in value.items()}
    if isinstance(value, list | tuple):
        items = [_strip(item, tensors, known) for item in value]
        return items if isinstance(value, list) else tuple(items)
    if isinstance(value, set):
        return set(value)  # what is in it cannot change, which of them are can
    return value


def _is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two that begin at one place are the same elements."""
    return (
        (one.dtype, one.shape, one.stride()) == (other.dtype, other.shape, other.stride())
        and one.device == other.device
        and (one.is_conj(), one.is_neg()) == (other.is_conj(), other.is_neg())
    )


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
