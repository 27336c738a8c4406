"""Count a model's parameters, and make a table of its layers with torchinfo, as Keras' `model.summary()`.

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
PARAMETERS = ("num_params", "trainable")


def model_summary(
    model: torch.nn.Module,
    batch: Any,
    depth: int,
    device: torch.device | None,
    autocast: Callable[[], AbstractContextManager[Any]],
) -> str:
    """Return the table that `Trainer.model_summary` describes.

    The forward pass runs in eval mode and without gradients. Modes, buffers and random states are restored:
    torchinfo would give all modules the mode of the model.
    """
    positive("depth", depth)
    torchinfo = import_torchinfo()
    model = unwrap(model)  # DistributedDataParallel would exchange buffers with the other ranks
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
    with undo, undo, autocast():
        undo.step(set_module_generators, model, module_generators(model))
        undo.step(set_rng_state, rng_state())
        undo.step(torchinfo.clear_cached_forward_pass)  # a global, which would keep the layers of the model
        save_modes_and_buffers(undo, model)
        found = torchinfo.summary(model, input_data=inputs, col_names=SIZES, mode="eval", **options)
    return str(found)


def count_text(model: torch.nn.Module) -> str:
    """Return the number of a model's parameters as text; lazy ones, of unknown size, are counted apart."""
    lazy = sum(is_lazy(p) for p in model.parameters())
    known = sum(p.numel() for p in model.parameters() if not is_lazy(p))
    return f"{known:,}" + (f" and {lazy} of unknown size" if lazy else "")


def import_torchinfo() -> ModuleType:
    """Import the library, or raise an error that names the extra."""
    try:
        from torchinfo import torchinfo
    except ImportError as error:
        raise ImportError(
            "model_summary needs torchinfo: pip install 'torch-eventloop[summary]'", name="torchinfo"
        ) from error
    module: ModuleType = torchinfo
    return module


def _inputs(batch: Any) -> Any:
    """Return the arguments of the model: a list of the inputs, or a mapping for a model called by names."""
    if isinstance(batch, list | tuple) and len(batch) == 2:
        batch = batch[0]
    return batch if isinstance(batch, Mapping) else [batch]
