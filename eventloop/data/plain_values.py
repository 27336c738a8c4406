"""What a checkpoint may hold: tensors and plain values, so that `torch.load(weights_only=True)` reads it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from eventloop.state.sharded import NO_SHARDED_SAVES, is_sharded, refuse_sharded

_PLAIN = frozenset(
    {
        str,
        int,
        float,
        bool,
        complex,
        bytes,
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
        TypeError: there is something else in it, which could be saved and not be loaded; or a tensor that is sharded
            over ranks.
    """
    try:
        return _plain(value)
    except _NotPlainError as error:
        where += "".join(reversed(error.keys))
        refuse_sharded(f"the checkpoint's {where}", error.found, NO_SHARDED_SAVES)
        raise TypeError(
            f"the checkpoint's {where} is {error.found!r}, a {type(error.found).__name__}: a state_dict must be of "
            "tensors, numbers, texts, lists and dicts, so that weights_only=True can load it"
        ) from None


def _plain(value: Any) -> Any:
    if type(value) in _PLAIN:
        return value
    if isinstance(value, torch.Tensor):
        return _plain_tensor(value)
    if isinstance(value, Mapping):
        return {
            key if type(key) in _PLAIN else _plain(key): item if type(item) in _PLAIN else _inside(item, key)
            for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        items = [item if type(item) in _PLAIN else _inside(item, i) for i, item in enumerate(value)]
        return items if isinstance(value, list) else tuple(items)
    if type(value) is set:
        return {_plain(item) for item in value}
    if isinstance(value, np.generic) and type(number := value.item()) in _PLAIN:
        return number  # of a date, or of more digits than Python's have, it is none
    raise _NotPlainError(value)


def _plain_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory without the class, if that is one which `torch.load` would not know. One that wraps others has no
    memory of its own, and is left."""
    if is_sharded(tensor):
        raise _NotPlainError(tensor)
    if type(tensor).__module__.partition(".")[0] == "torch" or is_traceable_wrapper_subclass(tensor):
        return tensor
    with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
        return tensor.as_subclass(torch.Tensor)


def _inside(value: Any, key: object) -> Any:
    """The way to what is wrong is put together only once something is: a text for every value costs more than
    all the rest."""
    try:
        return _plain(value)
    except _NotPlainError as error:
        error.keys.append(f"[{key!r}]")
        raise
