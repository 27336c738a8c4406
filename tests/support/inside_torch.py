"""Ask PyTorch for what it has no public function: its hooks, and what its compiler is told and has counted.

A release of PyTorch that renames one of them is met here, at one place.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


def module_hooks(model: nn.Module) -> list[int]:
    """Return the number of hooks on each module of a model."""
    return [
        len(module._forward_pre_hooks) + len(module._forward_hooks) + len(module._backward_hooks)
        for module in model.modules()
    ]


def step_hooks(optimizer: Any) -> int:
    """Return the number of hooks that an optimizer has before and after its steps."""
    return len(optimizer._optimizer_step_pre_hooks) + len(optimizer._optimizer_step_post_hooks)


def compiler_stance() -> str:
    """Return what the compiler is told to do just now."""
    return str(torch._dynamo.eval_frame._stance.stance)


def compiler_counts() -> tuple[int, int, int]:
    """Return how many graph breaks, failed frames and graphs Dynamo has counted since the last `compile_anew`."""
    counters = torch._dynamo.utils.counters
    frames = counters["frames"]
    return (
        sum(counters["graph_break"].values()) + sum(counters["unimplemented"].values()),
        frames["total"] - frames["ok"],
        counters["stats"]["unique_graphs"],
    )


def compile_anew() -> None:
    """Forget all compiled code and all counts."""
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()


def run_kernel(cycles: int) -> None:
    """Queue a kernel on the CUDA device that takes so many of its cycles."""
    torch.cuda._sleep(cycles)
