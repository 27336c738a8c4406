"""ActivationStats: statistics of chosen modules' outputs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from eventloop.hooks import ActivationStats, LoggerHook
from tests.support.inside_torch import module_hooks
from tests.support.trainers import MakeTrainer, batches


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.LSTM(3, 2))


def step(trainer: Any, batch: Any) -> Any:
    output, _ = trainer.model(batch[0])
    return output.square().mean()


def make(make_trainer: MakeTrainer, hook: ActivationStats, **arguments: Any) -> Any:
    model = net()
    return make_trainer(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.0),
        train_loader=batches(4),
        max_epochs=1,
        train_step=step,
        hooks=[hook, LoggerHook(interval=2)],
        **arguments,
    )


def test_statistics_of_the_outputs(make_trainer: MakeTrainer) -> None:
    """Mean, population standard deviation and the fraction near zero, at the interval, of the chosen modules."""
    trainer = make(make_trainer, ActivationStats("1", interval=2, threshold=0.1))
    with trainer.bus.capture("scalars_logged") as seen:
        trainer.train()

    told = {event.step: event.scalars for event in seen if "activation/1/mean" in event.scalars}
    assert [*told] == [2, 4]
    output = trainer.model[:2](batches(4)[3][0]).detach()
    assert told[4]["activation/1/mean"] == pytest.approx(output.mean().item())
    assert told[4]["activation/1/std"] == pytest.approx(output.std(correction=0).item())
    assert told[4]["activation/1/near_zero"] == pytest.approx((output.abs() <= 0.1).float().mean().item())


def test_modules_that_return_tuples(make_trainer: MakeTrainer) -> None:
    """Of several outputs the first one counts."""
    trainer = make(make_trainer, ActivationStats("*", interval=4))
    trainer.train()

    names = {name for name in trainer.metrics.latest() if name.startswith("activation/")}
    assert names == {f"activation/{i}/{what}" for i in range(3) for what in ("mean", "std", "near_zero")}


def test_histogram(make_trainer: MakeTrainer) -> None:
    """With `histogram` the outputs themselves are delivered."""
    trainer = make(make_trainer, ActivationStats("0", interval=4, histogram=True))
    with trainer.bus.capture("histogram_logged") as seen:
        trainer.train()

    (event,) = seen
    values = np.frombuffer(event.data, event.dtype)
    assert np.allclose(np.sort(values), np.sort(trainer.model[0](batches(4)[3][0]).detach().numpy().ravel()))


def test_nothing_is_left_on_the_model(make_trainer: MakeTrainer) -> None:
    """After training the modules carry no hook."""
    trainer = make(make_trainer, ActivationStats())
    trainer.train()

    assert not any(module_hooks(trainer.model))


def test_bad_input(make_trainer: MakeTrainer) -> None:
    """Refused where it is written, a pattern where the model is known."""
    with pytest.raises(ValueError, match="threshold must be above 0, got 0"):
        ActivationStats(threshold=0)
    with pytest.raises(ValueError, match="interval"):
        ActivationStats(interval=0)
    with pytest.raises(ValueError, match="no module of Sequential matches 'layers"):
        make(make_trainer, ActivationStats("layers.*"))
