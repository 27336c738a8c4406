"""Run the forward pass of a batch, and check the form of its result."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

LossFn = Callable[[Any, Any], Any]


def forward(model: torch.nn.Module, loss_fn: LossFn, batch: Any) -> Any:
    """Return the loss of a batch `(inputs, target)` of the train loader.

    Raises:
        TypeError: the batch has another form.
    """
    inputs, target = _pair(batch, "train", "train_step")
    return loss_fn(model(inputs), target)


def predict(model: torch.nn.Module, loss_fn: LossFn | None, batch: Any, mode: str) -> dict[str, Any]:
    """Return `preds`, `target` and, with a loss function, the loss or the mapping that it returns.

    Args:
        mode: "val" or "test", for the error.

    Raises:
        TypeError: the batch has another form than `(inputs, target)`.
    """
    inputs, target = _pair(batch, mode, "val_step")
    preds = model(inputs)
    loss = {} if loss_fn is None else loss_fn(preds, target)
    return {**(loss if isinstance(loss, Mapping) else {"loss": loss}), "preds": preds, "target": target}


def outputs_of_inputs(model: torch.nn.Module, batch: Any) -> Any:
    """Return the outputs of a model for a batch: the inputs alone, `(inputs, target)` or `(inputs,)`.

    Raises:
        TypeError: the batch is a longer list or tuple.
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
    """Return the result of a train step as a mapping."""
    if isinstance(outputs, torch.Tensor):
        return {"loss": outputs}
    if isinstance(outputs, Mapping) and "loss" in outputs:
        return dict(outputs)
    got = f"a mapping with {sorted(map(str, outputs))}" if isinstance(outputs, Mapping) else repr(outputs)
    itself = (
        ". A train_step that calls backward() and step() itself returns the loss tensor too, and needs "
        "default_hooks=dict(optimizer=None)"
        if isinstance(outputs, int | float)
        else ""
    )
    raise TypeError(f"the train step must return the loss tensor or a mapping with 'loss', got {got}{itself}")


def _pair(batch: Any, mode: str, step: str) -> tuple[Any, Any]:
    length = ""
    if isinstance(batch, list | tuple):
        if len(batch) == 2:
            return batch[0], batch[1]
        length = f" of {len(batch)}"
    raise TypeError(
        f"{mode}_loader must give batches (inputs, target), got a {type(batch).__name__}{length}: pass "
        f"{step}=... for batches of another form"
    )
