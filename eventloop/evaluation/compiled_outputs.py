"""Keep the outputs of compiled code, whose memory a CUDA graph overwrites in a later iteration.

With `mode="reduce-overhead"` PyTorch replays CUDA graphs. The loops of training, evaluation and the learning
rate test mark where an iteration begins, and keep copies of outputs. Without `compile=...` they call
nothing here but `run_step`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch

from eventloop.evaluation.outputs import map_tensors


def begin_compiled_step() -> None:
    """Mark for PyTorch where an iteration begins, so that the outputs of earlier ones may be overwritten."""
    if "torch._inductor.cudagraph_trees" in sys.modules:  # else no graph exists; the import takes 3 s
        torch.compiler.cudagraph_mark_step_begin()


def copied(outputs: Any) -> Any:
    """Return a copy of a dict with copies of its tensors, within their graph; return other objects unchanged.

    A mapping of another class is returned unchanged, because a copy as a dict would lose its attributes.
    """
    return map_tensors(outputs, torch.clone) if type(outputs) is dict else outputs


def run_step(step: Callable[[Any], Any], batch: Any, *, compiled: bool) -> Any:
    """Return the outputs of a step of an evaluation, without gradients.

    Args:
        compiled: whether the model is compiled, so that outputs must be copied.
    """
    with torch.no_grad():
        if not compiled:
            return step(batch)
        begin_compiled_step()
        return copied(step(batch))
