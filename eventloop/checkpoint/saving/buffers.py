"""Allocate host memory for copies of states: pinned, shared with another process, or both.

`snapshot` uses it.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any

import torch

from eventloop.processes.shared_memory import Mapped

logger = logging.getLogger("eventloop")


Spec = tuple[str, torch.dtype, torch.Size, bool]
"""A tensor's top-level key in the state, such as "optimizer", its type and shape, and if it is on CUDA."""


class Buffers:
    """The host memory into which states of one layout are copied, one after the other.

    Fresh memory costs seven times as much as memory that is used again. The tensors under one top-level key
    share one buffer for each type, because torch writes a state three times faster if tensors share a
    storage. The buffers are allocated again when the types or the shapes of the tensors change.

    Args:
        shared: allocate memory that another process can map.

    Attributes:
        rebuilt: by the `id` of each view, the result of its `__reduce_ex__`, by which pickle writes it. It
            is stored, because torch takes 20 us for each call, and the views of a layout stay the same.
        streams: by CUDA device, the stream for copies that the training does not wait for.
    """

    def __init__(self, *, shared: bool = False) -> None:
        self.shared = shared
        self.rebuilt: dict[int, tuple[Any, ...]] = {}
        self.streams: dict[torch.device, torch.cuda.Stream] = {}
        self._specs: Sequence[Spec] = ()
        self._views: list[torch.Tensor] = []
        self._buffers: list[Buffer] = []

    def views(self, specs: Sequence[Spec], tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """Return a view of a buffer for each of the tensors, which the specs describe."""
        if self._specs != specs:
            with _first_device(tensors):
                self._allocate(specs)
        return self._views

    def _allocate(self, specs: Sequence[Spec]) -> None:
        """Allocate a buffer for each top-level key, type and kind of memory, with a view for each tensor."""
        sizes: dict[tuple[str, torch.dtype, bool], int] = {}  # in elements
        places = []  # of each tensor: its buffer, the elements there, and its shape
        for key, dtype, shape, is_cuda in specs:
            group = key, dtype, is_cuda
            start = sizes.get(group, 0)
            sizes[group] = start + shape.numel()
            places.append((group, slice(start, sizes[group]), shape))
        buffers = {
            group: Buffer(size, group[1], pinned=group[2], shared=self.shared)
            for group, size in sizes.items()
        }
        self._views = [buffers[group].tensor[elements].view(shape) for group, elements, shape in places]
        self._specs, self._buffers = specs, [*buffers.values()]
        self.rebuilt = {id(view): view.__reduce_ex__(2) for view in self._views}

    def memory(self) -> dict[int, Mapped] | None:
        """Return, by the address of each buffer, the description by which another process maps it.

        Return None if another process cannot map all buffers. Empty buffers are left out.
        """
        mappings = {}
        for buffer in self._buffers:
            if not buffer.shared:
                return None
            if (memory := buffer.memory) is not None:
                mappings[buffer.tensor.data_ptr()] = memory
        return mappings


class Buffer:
    """Flat host memory for `size` elements.

    Memory that is to be both shared and pinned is mapped first and then registered with CUDA. If the
    registration fails, the buffer is pinned but not shared, because a copy from a device into memory that is
    not pinned blocks the calling thread.

    Attributes:
        tensor: the memory, as a tensor of one dimension.
        shared: whether another process can map the memory.
    """

    def __init__(self, size: int, dtype: torch.dtype, *, pinned: bool = False, shared: bool = False) -> None:
        self.size, self.dtype = size, dtype
        self._file: int | None = None
        self._pinned_by = 0  # the id of the process that registered the memory with CUDA; 0 for none
        self.shared = not size or (shared and self._share(pinned))
        if not self.shared or not size:
            self.tensor = torch.empty(size, dtype=dtype, pin_memory=pinned and size > 0)

    def _share(self, pinned: bool) -> bool:
        """Allocate shared memory; return False if it was to be pinned, and could not be."""
        # memory without a file's name, which the system frees once both processes have ended, even by a kill
        self._file = os.memfd_create("eventloop snapshot")
        os.truncate(self._file, self.size * torch.empty((), dtype=self.dtype).element_size())
        path = f"/proc/self/fd/{self._file}"
        self.tensor = torch.from_file(path, shared=True, size=self.size, dtype=self.dtype)
        if pinned and pin(self.tensor):
            self._pinned_by = os.getpid()
        return not pinned or bool(self._pinned_by)

    @property
    def memory(self) -> Mapped | None:
        """Return the description by which another process maps the memory; None if it is not shared."""
        if self._file is None:
            return None
        path, number = f"/proc/{os.getpid()}/fd/{self._file}", os.fstat(self._file).st_ino
        return Mapped(path, self.tensor.nbytes, number)

    def __del__(self) -> None:
        """Free the memory: end its registration with CUDA in the process that made it, and close its file."""
        if getattr(self, "_pinned_by", 0) == os.getpid():  # CUDA cannot be called in a forked child
            torch.cuda.cudart().cudaHostUnregister(self.tensor.data_ptr())
        if getattr(self, "_file", None) is not None:
            os.close(self._file)  # type: ignore[arg-type]


def _first_device(tensors: Iterable[torch.Tensor]) -> AbstractContextManager[Any]:
    """Return a context in which memory is pinned on the first CUDA device of the tensors.

    On another device, pinning might create a CUDA context of hundreds of MB that the training does not need.
    """
    first = next((tensor for tensor in tensors if tensor.is_cuda), None)
    return nullcontext() if first is None else torch.cuda.device_of(first)


def pin(tensor: torch.Tensor) -> bool:
    """Pin memory, so that a device can copy to it asynchronously; return False and log if that fails."""
    try:
        failed = int(torch.cuda.cudart().cudaHostRegister(tensor.data_ptr(), tensor.nbytes, 0))
    except (RuntimeError, AttributeError) as error:
        logger.warning("the memory for checkpoints could not be pinned: %s", error)
        return False
    if failed:
        logger.warning("the memory for checkpoints could not be pinned: CUDA error %d", failed)
        _clear_error()
    return not failed


def _clear_error() -> None:
    """Run a kernel that consumes CUDA's last error.

    PyTorch checks the last error after each kernel, and would raise it in the next kernel of the training.
    """
    if torch.cuda.is_initialized():
        with suppress(RuntimeError):
            torch.ones(1, device="cuda")
