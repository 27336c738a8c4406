"""Choose the values that can be logged as numbers among those that another engine (the host) logs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from eventloop.metrics.rows import Scalar
from eventloop.metrics.scalar_value import is_readable, single_numbers
from eventloop.state.sharded import is_sharded


def numbers_of(values: Mapping[str, Any]) -> dict[str, Scalar]:
    """Return the single numbers among `values`: floats, and tensors of one element, which are not read.

    Values that are sharded over ranks are left out, because reading one is a collective.
    """
    unsharded = {name: value for name, value in values.items() if not is_sharded(value)}
    return {name: value for name, value in single_numbers(unsharded).items() if is_readable(value)}


def read_numbers(values: Mapping[str, Any]) -> dict[str, float]:
    """Return the single numbers among `values` as floats, with one read for each device."""
    numbers, tensors = {}, {}
    for name, value in numbers_of(values).items():
        if isinstance(value, torch.Tensor):
            tensors[name] = value
        else:
            numbers[name] = value
    for device in {value.device for value in tensors.values()}:
        names = [name for name, value in tensors.items() if value.device == device]
        dtype = torch.float32 if device.type == "mps" else torch.float64  # mps has no float64
        read = torch.stack([tensors[name].to(dtype).reshape(()) for name in names]).tolist()
        numbers |= dict(zip(names, read, strict=True))
    return {name: numbers[name] for name in values if name in numbers}
