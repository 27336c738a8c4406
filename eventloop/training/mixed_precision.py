"""Run forward passes in mixed precision, and scale losses against underflow, for `AmpOptimizerHook`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Annotated, Any, Literal

import msgspec
import torch

from eventloop.optim.meshes import MeshGradScaler, any_dtensor
from eventloop.state.schema import Count, read_as
from eventloop.util.checks import check_choice, check_keys, number, positive

LossScale = float | str | Mapping[str, float]
Scaling = Literal["none", "static", "dynamic"]
"""The kinds of loss scaling. Gradients in a checkpoint can only be used with the same kind."""

_DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}
_SCALER_ARGUMENTS = ("init_scale", "growth_factor", "backoff_factor", "growth_interval")


class MixedPrecision:
    """The autocast type for a model's device, and the `GradScaler` if losses are scaled.

    Args:
        loss_scale: a constant, "dynamic" or arguments of `torch.amp.GradScaler`; None means dynamic scaling
            for float16, and no scaling otherwise.
        dtype: the autocast type; None or "auto" means PyTorch's default for the device.
    """

    def __init__(self, loss_scale: LossScale | None, dtype: str | torch.dtype | None) -> None:
        self._dtype = None if dtype in (None, "auto") else _parse_dtype(dtype)
        self._loss_scale = None if loss_scale is None else _parse_loss_scale(loss_scale)
        self.device = ""
        self.scaling: Scaling = "none"
        self.scaler: torch.amp.GradScaler | None = None
        self._autocast_dtype = torch.bfloat16
        self._is_sharded = False
        self._forward = ExitStack()

    def prepare(self, model: torch.nn.Module) -> None:
        """Choose the autocast type and the `GradScaler` for the model's device.

        They are chosen again if the model was moved to another device, or sharded. The present loss scale is
        kept.

        Raises:
            RuntimeError: the device does not support autocast to that type.
        """
        parameter = next(model.parameters(), None)
        device = "cpu" if parameter is None else parameter.device.type
        is_sharded = any_dtensor(model.parameters())
        if (device, is_sharded) == (self.device, self._is_sharded):
            return
        self.device, self._is_sharded = device, is_sharded
        self._autocast_dtype = self._dtype or torch.get_autocast_dtype(device)
        self.autocast()  # raises an error here, not at the first batch, if the device lacks this type
        loss_scale = self._loss_scale
        if loss_scale is None and self._autocast_dtype == torch.float16:
            loss_scale = {}
        previous, self.scaler, self.scaling = self.scaler, None, "none"
        scaler_class = MeshGradScaler if is_sharded else torch.amp.GradScaler
        if isinstance(loss_scale, float):
            self.scaling, self.scaler = "static", scaler_class(device, init_scale=loss_scale)
        elif loss_scale is not None:
            self.scaling, self.scaler = "dynamic", scaler_class(device, **loss_scale)
        if previous is not None and self.scaler is not None:
            self.scaler.load_state_dict(previous.state_dict())

    def autocast(self) -> torch.autocast:
        """Return a new autocast context with the type in use, for one forward pass."""
        return torch.autocast(self.device, dtype=self._autocast_dtype)

    def begin_forward(self) -> None:
        """Switch autocast on until `end_forward` or `backward`."""
        self._forward.close()  # a skipped batch has left it open
        self._forward.enter_context(self.autocast())

    def end_forward(self) -> None:
        """Switch autocast off; do nothing if it is off."""
        self._forward.close()

    def backward(self, loss: torch.Tensor) -> None:
        """Switch autocast off, and run backward on the loss, scaled if losses are scaled."""
        self._forward.close()  # backward uses the types of the forward pass without it
        if self.scaler is not None:
            loss = self.scaler.scale(loss)
        loss.backward()

    @staticmethod
    def unscale(
        scaler: torch.amp.GradScaler, optimizers: Sequence[torch.optim.Optimizer]
    ) -> torch.Tensor | None:
        """Divide the gradients by the loss scale.

        Returns:
            a 0-dim tensor on the device, above 0 if a gradient is not finite; None without any gradient.
        """
        for optimizer in optimizers:
            scaler.unscale_(optimizer)
        flags = [
            flag for optimizer in optimizers for flag in scaler._found_inf_per_device(optimizer).values()
        ]
        if not flags:
            scaler.update(scaler.get_scale())  # resets the scaler; `update()` would raise an error
            return None
        first = flags[0]
        return first if len(flags) == 1 else torch.stack([flag.to(first.device) for flag in flags]).sum()

    def update(self, scaler: torch.amp.GradScaler) -> None:
        """Update a dynamic scale after an optimizer step that was made or skipped; keep a constant scale."""
        scaler.update(self._loss_scale if isinstance(self._loss_scale, float) else None)

    def settings(self) -> dict[str, Any]:
        """Return the settings that a resumed run should share: of a dynamic scale its factors and interval.

        The initial value of a dynamic scale is left out, because it has no effect once the scale has changed.
        A constant scale is itself the setting. Without loss scaling the result is empty.
        """
        if self.scaler is None:
            return {}
        if isinstance(self._loss_scale, float):
            return {"loss_scale": self._loss_scale}
        return {
            "growth_factor": self.scaler.get_growth_factor(),
            "backoff_factor": self.scaler.get_backoff_factor(),
            "growth_interval": self.scaler.get_growth_interval(),
        }

    def state(self) -> dict[str, Any]:
        """Return the state of the `GradScaler`; {} if losses are not scaled."""
        return {} if self.scaler is None else self.scaler.state_dict()

    def load(self, state: Mapping[str, Any], owner: str) -> None:
        """Load a saved loss scale, and keep the present growth and backoff factors.

        Args:
            state: the state of a hook, whose key "scaler" has the state of the `GradScaler`.
            owner: the name of the hook, with which messages begin.

        Raises:
            CheckpointError: `state` has no scale.
        """
        if self.scaler is not None:
            saved = read_as(_State, state, f"{owner} cannot take its state").scaler
            self.scaler.load_state_dict({**self.scaler.state_dict(), **msgspec.structs.asdict(saved)})


class _Scaler(msgspec.Struct):
    """The part of the state of a `GradScaler` that is loaded."""

    scale: Annotated[float, msgspec.Meta(gt=0)]
    _growth_tracker: Count


class _State(msgspec.Struct):
    """The state of an optimizer hook, as far as it is read here."""

    scaler: _Scaler


def _parse_dtype(dtype: object) -> torch.dtype:
    """Return the type for its name, such as "float16"; accept the type itself."""
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
    _check_scaler_argument("init_scale", loss_scale, option="loss_scale")
    return float(loss_scale)


def _check_scaler_argument(key: str, value: object, option: str | None = None) -> None:
    """Refuse an invalid value of the argument `key` of `GradScaler`; messages call it `option`, if given."""
    what = option or f"loss_scale[{key!r}]"
    if key == "growth_interval":
        positive(what, value)
    else:
        above, below = {"growth_factor": (1, None), "backoff_factor": (0, 1)}.get(key, (0, None))
        number(what, value, above=above, below=below)
