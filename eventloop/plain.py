"""What a checkpoint may hold: tensors and plain values, so that `torch.load(weights_only=True)` reads it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

_PLAIN = frozenset(
    {str, int, float, bool, complex, bytes, set, type(None), torch.Size, torch.dtype, torch.device}
)


def plain(value: Any, where: str) -> Any:
    """A nested state in tensors and plain values alone, NumPy's numbers made Python's.

    Args:
        where: its place in the checkpoint, for the message.

    Raises:
        TypeError: there is something else in it, which could be saved and not be loaded.
    """
    if type(value) in _PLAIN or isinstance(value, torch.Tensor):
        return value
    if isinstance(value, Mapping):
        return {plain(key, where): plain(item, f"{where}[{key!r}]") for key, item in value.items()}
    if isinstance(value, list | tuple):
        items = [plain(item, f"{where}[{i}]") for i, item in enumerate(value)]
        return items if isinstance(value, list) else tuple(items)
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(
        f"the checkpoint's {where} is {value!r}, a {type(value).__name__}: a state_dict must be of tensors, numbers, "
        "texts, lists and dicts, so that weights_only=True can load it"
    )
