"""Find trainable parameters that a loss does not depend on.

The optimizer hooks use this module for `detect_anomalous_params`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from eventloop.checkpoint.weights import unwrap
from eventloop.state.sharded import fsdp_modules

logger = logging.getLogger("eventloop")


class AnomalousParams:
    """Log, as an error, the trainable parameters outside of the graph of a loss, whenever that set changes.

    It walks through the whole graph in Python in every iteration, so use it to find a fault, not in long
    trainings. Parameters inside `torch.utils.checkpoint(use_reentrant=True)` are hidden behind one node and
    count as not reached. Under FSDP2 the ranks gather the weights once more in each iteration.
    """

    def __init__(self) -> None:
        self._last: frozenset[str] = frozenset()

    def check(self, loss: torch.Tensor, model: torch.nn.Module) -> None:
        """Log the parameters of `model` outside the graph of `loss`.

        Call it before backward, which frees the graph.
        """
        missed = unreached_parameters(loss, model)
        names = frozenset(missed)
        if names and names != self._last:
            listed = "".join(f"\n  {name}, {tuple(parameter.shape)}" for name, parameter in missed.items())
            logger.error(
                "these parameters are not in the graph of the loss, which does not train them:%s", listed
            )
        self._last = names


def unreached_parameters(loss: torch.Tensor, model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """Return the parameters of `model`, by name, that require a gradient and would get none from `loss`."""
    inner = unwrap(model)
    reached = {id(loss)}
    # an explicit stack, because a deep graph exceeds Python's recursion limit
    waiting, seen = [loss.grad_fn], {loss.grad_fn}
    while waiting:
        node = waiting.pop()
        if node is None:
            continue
        if (variable := getattr(node, "variable", None)) is not None:
            reached.add(id(variable))
        for parent, _ in node.next_functions:
            if parent not in seen:
                seen.add(parent)
                waiting.append(parent)
    with _gathered(inner):
        return {name: p for name, p in inner.named_parameters() if p.requires_grad and id(p) not in reached}


@contextmanager
def _gathered(model: torch.nn.Module) -> Iterator[None]:
    """Give the model its whole parameters inside the block, because FSDP2's graphs refer to them."""
    modules = fsdp_modules(model)
    for module in modules:
        module.unshard()
    try:
        yield
    finally:
        for module in modules:
            module.reshard()
