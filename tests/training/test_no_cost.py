"""What nobody subscribed to is not built."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from eventloop import Bus
from eventloop.assembly.attach import DEFAULT_HOOKS
from eventloop.events import AfterRun, BeforeTrainIter, Event
from tests.support.trainers import MakeTrainer, batches

NO_HOOKS = dict.fromkeys(DEFAULT_HOOKS)


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """The names of the events that trainers announce and buses are given, counted."""
    counted: Counter[str] = Counter()
    emit = Bus.emit

    def count(self: Any, event: Event, trainer: Any = None) -> None:
        counted[type(event).__name__] += 1
        emit(self, event, trainer)

    monkeypatch.setattr(Bus, "emit", count)
    return counted


def test_no_subscriber_no_event(make_trainer: MakeTrainer, built: Counter[str]) -> None:
    """A training that nobody watches builds not one event."""
    trainer = make_trainer(default_hooks=NO_HOOKS, val_loader=batches(2))

    trainer.train()

    assert trainer.iter == 6
    assert built == {}


@pytest.mark.parametrize("offload", [None, "thread"])
def test_only_what_is_subscribed_is_built(
    make_trainer: MakeTrainer, built: Counter[str], offload: Any
) -> None:
    """A subscriber costs the events it asked for, and no other, in the background too."""
    trainer = make_trainer(default_hooks=NO_HOOKS)
    seen: list[Event] = []
    trainer.bus.subscribe(seen.append, "after_run", offload=offload)

    trainer.train()

    assert built == {"AfterRun": 1}
    assert seen == [AfterRun(iter=6, epoch=2, max_iters=6, max_epochs=2)]


def test_an_event_nobody_overrides_has_no_handlers(make_trainer: MakeTrainer) -> None:
    """Hooks subscribe what they override and nothing else: there are no empty methods to call."""
    trainer = make_trainer()

    assert trainer.bus.plan("before_train_iter") == trainer.bus.plan("after_backward") == []
    assert not trainer.bus.wants(BeforeTrainIter)
