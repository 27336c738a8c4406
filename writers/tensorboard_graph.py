"""Trace a model's graph for TensorBoard.

`TensorBoardWriter` does not have the model, so the training script calls `trace_graph` and passes the result
to the writer.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

from eventloop.util.checks import check_bools

if TYPE_CHECKING:
    import torch


def trace_graph(model: torch.nn.Module, inputs: Any, *, strict: bool = True) -> bytes:
    """Trace a model and return its graph as the bytes of a GraphDef, for `TensorBoardWriter`.

        TensorBoardWriter(graph=trace_graph(model, torch.zeros(1, 3, 224, 224)))

    The model runs once, in evaluation mode. Its modes and buffers, and the random state, are restored
    afterwards.

    Args:
        model: a module that `torch.jit.trace` accepts.
        inputs: a batch as in `model(inputs)`, on the model's device; a tuple for several arguments.
        strict: whether the model must return tensors and tuples only; False allows lists and dicts, too, as
            in `torch.jit.trace`.

    Raises:
        ImportError: tensorboard is not installed.
        TypeError: `strict` is not a bool.
        RuntimeError: the model cannot be traced; `__cause__` is torch's error.
    """
    check_bools(strict=strict)
    try:
        from torch.utils.tensorboard._pytorch_graph import graph
    except ImportError as error:
        raise ImportError("trace_graph needs tensorboard: pip install 'torch-eventloop[demo]'") from error
    import torch

    from eventloop.checkpoint.weights import save_modes_and_buffers
    from eventloop.data.rng import rng_state, set_rng_state
    from eventloop.state.undo import Undo

    undo = Undo()
    # `undo` twice, because an interrupt may keep one of the two from being left
    with undo, undo, warnings.catch_warnings(), torch.no_grad():
        undo.step(set_rng_state, rng_state())
        save_modes_and_buffers(undo, model)
        # torch.jit is deprecated, but TensorBoard's format needs it; torch 2.15 raises a FutureWarning
        warnings.simplefilter("ignore", DeprecationWarning)
        warnings.filterwarnings("ignore", r"`torch\.jit\.", FutureWarning)
        definition, _ = graph(model, inputs, use_strict_trace=strict)
    encoded: bytes = definition.SerializeToString()
    return encoded
