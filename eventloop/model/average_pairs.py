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

TensorLists = tuple[list[Tensor], list[Tensor]]
"""The tensors of an average, and those of the model in the same order."""


class Tracked(NamedTuple):
    """A parameter or buffer of a model, and whether it is averaged; if not, it is copied."""

    tensor: Tensor
    averaged: bool


class Pairs:
    """Hold the tensors of an average and of its model in equal order, for torch's foreach functions.

    To collect the tensors of a model with 240 parameters takes longer than to average them, so they are
    collected once. `current` takes a third of that time: it detects parameters, modules and buffers that were
    added, removed or replaced, and a move of the model to another device or dtype. For a DTensor the lists
    have this rank's part.

    Args:
        average, source: the results of `tracked` for the average and for the model, with equal names and
            shapes.
        model: the module from which `source` was taken.
    """

    def __init__(self, average: dict[str, Tracked], source: dict[str, Tracked], model: nn.Module) -> None:
        average_tensors = [average[name].tensor for name in source]
        source_tensors = [item.tensor for item in source.values()]
        self.averages, self.sources = local_parts(average_tensors), local_parts(source_tensors)
        parts = zip([*average_tensors, *source_tensors], [*self.averages, *self.sources], strict=True)
        self._dtensors = [(whole, part) for whole, part in parts if is_dtensor(whole)]
        # the pairs to average: by device and dtype if both tensors have the same, and all other pairs
        self._same_form: dict[tuple[torch.device, torch.dtype], TensorLists] = {}
        self._other_form: TensorLists = ([], [])
        self.copied: TensorLists = ([], [])
        """The tensors that are copied, not averaged."""
        for item, average_part, source_part in zip(source.values(), self.averages, self.sources, strict=True):
            average_list, source_list = self._lists_for(average_part, source_part, averaged=item.averaged)
            average_list.append(average_part)
            source_list.append(source_part)
        self.model = model
        # for `current`: the model's dicts of tensors and modules, their values, and devices and dtypes
        self._full, self._empty = _registries(model, buffers=_has_buffers(model, source_tensors))
        self._registered = [*chain.from_iterable(map(dict.values, self._full))]
        self._form = _form(self.sources) + _form(self.averages)

    def current(self, model: nn.Module) -> bool:
        """Return whether the lists still have the tensors of `model`, none of which was replaced or moved."""
        return (
            model is self.model
            and not any(self._empty)
            and sum(map(len, self._full)) == len(self._registered)
            and all(map(is_, chain.from_iterable(map(dict.values, self._full)), self._registered))
            and _form(self.sources) + _form(self.averages) == self._form
            and (not self._dtensors or self._has_same_parts())
        )

    def averaged(self) -> Iterator[TensorLists]:
        """Yield the lists of tensors to average: the average's tensors, and the model's in equal order.

        All tensors of two lists have one device and one dtype. A tensor of the model is converted if its
        average has another device or dtype.
        """
        yield from self._same_form.values()
        if self._other_form[0]:
            converted: dict[tuple[torch.device, torch.dtype], TensorLists] = {}
            for average_tensor, source_tensor in zip(*self._other_form, strict=True):
                form = average_tensor.device, average_tensor.dtype
                average_list, source_list = converted.setdefault(form, ([], []))
                average_list.append(average_tensor)
                source_list.append(source_tensor.to(average_tensor.device, average_tensor.dtype))
            yield from converted.values()

    def _lists_for(self, average_part: Tensor, source_part: Tensor, *, averaged: bool) -> TensorLists:
        """Return the lists to which a tensor of the average and its source in the model belong."""
        if not averaged:
            return self.copied
        if (average_part.device, average_part.dtype) != (source_part.device, source_part.dtype):
            return self._other_form
        return self._same_form.setdefault((average_part.device, average_part.dtype), ([], []))

    def _has_same_parts(self) -> bool:
        """Return whether the DTensors still use the memory of the parts in the lists."""
        parts = local_parts(whole for whole, _ in self._dtensors)
        recorded_parts = [part for _, part in self._dtensors]
        pairs = zip(parts, recorded_parts, strict=True)
        return all(part.data_ptr() == recorded_part.data_ptr() for part, recorded_part in pairs)


class Swap:
    """Copy an average into a model for an evaluation, and restore the model's own values after it.

    The average itself is not changed, so it loses no precision, and `back` may be called at any time and
    repeatedly, even after an interrupt within `put` or `back`. The model keeps its tensor objects, because
    graphs and optimizers refer to them. While the model has the average, a copy of its own values doubles
    their memory.
    """

    def __init__(self) -> None:
        # while the model has the average: its pairs, and a copy of the model's own values
        self._replaced: tuple[Pairs, list[Tensor]] | None = None

    @property
    def active(self) -> bool:
        """Return whether the model has the values of the average now."""
        return self._replaced is not None

    def put(self, pairs: Pairs) -> None:
        """Copy the values of the average into the model."""
        if self._replaced is None:
            self._replaced = (pairs, [tensor.detach().clone() for tensor in pairs.sources])
            _copy(pairs.sources, pairs.averages)

    def back(self) -> None:
        """Restore the model's own values, unless it has them already."""
        if self._replaced is not None:
            pairs, own_values = self._replaced
            # FSDP2 would otherwise use the gathered weights of the average in the next forward pass
            reshard(pairs.model)
            _copy(pairs.sources, own_values)
            self._replaced = None

    @contextmanager
    def undone(self, pairs: Pairs) -> Iterator[None]:
        """Restore the model's own values inside the `with` block, and copy the average again after it."""
        was_active = self.active
        self.back()
        try:
            yield
        finally:
            if was_active:
                self.put(pairs)


def _copy(tensors: list[Tensor], values: list[Tensor]) -> None:
    """Copy values into tensors, unnoticed by autograd."""
    if tensors:
        # `data` does not count as a change for autograd, so a graph without its backward pass stays usable;
        # an interrupt at the wrong time could leave `torch.no_grad` active
        torch._foreach_copy_([tensor.data for tensor in tensors], [value.detach() for value in values])


def tracked(model: nn.Module, *, copy_buffers: bool, update_buffers: bool) -> dict[str, Tracked]:
    """Return the parameters of a model by name, and its buffers if one of the options is True.

    Integers and booleans, such as `num_batches_tracked`, are copied, because their mean would be rounded
    down.

    Args:
        model: the model.
        copy_buffers: whether buffers are copied.
        update_buffers: whether buffers are averaged.
    """
    items = {name: Tracked(p, _has_mean(p)) for name, p in model.named_parameters()}
    if copy_buffers or update_buffers:
        items |= {name: Tracked(b, update_buffers and _has_mean(b)) for name, b in model.named_buffers()}
    return items


def _has_buffers(model: nn.Module, tensors: list[Tensor]) -> bool:
    """Return whether any of the tensors is not a parameter of the model."""
    parameters = {id(parameter) for parameter in model.parameters()}
    return any(id(tensor) not in parameters for tensor in tensors)


def _has_mean(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _registries(
    model: nn.Module, *, buffers: bool
) -> tuple[list[dict[str, object]], list[dict[str, object]]]:
    """Return the dicts with the parameters, the submodules and, with `buffers`, the buffers of all modules.

    The first list has the non-empty dicts, the second list the empty dicts.
    """
    registries: list[dict[str, object]] = []
    for module in model.modules():
        registries += [module._parameters, module._modules]  # type: ignore[list-item]
        if buffers:
            registries.append(module._buffers)  # type: ignore[arg-type]
    return [d for d in registries if d], [d for d in registries if not d]


def _form(tensors: list[Tensor]) -> tuple[object, ...]:
    """Return the device and dtype of the first and the last tensor, as a quick test for `model.to`."""
    first_and_last = (tensors[0], tensors[-1]) if tensors else ()
    return tuple((tensor.device, tensor.dtype) for tensor in first_and_last)
