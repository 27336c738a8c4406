"""Name the parameters of optimizers, whose states know them only by their numbers.

Checkpoints store the names, by which `eventloop.resume.by_name` finds the owner of each state, and the hook
that accumulates gradients finds the owner of each gradient.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch.nn.parameter import is_lazy

from eventloop.optim.optimizers import named_optimizers
from eventloop.util.errors import CheckpointError

T = TypeVar("T")


def parameter_names(model: torch.nn.Module, loss_fn: object, optimizer: Any) -> dict[str, list[str]]:
    """Return the parameters' names in the model, by optimizer and param group, joined by newlines.

    A parameter that is not the model's has its name in a `loss_fn` that is a module, as "loss_fn.log_var", or
    the name by which the optimizer was given it, as "log_var outside of the model", or an empty name.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    if isinstance(loss_fn, torch.nn.Module):
        names = {id(p): f"loss_fn.{name}" for name, p in loss_fn.named_parameters()} | names
    return {
        name: ["\n".join(_names_in(group, names)) for group in each.param_groups]
        for name, each in named_optimizers(optimizer).items()
    }


def _names_in(group: Mapping[str, Any], names: Mapping[int, str]) -> Iterator[str]:
    given = group.get("param_names") or [""] * len(
        group["params"]
    )  # by named_parameters(), as PyTorch has it
    for parameter, name in zip(group["params"], given, strict=False):
        yield names.get(id(parameter)) or (f"{name} outside of the model" if name else "")


def alike_without_a_name(optimizer: Any, groups: Sequence[str]) -> int:
    """Return how many of an optimizer's parameters have neither a name nor a shape of their own.

    Args:
        optimizer: the optimizer.
        groups: the names of its parameters, as `parameter_names` returns them.
    """
    names = [name for group in groups for name in group.split("\n")]
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    shapes = Counter(
        "no shape yet" if is_lazy(p) else tuple(p.shape)
        for p, name in zip(parameters, names, strict=False)
        if not name
    )
    return sum(count for count in shapes.values() if count > 1)


def labels_of(groups: Sequence[str], sizes: Iterable[int], source: object) -> list[list[str]]:
    """Return a label for each parameter of an optimizer, by param group: its name, if it has one.

    Parameters outside of the model may have no name; their order alone distinguishes them.

    Args:
        groups: the names as `parameter_names` returns them.
        sizes: the number of parameters of each group.
        source: the path of the checkpoint, for the error.

    Raises:
        CheckpointError: the names are not those of so many parameters.
    """
    sizes = [*sizes]
    split = [names.split("\n") if names or size else [] for names, size in zip(groups, sizes, strict=False)]
    if (found := [len(names) for names in split]) != sizes or len(groups) != len(sizes):
        raise CheckpointError(
            f"{source} has names of {found} parameters in meta.parameters, expected as many as the groups of "
            f"the optimizer's state have: {sizes}"
        )
    unnamed = iter(range(sum(sizes)))
    return [[name or f"parameter {next(unnamed)} outside of the model" for name in names] for names in split]


def labels(model: torch.nn.Module, loss_fn: object, optimizer: Any) -> list[str]:
    """Return a label for each parameter of all optimizers, in their order, as `labels_of` makes them."""
    names, found = parameter_names(model, loss_fn, optimizer), list[str]()
    for name, each in named_optimizers(optimizer).items():
        sizes = (len(group["params"]) for group in each.param_groups)
        found += (label for group in labels_of(names[name], sizes, "the trainer") for label in group)
    return found


def in_order_of(own: Sequence[str], saved: Sequence[str], values: Sequence[T]) -> Sequence[T | None]:
    """Return saved values in the order of this trainer's parameters; a new parameter gets None.

    Args:
        own, saved: the labels of this trainer's and of the saved parameters. An earlier version has saved no
            labels; then the order stays.
        values: a value for each of the saved parameters.
    """
    by_name = dict(zip(saved, values, strict=False))
    if not own or not len(by_name) == len(saved) == len(values):
        return values
    return [by_name.get(name) for name in own]
