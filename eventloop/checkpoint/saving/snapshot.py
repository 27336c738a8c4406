"""Copy a training's state to host memory, partly without blocking the training thread.

The saver uses it.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Collection, Iterable, Mapping
from contextlib import nullcontext
from typing import Any

import torch

from eventloop.checkpoint.saving.buffers import Buffers, Spec
from eventloop.costs.waits import waiting
from eventloop.state.tensors import bytes_of, tensors_of, with_tensors
from eventloop.util.waiting import Latch


class ChangedWhileCopiedError(RuntimeError):
    """A tensor was changed while it was being copied, so the copy mixes old and new values."""


_NONE: Mapping[int, torch.Tensor] = {}
_Pair = tuple[torch.Tensor, torch.Tensor]
"""A source, which is a tensor of the training, and the view of a buffer into which it is copied."""


class Snapshot:
    """The copy of a state at one moment, in nested dicts, lists and tuples.

    `begin` copies all values that may change at any time before it returns. Values that change only in an
    optimizer's step may be copied later, during the next forward and backward pass: CPU tensors by the thread
    that calls `copy`, once, and CUDA tensors on a separate stream, after the work queued on the device so
    far. On other accelerators everything is copied at once. The training thread calls `join` before it
    changes the tensors.

    Args:
        source: the state: nested mappings, lists and tuples with tensors. The tensors may change later, the
            mappings, lists and tuples must not, because `wait` copies them. It also frees the state: Python's
            lock is released for each tensor that is freed, so if the training thread freed them, it would
            wait for the thread that copies, often for a time slice.

    Attributes:
        size: the bytes of the tensors.
    """

    def __init__(self, source: Mapping[str, Any]) -> None:
        self._source = source
        self._tensors = {key: tensors_of(value) for key, value in source.items()}
        self.size = sum(map(bytes_of, self._tensors.values()))
        self._views: list[torch.Tensor] = []
        self._copies: dict[int, int | torch.Tensor] = {}
        """By the `id` of each tensor of the state, the index of its view or its copy; see `_distinct`."""
        self._late: list[_Pair] = []  # CPU tensors that `copy` copies
        self._streamed: list[tuple[torch.device, torch.cuda.Event]] = []
        """The end of the copies on each device's stream for copies, for which `join` lets the device wait."""
        self._events: list[torch.cuda.Event] = []  # the ends of all asynchronous copies
        self._versions: list[tuple[torch.Tensor, int]] = []
        """The tensors that must not change before `join`, each with its version count in `begin`."""
        self._changed = 0  # the number of these tensors that did change
        self._lock = threading.Lock()  # for `_versions` and `_changed`
        self._done = Latch()  # set once all CPU tensors are copied, or cannot be

    def begin(
        self,
        buffers: Buffers,
        later: Collection[int] = (),
        watched: Mapping[int, torch.Tensor] = _NONE,
    ) -> None:
        """Copy the state into buffers, except the CPU tensors that `copy` copies.

        The next snapshot that begins to use the buffers overwrites the copy.

        Args:
            buffers: the memory for the copy.
            later: the `data_ptr` of tensors that do not change before `join` is called.
            watched: by the `id` of a tensor of the state, another tensor whose changes count as its own: an
                optimizer's step raises the version count of a DTensor, but not that of its local tensor.
        """
        sources, specs, copies = self._distinct()
        views = buffers.views(specs, sources)
        now: list[_Pair] = []
        late: list[_Pair] = []
        beside: dict[torch.device, list[_Pair]] = {}  # by device, for its stream for copies
        for source, view in zip(sources, views, strict=True):
            if source.data_ptr() not in later or not (source.is_cpu or source.is_cuda):
                now.append((source, view))
            elif source.is_cuda:
                beside.setdefault(source.device, []).append((source, view))
            else:
                late.append((source, view))
        _copy(now)
        self._views, self._copies = views, copies
        devices = {source.device for source, _ in now if source.is_cuda}
        self._events = [event_after(torch.cuda.current_stream(device)) for device in devices]
        changing = [source for pairs in (late, *beside.values()) for source, _ in pairs]
        changing += [watched[id(source)] for source in changing if id(source) in watched]
        self._versions = [(tensor, tensor._version) for tensor in changing]
        for device, pairs in beside.items():
            self._copy_beside(device, pairs, buffers)
        self._late = late
        self._tensors = {}  # only now: after an error the saver begins again, in memory that is not shared
        if not late:
            self._done.set()

    def _distinct(self) -> tuple[list[torch.Tensor], list[Spec], dict[int, int | torch.Tensor]]:
        """Find the tensors to copy into buffers; tensors that share all their memory count once.

        A tensor that does not fit into a buffer, such as a sparse one, is copied here.

        Returns:
            The tensors, the spec of each, and by the `id` of each tensor of the state either its index in
            the first two lists or its own copy.
        """
        sources: list[torch.Tensor] = []
        specs: list[Spec] = []
        copies: dict[int, int | torch.Tensor] = {}
        first_at: dict[int, int] = {}  # by address, the index of the first tensor there
        for key, tensors in self._tensors.items():
            for tensor in tensors:
                is_special = tensor.is_quantized or tensor.is_meta or tensor.is_nested
                if is_special or tensor.layout is not torch.strided:
                    copy = tensor.detach().clone()
                    copies[id(tensor)] = copy if tensor.is_meta else copy.cpu()
                    continue
                index = first_at.setdefault(tensor.data_ptr(), len(sources))
                if index == len(sources) or not _is_same(sources[index], tensor):
                    index = len(sources)
                    sources.append(tensor)
                    specs.append((key, tensor.dtype, tensor.shape, tensor.is_cuda))
                copies[id(tensor)] = index
        return sources, specs, copies

    def _copy_beside(self, device: torch.device, pairs: list[_Pair], buffers: Buffers) -> None:
        """Copy tensors of a CUDA device on its stream for copies, after the work queued on it so far."""
        stream = buffers.streams.get(device) or torch.cuda.Stream(device)
        buffers.streams[device] = stream
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            _copy(pairs)
            for source, _ in pairs:
                source.record_stream(stream)  # the allocator must not reuse its memory before it is read
            event = event_after(stream)
        self._streamed.append((device, event))
        self._events.append(event)

    @property
    def unfinished(self) -> bool:
        """Return whether CPU tensors are left for `copy`."""
        return not self._done.is_set()

    def copy(self) -> None:
        """Copy the CPU tensors that are left.

        `memmove` uses the calling thread only: the threads of PyTorch's own copy are busy with the training.
        """
        try:
            irregular = []  # tensors that `memmove` cannot copy
            for source, view in self._late:
                if source.is_contiguous() and not source.is_conj() and not source.is_neg():
                    ctypes.memmove(view.data_ptr(), source.data_ptr(), source.nbytes)  # releases the GIL
                else:
                    irregular.append((source, view))
            _copy(irregular)
            self._count_changes()
        finally:
            self._late = []
            self._done.set()

    def join(self) -> None:
        """Wait until the training thread may change the tensors.

        It waits for the copies of CPU tensors. It does not wait for tensors on a CUDA device, because work
        that is queued on the device later begins after the copies.
        """
        with waiting("checkpoint", "the copy of the state") if self.unfinished else nullcontext():
            self._done.wait()
        self._count_changes()  # later changes are allowed
        for device, event in self._streamed:
            torch.cuda.current_stream(device).wait_event(event)

    def wait(self) -> dict[str, Any]:
        """Wait until the whole state is copied, and return the copy; free the state.

        Called once, and never on the training thread. The tensors of the copy are views of the buffers that
        `begin` was given, except those that do not fit into a buffer, such as sparse ones.

        Raises:
            ChangedWhileCopiedError: a tensor was changed before `join`, so the copy cannot be used.
        """
        self._done.wait()
        copy: dict[str, Any] = with_tensors(self._source, self._copy_of)
        self._source, self._copies = {}, {}
        for event in self._events:
            event.synchronize()
        self._count_changes()
        if self._changed:
            raise ChangedWhileCopiedError(
                f"{self._changed} tensors of the parameters or of the optimizer's state were changed while "
                "they were copied, by something else than the optimizer's step: change them in a handler "
                "that runs before CheckpointHook, or use CheckpointHook(overlap=False)"
            )
        return copy

    def _copy_of(self, tensor: torch.Tensor) -> torch.Tensor:
        copy = self._copies[id(tensor)]
        return self._views[copy] if isinstance(copy, int) else copy

    def _count_changes(self) -> None:
        """Count the tensors that have changed since `begin`; only the first call counts.

        PyTorch's version count misses changes through `.data`, by another process, or by a replayed CUDA
        graph.
        """
        with self._lock:
            versions, self._versions = self._versions, []
            self._changed += sum(tensor._version != version for tensor, version in versions)


def event_after(stream: torch.cuda.Stream) -> torch.cuda.Event:
    """Record an event after all work that is queued on a stream so far, and return it.

    A thread that waits for it sleeps. An event of CUDA's default kind would keep a CPU of the training busy
    instead.
    """
    event = torch.cuda.Event(blocking=True)
    event.record(stream)
    return event


def _copy(pairs: Iterable[_Pair]) -> None:
    """Copy tensors into their views, CUDA tensors asynchronously on the current stream.

    From other accelerators the copy is synchronous, because no memory is pinned and no event is recorded for
    them.
    """
    sources, views, waits = [], [], False
    for source, view in pairs:
        waits = waits or not (source.is_cpu or source.is_cuda)
        sources.append(_resolved(source) if source.is_cuda else source)
        views.append(view)
    if sources:
        with torch.no_grad():
            torch._foreach_copy_(views, sources, non_blocking=not waits)


def _resolved(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor without conjugate or negative flags.

    An asynchronous copy to the host would apply such a flag before the numbers have arrived (PyTorch's issue
    146286).
    """
    return tensor.resolve_conj().resolve_neg() if tensor.is_conj() or tensor.is_neg() else tensor


def _is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors with the same first element share all their elements."""
    return (
        (one.dtype, one.shape, one.stride()) == (other.dtype, other.shape, other.stride())
        and one.device == other.device
        and (one.is_conj(), one.is_neg()) == (other.is_conj(), other.is_neg())
    )
