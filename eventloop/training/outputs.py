"""Read the loss from the outputs of a train step, and detach or average the outputs after backward."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from eventloop.metrics.scalar_value import is_number, own

_STEPS_ITSELF = (
    "A train_step or loop that calls backward() and step() itself needs default_hooks=dict(optimizer=None)"
)


def loss_of(outputs: Any) -> torch.Tensor:
    """Return the loss tensor from the outputs of a train step.

    Raises:
        TypeError: `outputs` is not a mapping with a "loss" tensor of one element.
        RuntimeError: the loss requires no grad.
    """
    loss = outputs.get("loss") if type(outputs) is dict or isinstance(outputs, Mapping) else None
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        if isinstance(loss, torch.Tensor):
            got = f"a loss of shape {tuple(loss.shape)}: take its mean()"
        elif isinstance(loss, int | float):
            got = f"{outputs!r}. {_STEPS_ITSELF}"
        else:
            got = repr(outputs)
        raise TypeError(
            "expected trainer.outputs to be a mapping with a 'loss' tensor of one element, set in this "
            f"iteration; got {got}"
        )
    if not loss.requires_grad:
        raise RuntimeError(
            "the loss needs no grad, so backward would train nothing: was it computed under torch.no_grad(), "
            f"detached, or are all parameters frozen? {_STEPS_ITSELF}"
        )
    return loss


def explain_freed_graph(error: RuntimeError) -> None:
    """Add the cause and a remedy, as a note, to PyTorch's error about a second backward through one graph."""
    if "backward through the graph a second time" in str(error):
        error.add_note(
            f"The optimizer hook calls backward() on trainer.outputs['loss']. {_STEPS_ITSELF}. Call detach() "
            "on a tensor that is kept from an earlier iteration, such as a recurrent state."
        )


def detached(outputs: Any) -> Any:
    """Return a copy of a dict with its tensors detached from their graph.

    Any other object is returned unchanged. If it is a mapping, a copy as a dict would lose its attributes.
    """
    if type(outputs) is not dict:
        return outputs
    result = outputs.copy()
    for name, value in outputs.items():
        # the exact type first, because `isinstance` calls a method of Tensor's metaclass, which is slower
        if (type(value) is Tensor or isinstance(value, Tensor)) and value.requires_grad:
            result[name] = value.detach()
    return result


class MeanOutputs:
    """Average the numbers in the outputs of several batches, without waiting for the device.

    Numbers are Python numbers and tensors of one element, also those in a mapping `log_vars`. A number that
    only some batches return is averaged over these. Any other value is that of the last batch. No tensors of
    earlier batches stay in memory, because only sums are kept.
    """

    def __init__(self) -> None:
        self._sums: dict[str, Any] = {}
        self._counts: dict[str, int] = {}
        self._outputs: dict[str, Any] = {}

    def add(self, outputs: Mapping[str, Any]) -> dict[str, Any]:
        """Add the outputs of a batch after its backward, and return them with the means so far."""
        self._outputs |= {name: self._mean(str(name), value) for name, value in outputs.items()}
        return dict(self._outputs)

    def _mean(self, name: str, value: Any) -> Any:
        """Return the mean of an output over the batches so far, or `value` itself if it is no number."""
        if name == "log_vars" and isinstance(value, Mapping):
            return {inner: self._mean(f"log_vars.{inner}", number) for inner, number in value.items()}
        if isinstance(value, Tensor):
            value = value.detach()
            if value.numel() != 1:
                return value
            number = own(value if value.dtype.is_complex or value.dtype == torch.float64 else value.float())
        elif is_number(value):
            number = value
        else:
            return value
        self._sums[name] = number + self._sums[name] if name in self._sums else number
        self._counts[name] = self._counts.get(name, 0) + 1
        return self._sums[name] / self._counts[name]
