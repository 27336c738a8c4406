"""Find the tensors of a nested state, change them, and count their bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from eventloop.state.containers import MAPPINGS, SEQUENCES

_ATOMS = frozenset({str, int, float, bool, type(None)})
"""The types of values that are neither tensors nor containers, and that most values have."""


def tensors_of(value: Any) -> list[torch.Tensor]:
    """Return the tensors in nested mappings, lists and tuples, in order."""
    found: list[torch.Tensor] = []
    _find((value,), found)
    return found


def _find(values: Iterable[Any], found: list[torch.Tensor]) -> None:
    """Append the tensors in some nested values to `found`."""
    for value in values:
        if type(value) in _ATOMS:  # first, because `isinstance` of each value would take most of the time
            continue
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, MAPPINGS):
            _find(value.values(), found)
        elif isinstance(value, SEQUENCES):
            _find(value, found)


def with_tensors(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return a nested state in new dicts, lists and tuples, with `change(tensor)` for each of its tensors."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, MAPPINGS):
        return {
            key: each if type(each) in _ATOMS else with_tensors(each, change) for key, each in value.items()
        }
    if isinstance(value, SEQUENCES):
        changed = [each if type(each) in _ATOMS else with_tensors(each, change) for each in value]
        return changed if isinstance(value, list) else tuple(changed)
    return value


def bytes_of(tensors: Iterable[torch.Tensor]) -> int:
    """Return the number of bytes that a save of tensors copies and writes.

    A sparse COO tensor, which has no `nbytes`, counts with the bytes of its indices and values. A sparse
    tensor of another layout counts as if it were dense, because PyTorch's `nbytes` does so.
    """
    return sum(t.nbytes if t.layout is not torch.sparse_coo else _bytes_of_coo(t) for t in tensors)


def _bytes_of_coo(tensor: torch.Tensor) -> int:
    return tensor._indices().nbytes + tensor._values().nbytes
