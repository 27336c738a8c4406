"""Convert a state to tensors and plain values, which `torch.load(weights_only=True)` can read.

Plain values are numbers, strings, None, and lists, tuples, sets and dicts of plain values and tensors. All
code that puts a user's `state_dict` into a checkpoint uses this module.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from eventloop.state.containers import MAPPINGS, SEQUENCES
from eventloop.state.sharded import NO_SHARDS_THERE, is_dtensor, is_sharded, refuse_sharded

_PLAIN = frozenset(
    {str, int, float, bool, complex, bytes, type(None), torch.Size, torch.dtype, torch.device, torch.Tensor}
)
"""The types of values that are saved as they are."""


class _NotPlainError(Exception):
    """Raised for a value that is not plain, which is in `found`."""

    def __init__(self, found: Any) -> None:
        self.found = found


def plain(value: Any, where: str, *, shards: bool = False) -> Any:
    """Return a nested state as tensors and plain values; convert NumPy's numbers to Python's.

    Args:
        value: the state.
        where: the key of the state in the checkpoint, with which the message names the value.
        shards: whether it may have DTensors.

    Raises:
        TypeError: a value is not plain; the message has the keys that lead to it.
    """
    try:
        return _plain(value, shards)
    except _NotPlainError as error:
        where += _place_of(error.found, value) or ""
        refuse_sharded(f"the checkpoint's {where}", error.found, NO_SHARDS_THERE)
        raise TypeError(
            f"the checkpoint's {where} is {error.found!r}, a {type(error.found).__name__}: a state_dict must "
            "consist of tensors, numbers, strings, lists and dicts, so that weights_only=True can load it"
        ) from None


def _plain(value: Any, shards: bool) -> Any:
    """Return a value made of plain types only; raise `_NotPlainError` with a part that cannot be."""
    if type(value) in _PLAIN:
        return value
    if isinstance(value, torch.Tensor):
        return _plain_tensor(value, shards)
    if isinstance(value, MAPPINGS):
        return {
            key if type(key) in _PLAIN else _plain(key, False): item
            if type(item) in _PLAIN
            else _plain(item, shards)
            for key, item in value.items()
        }
    if isinstance(value, SEQUENCES):
        items = [item if type(item) in _PLAIN else _plain(item, shards) for item in value]
        return items if isinstance(value, list) else tuple(items)
    if type(value) is set:
        return {_plain(item, shards) for item in value}
    if isinstance(value, np.generic) and type(number := value.item()) in _PLAIN:
        return number  # dates and long doubles do not convert to a plain number
    raise _NotPlainError(value)


def _plain_tensor(tensor: torch.Tensor, shards: bool) -> torch.Tensor:
    """Return a tensor as a type that `torch.load` knows; a subclass is replaced, and shares its memory.

    A wrapper subclass has no memory of its own, and is returned unchanged.
    """
    if is_sharded(tensor) and not (shards and is_dtensor(tensor)):
        raise _NotPlainError(tensor)
    if type(tensor).__module__.partition(".")[0] == "torch" or is_traceable_wrapper_subclass(tensor):
        return tensor
    with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
        return tensor.as_subclass(torch.Tensor)


def _place_of(found: Any, value: Any) -> str | None:
    """Return the keys that lead to an object in a nested state, such as "['a'][0]".

    It is called only after an error, because to build a text for every value would take most of the time of a
    save. For an object in a key or a set, the keys that lead to the mapping or set are returned.

    Args:
        found: the object.
        value: the state.

    Returns:
        None if the object is not in the state.
    """
    if value is found:
        return ""
    if isinstance(value, set):
        return "" if any(_place_of(found, each) is not None for each in value) else None
    if not isinstance(value, (*MAPPINGS, *SEQUENCES)):
        return None
    for key, item in value.items() if isinstance(value, MAPPINGS) else enumerate(value):
        if _place_of(found, key) is not None:
            return ""
        if (place := _place_of(found, item)) is not None:
            return f"[{key!r}]{place}"
    return None


def arrays_as_tensors(value: Any) -> tuple[Any, list[list[Any]]]:
    """Replace NumPy's numeric arrays in a nested state by tensors, and list where they were.

    Arrays of objects, texts and dates, and subclasses such as masked arrays, are left as they are.

    Returns:
        The state with tensors, and for each of them a list of the keys that lead to it.
    """
    if type(value) is np.ndarray and value.dtype.kind in "biufc" and value.dtype.itemsize <= 16:
        native = np.array(value, dtype=value.dtype.newbyteorder("="), order="C")
        try:
            return torch.from_numpy(native), [[]]
        except TypeError:  # long doubles
            return value, []
    if isinstance(value, MAPPINGS):
        items: Iterable[tuple[Any, Any]] = value.items()
    elif isinstance(value, SEQUENCES):
        items = enumerate(value)
    else:
        return value, []
    changed: dict[Any, Any] = {}
    places: list[list[Any]] = []
    for key, item in items:
        if type(item) not in _PLAIN:
            item, inner = arrays_as_tensors(item)
            if inner:
                changed[key] = item
                places += [[key, *place] for place in inner]
    return (_replaced(value, changed) if places else value), places


def with_arrays(value: Any, places: Iterable[Sequence[Any]]) -> Any:
    """Return a nested state with NumPy's arrays in place of tensors.

    Args:
        value: the state.
        places: the lists of keys that `arrays_as_tensors` has returned.
    """
    for keys in places:
        value = _with_array(value, keys)
    return value


def _with_array(value: Any, keys: Sequence[Any]) -> Any:
    """Return a nested state with an array in place of the tensor to which a list of keys leads."""
    if not keys:
        return value.numpy().copy() if isinstance(value, torch.Tensor) else value
    try:
        inner = value[keys[0]]
    except (KeyError, IndexError, TypeError):  # a handler has changed the checkpoint since it was saved
        return value
    return _replaced(value, {keys[0]: _with_array(inner, keys[1:])})


def _replaced(value: Any, items: Mapping[Any, Any]) -> Any:
    """Return a copy of a container with other items for some keys or indices."""
    if isinstance(value, Mapping):
        return {**value, **items}
    listed = [items.get(number, item) for number, item in enumerate(value)]
    return tuple(listed) if isinstance(value, tuple) else listed
