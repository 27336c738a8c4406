"""A model of one number, whose average a test computes by hand."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from eventloop.hooks import BaseAveragedModel


class Number(nn.Module):
    """A model of one number."""

    def __init__(self, value: float = 0.0) -> None:
        super().__init__()
        self.value = nn.Parameter(torch.tensor([value]))

    def set(self, value: float) -> None:
        """Change it as an optimizer would."""
        self.value.data.fill_(value)


def value_of(average: BaseAveragedModel) -> float:
    """The average of a number."""
    return float(next(average.module.parameters()))


def inside(average: BaseAveragedModel) -> Any:
    """The averaged copy, whatever it is."""
    return average.module
