"""Bring the outputs of a prediction to the host, and join those of several batches.

Outputs are tensors, arrays, lists and other objects, also nested in mappings and tuples. `prediction` uses
this module.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from eventloop.state.sharded import refuse_sharded


class OnHost:
    """A copy of the outputs of one batch on the host, begun by the constructor.

    From CUDA the copy goes to page-locked memory without waiting. Tensors on the host are copied too, because
    a view would keep the whole tensor in memory, and a model may write its next outputs into the same one.
    """

    def __init__(self, outputs: Any) -> None:
        self._devices: set[torch.device] = set()
        self._outputs = map_tensors(outputs, self._begin)
        self._done: list[torch.cuda.Event] = []
        for device in self._devices:
            done = torch.cuda.Event(blocking=True)
            done.record(torch.cuda.current_stream(device))
            self._done.append(done)

    def _begin(self, tensor: torch.Tensor) -> torch.Tensor:
        refuse_sharded("the output of a prediction", tensor)
        tensor = tensor.detach()
        if not tensor.is_cuda or tensor.layout is not torch.strided:
            return tensor.to("cpu", copy=True)
        self._devices.add(tensor.device)
        pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        return pinned.copy_(tensor, non_blocking=True)

    def wait(self) -> Any:
        """Return the outputs, after waiting for the device. Call it once."""
        for done in self._done:
            done.synchronize()
        # page-locked memory is scarce: it is used again for another batch
        return map_tensors(self._outputs, torch.clone) if self._done else self._outputs


def map_tensors(outputs: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Replace the tensors in nested outputs. A mapping becomes a dict."""
    if isinstance(outputs, torch.Tensor):
        return change(outputs)
    if isinstance(outputs, Mapping):
        return {name: map_tensors(value, change) for name, value in outputs.items()}
    if isinstance(outputs, tuple):
        return _tuple_like(outputs, [map_tensors(value, change) for value in outputs])
    if isinstance(outputs, list):
        return [map_tensors(value, change) for value in outputs]
    return outputs


def join(parts: Sequence[Any]) -> Any:
    """Join the outputs of batches, in their order.

    Tensors and arrays are concatenated along dimension 0, and listed by sample if their other dimensions
    differ. Mappings and tuples are joined by field, lists one after the other. Any other object, and outputs
    of different forms, become a list with an entry for each batch.
    """
    first = parts[0]
    if _all(parts, Mapping) and all(part.keys() == first.keys() for part in parts):
        return {name: join([part[name] for part in parts]) for name in first}
    if _all(parts, tuple) and all(len(part) == len(first) for part in parts):
        return _tuple_like(first, [join(values) for values in zip(*parts, strict=True)])
    if _all(parts, list):
        return [value for part in parts for value in part]
    if _all(parts, torch.Tensor):
        return _concatenated(parts, torch.stack, torch.cat)
    if _all(parts, np.ndarray):
        return _concatenated(parts, np.stack, np.concatenate)
    return [*parts]


def join_ranks(parts: Sequence[Any]) -> Any:
    """Join what `join` has made on each rank; a field that one rank has listed becomes a list."""
    first = parts[0]
    if _all(parts, dict):
        return {name: join_ranks([part[name] for part in parts]) for name in first}
    if _all(parts, tuple):
        return _tuple_like(first, [join_ranks(values) for values in zip(*parts, strict=True)])
    return (
        join(parts) if len({type(part) for part in parts}) == 1 else [row for part in parts for row in part]
    )


def select(outputs: Any, rows: Sequence[int], of: int) -> Any:
    """Return some rows of joined outputs.

    Args:
        rows: positions, in the order of the result.
        of: the number of samples. A field with another length has no rows, and is left as it is.
    """
    if isinstance(outputs, dict):
        return {name: select(value, rows, of) for name, value in outputs.items()}
    if isinstance(outputs, tuple):
        return _tuple_like(outputs, [select(value, rows, of) for value in outputs])
    if len(outputs) != of:
        return outputs
    return [outputs[row] for row in rows] if isinstance(outputs, list) else outputs[list(rows)]


def _all(parts: Sequence[Any], kind: type) -> bool:
    return all(isinstance(part, kind) for part in parts)


def _tuple_like(former: tuple[Any, ...], values: Sequence[Any]) -> Any:
    return type(former)(*values) if hasattr(former, "_fields") else tuple(values)


def _concatenated(parts: Sequence[Any], stack: Callable[[Any], Any], cat: Callable[[Any], Any]) -> Any:
    if any(part.ndim == 0 for part in parts):
        return stack(parts) if all(part.ndim == 0 for part in parts) else [*parts]
    if all(part.shape[1:] == parts[0].shape[1:] for part in parts):
        return cat(parts)
    return [row for part in parts for row in part]
