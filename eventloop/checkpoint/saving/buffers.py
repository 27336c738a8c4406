"""Allocate host memory for copies of states: pinned, shared with another process, or both.

`snapshot` uses it.
"""

from __future__ import annotations

import logging
import os
from contextlib import suppress

import torch

from eventloop.processes.shared_memory import Mapped

logger = logging.getLogger("eventloop")


class Buffer:
    """Flat host memory for `size` elements.

    Memory that is to be both shared and pinned is mapped first and then registered with CUDA. If that fails,
    the buffer is pinned and not shared, because a copy from a device into unpinned memory blocks the calling
    thread.

    Attributes:
        tensor: the memory, as a tensor of one dimension.
        shared: whether another process can map the memory.
    """

    def __init__(self, size: int, dtype: torch.dtype, *, pinned: bool = False, shared: bool = False) -> None:
        self.size, self.dtype = size, dtype
        self._file: int | None = None
        self._pinned_by = 0  # id of the process that registered the memory
        self.shared = not size or (shared and self._share(pinned))
        if not self.shared or not size:
            self.tensor = torch.empty(size, dtype=dtype, pin_memory=pinned and size > 0)

    def _share(self, pinned: bool) -> bool:
        # memory without a name, which the system frees when both processes have ended, even by a kill
        self._file = os.memfd_create("eventloop snapshot")
        os.truncate(self._file, self.size * torch.empty((), dtype=self.dtype).element_size())
        path = f"/proc/self/fd/{self._file}"
        self.tensor = torch.from_file(path, shared=True, size=self.size, dtype=self.dtype)
        if pinned and pin(self.tensor):
            self._pinned_by = os.getpid()
        return not pinned or bool(self._pinned_by)

    @property
    def memory(self) -> Mapped | None:
        """Return a description for another process to map the memory; None if it is not shared."""
        if self._file is None:
            return None
        path, number = f"/proc/{os.getpid()}/fd/{self._file}", os.fstat(self._file).st_ino
        return Mapped(path, self.tensor.nbytes, number)

    def __del__(self) -> None:
        if getattr(self, "_pinned_by", 0) == os.getpid():  # CUDA cannot be called in a forked child
            torch.cuda.cudart().cudaHostUnregister(self.tensor.data_ptr())
        if getattr(self, "_file", None) is not None:
            os.close(self._file)  # type: ignore[arg-type]


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
