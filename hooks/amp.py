"""Train in mixed precision: autocast around the forward pass, and optimizer steps with scaled losses."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from time import perf_counter
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import torch

from eventloop.events import AfterTrainEpoch, BeforeRun, BeforeTrainIter, OptimizerStepSkipped
from eventloop.events.priority import Priority
from eventloop.hooks.gradient_cumulative import GradientCumulativeOptimizerHook
from eventloop.hooks.hook import on
from eventloop.state.schema import Count, read_as
from eventloop.util.checks import check_choice, check_keys, number, positive

if TYPE_CHECKING:
    from eventloop.training.trainer import Trainer

LossScale = float | str | Mapping[str, float]

_DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}
_SCALER_ARGUMENTS = ("init_scale", "growth_factor", "backoff_factor", "growth_interval")


class AmpOptimizerHook(GradientCumulativeOptimizerHook):
    """Train in mixed precision, with `torch.autocast` in the forward pass and a scaled loss in backward.

        hooks=[AmpOptimizerHook(dtype="bfloat16", grad_clip=dict(max_norm=1.0))]
        hooks=[AmpOptimizerHook(loss_scale=dict(init_scale=2.0**14), cumulative_iters=4)]

    Autocast is on from `before_train_iter` until backward, so it also covers the body of a hand-written loop,
    and it is on in every `val_step`. Use `trainer.autocast()` for other forward passes. Weights, gradients
    and optimizer state keep their types (float32).

    With scaled losses, gradients are unscaled before they are clipped and before `grad_norm` is recorded.
    When a gradient is not finite, no optimizer makes a step: `optimizer_step_skipped` is emitted in place of
    `before_optimizer_step` and `after_optimizer_step`. A dynamic scale is recorded as the metric `loss_scale`
    and saved in checkpoints.

    With scaled losses the training thread waits for the device once a step, as `torch.amp.GradScaler.step`
    does, because the next action depends on whether the gradients are finite. Saving a checkpoint waits
    twice. With bfloat16, which is not scaled by default, the thread never waits.

    Args:
        loss_scale: "dynamic"; a number, for a constant scale; or arguments of `torch.amp.GradScaler`, a dict
            of init_scale, growth_factor, backoff_factor, growth_interval. By default "dynamic" for float16
            and no scaling for bfloat16.
        dtype: "float16" or "bfloat16", or `torch.float16` or `torch.bfloat16`. By default autocast's type for
            the model's device: float16 on CUDA, bfloat16 on the CPU.
        cumulative_iters, grad_clip, detect_anomalous_params: see `GradientCumulativeOptimizerHook`.

    Raises:
        TypeError, ValueError: an option is unknown, of the wrong type or out of range.
    """

    def __init__(
        self,
        loss_scale: LossScale | None = None,
        dtype: str | torch.dtype | None = None,
        cumulative_iters: int = 1,
        grad_clip: Mapping[str, Any] | None = None,
        detect_anomalous_params: bool = False,
    ) -> None:
        super().__init__(cumulative_iters, grad_clip, detect_anomalous_params)
        self._dtype = None if dtype is None else _parse_dtype(dtype)
        self._loss_scale = None if loss_scale is None else _parse_loss_scale(loss_scale)
        self._device = ""
        self._autocast_dtype = torch.bfloat16
        self._scaler: torch.amp.GradScaler | None = None
        self._static_scale: float | None = None
        self._forward = ExitStack()

    def check(self, trainer: Trainer) -> None:
        """Choose the autocast type and the `GradScaler` for the model's device.

        The scaler must exist before a checkpoint's state is loaded.

        Raises:
            RuntimeError: the device does not support autocast to that type.
        """
        super().check(trainer)
        self._prepare(trainer)
        trainer.autocast = self._autocast

    def before_run(self, trainer: Trainer, event: BeforeRun) -> None:
        """Choose the autocast type and the `GradScaler` again if the model was moved to another device."""
        self._prepare(trainer)

    def _prepare(self, trainer: Trainer) -> None:
        first = next(trainer.model.parameters(), None)
        device = "cpu" if first is None else first.device.type
        if device == self._device:
            return
        self._device = device
        self._autocast_dtype = self._dtype or torch.get_autocast_dtype(device)
        self._autocast()  # raises here if the device has no autocast to this type
        loss_scale = self._loss_scale
        if loss_scale is None and self._autocast_dtype == torch.float16:
            loss_scale = {}
        if loss_scale is None:
            self._scaler, self.loss_scaling = None, "none"
            return
        former = self._scaler
        if isinstance(loss_scale, float):
            self.loss_scaling, self._static_scale = "static", loss_scale
            self._scaler = torch.amp.GradScaler(device, init_scale=loss_scale)
        else:
            self.loss_scaling = "dynamic"
            self._scaler = torch.amp.GradScaler(device, **loss_scale)
        if former is not None:
            self._scaler.load_state_dict(former.state_dict())

    def _autocast(self) -> torch.autocast:
        return torch.autocast(self._device, dtype=self._autocast_dtype)

    # --- the forward pass ----------------------------------------------------------------------------------

    @on(priority=Priority.LOWEST)
    def before_train_iter(self, trainer: Trainer, event: BeforeTrainIter) -> None:
        """Enter autocast for the forward pass that follows."""
        super().before_train_iter(trainer, event)
        self._forward.close()  # left open by a batch that was skipped
        self._forward.enter_context(self._autocast())

    def after_train_epoch(self, trainer: Trainer, event: AfterTrainEpoch) -> None:
        """Leave autocast if the last forward pass failed or was skipped, then call the base class's method.

        The base class steps with the accumulated gradients when the last epoch ended within a window.
        """
        self._forward.close()
        super().after_train_epoch(trainer, event)

    # --- the step ------------------------------------------------------------------------------------------

    def _backward(self, loss: torch.Tensor) -> None:
        self._forward.close()  # backward needs no autocast, as it uses the types of the forward pass
        if self._scaler is not None:
            loss = self._scaler.scale(loss)
        loss.backward()

    def _leave_forward(self) -> None:
        self._forward.close()
        super()._leave_forward()

    def _step(self, trainer: Trainer) -> None:
        """Step unless a gradient is not finite, and update the loss scale.

        Raises:
            RuntimeError: no parameter has a gradient.
        """
        scaler = self._scaler
        if scaler is None:
            super()._step(trainer)
            return
        found_inf = self._unscale(scaler)
        try:
            self._step_unless_inf(trainer, scaler, found_inf)
        finally:
            if self._count:  # an error prevented the step, which is retried later
                self._scale_back(scaler)
            else:
                scaler.update(self._static_scale)

    def _unscale(self, scaler: torch.amp.GradScaler) -> torch.Tensor:
        """Unscale the gradients; return a 0-dim device tensor, above 0 if a gradient is not finite."""
        for optimizer in self._optimizers:
            scaler.unscale_(optimizer)
        found = [value for o in self._optimizers for value in scaler._found_inf_per_device(o).values()]
        if not found:
            self._count = 0
            scaler.update(scaler.get_scale())  # resets the scaler; update() would require inf checks
            raise RuntimeError(
                "backward left no gradient for any parameter of the optimizer, so there is nothing to step: "
                "compute the loss with the model whose parameters were passed to the optimizer"
            )
        first = found[0]
        return first if len(found) == 1 else torch.stack([value.to(first.device) for value in found]).sum()

    def _step_unless_inf(
        self, trainer: Trainer, scaler: torch.amp.GradScaler, found_inf: torch.Tensor
    ) -> None:
        if self._static_scale is None:
            trainer.metrics.put_scalar("loss_scale", scaler.scale(torch.ones_like(found_inf)))
        # the step's only wait for the device; GradScaler.step would wait after clipping and return no result.
        # The gradients are unscaled by now, so finite ones only need optimizer.step()
        if found_inf.item():
            self._count = 0
            trainer.within = trainer.within or "iter"
            self._allow_schedulers()
            began = perf_counter()
            trainer.announce(OptimizerStepSkipped, reason="non-finite gradients")
            self._other_seconds += perf_counter() - began
        else:
            super()._step(trainer)

    def _scale_back(self, scaler: torch.amp.GradScaler) -> None:
        """Multiply unscaled gradients by the loss scale again, for a step that is repeated after an error."""
        scale = scaler.get_scale()
        gradients = [parameter.grad for parameter in self._parameters() if parameter.grad is not None]
        torch._foreach_mul_(gradients, scale)
        scaler.update(scale)

    def settings(self) -> dict[str, Any]:
        """Return the options of clipping, accumulation and loss scaling.

        A constant scale is returned as `loss_scale`. For a dynamic scale the growth factor, the backoff
        factor and the growth interval are returned. The initial scale is left out, because it has no effect
        once the scale has changed.
        """
        own = super().settings()
        if self._scaler is None:
            return own
        if self._static_scale is not None:
            return {**own, "loss_scale": self._static_scale}
        scaler = self._scaler
        return {
            **own,
            "growth_factor": scaler.get_growth_factor(),
            "backoff_factor": scaler.get_backoff_factor(),
            "growth_interval": scaler.get_growth_interval(),
        }

    # --- saving and resuming -------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the scaler's state, and the gradients of an unfinished accumulation window."""
        scaler = {} if self._scaler is None else self._scaler.state_dict()
        return {**super().state_dict(), "scaler": scaler}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a saved loss scale, and the gradients of an unfinished accumulation window.

        The growth and backoff factors remain those given to this hook.

        Raises:
            CheckpointError: `state` does not have the fields of this hook's state.
            ValueError: `state` is from a run with another loss scaling, or its gradients do not fit.
        """
        super().load_state_dict(state)
        if self._scaler is not None:
            saved = read_as(_State, state, f"{type(self).__name__} cannot take its state").scaler
            self._scaler.load_state_dict({**self._scaler.state_dict(), **msgspec.structs.asdict(saved)})


class _Scaler(msgspec.Struct):
    scale: Annotated[float, msgspec.Meta(gt=0)]
    _growth_tracker: Count


class _State(msgspec.Struct):
    scaler: _Scaler


class Fp16OptimizerHook(AmpOptimizerHook):
    """Train in float16, by default with a constant loss scale of 512; mmcv's name and arguments.

        hooks=[Fp16OptimizerHook(loss_scale="dynamic", grad_clip=dict(max_norm=35))]

    Args:
        grad_clip, loss_scale, detect_anomalous_params: see `AmpOptimizerHook`.

    Raises:
        TypeError, ValueError: see `AmpOptimizerHook`.
    """

    def __init__(
        self,
        grad_clip: Mapping[str, Any] | None = None,
        loss_scale: LossScale = 512.0,
        detect_anomalous_params: bool = False,
    ) -> None:
        super().__init__(loss_scale, torch.float16, 1, grad_clip, detect_anomalous_params)


class GradientCumulativeFp16OptimizerHook(AmpOptimizerHook):
    """Train in float16 and step every `cumulative_iters` iterations; mmcv's name and arguments.

        hooks=[GradientCumulativeFp16OptimizerHook(cumulative_iters=4)]

    Args:
        cumulative_iters, grad_clip, loss_scale, detect_anomalous_params: see `AmpOptimizerHook`.

    Raises:
        TypeError, ValueError: see `AmpOptimizerHook`.
    """

    def __init__(
        self,
        cumulative_iters: int = 1,
        grad_clip: Mapping[str, Any] | None = None,
        loss_scale: LossScale = 512.0,
        detect_anomalous_params: bool = False,
    ) -> None:
        super().__init__(loss_scale, torch.float16, cumulative_iters, grad_clip, detect_anomalous_params)


def _parse_dtype(dtype: object) -> torch.dtype:
    if dtype in _DTYPES.values():
        return dtype  # type: ignore[return-value]
    if not isinstance(dtype, str | torch.dtype):
        raise TypeError(f'dtype must be "float16" or "bfloat16", got {dtype!r}')
    name = str(dtype).removeprefix("torch.")
    check_choice("dtype", name, _DTYPES)
    return _DTYPES[name]


def _parse_loss_scale(loss_scale: object) -> float | dict[str, Any]:
    """Return a constant scale as a float, or the arguments of a dynamic scaler as a dict."""
    if loss_scale == "dynamic":
        return {}
    if isinstance(loss_scale, Mapping):
        check_keys("loss_scale", loss_scale, _SCALER_ARGUMENTS)
        for key, value in loss_scale.items():
            _check_scaler_argument(key, value)
        return dict(loss_scale)
    if isinstance(loss_scale, bool) or not isinstance(loss_scale, int | float):
        raise TypeError(
            'loss_scale must be a number, "dynamic", or a dict of arguments of torch.amp.GradScaler, '
            f"got {loss_scale!r}"
        )
    _check_scaler_argument("init_scale", loss_scale, of="loss_scale")
    return float(loss_scale)


def _check_scaler_argument(key: str, value: object, of: str | None = None) -> None:
    what = of or f"loss_scale[{key!r}]"
    if key == "growth_interval":
        positive(what, value)
    else:
        above, below = {"growth_factor": (1, None), "backoff_factor": (0, 1)}.get(key, (0, None))
        number(what, value, above=above, below=below)
