"""Run the forward pass of a batch in a training, validation, test or prediction; the trainer uses it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

LossFn = Callable[[Any, Any], Any]
"""A function `(outputs, target)` that returns the loss, or a mapping with the loss."""


def forward(model: torch.nn.Module, loss_fn: LossFn, batch: Any) -> Any:
    """Return the loss of a batch `(inputs, target)` of the train loader.

    Raises:
        TypeError: the batch is not a pair `(inputs, target)`.
    """
    inputs, target = _pair(batch, "train", "train_step")
    return loss_fn(model(inputs), target)


def predict(model: torch.nn.Module, loss_fn: LossFn | None, batch: Any, mode: str) -> dict[str, Any]:
    """Return the model's outputs for a batch as `preds`, its `target`, and with a loss function the loss.

    If the loss function returns a mapping, the result has its items.

    Args:
        model: the model.
        loss_fn: the loss function, or None.
        batch: a pair `(inputs, target)`.
        mode: "val" or "test", for the error.

    Raises:
        TypeError: the batch is not a pair `(inputs, target)`.
    """
    inputs, target = _pair(batch, mode, "val_step")
    preds = model(inputs)
    loss = {} if loss_fn is None else loss_fn(preds, target)
    losses = loss if isinstance(loss, Mapping) else {"loss": loss}
    return {**losses, "preds": preds, "target": target}


def outputs_of_inputs(model: torch.nn.Module, batch: Any) -> Any:
    """Return the outputs of a model for a batch, which is the inputs, `(inputs,)` or `(inputs, target)`.

    Raises:
        TypeError: the batch is an empty or longer list or tuple.
    """
    if not isinstance(batch, list | tuple):
        return model(batch)
    if len(batch) in (1, 2):
        return model(batch[0])
    raise TypeError(
        f"predict needs batches of inputs, or (inputs, target), got a {type(batch).__name__} of {len(batch)} "
        "from the loader: pass predict_step=... for batches of another form"
    )


def train_outputs(outputs: Any) -> dict[str, Any]:
    """Return the result of a train step, a loss tensor or a mapping with "loss", as a mapping.

    Raises:
        TypeError: the result is neither a tensor nor such a mapping.
    """
    if isinstance(outputs, torch.Tensor):
        return {"loss": outputs}
    if isinstance(outputs, Mapping) and "loss" in outputs:
        return dict(outputs)
    got = f"a mapping with {sorted(map(str, outputs))}" if isinstance(outputs, Mapping) else repr(outputs)
    hint = ""
    if isinstance(outputs, int | float):  # the train step may have called `backward` and `loss.item()`
        hint = (
            ". A train_step that calls backward() and step() itself returns the loss tensor too, and needs "
            "default_hooks=dict(optimizer=None)"
        )
    raise TypeError(f"the train step must return the loss tensor or a mapping with 'loss', got {got}{hint}")


def _pair(batch: Any, mode: str, step: str) -> tuple[Any, Any]:
    """Return a batch as `(inputs, target)`, or raise a TypeError that recommends the argument `step`."""
    length = ""
    if isinstance(batch, list | tuple):
        if len(batch) == 2:
            return batch[0], batch[1]
        length = f" of {len(batch)}"
    raise TypeError(
        f"{mode}_loader must give batches (inputs, target), got a {type(batch).__name__}{length}: pass "
        f"{step}=... for batches of another form"
    )
