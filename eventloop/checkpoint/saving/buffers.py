"""Memory on the host that states are copied into: pinned for a device, shared with another process, or both."""

from __future__ import annotations

import logging
import os
from contextlib import suppress
from typing import Any

import torch

logger = logging.getLogger("eventloop")


class Buffer:
    """Flat memory for `size` elements. Pickled, a shared one stands for its memory, not for its contents.

    Memory that is both shared and pinned is mapped first and then made known to CUDA; where that cannot be had, it
    is pinned and not shared: a copy from a device into other memory makes whoever asks for it wait.

    Attributes:
        shared: another process can see it.
    """

    def __init__(self, size: int, dtype: torch.dtype, *, pinned: bool = False, shared: bool = False) -> None:
        self.size, self.dtype = size, dtype
        self._file: int | None = None
        self._pinned_by = 0  # the process that did
        self.shared = not size or (shared and self._share(pinned))
        if not self.shared or not size:
            self.tensor = torch.empty(size, dtype=dtype, pin_memory=pinned and size > 0)

    def _share(self, pinned: bool) -> bool:
        # memory without a name: it is gone when both processes are, however they end
        self._file = os.memfd_create("eventloop snapshot")
        os.truncate(self._file, self.size * torch.empty((), dtype=self.dtype).element_size())
        self.tensor = _map(f"/proc/self/fd/{self._file}", self.size, self.dtype)
        if pinned and pin(self.tensor):
            self._pinned_by = os.getpid()
        return not pinned or bool(self._pinned_by)

    def __reduce__(self) -> tuple[Any, ...]:
        if self._file is None:
            return Buffer, (self.size, self.dtype)
        return mapped, (f"/proc/{os.getpid()}/fd/{self._file}", self.size, self.dtype)

    def __del__(self) -> None:
        if getattr(self, "_pinned_by", 0) == os.getpid():  # in a forked one CUDA cannot be asked
            torch.cuda.cudart().cudaHostUnregister(self.tensor.data_ptr())
        if getattr(self, "_file", None) is not None:
            os.close(self._file)  # type: ignore[arg-type]


def pin(tensor: torch.Tensor) -> bool:
    """Lock memory that is there already, so that a device can write to it beside everything else; False where that
    cannot be had."""
    try:
        failed = int(torch.cuda.cudart().cudaHostRegister(tensor.data_ptr(), tensor.nbytes, 0))
    except (RuntimeError, AttributeError) as error:
        logger.warning("the memory for checkpoints could not be pinned: %s", error)
        return False
    if failed:
        logger.warning("the memory for checkpoints could not be pinned: CUDA's error %d", failed)
        _clear_error()
    return not failed


def _clear_error() -> None:
    """PyTorch asks after each kernel for the last error of CUDA, whoever made it, and would fail the next one of the
    training: this one is asked in its place."""
    if torch.cuda.is_initialized():
        with suppress(RuntimeError):
            torch.ones(1, device="cuda")


def mapped(path: str, size: int, dtype: torch.dtype) -> Buffer:
    """The buffer of another process."""
    buffer = Buffer(0, dtype)
    buffer.tensor = _map(path, size, dtype)
    return buffer


def _map(path: str, size: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.from_file(path, shared=True, size=size, dtype=dtype)
