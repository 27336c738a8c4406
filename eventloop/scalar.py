"""What may be put as one number, and what is kept of it."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from eventloop.packet import Scalar


def is_number(value: Any) -> bool:
    """True for a number or an array of one element; a tensor is none of them."""
    return isinstance(value, float | int) or (isinstance(value, np.number | np.ndarray) and value.size == 1)


def single_number(name: str, value: Any) -> Scalar:
    """What is kept of a value that is put under a name: a float, or a 0-dim or one-element tensor that is not read.

    Raises:
        TypeError: it is no single number.
    """
    if isinstance(value, torch.Tensor):
        if value.numel() != 1:
            raise TypeError(f"scalar {name!r} must be one number, got a tensor of shape {tuple(value.shape)}")
        return own(value)
    if isinstance(value, int | float):
        return float(value)
    item = getattr(value, "item", None)
    if item is not None and getattr(value, "size", 1) == 1:
        return float(item())
    raise TypeError(f"scalar {name!r} must be a number or a tensor of one element, got {value!r}")


def own(value: torch.Tensor) -> torch.Tensor:
    """The tensor without its graph, as it is now; on its device."""
    # A result of the graph is nobody else's; any other tensor may be a buffer its owner goes on changing,
    # and a view would keep all that it is a view of.
    if value.is_leaf or value._is_view():
        return value.detach().clone() if value.requires_grad else value.clone()
    # `data` is `detach` at two thirds of its time, less a count of changes in place, which nobody makes here
    return value.data if type(value) is torch.Tensor else value.detach()
