"""Resolve the class of an average from EMAHook's arguments, and check them before a model exists."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Mapping
from typing import Any

from torch import nn

from eventloop.model.averages import (
    BaseAveragedModel,
    ExponentialMovingAverage,
    MomentumAnnealingEMA,
    StochasticWeightAverage,
)
from eventloop.registry import build, find_class
from eventloop.util.suggest import suggest

_OWN: dict[str, type[BaseAveragedModel]] = {
    cls.__name__: cls for cls in (ExponentialMovingAverage, StochasticWeightAverage, MomentumAnnealingEMA)
}
"""eventloop's own averages by their names."""


def average_config(ema_type: Any, arguments: dict[str, Any]) -> dict[str, Any]:
    """Return EMAHook's arguments as a config `dict(type=CLASS, ...)` of an average.

    The arguments of eventloop's own averages are checked by building an average of an empty model.

    Args:
        ema_type: the name of a class, a class or a config.
        arguments: the arguments of the class.

    Raises:
        TypeError, ValueError: there is no such class, or it refuses an argument.
    """
    config = {**ema_type, **arguments} if isinstance(ema_type, Mapping) else {"type": ema_type, **arguments}
    cls = config.get("type")
    if isinstance(cls, str):
        cls = _OWN.get(cls) or _registered(cls)
    if not isinstance(cls, type) or not issubclass(cls, BaseAveragedModel):
        raise TypeError(
            "ema_type must be a name, a subclass of BaseAveragedModel or a config dict(type=...), got "
            f"{ema_type!r}"
        )
    if "model" in config:
        raise ValueError("EMAHook averages the trainer's model: leave model out")
    config["type"] = cls
    if is_own(config):
        try:
            build(config, model=nn.Identity())
        except (TypeError, ValueError) as error:
            error_class = TypeError if isinstance(error, TypeError) else ValueError
            raise error_class(f"EMAHook: {error}") from None
    return config


def _registered(name: str) -> type:
    """Return the registered class of this name; raise ValueError if there is none."""
    try:
        return find_class(name)
    except ValueError:
        raise ValueError(
            f"unknown ema_type {name!r}{suggest(name, [*_OWN])}; @register makes your own known"
        ) from None


def is_own(config: Mapping[str, Any]) -> bool:
    """Return whether the class of a config is one of eventloop's own averages, not a user's."""
    return config["type"] in _OWN.values()


def arguments_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the class name and all arguments of an average, including defaults.

    A resume compares them with those of the checkpoint. `device` is left out, because it does not change the
    values of an average.
    """
    cls = config["type"]
    parameters = inspect.signature(cls).parameters.values()
    arguments = {p.name: p.default for p in parameters if p.default is not p.empty} | {**config}
    for name in ("type", "device"):
        arguments.pop(name, None)
    return {"ema_type": cls.__name__, **arguments}


def build_average(config: Mapping[str, Any], model: nn.Module) -> BaseAveragedModel:
    """Build an average of `model` from a config that `average_config` has returned."""
    with warnings.catch_warnings():
        if is_own(config):  # `average_config` has built such an average, and so has given the same warnings
            warnings.simplefilter("ignore")
        average: BaseAveragedModel = build(config, model=model)
    return average
