"""Find the tensors of a nested state, and count their bytes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

_ATOMS = frozenset({str, int, float, bool, type(None)})


def tensors_of(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in nested mappings, lists and tuples, in order."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping | list | tuple):
        for item in value.values() if isinstance(value, Mapping) else value:
            if type(item) not in _ATOMS:  # most items are atoms, and isinstance checks of each take long
                yield from tensors_of(item)


def bytes_of(tensors: Iterable[torch.Tensor]) -> int:
    """Return the number of bytes of tensors, as a save copies and writes them.

    The bytes of a COO tensor, which has no `nbytes`, are those of its indices and values. The bytes of
    another sparse tensor are PyTorch's: those of the dense tensor.
    """
    return sum(t.nbytes if t.layout is not torch.sparse_coo else _bytes_of_coo(t) for t in tensors)


def _bytes_of_coo(tensor: torch.Tensor) -> int:
    return tensor._indices().nbytes + tensor._values().nbytes
