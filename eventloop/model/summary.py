"""Count a model's parameters, and make a table of its layers with torchinfo, like Keras' `model.summary()`.

`Trainer.model_summary`, `repr(trainer)` and `RuntimeInfoHook` use it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from types import ModuleType
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from eventloop.checkpoint.weights import save_modes_and_buffers, unwrap
from eventloop.data.loader_info import to_device
from eventloop.data.rng import module_generators, rng_state, set_module_generators, set_rng_state
from eventloop.state.undo import Undo
from eventloop.util.checks import positive

SIZES = ("input_size", "output_size", "num_params", "trainable", "mult_adds")
"""torchinfo's columns for a table that is made with a batch."""
PARAMETERS = ("num_params", "trainable")
"""torchinfo's columns for a table that is made without a batch."""


def model_summary(
    model: torch.nn.Module,
    batch: Any,
    depth: int,
    device: torch.device | None,
    autocast: Callable[[], AbstractContextManager[Any]],
) -> str:
    """Return a table of a model's layers; with a batch it has the sizes of their inputs and outputs.

    With a batch, the model runs once in eval mode and without gradients. Modes, buffers and random states are
    restored afterwards.

    Args:
        model: the model.
        batch: a batch of the train loader, or None.
        depth: how many levels of nested modules are shown.
        device: the device to move the batch to; None leaves it where it is.
        autocast: returns the context manager in which the model runs.

    Raises:
        ImportError: torchinfo is not installed.
        ValueError: `depth` is below 1, or a parameter is lazy.
    """
    positive("depth", depth)
    torchinfo = import_torchinfo()
    model = unwrap(model)  # DistributedDataParallel would run collectives, which other ranks do not join
    if lazy := [name for name, parameter in model.named_parameters() if is_lazy(parameter)]:
        raise ValueError(
            f"model_summary needs a model whose parameters have shapes, and {lazy[0]!r} is lazy: call the "
            "model with a batch before"
        )
    options: dict[str, Any] = {"depth": depth, "verbose": 0, "row_settings": ("var_names", "depth")}
    if batch is None:
        return str(torchinfo.summary(model, col_names=PARAMETERS, **options))
    inputs = to_device(_inputs(batch), device)
    undo = Undo()
    with undo, undo, autocast():  # twice, because an interrupt may keep one of the two from being left
        undo.step(set_module_generators, model, module_generators(model))
        undo.step(set_rng_state, rng_state())
        undo.step(torchinfo.clear_cached_forward_pass)  # the cache would keep the model's layers in memory
        save_modes_and_buffers(undo, model)
        table = torchinfo.summary(model, input_data=inputs, col_names=SIZES, mode="eval", **options)
    return str(table)


def count_text(model: torch.nn.Module) -> str:
    """Return the number of elements in a model's parameters as text, with the number of lazy parameters."""
    lazy_count = sum(is_lazy(parameter) for parameter in model.parameters())
    size = sum(parameter.numel() for parameter in model.parameters() if not is_lazy(parameter))
    return f"{size:,}" + (f" and {lazy_count} of unknown size" if lazy_count else "")


def import_torchinfo() -> ModuleType:
    """Import torchinfo; if it is not installed, raise an ImportError with the command that installs it."""
    try:
        from torchinfo import torchinfo
    except ImportError as error:
        raise ImportError(
            "model_summary needs torchinfo: pip install 'torch-eventloop[summary]'", name="torchinfo"
        ) from error
    module: ModuleType = torchinfo
    return module


def _inputs(batch: Any) -> Any:
    """Return the model's arguments for a batch: a list of positional arguments, or a mapping of keywords."""
    if isinstance(batch, list | tuple) and len(batch) == 2:
        batch = batch[0]
    return batch if isinstance(batch, Mapping) else [batch]
