"""Put the average's values into the model's own tensors for a while, and restore them.

EMAHook swaps before each evaluation and back after it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from eventloop.model.averages import BaseAveragedModel


class Swap:
    """Put the values of an average into a model, and restore the model's own values.

    Values are copied, never exchanged: the average is not touched, so it loses no precision, and `back` may
    be called at any moment and again, also after an interrupt in the middle of either. The addresses of the
    model's tensors stay, for graphs and optimizers that know them. While the average is in, the model's own
    values are held in a second copy of the same size.
    """

    def __init__(self) -> None:
        self._kept: tuple[list[Tensor], list[Tensor]] | None = None

    @property
    def active(self) -> bool:
        """True while the model has the values of the average."""
        return self._kept is not None

    @torch.no_grad()
    def put(self, average: BaseAveragedModel, model: nn.Module) -> None:
        """Copy the values of the average into the model."""
        if self._kept is None:
            pairs = average.pairs_with(model)
            self._kept = (pairs.sources, [tensor.clone() for tensor in pairs.sources])
            _copy(pairs.sources, pairs.averages)

    @torch.no_grad()
    def back(self) -> None:
        """Restore the model's own values, unless it has them already."""
        if self._kept is not None:
            _copy(*self._kept)
            self._kept = None

    @contextmanager
    def undone(self, average: BaseAveragedModel, model: nn.Module) -> Iterator[None]:
        """Restore the model's own values inside the block, and put the average back after it."""
        was_active = self.active
        self.back()
        try:
            yield
        finally:
            if was_active:
                self.put(average, model)


def _copy(tensors: list[Tensor], values: list[Tensor]) -> None:
    if tensors:
        # .data: autograd does not count the change, so a graph that awaits its backward stays usable
        torch._foreach_copy_([tensor.data for tensor in tensors], values)
