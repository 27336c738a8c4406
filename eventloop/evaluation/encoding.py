"""Encode the outputs of a batch as the bytes of the event `batch_predicted`, and decode them.

Tensors are pickled as their memory, type and shape. PyTorch's own pickling takes 0.3 ms or more to save a
tensor, and as long to load it.
"""

from __future__ import annotations

import io
import pickle
from typing import Any

import torch

from eventloop.events import BatchPredicted


class _Pickler(pickle.Pickler):
    """Pickle dense tensors as their memory, and all other objects as `pickle` does."""

    def reducer_override(self, value: Any) -> Any:
        """Return the function and arguments that restore a dense tensor; NotImplemented for other objects."""
        if type(value) is not torch.Tensor or value.layout is not torch.strided or value.is_quantized:
            return NotImplemented
        flat = value.resolve_conj().resolve_neg().contiguous().reshape(-1)
        return _tensor, (flat.view(torch.uint8).numpy().tobytes(), value.dtype, tuple(value.shape))


def _tensor(memory: bytes, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """Return the tensor with the given memory; pickles refer to this function by its name."""
    if not memory:
        return torch.empty(shape, dtype=dtype)
    # a copy, because a tensor over `bytes` would be read-only
    return torch.frombuffer(bytearray(memory), dtype=dtype).reshape(shape)


def encode(outputs: Any) -> bytes:
    """Return outputs, with their tensors on the CPU, as bytes."""
    buffer = io.BytesIO()
    _Pickler(buffer, pickle.HIGHEST_PROTOCOL).dump(outputs)
    return buffer.getvalue()


def outputs_of(event: BatchPredicted) -> Any:
    """Return the outputs in a `batch_predicted` event, with their tensors on the CPU.

    The function uses `pickle`, so decode events of a log only if you trust the log.
    """
    return pickle.loads(event.data)
