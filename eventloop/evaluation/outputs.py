"""Copy the outputs of a prediction to the host, and join the outputs of several batches.

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
    """A copy of the outputs of one batch on the host, which the constructor starts.

    The constructor does not wait for tensors on CUDA, which are copied to page-locked memory. Tensors on the
    host are copied too: a view would keep the whole tensor in memory, and a model may write the outputs of
    the next batch into the same memory.
    """

    def __init__(self, outputs: Any) -> None:
        self._devices: set[torch.device] = set()  # the CUDA devices from which tensors are copied
        self._outputs = map_tensors(outputs, self._start_copy)
        self._ends_of_copies: list[torch.cuda.Event] = []
        for device in self._devices:
            end = torch.cuda.Event(blocking=True)
            end.record(torch.cuda.current_stream(device))
            self._ends_of_copies.append(end)

    def _start_copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a copy of a tensor on the host; from CUDA its values arrive later, before `wait` returns."""
        refuse_sharded("the output of a prediction", tensor)
        tensor = tensor.detach()
        if not tensor.is_cuda or tensor.layout is not torch.strided:
            return tensor.to("cpu", copy=True)
        self._devices.add(tensor.device)
        pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        return pinned.copy_(tensor, non_blocking=True)

    def wait(self) -> Any:
        """Wait for the copies, and return the outputs on the host; call this once."""
        for end in self._ends_of_copies:
            end.synchronize()
        # copied out of the page-locked memory, which is scarce and then serves another batch
        return map_tensors(self._outputs, torch.clone) if self._ends_of_copies else self._outputs


def map_tensors(outputs: Any, function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return nested outputs with `function` applied to each tensor; a mapping becomes a dict."""
    if isinstance(outputs, torch.Tensor):
        return function(outputs)
    if isinstance(outputs, Mapping):
        return {name: map_tensors(value, function) for name, value in outputs.items()}
    if isinstance(outputs, tuple):
        return _tuple_like(outputs, [map_tensors(value, function) for value in outputs])
    if isinstance(outputs, list):
        return [map_tensors(value, function) for value in outputs]
    return outputs


def join(parts: Sequence[Any]) -> Any:
    """Join the outputs of batches, in the order of the batches.

    Tensors and arrays are concatenated along dimension 0; if their other dimensions differ, the result is a
    list of samples. Mappings and tuples are joined by field, and lists are concatenated. Other objects, and
    outputs of different structures, become a list with an entry for each batch.
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
    """Join the results of `join` from all ranks; a field that is a list on one rank becomes a list."""
    first = parts[0]
    if _all(parts, dict):
        return {name: join_ranks([part[name] for part in parts]) for name in first}
    if _all(parts, tuple):
        return _tuple_like(first, [join_ranks(values) for values in zip(*parts, strict=True)])
    if len({type(part) for part in parts}) == 1:
        return join(parts)
    return [row for part in parts for row in part]


def select(outputs: Any, rows: Sequence[int], of: int) -> Any:
    """Return chosen rows of joined outputs.

    Args:
        rows: the indices of the rows, in the order of the result.
        of: the number of samples. A field with another length has no row for each sample, and is returned
            whole.
    """
    if isinstance(outputs, dict):
        return {name: select(value, rows, of) for name, value in outputs.items()}
    if isinstance(outputs, tuple):
        return _tuple_like(outputs, [select(value, rows, of) for value in outputs])
    if len(outputs) != of:
        return outputs
    if isinstance(outputs, list):
        return [outputs[row] for row in rows]
    return outputs[list(rows)]


def _all(parts: Sequence[Any], kind: type) -> bool:
    return all(isinstance(part, kind) for part in parts)


def _tuple_like(original: tuple[Any, ...], values: Sequence[Any]) -> Any:
    """Return values as a tuple, or as the named tuple that `original` is."""
    return type(original)(*values) if hasattr(original, "_fields") else tuple(values)


def _concatenated(parts: Sequence[Any], stack: Callable[[Any], Any], cat: Callable[[Any], Any]) -> Any:
    """Stack scalars, and concatenate tensors or arrays; return a list of rows if their shapes differ."""
    if all(part.ndim == 0 for part in parts):
        return stack(parts)
    if any(part.ndim == 0 for part in parts):
        return [*parts]
    if all(part.shape[1:] == parts[0].shape[1:] for part in parts):
        return cat(parts)
    return [row for part in parts for row in part]
