"""Find the class for the config of an average, and check its arguments before a model exists.

EMAHook uses this module.
"""

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


def average_config(ema_type: Any, arguments: dict[str, Any]) -> dict[str, Any]:
    """Return `ema_type` and its arguments as a config whose `type` is the class of the average.

    The arguments of eventloop's own averages are checked by building an average of an empty model.
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
            kind = TypeError if isinstance(error, TypeError) else ValueError
            raise kind(f"EMAHook: {error}") from None
    return config


def _registered(name: str) -> type:
    try:
        return find_class(name)
    except ValueError:
        raise ValueError(
            f"unknown ema_type {name!r}{suggest(name, [*_OWN])}; @register makes your own known"
        ) from None


def is_own(config: Mapping[str, Any]) -> bool:
    """Return whether a config names one of eventloop's own averages, which can be built for any model."""
    return config["type"] in _OWN.values()


def arguments_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the class name and all arguments of an average, defaults included, for a resume to compare.

    `device` is left out, because it does not change the values of an average.
    """
    cls = config["type"]
    defaults = {
        name: parameter.default
        for name, parameter in inspect.signature(cls).parameters.items()
        if parameter.default is not parameter.empty
    }
    given = {name: value for name, value in config.items() if name != "type"}
    found = {"ema_type": cls.__name__, **defaults, **given}
    return {name: value for name, value in found.items() if name != "device"}


def build_average(config: Mapping[str, Any], model: nn.Module) -> BaseAveragedModel:
    """Build an average of `model` from the config that `average_config` returned."""
    with warnings.catch_warnings():
        if is_own(config):  # `average_config` built one before and gave the warnings
            warnings.simplefilter("ignore")
        average: BaseAveragedModel = build(config, model=model)
    return average
