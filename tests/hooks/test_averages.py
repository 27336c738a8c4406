"""The averages of a model's weights, by themselves."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, get_swa_multi_avg_fn

from eventloop.hooks import (
    BaseAveragedModel,
    ExponentialMovingAverage,
    MomentumAnnealingEMA,
    StochasticWeightAverage,
)
from eventloop.model.averages import _Weighted
from tests.support.averaged import Number, inside, value_of

OURS = [ExponentialMovingAverage, MomentumAnnealingEMA, StochasticWeightAverage]


def follow(make: Callable[[nn.Module], Any], *values: float) -> list[float]:
    """The average after each of the values."""
    model = Number()
    average = make(model)
    seen = []
    for value in values:
        model.set(value)
        average.update_parameters(model)
        seen.append(value_of(average))
    return seen


def conv_net() -> Any:
    """Parameters, running statistics, and integers."""
    torch.manual_seed(3)
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(16, 2))


def walk(model: nn.Module, seed: int) -> None:
    """Change the weights at random, and run a batch through, which moves the buffers."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator))
        model(torch.randn(8, 1, 4, 4, generator=generator))


# --- what the averages are ---------------------------------------------------------------------------------


def test_exponential_average_moves_by_the_momentum() -> None:
    """The first update copies; each one after goes the momentum's share of the way to the model."""
    seen = follow(lambda model: ExponentialMovingAverage(model, momentum=0.25), 4.0, 8.0, 1.0)

    assert seen == [4.0, 5.0, 4.0]


def test_stochastic_average_is_the_mean() -> None:
    """Each value taken in has the same share."""
    seen = follow(StochasticWeightAverage, 4.0, 8.0, 3.0, 1.0)

    assert seen == pytest.approx([4.0, 6.0, 5.0, 4.0])


def test_annealed_momentum_begins_large_and_ends_at_the_momentum() -> None:
    """The momentum after n updates is gamma / (gamma + n), and never below `momentum`."""
    average = MomentumAnnealingEMA(Number(), momentum=0.25, gamma=2)

    assert [average.weight(n) for n in (2, 4, 6, 100)] == [0.5, 2 / 6, 0.25, 0.25]


def test_annealed_average_uses_its_momentum() -> None:
    """With gamma 1 the shares are 1/2, 1/3, ...: the mean."""
    seen = follow(lambda model: MomentumAnnealingEMA(model, momentum=0.125, gamma=1), 4.0, 8.0, 3.0)

    assert seen == pytest.approx([4.0, 6.0, 5.0])


@pytest.mark.parametrize("make", OURS)
def test_interval_leaves_out_the_updates_between(make: Any) -> None:
    """With interval 2 the first, third, fifth ... value is taken in, and the others are as if they never were."""
    every_second = follow(lambda model: make(model, interval=2), 4.0, 99.0, 8.0, 99.0, 3.0)

    if make is MomentumAnnealingEMA:  # its momentum counts every update
        assert every_second[0] == every_second[1] == 4.0
    else:
        assert every_second[::2] == follow(make, 4.0, 8.0, 3.0)
    assert every_second[2] == every_second[3]


def test_equals_torchs_exponential_average() -> None:
    """In float32 the result is that of `torch.optim.swa_utils.AveragedModel`, to the bit."""
    model = conv_net()
    ours = ExponentialMovingAverage(model, momentum=0.125)
    theirs = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.875))

    for seed in range(5):
        walk(model, seed)
        ours.update_parameters(model)
        theirs.update_parameters(model)

    for a, b in zip(ours.module.parameters(), theirs.module.parameters(), strict=True):
        assert torch.equal(a, b)


def test_equals_torchs_stochastic_average() -> None:
    """The same for the mean, up to the rounding of its share, which torch computes in float32."""
    model = conv_net()
    ours, theirs = (
        StochasticWeightAverage(model),
        AveragedModel(model, multi_avg_fn=get_swa_multi_avg_fn()),
    )

    for seed in range(5):
        walk(model, seed)
        ours.update_parameters(model)
        theirs.update_parameters(model)

    for a, b in zip(ours.module.parameters(), theirs.module.parameters(), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("make", OURS)
def test_tensor_by_tensor_gives_the_same_as_all_at_once(make: Any) -> None:
    """`avg_func` is the formula of `multi_avg_func`."""
    model = conv_net()
    average = make(model)
    before = [p.clone() for p in average.module.parameters()]
    walk(model, 0)
    one_by_one = [average.avg_func(a, p, 3) for a, p in zip(before, model.parameters(), strict=True)]

    average.multi_avg_func(before, [*model.parameters()], 3)

    for a, b in zip(before, one_by_one, strict=True):
        torch.testing.assert_close(a, b)


# --- averages of one's own ---------------------------------------------------------------------------------


class Largest(BaseAveragedModel):
    """Keeps the largest value of each weight."""

    def avg_func(self, averaged_param: Tensor, source_param: Tensor, steps: int) -> Tensor:
        return torch.maximum(averaged_param, source_param)


def test_own_average_needs_only_a_formula() -> None:
    """A subclass of the base defines `avg_func`; the first update copies there too."""
    assert follow(Largest, -4.0, 8.0, 3.0) == [-4.0, 8.0, 8.0]


def test_own_formula_in_a_subclass_of_ours_is_used() -> None:
    """An `avg_func` that overrides ours is not passed over for the faster form."""

    class Frozen(ExponentialMovingAverage):
        def avg_func(self, averaged_param: Tensor, source_param: Tensor, steps: int) -> Tensor:
            return averaged_param

    assert follow(Frozen, 4.0, 8.0) == [4.0, 4.0]


def test_an_average_must_say_its_weight() -> None:
    """A share that a subclass does not define is missed at the first update that needs it."""

    class Nameless(_Weighted):
        pass

    average = Nameless(Number())
    average.update_parameters(Number())  # copies

    with pytest.raises(NotImplementedError, match="Nameless must define weight"):
        average.update_parameters(Number())


def test_own_weight_in_a_subclass_of_ours_is_used() -> None:
    """A momentum that depends on the step is one method; it is told the updates made before."""

    class Halving(ExponentialMovingAverage):
        def weight(self, steps: int) -> float:
            return 0.5**steps

    assert follow(Halving, 0.0, 8.0, 8.0) == [0.0, 4.0, 5.0]


def test_average_without_a_formula_is_an_error() -> None:
    """The message names the class and what it lacks."""

    class Nothing(BaseAveragedModel):
        pass

    with pytest.raises(NotImplementedError, match="Nothing must define avg_func or multi_avg_func"):
        follow(Nothing, 1.0, 2.0)


# --- buffers, types, frozen parameters ---------------------------------------------------------------------


def test_buffers_are_copied() -> None:
    """By default the average has the model's own running statistics, and its counters."""
    model = conv_net()
    average = ExponentialMovingAverage(model)

    for seed in range(3):
        walk(model, seed)
        average.update_parameters(model)

    for a, b in zip(average.module.buffers(), model.buffers(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("make", OURS)
def test_buffers_are_copied_between_two_updates(make: Any) -> None:
    """With an interval they are the model's after each call, as MMEngine's; the weights wait for the interval."""
    model = conv_net()
    average, means = make(model, interval=3), []

    for seed in range(3):
        walk(model, seed)
        average.update_parameters(model)
        means.append(torch.equal(inside(average)[1].running_mean, model[1].running_mean))

    assert means == [True] * 3
    assert not torch.equal(inside(average)[0].weight, model[0].weight)


def test_update_buffers_averages_statistics_and_copies_integers() -> None:
    """With `update_buffers` running means follow the formula; `num_batches_tracked` is the model's."""
    model = conv_net()
    average = ExponentialMovingAverage(model, momentum=0.25, update_buffers=True)
    walk(model, 0)
    average.update_parameters(model)
    first = model[1].running_mean.clone()
    walk(model, 1)

    average.update_parameters(model)

    norm = inside(average)[1]
    torch.testing.assert_close(norm.running_mean, torch.lerp(first, model[1].running_mean, 0.25))
    assert int(norm.num_batches_tracked) == 2


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_averaged_in_single(dtype: torch.dtype) -> None:
    """Small steps add up, which half precision would round away, one by one."""
    model = Number(1.0).to(dtype)
    average = ExponentialMovingAverage(model, momentum=0.0002)
    average.update_parameters(model)
    model.set(2.0)

    for _ in range(100):
        average.update_parameters(model)

    assert average.module.value.dtype == torch.float32
    assert value_of(average) == pytest.approx(2.0 - 0.9998**100, abs=1e-5)


def test_mixed_types_are_averaged_each_in_its_own() -> None:
    """Double, single, half and complex weights in one model all follow the formula."""
    model = nn.ParameterList(
        [
            nn.Parameter(torch.zeros(2, dtype=dtype))
            for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.complex64)
        ]
    )
    average = ExponentialMovingAverage(model, momentum=0.25)
    average.update_parameters(model)
    for parameter in model:
        parameter.data.fill_(4.0)

    average.update_parameters(model)

    assert [complex(p[0]) for p in average.module.parameters()] == [1.0] * 4
    dtypes = [p.dtype for p in average.module.parameters()]
    assert dtypes == [torch.float64, torch.float32, torch.float32, torch.complex64]


def test_integer_parameters_are_copied() -> None:
    """A quantised weight has no mean."""
    model = nn.ParameterList([nn.Parameter(torch.tensor([1]), requires_grad=False)])
    average = ExponentialMovingAverage(model, momentum=0.25)
    average.update_parameters(model)
    model[0].data.fill_(100)

    average.update_parameters(model)

    assert int(inside(average)[0]) == 100


def test_frozen_parameter_that_thaws_is_averaged() -> None:
    """What is frozen when the average is made follows the model once it moves."""
    model = Number()
    model.value.requires_grad_(False)
    average = ExponentialMovingAverage(model, momentum=0.25)
    average.update_parameters(model)
    model.value.requires_grad_(True)
    model.set(4.0)

    average.update_parameters(model)

    assert value_of(average) == 1.0


def test_frozen_parameter_keeps_its_value_exactly() -> None:
    """The average of one value is that value, to the bit."""
    values = torch.randn(1000)
    model = nn.ParameterList([nn.Parameter(values.clone(), requires_grad=False)])
    average = ExponentialMovingAverage(model, momentum=0.3)

    for _ in range(50):
        average.update_parameters(model)

    assert torch.equal(inside(average)[0], values)


def test_tied_weights_are_averaged_once() -> None:
    """A weight with two names moves by one share, and is tied in the average too."""
    model: Any = nn.ModuleDict({"encode": nn.Linear(2, 2, bias=False), "decode": nn.Linear(2, 2, bias=False)})
    model["decode"].weight = model["encode"].weight
    average = ExponentialMovingAverage(model, momentum=0.25)
    model["encode"].weight.data.fill_(0.0)
    average.update_parameters(model)
    model["encode"].weight.data.fill_(4.0)

    average.update_parameters(model)

    assert float(inside(average)["decode"].weight[0, 0]) == 1.0
    assert inside(average)["decode"].weight is inside(average)["encode"].weight


# --- the copy ----------------------------------------------------------------------------------------------


def test_average_has_no_gradients() -> None:
    """The copy leaves gradients behind, and asks for none when it is run."""
    model = Number(1.0)
    model.value.grad = torch.ones(1)

    average = ExponentialMovingAverage(model)

    assert inside(average).value.grad is None
    assert not any(parameter.requires_grad for parameter in average.parameters())


def test_called_it_is_the_model_with_averaged_weights() -> None:
    """A teacher in semi-supervised training is called like its student."""
    model = nn.Linear(2, 1)
    teacher = ExponentialMovingAverage(model)
    before = model(torch.ones(1, 2))
    model.weight.data.zero_()

    assert torch.equal(teacher(torch.ones(1, 2)), before)


def test_copy_of_an_average_does_not_copy_the_model() -> None:
    """An average that was copied goes on by itself, and with any model of its form."""
    model = Number(4.0)
    average = ExponentialMovingAverage(model, momentum=0.25)
    average.update_parameters(model)
    twin = copy.deepcopy(average)
    model.set(8.0)

    twin.update_parameters(model)

    assert (value_of(average), value_of(twin)) == (4.0, 5.0)


def test_state_goes_through_a_checkpoint() -> None:
    """Loaded into another, weights and the number of updates are what they were; the keys are MMEngine's."""
    model = Number(4.0)
    first, second = StochasticWeightAverage(model), StochasticWeightAverage(model)
    first.update_parameters(model)
    first.update_parameters(model)

    state = first.state_dict()
    second.load_state_dict(state)

    assert [*state] == ["module.value", "steps"] or [*state] == ["steps", "module.value"]
    assert second.steps == 2
    assert value_of(second) == 4.0


def test_state_without_the_number_of_updates_is_refused() -> None:
    """A strict load names the missing key."""
    with pytest.raises(RuntimeError, match=r'Missing key.*"steps"'):
        ExponentialMovingAverage(Number()).load_state_dict({"module.value": torch.zeros(1)})
