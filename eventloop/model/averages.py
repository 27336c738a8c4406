"""Average the weights of a model during its training, for EMAHook or in a training loop of your own."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Mapping
from copy import deepcopy
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from eventloop.model.average_pairs import Pairs, tracked
from eventloop.state.sharded import (
    gathers_weights,
    is_dtensor,
    layout,
    local_parts,
    refuse_old_shards,
    reshard,
)
from eventloop.state.sharded_copy import copy_shards
from eventloop.util.checks import check_bools, number, positive

logger = logging.getLogger("eventloop")

_HALF = (torch.float16, torch.bfloat16)
"""The dtypes that are averaged in float32."""


class BaseAveragedModel(nn.Module):
    """Average the weights of a model in a copy of it; calling the average runs the copy.

        class Slow(BaseAveragedModel):
            def avg_func(self, averaged_param, source_param, steps):
                return torch.lerp(averaged_param, source_param, 1 / (steps + 10))

        teacher = Slow(student)
        teacher.update_parameters(student)       # after each step of the optimizer

    A subclass defines `avg_func` for one tensor, or `multi_avg_func` for a list of tensors, which is faster.
    Both receive this rank's part of a DTensor. The first update copies the weights. Integers and booleans are
    copied at each update. Half-precision weights are averaged in float32, because a small momentum would be
    rounded to nothing. To run such an average in the model's dtype, use `deepcopy(average).to(dtype)`. The
    average of a parameter that is added to the model later begins as a copy. Frozen parameters are averaged
    too, because they may be trained later.

    Args:
        model: the model to average, which is copied without gradients. The copy of a model with DTensors has
            DTensors with equal parts, and cannot be called.
        interval: the number of calls of `update_parameters` for one averaging. Buffers that are not averaged
            are copied at each call.
        device: the device of the average; by default each tensor is on the device of the model's tensor. With
            another device, the training thread waits for a copy at each update.
        update_buffers: whether floating-point buffers, such as batch norm's running statistics, are averaged.
            By default buffers are copied at each update.

    `state_dict` has the state of the copy under `module.`, and the number of updates as `steps`.

    Raises:
        TypeError, ValueError: an argument is of the wrong type or out of range, the model is sharded by FSDP1
            or has a ShardedTensor, or a lazy module has no shape yet.
    """

    def __init__(
        self,
        model: nn.Module,
        interval: int = 1,
        device: torch.device | str | int | None = None,
        update_buffers: bool = False,
    ) -> None:
        super().__init__()
        if not isinstance(model, nn.Module):
            raise TypeError(f"model must be a torch.nn.Module, got {model!r}")
        positive("interval", interval)
        check_bools(update_buffers=update_buffers)
        self.interval = interval
        self.device = None if device is None else torch.device(device)
        self.update_buffers = update_buffers
        self.copy_buffers = not update_buffers
        self.steps = 0
        """The number of calls of `update_parameters`; at 0 the next call copies the weights."""
        self._pairs: Pairs | None = None
        self.module = self._copy_of(model)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the averaged copy."""
        return self.module(*args, **kwargs)

    def avg_func(self, averaged_param: Tensor, source_param: Tensor, steps: int) -> Tensor:
        """Return the new average of one tensor.

        Args:
            averaged_param: the average so far.
            source_param: the model's tensor.
            steps: the number of earlier updates, at least one.

        Raises:
            NotImplementedError: the subclass defines neither this nor `multi_avg_func`.
        """
        raise NotImplementedError(f"{type(self).__name__} must define avg_func or multi_avg_func")

    def multi_avg_func(self, averaged_params: list[Tensor], source_params: list[Tensor], steps: int) -> None:
        """Update the averages of several tensors in place; all of them have the same device and dtype."""
        for averaged, source in zip(averaged_params, source_params, strict=True):
            averaged.copy_(self.avg_func(averaged, source, steps))

    @torch.no_grad()
    def update_parameters(self, model: nn.Module) -> None:
        """Add the model's present weights to the average, without waiting for a device.

        Raises:
            RuntimeError: the tensors of `model` are not those of the averaged model, and it cannot be copied.
            TypeError: `model` is sharded by FSDP1, or has a ShardedTensor.
        """
        steps = self.steps
        is_due = steps % self.interval == 0
        if is_due or self.copy_buffers:
            pairs = self.pairs_with(model)
            for averages, sources in pairs.averaged() if is_due else ():
                if steps == 0:
                    torch._foreach_copy_(averages, sources)
                else:
                    self.multi_avg_func(averages, sources, steps)
            if pairs.copied[0]:
                torch._foreach_copy_(*pairs.copied)
        self.steps = steps + 1

    @torch.no_grad()
    def sync_buffers(self, model: nn.Module) -> None:
        """Copy the model's buffers into the average, unless buffers are averaged."""
        if self.update_buffers:
            return
        buffers = dict(model.named_buffers())
        self.pairs_with(model)  # copies the model if it has changed
        if buffers.keys() != dict(self.module.named_buffers()).keys():
            self._copy_changed(model)
        own_buffers = dict(self.module.named_buffers())
        for name, buffer in buffers.items():
            if own_buffers[name].shape == buffer.shape:
                own_buffers[name].copy_(buffer)
            else:
                own_buffers[name].data = buffer.detach().clone()

    def pairs_with(self, model: nn.Module) -> Pairs:
        """Return the paired tensors of the average and of `model`, from a cache if `model` is unchanged."""
        pairs = self._pairs
        if pairs is None or not pairs.current(model):
            pairs = self._pairs = self._pair(model)
        return pairs

    def restart(self) -> None:
        """Set the number of updates to 0, so that the next update copies the weights."""
        self.steps = 0

    # --- the copy ------------------------------------------------------------------------------------------

    def _copy_of(self, model: nn.Module) -> nn.Module:
        """Return a copy of a model on `device`, with averaged half-precision tensors in float32."""
        refuse_old_shards(type(self).__name__, model)
        lazy = [name for name, p in chain(model.named_parameters(), model.named_buffers()) if is_lazy(p)]
        if lazy:
            raise ValueError(f"{lazy[0]} has no shape yet: run a batch through lazy modules before averaging")
        if gathers_weights(model):
            return copy_shards(model, self._copy_of_tensor)
        copy = deepcopy(model)
        for parameter in copy.parameters():
            parameter.grad = None
            parameter.requires_grad_(False)
        if self.device is not None:
            copy.to(self.device)
        for tensor in chain(copy.parameters(), copy.buffers() if self.update_buffers else ()):
            if tensor.dtype in _HALF:
                tensor.data = tensor.data.float()
        return copy

    def _copy_of_tensor(self, tensor: Tensor, averaged: bool) -> Tensor:
        """Return a copy of a tensor as `_copy_of` makes it; `averaged` is whether it is a parameter."""
        is_widened = tensor.dtype in _HALF and (averaged or self.update_buffers)
        dtype = torch.float32 if is_widened else tensor.dtype
        return tensor.detach().to(self.device or tensor.device, dtype, copy=True)

    def _pair(self, model: nn.Module) -> Pairs:
        """Pair the average's tensors with a model's; if names or shapes differ, copy the model first."""
        refuse_old_shards(type(self).__name__, model)
        options = {"copy_buffers": self.copy_buffers, "update_buffers": self.update_buffers}
        reshard(model)
        source_tensors = tracked(model, **options)
        layouts = {name: layout(item.tensor) for name, item in source_tensors.items()}
        own_tensors = tracked(self.module, **options)
        if layouts != {name: layout(item.tensor) for name, item in own_tensors.items()}:
            self._copy_changed(model)
            own_tensors = tracked(self.module, **options)
        if self.device is None:
            for name, (tensor, _) in source_tensors.items():
                if own_tensors[name].tensor.device != tensor.device and not is_dtensor(tensor):
                    own_tensors[name].tensor.data = own_tensors[name].tensor.data.to(tensor.device)
        return Pairs(own_tensors, source_tensors, model)

    def _copy_changed(self, model: nn.Module) -> None:
        """Copy a changed model, and keep the averages of tensors whose name and shape are unchanged."""
        new_copy = self._copy_of(model)
        old_tensors = dict(chain(self.module.named_parameters(), self.module.named_buffers()))
        new_names = []
        for name, tensor in chain(new_copy.named_parameters(), new_copy.named_buffers()):
            old_tensor = old_tensors.pop(name, None)
            if old_tensor is not None and layout(old_tensor) == layout(tensor):
                if is_dtensor(tensor):  # setting `data` of a DTensor does not change its local part
                    torch._foreach_copy_(local_parts([tensor]), local_parts([old_tensor]))
                else:
                    tensor.data = old_tensor.data
            else:
                new_names.append(name)
        self.module, self._pairs = new_copy, None
        if self.steps:
            logger.warning(
                "the model has changed since it was averaged last: the average of %s begins as a copy; "
                "gone: %s",
                ", ".join(new_names) or "nothing",
                ", ".join(old_tensors) or "nothing",
            )

    # --- copying and saving the average itself -------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        # the pairs refer to the tensors of this object, and a copy has other tensors
        return {**self.__dict__, "_pairs": None}

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}steps"] = torch.tensor(self.steps)

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        """Load the copy as torch does, and the number of averaged steps, which torch does not know."""
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )
        key = f"{prefix}steps"
        if key not in state_dict:
            missing_keys.append(key)
            return
        self.steps = int(state_dict[key])
        if key in unexpected_keys:
            unexpected_keys.remove(key)


class _Weighted(BaseAveragedModel):
    """Average by `average += weight(steps) * (model - average)`; a base class."""

    def weight(self, steps: int) -> float:
        """Return the weight of the model's values, in (0, 1], after `steps` earlier updates, at least one."""
        raise NotImplementedError(f"{type(self).__name__} must define weight")

    def avg_func(self, averaged_param: Tensor, source_param: Tensor, steps: int) -> Tensor:
        """Return the new average of one tensor."""
        return torch.lerp(averaged_param, source_param, self.weight(steps))

    def multi_avg_func(self, averaged_params: list[Tensor], source_params: list[Tensor], steps: int) -> None:
        """Update the averages of several tensors in one call, or by `avg_func` if a subclass overrides it."""
        if type(self).avg_func is _Weighted.avg_func:
            torch._foreach_lerp_(averaged_params, source_params, self.weight(steps))
        else:
            super().multi_avg_func(averaged_params, source_params, steps)


class StochasticWeightAverage(_Weighted):
    """Average the weights of all updates with equal weight (Izmailov et al. 2018, arXiv:1803.05407).

        EMAHook(ema_type="StochasticWeightAverage", begin_epoch=75)

    `average += (model - average) / (n + 1)`, where `n = steps // interval` is the number of weights that were
    averaged before. Arguments and errors are those of `BaseAveragedModel`.
    """

    def weight(self, steps: int) -> float:
        """Return `1 / (n + 1)`, where `n` is the number of weights averaged before."""
        return 1.0 / (steps // self.interval + 1)


class ExponentialMovingAverage(_Weighted):
    """Average exponentially: `average = (1 - momentum) * average + momentum * model`, by `torch.lerp`.

        teacher = ExponentialMovingAverage(student, momentum=0.001)

    Some libraries take the decay `1 - momentum` instead: `momentum=0.0002` is a decay of 0.9998. A subclass
    may override `weight` to change the momentum during the training.

    Args:
        model, interval, device, update_buffers: as in `BaseAveragedModel`.
        momentum: the weight of the newest values, between 0 and 1.

    Raises:
        TypeError, ValueError: as `BaseAveragedModel`, or `momentum` is not a number between 0 and 1.

    Warns:
        UserWarning: `momentum` is above 0.5, as a decay would be.
    """

    def __init__(
        self,
        model: nn.Module,
        momentum: float = 0.0002,
        interval: int = 1,
        device: torch.device | str | int | None = None,
        update_buffers: bool = False,
    ) -> None:
        number("momentum", momentum, above=0, below=1)
        if momentum > 0.5:
            warnings.warn(
                f"momentum={momentum} is the share of the newest weights, so the average hardly averages; "
                f"for a decay of {momentum} write momentum={1 - momentum:.6g}",
                UserWarning,
                stacklevel=2,
            )
        super().__init__(model, interval, device, update_buffers)
        self.momentum = momentum

    def weight(self, steps: int) -> float:
        """Return the momentum."""
        return self.momentum


class MomentumAnnealingEMA(ExponentialMovingAverage):
    """Average exponentially, with a momentum that begins high and falls to `momentum`.

        EMAHook(ema_type="MomentumAnnealingEMA", momentum=0.0002, gamma=100)

    The momentum after `steps` updates is `max(momentum, gamma / (gamma + steps))`, as in MMEngine.

    Args:
        model, momentum, interval, device, update_buffers: as in `ExponentialMovingAverage`.
        gamma: the number of updates after which the momentum has fallen to 0.5; above 0.

    Raises:
        TypeError, ValueError: as `ExponentialMovingAverage`, or `gamma` is not a finite number above 0.
    """

    def __init__(
        self,
        model: nn.Module,
        momentum: float = 0.0002,
        gamma: float = 100,
        interval: int = 1,
        device: torch.device | str | int | None = None,
        update_buffers: bool = False,
    ) -> None:
        number("gamma", gamma, above=0)
        super().__init__(model, momentum, interval, device, update_buffers)
        self.gamma = gamma

    def weight(self, steps: int) -> float:
        """Return the momentum after `steps` updates."""
        return max(self.momentum, self.gamma / (self.gamma + steps))
