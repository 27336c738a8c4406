"""What nobody subscribed to is not built."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from eventloop import Trainer, trainer as trainer_module
from eventloop.events import AfterRun, Event
from tests.trainer.conftest import MakeTrainer, batches

NO_HOOKS = dict.fromkeys(
    ("runtime_info", "optimizer", "timer", "sampler_seed", "logger", "param_scheduler", "checkpoint")
)


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """The names of the events that trainers announce and buses are given, counted."""
    counted: Counter[str] = Counter()
    emit = trainer_module.Bus.emit

    def count(self: Any, event: Event, trainer: Any = None) -> None:
        counted[type(event).__name__] += 1
        emit(self, event, trainer)

    monkeypatch.setattr(trainer_module.Bus, "emit", count)
    return counted


def test_no_subscriber_no_event(make_trainer: MakeTrainer, built: Counter[str]) -> None:
    """A training that nobody watches builds not one event."""
    trainer = make_trainer(default_hooks=NO_HOOKS, val_loader=batches(2))

    trainer.train()

    assert trainer.iter == 6
    assert built == {}


def test_only_what_is_subscribed_is_built(make_trainer: MakeTrainer, built: Counter[str]) -> None:
    """One subscriber costs the events it asked for, and no other."""
    trainer = make_trainer(default_hooks=NO_HOOKS)
    trainer.bus.subscribe(lambda event: None, "after_train_epoch")

    trainer.train()

    assert built == {"AfterTrainEpoch": 2}


def test_a_background_subscriber_is_one_too(make_trainer: MakeTrainer, built: Counter[str]) -> None:
    """An event that only the background wants is built."""
    trainer = make_trainer(default_hooks=NO_HOOKS)
    seen: list[Any] = []
    trainer.bus.subscribe(seen.append, "after_run", offload="thread")

    trainer.train()

    assert built == {"AfterRun": 1}
    assert seen == [AfterRun(iter=6, epoch=2, max_iters=6, max_epochs=2)]


def test_the_optimizers_events_are_built_on_demand(make_trainer: MakeTrainer, built: Counter[str]) -> None:
    """The default stack builds no event between backward and step unless somebody asks."""
    make_trainer(val_loader=batches(1)).train()

    assert not built.keys() & {
        "AfterBackward",
        "BeforeOptimizerStep",
        "AfterOptimizerStep",
        "BeforeTrainIter",
    }


def test_an_overridden_method_is_a_subscription(make_trainer: MakeTrainer) -> None:
    """Hooks subscribe what they override and nothing else: there are no empty methods to call."""
    trainer: Trainer = make_trainer()

    assert trainer.bus.plan("before_train_iter") == []
    assert not trainer.bus.wants(type(trainer.bus.signal("before_train_iter").event_type)) is None
