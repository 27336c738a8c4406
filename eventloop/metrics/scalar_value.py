"""Check a value that is logged as one number, and convert it to a float or a detached tensor.

`EventStorage` calls these functions on the training thread, so none of them reads the value of a tensor.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from numbers import Real
from typing import Any

import numpy as np
import torch

from eventloop.metrics.rows import Scalar
from eventloop.state.sharded import refuse_sharded

_INTEGER_TYPES = frozenset(
    {
        torch.bool,
        torch.uint8,
        torch.uint16,
        torch.uint32,
        torch.uint64,
        torch.int8,
        torch.int16,
        torch.int32,
        torch.int64,
    }
)
"""The dtypes of integers and booleans that can be read as floats."""


def is_number(value: Any) -> bool:
    """Return whether `value` is a Python or NumPy number, or an array of one number; False for tensors."""
    if isinstance(value, np.ndarray | np.generic):
        return value.size == 1 and value.dtype.kind in "biuf"
    return isinstance(value, int | float | Real)


def is_single(value: Any) -> bool:
    """Return whether `value` is a number by `is_number`, or a tensor of one element."""
    return value.numel() == 1 if isinstance(value, torch.Tensor) else is_number(value)


def single_number(name: str, value: Any) -> Scalar:
    """Return a number as a float, or a tensor of one element without its graph.

    Raises:
        TypeError: the value is neither; the message has `name`.
    """
    if isinstance(value, torch.Tensor):
        if value.numel() != 1:
            raise TypeError(f"scalar {name!r} must be one number, got a tensor of shape {tuple(value.shape)}")
        return _unsharded(name, value)
    number = value
    if not isinstance(value, int | float | Real):
        item = getattr(value, "item", None)
        number = item() if item is not None and getattr(value, "size", 1) == 1 else None
        if not isinstance(number, Real):  # the element of an array may be complex, a text or a date
            raise TypeError(f"scalar {name!r} must be a number or a tensor of one element, got {value!r}")
    try:
        return float(number)
    except OverflowError:
        raise TypeError(
            f"scalar {name!r} must be within the range of a float, up to 1.8e308, got a larger number"
        ) from None


def single_numbers(values: Mapping[str, Any]) -> dict[str, Scalar]:
    """Return the single numbers in `values`, converted by `single_number`, and leave out all other values.

    Raises:
        TypeError: a tensor of one element is sharded over ranks.
    """
    numbers: dict[str, Scalar] = {}
    for name, value in values.items():
        if type(value) is float:
            numbers[name] = value
        elif isinstance(value, torch.Tensor):
            if value.numel() == 1:
                numbers[name] = _unsharded(name, value)
        elif is_number(value):
            with suppress(TypeError):  # an int beyond the range of a float
                numbers[name] = single_number(name, value)
    return numbers


def with_log_vars(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return `values`, and the items of the mapping `values["log_vars"]`, which mmcv's models return."""
    log_vars = values.get("log_vars")
    return {**log_vars, **values} if isinstance(log_vars, Mapping) else values


def unlogged(values: Mapping[str, Any]) -> list[str]:
    """Return the keys in `values` whose value is a mapping of numbers; such values are not logged."""
    names = []
    for name, value in values.items():
        is_mapping = isinstance(value, Mapping) and name != "log_vars"
        if is_mapping and value and all(map(is_single, value.values())):
            names.append(str(name))
    return names


def not_a_mapping(name: str) -> TypeError:
    """Return the error for a call such as `put_scalars("loss", 0.5)`, which should be `put_scalar`."""
    return TypeError(
        f"put_scalars takes a mapping of numbers by name, got {name!r}: use put_scalar({name!r}, value)"
    )


def _unsharded(name: str, value: torch.Tensor) -> torch.Tensor:
    """Return the current value of a tensor as `own` does; raise a TypeError if the tensor is a DTensor.

    Reading a DTensor may be a collective, and perhaps only one rank puts the value.
    """
    if type(value) is not torch.Tensor:
        refuse_sharded(f"scalar {name!r}", value)
    return own(value)


def is_readable(value: Scalar) -> bool:
    """Return whether a value is a float, or a tensor that can be read as a float."""
    return not isinstance(value, torch.Tensor) or not unreadable_kind(value)


def refuse_unreadable(names: Iterable[str], values: Iterable[Scalar]) -> None:
    """Raise a TypeError if a value is a tensor whose dtype, layout or device cannot be read as a float."""
    for name, value in zip(names, values, strict=True):
        if isinstance(value, torch.Tensor) and (reason := unreadable_kind(value)):
            raise TypeError(f"scalar {name!r} must be a real number, got {reason}")


def unreadable_kind(tensor: torch.Tensor) -> str:
    """Return why a tensor cannot be read as floats, and what to put instead; "" if it can be read."""
    if tensor.is_meta:
        return "a tensor of the meta device, which holds no values"
    if tensor.is_quantized:
        return f"quantized {tensor.dtype}: put its dequantize()"
    if tensor.is_complex():
        return f"{tensor.dtype}: put its real part, or its abs()"
    if tensor.layout is not torch.strided:
        return f"a tensor of layout {tensor.layout}: put its to_dense()"
    if not (tensor.dtype.is_floating_point or tensor.dtype in _INTEGER_TYPES):  # elements of less than a byte
        return f"{tensor.dtype}, whose elements cannot be read"
    return ""


def own(value: torch.Tensor) -> torch.Tensor:
    """Return the current value of a tensor, on its device and without its graph; a copy if it may change."""
    # A leaf may be a buffer that the model changes later, and a view would keep the memory of its base.
    # The result of an operation with a graph is not changed by other code.
    if value.is_leaf or value._is_view():
        return value.detach().clone() if value.requires_grad else value.clone()
    # `data` takes two thirds of the time of `detach`; it does not share the version counter of autograd
    return value.data if type(value) is torch.Tensor else value.detach()
