"""The average's values in the model's own tensors for a while, and back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from eventloop.model.averages import BaseAveragedModel


class Swap:
    """Puts an average into a model, and the model's own values back.

    Values are copied, never exchanged: the average is not touched, so it loses no precision, and `back` may be
    called at any moment and again, also after an interrupt in the middle of either. The addresses of the model's
    tensors stay, for graphs and optimizers that know them. Meanwhile the model's own values take their memory again.
    """

    def __init__(self) -> None:
        self._kept: tuple[list[Tensor], list[Tensor]] | None = None

    @property
    def active(self) -> bool:
        """True while the model has the values of the average."""
        return self._kept is not None

    @torch.no_grad()
    def put(self, average: BaseAveragedModel, model: nn.Module) -> None:
        """Give the model the values of the average."""
        if self._kept is None:
            pairs = average.pairs_with(model)
            self._kept = (pairs.sources, [tensor.clone() for tensor in pairs.sources])
            _copy(pairs.sources, pairs.averages)

    @torch.no_grad()
    def back(self) -> None:
        """Give the model its own values again, if it does not have them."""
        if self._kept is not None:
            _copy(*self._kept)
            self._kept = None

    @contextmanager
    def undone(self, average: BaseAveragedModel, model: nn.Module) -> Iterator[None]:
        """Inside, the model has its own values."""
        was_active = self.active
        self.back()
        try:
            yield
        finally:
            if was_active:
                self.put(average, model)


def _copy(tensors: list[Tensor], values: list[Tensor]) -> None:
    if tensors:
        # .data: a graph that is waiting for its backward may use them, and finds them as they were
        torch._foreach_copy_([tensor.data for tensor in tensors], values)
