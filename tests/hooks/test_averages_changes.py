"""Averages of models that change, and what an average refuses."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn

from eventloop.hooks import ExponentialMovingAverage, MomentumAnnealingEMA
from tests.support.averaged import Number, inside, value_of

# --- models that change ------------------------------------------------------------------------------------


def test_parameter_added_later_begins_as_a_copy(caplog: pytest.LogCaptureFixture) -> None:
    """The others go on; the log says which one is new."""
    first = Number(4.0)
    model = nn.Sequential(first)
    average = ExponentialMovingAverage(model, momentum=0.25)
    average.update_parameters(model)
    second = Number(4.0)
    model.append(second)
    first.set(8.0)

    average.update_parameters(model)
    second.set(8.0)
    average.update_parameters(model)

    assert [float(p) for p in average.module.parameters()] == [5.75, 5.0]
    assert "the average of 1.value begins as a copy; gone: nothing" in caplog.text


def test_replaced_module_of_another_shape_begins_as_a_copy(caplog: pytest.LogCaptureFixture) -> None:
    """A new head is taken up; nothing is averaged with a tensor that is no longer the model's."""
    model: Any = nn.Sequential(Number(4.0), nn.Linear(1, 3))
    average = ExponentialMovingAverage(model, momentum=0.25)
    average.update_parameters(model)
    model[1] = nn.Linear(1, 5)

    average.update_parameters(model)

    averaged = dict(average.module.named_parameters())
    assert torch.equal(averaged["1.weight"], model[1].weight)
    assert "the average of 1.weight, 1.bias begins as a copy" in caplog.text


@pytest.mark.parametrize("inside", [True, False], ids=["parameter", "module"])
def test_replaced_parameter_of_the_same_shape_is_followed(inside: bool) -> None:
    """An average does not go on following an object that the model no longer has."""
    model = nn.Sequential(Number(4.0))
    average = ExponentialMovingAverage(model, momentum=0.25)
    average.update_parameters(model)
    if inside:
        model[0].value = nn.Parameter(torch.tensor([8.0]))
    else:
        model[0] = Number(8.0)

    average.update_parameters(model)

    assert float(next(average.parameters())) == 5.0


def test_removed_parameter_is_dropped(caplog: pytest.LogCaptureFixture) -> None:
    """The log says what is gone."""
    model = nn.Sequential(Number(4.0), Number(4.0))
    average = ExponentialMovingAverage(model)
    average.update_parameters(model)
    del model[1]

    average.update_parameters(model)

    assert len([*average.parameters()]) == 1
    assert "gone: 1.value" in caplog.text


def test_rebound_buffers_are_followed() -> None:
    """A module that assigns a new tensor to its buffer each time, of another size too, is copied all the same."""
    model: Any = nn.Module()
    model.register_buffer("cache", torch.zeros(2))
    average = ExponentialMovingAverage(model)
    average.update_parameters(model)

    for size in (2, 5):
        model.cache = torch.full((size,), float(size))
        average.update_parameters(model)

    assert torch.equal(inside(average).cache, torch.full((5,), 5.0))


def test_model_that_changes_its_type_is_followed() -> None:
    """After `model.double()` the average keeps its own type and goes on."""
    model = Number(4.0)
    average = ExponentialMovingAverage(model, momentum=0.25)
    average.update_parameters(model)
    model.double()
    model.set(8.0)

    average.update_parameters(model)

    assert value_of(average) == 5.0


# --- what is refused ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [ExponentialMovingAverage, MomentumAnnealingEMA])
@pytest.mark.parametrize("momentum", [0.0, 1.0, -0.1, 1.5, float("nan")])
def test_momentum_outside_the_unit_interval_is_refused(make: Any, momentum: float) -> None:
    """The bounds are excluded: 0 never moves, 1 does not average."""
    with pytest.raises(ValueError, match=f"momentum must be .*, got {momentum}"):
        make(Number(), momentum=momentum)


def test_momentum_that_is_a_decay_warns() -> None:
    """The direction is the common mistake; the warning says what to write."""
    with pytest.warns(UserWarning, match=r"share of the newest weights.*write momentum=0.001"):
        ExponentialMovingAverage(Number(), momentum=0.999)


def test_half_is_no_decay() -> None:
    """A momentum of 0.5 is taken as it is."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")

        ExponentialMovingAverage(Number(), momentum=0.5)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"momentum": "0.1"}, TypeError, "momentum must be a number, got '0.1'"),
        ({"momentum": True}, TypeError, "momentum must be a number, got True"),
        ({"interval": 0}, ValueError, "interval must be at least 1, got 0"),
        ({"interval": 1.0}, TypeError, "interval must be an int, got 1.0"),
        ({"update_buffers": 1}, TypeError, "update_buffers must be True or False, got 1"),
        ({"gamma": 0}, ValueError, "gamma must be above 0, got 0"),
        ({"gamma": float("inf")}, ValueError, "gamma must be a finite number, got inf"),
        ({"gamma": "100"}, TypeError, "gamma must be a number, got '100'"),
        ({"device": "abacus"}, RuntimeError, "abacus"),
    ],
)
def test_bad_argument_is_refused(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    """The constructor says what it expected, and what came."""
    with pytest.raises(error, match=message):
        MomentumAnnealingEMA(Number(), **arguments)


def test_what_is_no_model_is_refused() -> None:
    """A list of parameters is none."""
    with pytest.raises(TypeError, match=r"model must be a torch.nn.Module, got \[\]"):
        ExponentialMovingAverage([])  # type: ignore[arg-type]


def test_lazy_model_is_refused() -> None:
    """It has nothing to copy before its first batch."""
    with pytest.raises(ValueError, match="weight has no shape yet: run a batch through lazy modules"):
        ExponentialMovingAverage(nn.LazyLinear(2))
