"""`capture` for tests, `latest` for code that has the bus and not the trainer."""

from __future__ import annotations

import pytest

from eventloop.bus import Bus
from eventloop.events import AfterTrainIter, AfterVal, AfterValEpoch, Event, ScalarsLogged


class Ready:
    """One scalar whose value is there."""

    def ready(self) -> bool:
        return True

    def events(self) -> list[Event]:
        return [ScalarsLogged(step=1)]


def test_capture_collects_while_the_block_runs(bus: Bus) -> None:
    """Exactly the events named, exactly those of the block, in the order of the emits, behind every handler. Leaving the
    block waits for those that are born in the background."""
    order: list[str] = []
    bus.emit(AfterVal(reason="before"))
    with bus.capture("after_train_iter", AfterVal, "scalars_logged") as seen:
        bus.subscribe(lambda event: order.append(f"handler {len(seen)}"), "after_val", priority=99)
        bus.emit(AfterTrainIter(iter=1))
        bus.emit(AfterValEpoch())
        bus.emit(AfterVal())
        bus.post(Ready(), ScalarsLogged)
    bus.emit(AfterVal(reason="after"))

    assert seen == [AfterTrainIter(iter=1), AfterVal(), ScalarsLogged(step=1)]
    assert order[0] == "handler 1"


def test_capture_leaves_nothing_behind(bus: Bus) -> None:
    """Afterwards the bus is as before, even when the block raised."""
    with pytest.raises(KeyError), bus.capture("after_val", "scalars_logged"):
        raise KeyError

    assert bus.stats() == []
    assert not bus.wants(AfterVal)


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("on_train_epoch_end", "after_train_epoch"),
        ("on_train_start", "before_train"),
        ("on_train_batch_end", "after_train_iter"),
        ("on_validation_epoch_end", "after_val_epoch"),
        ("after_train_batch", "after_train_iter"),
        ("on_step_end", "after_train_iter"),
        ("ITERATION_COMPLETED", "after_train_iter"),
        ("EPOCH_STARTED", "before_train_epoch"),
    ],
)
def test_another_systems_name_is_translated(bus: Bus, name: str, meant: str) -> None:
    """Names of callbacks of Lightning and Transformers, and of ignite's events, get the event, not the name that is spelled alike."""
    with pytest.raises(ValueError, match=f"unknown event '{name}': use '{meant}'"):
        bus.on(name)(print)


def test_latest_is_the_last_event_emitted(bus: Bus) -> None:
    """By class or by name, without a subscriber and after one is added; None before the first."""
    assert bus.latest(AfterValEpoch) is None
    for epoch in (1, 2):
        bus.emit(AfterValEpoch(epoch=epoch, metrics={"accuracy": 0.5 * epoch}))

    assert bus.latest(AfterValEpoch) == AfterValEpoch(epoch=2, metrics={"accuracy": 1.0})
    latest = bus.latest("after_val_epoch")
    bus.subscribe(lambda event: None, "after_val_epoch")
    bus.stats()
    assert bus.latest(AfterValEpoch) is latest


def test_latest_is_set_before_the_handlers_run(bus: Bus) -> None:
    """A handler that asks gets the event it is called for."""
    seen: list[Event | None] = []
    bus.subscribe(lambda event: seen.append(bus.latest(AfterVal)), "after_val")

    bus.emit(AfterVal(reason="now"))

    assert seen == [AfterVal(reason="now")]


def test_latest_of_an_unknown_event_is_refused(bus: Bus) -> None:
    """A misspelled name is not an event that never came, neither for `latest` nor for `capture`."""
    with pytest.raises(ValueError, match="unknown event 'after_vla'"):
        bus.latest("after_vla")
    with (
        pytest.raises(ValueError, match=r"'after_vla': did you mean 'after_val'\?"),
        bus.capture("after_vla"),
    ):
        pass
