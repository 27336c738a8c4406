"""Read the loss from the outputs of a train step, and detach the outputs after backward."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

_STEPS_ITSELF = (
    "A train_step or loop that calls backward() and step() itself needs default_hooks=dict(optimizer=None)"
)


def loss_of(outputs: Any) -> torch.Tensor:
    """Return the loss tensor of a train step, ready for backward.

    Raises:
        TypeError: `outputs` is not a mapping with a "loss" tensor of one element.
        RuntimeError: the loss needs no grad.
    """
    loss = outputs.get("loss") if type(outputs) is dict or isinstance(outputs, Mapping) else None
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        if isinstance(loss, torch.Tensor):
            got = f"a loss of shape {tuple(loss.shape)}: take its mean()"
        else:
            got = f"{outputs!r}{f'. {_STEPS_ITSELF}' if isinstance(loss, int | float) else ''}"
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
    """Add the cause and the remedy to PyTorch's error about a second backward through one graph."""
    if "backward through the graph a second time" in str(error):
        error.add_note(
            f"The optimizer hook calls backward() on trainer.outputs['loss']. {_STEPS_ITSELF}. Call detach() "
            "on a tensor that is kept from an earlier iteration, such as a recurrent state."
        )


def detached(outputs: Any) -> Any:
    """Return a copy of a dict with its tensors detached from their graph; return other objects unchanged.

    A mapping of another class is returned unchanged, because a copy as a dict would lose its attributes.
    """
    if type(outputs) is not dict:
        return outputs
    kept = outputs.copy()
    for name, value in outputs.items():
        # the exact type first: `isinstance` runs a metaclass's check, which is slower
        if (type(value) is Tensor or isinstance(value, Tensor)) and value.requires_grad:
            kept[name] = value.detach()
    return kept
