"""What may be put as one number, and what is kept of it."""

from __future__ import annotations

from collections.abc import Iterable
from numbers import Real
from typing import Any

import numpy as np
import torch

from eventloop.metrics.rows import Scalar
from eventloop.state.sharded import refuse_sharded

_WHOLE = frozenset(
    {
        torch.bool, torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.int8, torch.int16, torch.int32,
        torch.int64,
    }
)  # fmt: skip


def is_number(value: Any) -> bool:
    """True for a number or an array of one element; a tensor is none of them."""
    return isinstance(value, float | int) or (isinstance(value, np.number | np.ndarray) and value.size == 1)


def single_number(name: str, value: Any) -> Scalar:
    """What is kept of a value that is put under a name: a float, or a 0-dim or one-element tensor that is not read.

    Raises:
        TypeError: it is no single number, or a tensor that is sharded over ranks.
    """
    if isinstance(value, torch.Tensor):
        refuse_sharded(f"scalar {name!r}", value)  # reading a Partial one is a collective
        if value.numel() != 1:
            raise TypeError(f"scalar {name!r} must be one number, got a tensor of shape {tuple(value.shape)}")
        return own(value)
    number = value
    if not isinstance(value, int | float):
        item = getattr(value, "item", None)
        number = item() if item is not None and getattr(value, "size", 1) == 1 else None
        if not isinstance(number, Real):  # an element may be complex, a text or a date
            raise TypeError(f"scalar {name!r} must be a number or a tensor of one element, got {value!r}")
    try:
        return float(number)
    except OverflowError:
        raise TypeError(
            f"scalar {name!r} must be a number that a float has room for, up to 1.8e308"
        ) from None


def refuse_unreadable(names: Iterable[str], values: Iterable[Scalar]) -> None:
    """Refuse tensors of which their kind alone says that no float will come of them. Reads none.

    Raises:
        TypeError: there is one.
    """
    for name, value in zip(names, values, strict=True):
        if isinstance(value, torch.Tensor) and (kind := unreadable_kind(value)):
            raise TypeError(f"scalar {name!r} must be a real number, got {kind}")


def unreadable_kind(tensor: torch.Tensor) -> str:
    """What of a tensor's kind makes its elements no floats, and what to put instead; nothing where they are."""
    if tensor.is_meta:
        return "a tensor of the meta device, which holds no values"
    if tensor.is_quantized:
        return f"quantized {tensor.dtype}: put its dequantize()"
    if tensor.is_complex():
        return f"{tensor.dtype}: put its real part, or its abs()"
    if tensor.layout is not torch.strided:
        return f"a tensor of layout {tensor.layout}: put its to_dense()"
    if not (tensor.dtype.is_floating_point or tensor.dtype in _WHOLE):  # of bits, or of half a byte
        return f"{tensor.dtype}, whose elements cannot be read"
    return ""


def own(value: torch.Tensor) -> torch.Tensor:
    """The tensor without its graph, as it is now; on its device."""
    # A result of the graph is nobody else's; any other tensor may be a buffer its owner goes on changing,
    # and a view would keep all that it is a view of.
    if value.is_leaf or value._is_view():
        return value.detach().clone() if value.requires_grad else value.clone()
    # `data` is `detach` at two thirds of its time, less a count of changes in place, which nobody makes here
    return value.data if type(value) is torch.Tensor else value.detach()
