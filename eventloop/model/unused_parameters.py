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
    """Log the trainable parameters on which a loss does not depend, as an error, whenever the set changes.

    It walks through the whole graph of the loss in Python in every iteration, so use it to find a fault, not
    in long trainings. Parameters inside `torch.utils.checkpoint(use_reentrant=True)` are hidden in one node
    of the graph, and are named, too. Under FSDP2 the ranks gather the weights once more in each iteration.
    """

    def __init__(self) -> None:
        self._last_names: frozenset[str] = frozenset()

    def check(self, loss: torch.Tensor, model: torch.nn.Module) -> None:
        """Log the parameters of `model` on which `loss` does not depend.

        Call it before backward, which frees the graph.
        """
        unreached = unreached_parameters(loss, model)
        names = frozenset(unreached)
        if names and names != self._last_names:
            lines = "".join(f"\n  {name}, {tuple(parameter.shape)}" for name, parameter in unreached.items())
            logger.error(
                "these parameters are not in the graph of the loss, which does not train them:%s", lines
            )
        self._last_names = names


def unreached_parameters(loss: torch.Tensor, model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """Return the parameters of `model`, by name, that require a gradient and would get none from `loss`."""
    inner_model = unwrap(model)
    reached = {id(loss)}
    # a stack instead of recursion, because a deep graph exceeds Python's recursion limit
    stack, seen = [loss.grad_fn], {loss.grad_fn}
    while stack:
        node = stack.pop()
        if node is None:
            continue
        if (parameter := getattr(node, "variable", None)) is not None:
            reached.add(id(parameter))
        for next_node, _ in node.next_functions:
            if next_node not in seen:
                seen.add(next_node)
                stack.append(next_node)
    with _gathered(inner_model):
        trainable = {name: p for name, p in inner_model.named_parameters() if p.requires_grad}
        return {name: p for name, p in trainable.items() if id(p) not in reached}


@contextmanager
def _gathered(model: torch.nn.Module) -> Iterator[None]:
    """Gather the sharded parameters of FSDP2 in the `with` block, because its graphs refer to whole ones."""
    modules = fsdp_modules(model)
    for module in modules:
        module.unshard()
    try:
        yield
    finally:
        for module in modules:
            module.reshard()
