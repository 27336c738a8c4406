"""Name the parameters of optimizers, whose states have only the index of each parameter.

Checkpoints store the names. By them `eventloop.resume.by_name` finds the parameter of each saved state, and
the hook that accumulates gradients finds the parameter of each saved gradient.
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
    """Return the names of the parameters of each optimizer.

    A parameter outside of the model has its name in a `loss_fn` that is a module, such as "loss_fn.log_var";
    else a name with which it was passed to the optimizer, as "log_var outside of the model"; else "".

    Returns:
        For each optimizer, by its name, a list with a text for each param group: the names of the group's
        parameters, joined by newlines.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    if isinstance(loss_fn, torch.nn.Module):
        names = {id(p): f"loss_fn.{name}" for name, p in loss_fn.named_parameters()} | names
    return {
        name: ["\n".join(_names_in(group, names)) for group in each.param_groups]
        for name, each in named_optimizers(optimizer).items()
    }


def _names_in(group: Mapping[str, Any], names: Mapping[int, str]) -> Iterator[str]:
    """Yield the names of the parameters in a param group, of which `names` has the known ones by id."""
    # PyTorch stores names in the group if the optimizer was given pairs of names and parameters
    given = group.get("param_names") or [""] * len(group["params"])
    for parameter, name in zip(group["params"], given, strict=False):
        yield names.get(id(parameter)) or (f"{name} outside of the model" if name else "")


def alike_without_a_name(optimizer: Any, groups: Sequence[str]) -> int:
    """Return how many parameters without a name have the shape of another parameter without a name.

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
    """Return a list of labels for each param group of an optimizer, with a label for each parameter.

    A label is the parameter's name, or a text with its number among the parameters without a name.

    Args:
        groups: the names as `parameter_names` returns them.
        sizes: the number of parameters of each group.
        source: the path of the checkpoint, for the error.

    Raises:
        CheckpointError: the number of names differs from the number of parameters.
    """
    sizes = [*sizes]
    by_group = [
        names.split("\n") if names or size else [] for names, size in zip(groups, sizes, strict=False)
    ]
    if (counts := [len(names) for names in by_group]) != sizes or len(groups) != len(sizes):
        raise CheckpointError(
            f"{source} has names of {counts} parameters in meta.parameters, expected as many as the groups "
            f"of the optimizer's state have: {sizes}"
        )
    unnamed = iter(range(sum(sizes)))
    return [
        [name or f"parameter {next(unnamed)} outside of the model" for name in names] for names in by_group
    ]


def labels(model: torch.nn.Module, loss_fn: object, optimizer: Any) -> list[str]:
    """Return a label for each parameter of all optimizers, in their order, as `labels_of` makes them."""
    names, all_labels = parameter_names(model, loss_fn, optimizer), list[str]()
    for name, each in named_optimizers(optimizer).items():
        sizes = (len(group["params"]) for group in each.param_groups)
        all_labels += (label for group in labels_of(names[name], sizes, "the trainer") for label in group)
    return all_labels


def in_order_of(own: Sequence[str], saved: Sequence[str], values: Sequence[T]) -> Sequence[T | None]:
    """Return saved values in the order of this trainer's parameters; a new parameter gets None.

    Args:
        own, saved: the labels of this trainer's and of the saved parameters. If an earlier version of
            eventloop has saved the values without labels, the order stays.
        values: a value for each of the saved parameters.
    """
    by_name = dict(zip(saved, values, strict=False))
    if not own or not len(by_name) == len(saved) == len(values):
        return values
    return [by_name.get(name) for name in own]
