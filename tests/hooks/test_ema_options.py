"""EMAHook's options: which average, given how, and what is refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from eventloop import Trainer, register
from eventloop.hooks import BaseAveragedModel, EMAHook, ExponentialMovingAverage, MomentumAnnealingEMA
from eventloop.model.average_pairs import Swap

MakeTrainer = Callable[..., Trainer]


@register
class LastWeights(BaseAveragedModel):
    """An average of one's own, with an option of its own."""

    def __init__(self, model: nn.Module, share: float = 1.0, interval: int = 1) -> None:
        if share > 1:
            raise ValueError(f"share must be at most 1, got {share}")
        super().__init__(model, interval)
        self.share = share

    def avg_func(self, averaged_param: Tensor, source_param: Tensor, steps: int) -> Tensor:
        return torch.lerp(averaged_param, source_param, self.share)


@pytest.mark.parametrize(
    "hook",
    [
        EMAHook(ema_type="MomentumAnnealingEMA", gamma=7),
        EMAHook(ema_type=MomentumAnnealingEMA, gamma=7),
        EMAHook(ema_type={"type": "MomentumAnnealingEMA", "gamma": 7}),
        EMAHook(ema_type={"type": MomentumAnnealingEMA}, gamma=7),
    ],
    ids=["name", "class", "config", "config of a class"],
)
def test_average_is_given_by_name_class_or_config(make_trainer: MakeTrainer, hook: EMAHook) -> None:
    """All four make the same average."""
    make_trainer(hooks=[hook]).train()

    average = hook.ema_model
    assert isinstance(average, MomentumAnnealingEMA)
    assert (average.gamma, average.momentum) == (7, 0.0002)


def test_default_is_mmengines(make_trainer: MakeTrainer) -> None:
    """Exponential, momentum 0.0002, each step, buffers not averaged."""
    hook = EMAHook()
    make_trainer(hooks=[hook]).train()

    average = hook.ema_model
    assert isinstance(average, ExponentialMovingAverage)
    assert (average.momentum, average.interval, average.update_buffers) == (0.0002, 1, False)


@pytest.mark.parametrize("ema_type", ["LastWeights", LastWeights], ids=["name", "class"])
def test_own_average_in_the_hook(make_trainer: MakeTrainer, ema_type: Any) -> None:
    """A registered name or the class, with its own options."""
    hook = EMAHook(ema_type=ema_type, share=0.5)
    make_trainer(hooks=[hook]).train()

    assert isinstance(hook.ema_model, LastWeights)
    assert hook.ema_model.share == 0.5


def test_average_that_has_not_begun_is_an_error() -> None:
    """There is nothing to hand out before a training."""
    with pytest.raises(RuntimeError, match="EMAHook has no average yet: it is made when training begins"):
        _ = EMAHook().ema_model


# --- what the constructor refuses --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"momentum": 0.0}, ValueError, "momentum must be above 0 and below 1, got 0.0"),
        ({"momentum": 1.0}, ValueError, "momentum must be above 0 and below 1, got 1.0"),
        ({"interval": 0}, ValueError, "interval must be at least 1, got 0"),
        (
            {"momentun": 0.1},
            ValueError,
            "EMAHook: ExponentialMovingAverage has no argument 'momentun': did you mean",
        ),
        (
            {"ema_type": "StochasticWeightAverage", "momentum": 0.1},
            ValueError,
            "StochasticWeightAverage has no argument 'momentum'",
        ),
        ({"begin_iter": 3, "begin_epoch": 1}, ValueError, "not both: got begin_iter=3, begin_epoch=1"),
        ({"begin_iter": -1}, ValueError, "begin_iter must be at least 0, got -1"),
        ({"begin_epoch": -1}, ValueError, "begin_epoch must be at least 0, got -1"),
        ({"begin_epoch": 1.5}, TypeError, "begin_epoch must be an int, got 1.5"),
        ({"begin_iter": True}, TypeError, "begin_iter must be an int, got True"),
        (
            {"ema_type": "ExponentialMovingAverge"},
            ValueError,
            "unknown ema_type 'ExponentialMovingAverge': did you mean 'ExponentialMovingAverage'",
        ),
        ({"ema_type": nn.Linear}, TypeError, "ema_type must be a name, a subclass of BaseAveragedModel"),
        ({"ema_type": "EMAHookless"}, ValueError, "unknown ema_type 'EMAHookless': known are"),
        ({"ema_type": {"momentum": 0.1}}, TypeError, "ema_type must be a name, a subclass"),
        ({"model": nn.Identity()}, ValueError, "averages the trainer's model: leave model out"),
    ],
)
def test_bad_option_is_refused(options: dict[str, Any], error: type[Exception], message: str) -> None:
    """The line that made the mistake raises, before there is a trainer."""
    with pytest.raises(error, match=message):
        EMAHook(**options)


def test_momentum_that_is_a_decay_warns_once(make_trainer: MakeTrainer) -> None:
    """When the hook is built; the training does not repeat it."""
    with pytest.warns(UserWarning, match="for a decay of 0.999 write momentum=0.001"):
        hook = EMAHook(momentum=0.999)

    make_trainer(hooks=[hook]).train()


# --- what the trainer refuses ------------------------------------------------------------------------------


def test_begin_epoch_in_a_run_of_iterations_is_refused(make_trainer: MakeTrainer) -> None:
    """The units contradict each other: such a run has no epochs."""
    with pytest.raises(
        ValueError, match=r"begin_epoch=2\) in a run measured in iterations would never begin"
    ):
        make_trainer(hooks=[EMAHook(begin_epoch=2)], max_iters=9)


@pytest.mark.parametrize(
    ("options", "end"), [({"begin_epoch": 3}, 2), ({"begin_iter": 9}, 8)], ids=["epoch", "iter"]
)
def test_beginning_after_the_end_is_refused(
    make_trainer: MakeTrainer, options: dict[str, Any], end: int
) -> None:
    """The message has both numbers."""
    name, value = next(iter(options.items()))

    with pytest.raises(
        ValueError, match=rf"EMAHook\({name}={value}\) would never begin: the run ends at {end}"
    ):
        make_trainer(hooks=[EMAHook(**options)], batches=4, max_epochs=2)


def test_bad_option_of_an_own_average_is_refused_with_the_trainer(make_trainer: MakeTrainer) -> None:
    """An average of one's own may need the model to judge its options."""
    with pytest.raises(ValueError, match="share must be at most 1, got 2"):
        make_trainer(hooks=[EMAHook(ema_type=LastWeights, share=2)])


def test_two_averages_are_refused(make_trainer: MakeTrainer) -> None:
    """Only one can stand in for the model."""
    second = EMAHook()
    second.name = "second"
    trainer = make_trainer(hooks=[EMAHook(), second])

    with pytest.raises(ValueError, match="two EMAHooks: only one average can be evaluated and saved"):
        trainer.train()


def test_two_averages_of_one_name_are_refused(make_trainer: MakeTrainer) -> None:
    """They are told apart neither in a checkpoint."""
    with pytest.raises(ValueError, match="two hooks have the state name 'EMAHook'"):
        make_trainer(hooks=[EMAHook(), EMAHook()])


# --- the swap ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("moment", [1, 2], ids=["on the way in", "on the way back"])
def test_interrupt_in_the_middle_of_a_swap_can_be_mended(
    monkeypatch: pytest.MonkeyPatch, moment: int
) -> None:
    """However far the copying got when Ctrl-C came, `back` gives every weight back."""
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(3)))
    average = ExponentialMovingAverage(model)
    for parameter in model.parameters():
        parameter.data.add_(1.0)
    own = copy.deepcopy(model.state_dict())
    swap, calls = Swap(), 0

    def half(targets: list[Tensor], values: list[Tensor]) -> None:
        nonlocal calls
        calls += 1
        for i, (target, value) in enumerate(zip(targets, values, strict=True)):
            if calls == moment and i == 3:
                raise KeyboardInterrupt
            target.copy_(value)

    monkeypatch.setattr(torch, "_foreach_copy_", half)

    with pytest.raises(KeyboardInterrupt):  # noqa: PT012
        swap.put(average.pairs_with(model))
        swap.back()
    swap.back()

    assert all(torch.equal(own[name], value) for name, value in model.state_dict().items())
    assert not swap.active


def test_addresses_stay(make_trainer: MakeTrainer) -> None:
    """A captured graph or a fused optimizer finds the model's tensors where they were, during an evaluation too."""
    seen: set[int] = set()
    trainer = make_trainer(
        hooks=[EMAHook()], val_loader=[0], val_step=lambda trainer, batch: {"acc": 1.0}, max_epochs=2
    )

    def record_pointer(trainer: Trainer, event: Any) -> None:
        seen.add(next(trainer.model.parameters()).data_ptr())

    for event in ("before_train", "before_val_iter", "after_train"):
        trainer.bus.subscribe(record_pointer, event)

    trainer.train()

    assert len(seen) == 1
