"""Test that tensors of an optimizer which no checkpoint would have are named before the first iteration."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.trainers import MakeTrainer, tiny_model


class Lookahead(torch.optim.SGD):
    """An optimizer that keeps slow weights beside its state."""

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, **options)
        self.fast = [p for group in self.param_groups for p in group["params"]]
        self.slow = {"weights": [p.detach().clone() for p in self.fast]}


class Saving(Lookahead):
    """One that saves them."""

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "slow": self.slow}


@pytest.mark.parametrize(("kind", "named"), [(Lookahead, True), (Saving, False), (torch.optim.SGD, False)])
def test_tensors_outside_of_the_state(
    make_trainer: MakeTrainer, caplog: pytest.LogCaptureFixture, kind: Any, named: bool
) -> None:
    """One line before the first iteration names the attribute; parameters are no such tensors."""
    model = tiny_model()
    trainer = make_trainer(model=model, optimizer=kind(model.parameters(), lr=0.1))
    lines: list[str] = []
    trainer.bus.subscribe(
        lambda trainer, event: lines.extend(caplog.messages), "before_train_iter", once=True
    )

    trainer.train()

    assert (
        any("Lookahead holds tensors in slow, which its state_dict() does not" in each for each in lines)
        == named
    )


def test_they_are_lost_on_a_resume(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    """What the line says is so: a resumed optimizer has others."""
    model = tiny_model()
    optimizer = Lookahead(model.parameters(), lr=0.1)
    first = make_trainer(model=model, optimizer=optimizer, work_dir=tmp_path)
    first.train()
    optimizer.slow["weights"][0].zero_()
    other = tiny_model()
    trainer = make_trainer(model=other, optimizer=Lookahead(other.parameters(), lr=0.1), work_dir=tmp_path)

    trainer.resume()

    assert trainer.optimizer.slow["weights"][0].abs().sum() > 0
