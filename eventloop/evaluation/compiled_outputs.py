"""Copy the outputs of compiled code, whose memory a CUDA graph overwrites in a later iteration.

With `mode="reduce-overhead"` PyTorch replays CUDA graphs. The loops of training, evaluation and the learning
rate test then report to PyTorch where an iteration begins, and keep copies of the outputs.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch

from eventloop.evaluation.outputs import map_tensors


def begin_compiled_step() -> None:
    """Report to PyTorch that an iteration begins, so that it may overwrite the outputs of earlier ones."""
    # a module that is not imported has no CUDA graphs, and the call would import it, which takes 3 s
    if "torch._inductor.cudagraph_trees" in sys.modules:
        torch.compiler.cudagraph_mark_step_begin()


def copied(outputs: Any) -> Any:
    """Return a copy of a dict with copies of its tensors, which stay in the autograd graph.

    Other objects are returned unchanged, also a mapping of another class, whose attributes a dict would lose.
    """
    return map_tensors(outputs, torch.clone) if type(outputs) is dict else outputs


def run_step(step: Callable[[Any], Any], batch: Any, *, compiled: bool) -> Any:
    """Run a step of an evaluation on a batch, without gradients, and return its outputs.

    Args:
        compiled: whether the model is compiled. Its outputs are then copied, because a CUDA graph writes the
            outputs of the next batch to the same memory.
    """
    with torch.no_grad():
        if not compiled:
            return step(batch)
        begin_compiled_step()
        return copied(step(batch))
