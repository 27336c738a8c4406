"""Which average a config names, and whether its arguments are right before there is a model."""

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
    """The config of the average, its class looked up and, for our own classes, its arguments tried.

    Raises:
        TypeError, ValueError: no average, an unknown one, or a bad argument.
    """
    config = {**ema_type, **arguments} if isinstance(ema_type, Mapping) else {"type": ema_type, **arguments}
    cls = config.get("type")
    if isinstance(cls, str):
        cls = _OWN.get(cls) or _registered(cls)
    if not isinstance(cls, type) or not issubclass(cls, BaseAveragedModel):
        raise TypeError(
            f"ema_type must be a name, a subclass of BaseAveragedModel or a config dict(type=...), got {ema_type!r}"
        )
    if "model" in config:
        raise ValueError("EMAHook averages the trainer's model: leave model out")
    config["type"] = cls
    if is_own(config):
        build(config, model=nn.Identity())
    return config


def _registered(name: str) -> type:
    try:
        return find_class(name)
    except ValueError:
        raise ValueError(
            f"unknown ema_type {name!r}{suggest(name, [*_OWN])}; @register makes your own known"
        ) from None


def is_own(config: Mapping[str, Any]) -> bool:
    """True for eventloop's own averages: they can be made of any model, so arguments can be tried beforehand."""
    return config["type"] in _OWN.values()


def arguments_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """The kind of an average, and its arguments with the defaults of those that were not given; not where it is kept,
    which changes nothing."""
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
    """Make the average of a model."""
    with warnings.catch_warnings():
        if is_own(config):  # what there is to warn of was said when the arguments were tried
            warnings.simplefilter("ignore")
        average: BaseAveragedModel = build(config, model=model)
    return average
