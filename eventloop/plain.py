"""What a checkpoint may hold: tensors and plain values, so that `torch.load(weights_only=True)` reads it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

_PLAIN = frozenset(
    {
        str,
        int,
        float,
        bool,
        complex,
        bytes,
        set,
        type(None),
        torch.Size,
        torch.dtype,
        torch.device,
        torch.Tensor,
    }
)


class _NotPlainError(Exception):
    """What was found, and on the way out the keys that lead to it."""

    def __init__(self, found: Any) -> None:
        self.found, self.keys = found, [""]


def plain(value: Any, where: str) -> Any:
    """A nested state in tensors and plain values alone, NumPy's numbers made Python's.

    Args:
        where: its place in the checkpoint, for the message.

    Raises:
        TypeError: there is something else in it, which could be saved and not be loaded.
    """
    try:
        return _plain(value)
    except _NotPlainError as error:
        where += "".join(reversed(error.keys))
        raise TypeError(
            f"the checkpoint's {where} is {error.found!r}, a {type(error.found).__name__}: a state_dict must be of "
            "tensors, numbers, texts, lists and dicts, so that weights_only=True can load it"
        ) from None


def _plain(value: Any) -> Any:
    if type(value) in _PLAIN or isinstance(value, torch.Tensor):
        return value
    if isinstance(value, Mapping):
        return {
            key if type(key) in _PLAIN else _plain(key): item if type(item) in _PLAIN else _inside(item, key)
            for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        items = [item if type(item) in _PLAIN else _inside(item, i) for i, item in enumerate(value)]
        return items if isinstance(value, list) else tuple(items)
    if isinstance(value, np.generic):
        return value.item()
    raise _NotPlainError(value)


def _inside(value: Any, key: object) -> Any:
    """The way to what is wrong is put together only once something is: a text for every value costs more than
    all the rest."""
    try:
        return _plain(value)
    except _NotPlainError as error:
        error.keys.append(f"[{key!r}]")
        raise
