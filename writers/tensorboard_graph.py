"""A model's graph for TensorBoard: traced by whoever has the model, and written by the writer, which has not."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from eventloop.util.checks import check_bools

if TYPE_CHECKING:
    import torch


def trace_graph(model: torch.nn.Module, inputs: Any, *, strict: bool = True) -> bytes:
    """Trace a model and return its graph, an encoded GraphDef.

        TensorBoardWriter(graph=trace_graph(model, torch.zeros(1, 3, 224, 224)))

    The model runs once, in evaluation mode. Modes, buffers and random state are afterwards what they were before.

    Args:
        model: anything `torch.jit.trace` takes.
        inputs: a batch as `model(inputs)` takes it, on the model's device; a tuple for several arguments.
        strict: False lets the model return lists and dicts; see `torch.jit.trace`.

    Raises:
        ImportError: tensorboard is not installed.
        TypeError: `strict` is neither True nor False.
        RuntimeError: the model cannot be traced; the cause says why.
    """
    check_bools(strict=strict)
    try:
        from torch.utils.tensorboard._pytorch_graph import graph
    except ImportError as error:
        raise ImportError("trace_graph needs tensorboard: pip install 'torch-eventloop[demo]'") from error
    with _untouched(model), warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of torch.jit, which TensorBoard's format needs
        warnings.filterwarnings("ignore", r"`torch\.jit\.", FutureWarning)  # the same in torch 2.15
        definition, _ = graph(model, inputs, use_strict_trace=strict)
    encoded: bytes = definition.SerializeToString()
    return encoded


@contextmanager
def _untouched(model: torch.nn.Module) -> Iterator[None]:
    import torch

    modes = {module: module.training for module in model.modules()}
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    try:
        with torch.no_grad(), torch.random.fork_rng():
            yield
    finally:
        for module, training in modes.items():  # one by one: some may be frozen, others not
            module.training = training
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)
