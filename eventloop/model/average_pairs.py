"""Pair the tensors of a model with those of its average, in lists for torch's foreach functions.

`BaseAveragedModel` collects the lists once and checks before each use that they are still current. EMAHook
swaps the values in the lists before each evaluation and back after it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from operator import is_
from typing import NamedTuple

import torch
from torch import Tensor, nn

from eventloop.state.sharded import is_dtensor, local_parts, reshard


class Tracked(NamedTuple):
    """A parameter or buffer of a model, and whether it is averaged or only copied."""

    tensor: Tensor
    averaged: bool


class Pairs:
    """Hold the tensors of a model and of its copy in matching order, for torch's foreach functions.

    Walking through a model of 240 parameters takes longer than averaging them, so it is done once. `current`
    takes a third of that time. It notices each parameter, module or buffer that was added, removed or
    replaced, and a move of the model to another device or type. Of a DTensor the lists have this rank's part.

    Args:
        average, source: the results of `tracked` for the copy and for the model, with equal names and shapes.
        model: the module from which `source` was taken.
    """

    def __init__(self, average: dict[str, Tracked], source: dict[str, Tracked], model: nn.Module) -> None:
        copies, wholes = [average[name].tensor for name in source], [each.tensor for each in source.values()]
        self.averages, self.sources = local_parts(copies), local_parts(wholes)
        parts = zip([*copies, *wholes], [*self.averages, *self.sources], strict=True)
        self._shards = [(whole, part) for whole, part in parts if is_dtensor(whole)]
        self._alike: dict[tuple[torch.device, torch.dtype], tuple[list[Tensor], list[Tensor]]] = {}
        self._unlike: tuple[list[Tensor], list[Tensor]] = ([], [])
        self.copied: tuple[list[Tensor], list[Tensor]] = ([], [])
        for (_, averaged), own, tensor in zip(source.values(), self.averages, self.sources, strict=True):
            ours, theirs = self._list_of(own, tensor, averaged=averaged)
            ours.append(own)
            theirs.append(tensor)
        self.model = model
        self._full, self._empty = _registries(model, buffers=_has_buffers(model, wholes))
        self._registered = [*chain.from_iterable(map(dict.values, self._full))]
        self._form = _form(self.sources) + _form(self.averages)

    def current(self, model: nn.Module) -> bool:
        """Return whether the lists still match the tensors of `model`, which may have been replaced."""
        return (
            model is self.model
            and not any(self._empty)
            and sum(map(len, self._full)) == len(self._registered)
            and all(map(is_, chain.from_iterable(map(dict.values, self._full)), self._registered))
            and _form(self.sources) + _form(self.averages) == self._form
            and (not self._shards or self._has_parts())
        )

    def averaged(self) -> Iterator[tuple[list[Tensor], list[Tensor]]]:
        """Yield the tensors to average, in pairs of lists: those of the average, and the model's.

        Both lists of a pair have one device and one dtype. The model's tensors are converted if the average
        is on another device or has another dtype.
        """
        yield from self._alike.values()
        if self._unlike[0]:
            by_form: dict[tuple[torch.device, torch.dtype], tuple[list[Tensor], list[Tensor]]] = {}
            for own, tensor in zip(*self._unlike, strict=True):
                ours, theirs = by_form.setdefault((own.device, own.dtype), ([], []))
                ours.append(own)
                theirs.append(tensor.to(own.device, own.dtype))
            yield from by_form.values()

    def _list_of(self, own: Tensor, tensor: Tensor, *, averaged: bool) -> tuple[list[Tensor], list[Tensor]]:
        if not averaged:
            return self.copied
        if (own.device, own.dtype) != (tensor.device, tensor.dtype):
            return self._unlike
        return self._alike.setdefault((own.device, own.dtype), ([], []))

    def _has_parts(self) -> bool:
        """Return whether the DTensors still have the memory that the lists have."""
        parts = local_parts(whole for whole, _ in self._shards)
        return all(
            new.data_ptr() == old.data_ptr() for new, (_, old) in zip(parts, self._shards, strict=True)
        )


class Swap:
    """Copy an average into a model for an evaluation, and restore the model's own values after it.

    The average itself is not changed, so it loses no precision, and `back` may be called at any time and
    repeatedly, even after an interrupt within `put` or `back`. The model keeps its tensor objects, because
    graphs and optimizers refer to them. While the model has the average, a copy of its own values doubles
    their memory.
    """

    def __init__(self) -> None:
        self._replaced: tuple[Pairs, list[Tensor]] | None = None

    @property
    def active(self) -> bool:
        """True while the model has the values of the average."""
        return self._replaced is not None

    def put(self, pairs: Pairs) -> None:
        """Copy the values of the average into the model."""
        if self._replaced is None:
            self._replaced = (pairs, [tensor.detach().clone() for tensor in pairs.sources])
            _copy(pairs.sources, pairs.averages)

    def back(self) -> None:
        """Restore the model's own values, unless it has them already."""
        if self._replaced is not None:
            pairs, values = self._replaced
            reshard(pairs.model)  # forward passes would use weights that FSDP2 has gathered from the average
            _copy(pairs.sources, values)
            self._replaced = None

    @contextmanager
    def undone(self, pairs: Pairs) -> Iterator[None]:
        """Restore the model's own values inside the block, and put the average back after it."""
        was_active = self.active
        self.back()
        try:
            yield
        finally:
            if was_active:
                self.put(pairs)


def _copy(tensors: list[Tensor], values: list[Tensor]) -> None:
    if tensors:
        # .data: autograd does not count the change, so a graph that awaits its backward stays usable
        # no grad mode is set, because an interrupt may keep it from being restored
        torch._foreach_copy_([tensor.data for tensor in tensors], [value.detach() for value in values])


def tracked(model: nn.Module, *, copy_buffers: bool, update_buffers: bool) -> dict[str, Tracked]:
    """Return by name the parameters of a model, and its buffers if they are to be copied or averaged.

    Integers and booleans, such as `num_batches_tracked`, are only copied, because their mean would be
    rounded down.
    """
    found = {name: Tracked(p, _has_mean(p)) for name, p in model.named_parameters()}
    if copy_buffers or update_buffers:
        found |= {name: Tracked(b, update_buffers and _has_mean(b)) for name, b in model.named_buffers()}
    return found


def _has_buffers(model: nn.Module, tensors: list[Tensor]) -> bool:
    parameters = {id(parameter) for parameter in model.parameters()}
    return any(id(tensor) not in parameters for tensor in tensors)


def _has_mean(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _registries(
    model: nn.Module, *, buffers: bool
) -> tuple[list[dict[str, object]], list[dict[str, object]]]:
    """Return the dicts in which a model's modules hold parameters, submodules and, with `buffers`, buffers.

    The first list has the non-empty dicts, the second one the empty dicts.
    """
    found: list[dict[str, object]] = []
    for module in model.modules():
        found += [module._parameters, module._modules]  # type: ignore[list-item]
        if buffers:
            found.append(module._buffers)  # type: ignore[arg-type]
    return [d for d in found if d], [d for d in found if not d]


def _form(tensors: list[Tensor]) -> tuple[object, ...]:
    """Return device and dtype of the first and the last tensor, which `model.to` changes together."""
    ends = (tensors[0], tensors[-1]) if tensors else ()
    return tuple((tensor.device, tensor.dtype) for tensor in ends)
