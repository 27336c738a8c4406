"""Events whose values are still on a device when they are put."""

from __future__ import annotations

from typing import Any

import pytest

from eventloop.bus import Bus
from eventloop.events import AfterRun, AfterTrain, Event, ScalarsLogged
from tests.conftest import DEADLINE


class Value:
    """Events that can be made once a value is there."""

    def __init__(self, step: int, ready: bool = True, error: BaseException | None = None) -> None:
        self.step = step
        self.there = ready
        self.error = error

    def ready(self) -> bool:
        return self.there

    def events(self) -> list[Event]:
        if self.error is not None:
            raise self.error
        return [ScalarsLogged(step=self.step)]


def test_deferred_events_are_delivered_in_order_when_they_are_ready(bus: Bus) -> None:
    """A flush waits for the values put before it; neither later ones nor other events overtake them."""
    seen: list[Any] = []
    bus.subscribe(seen.append, "scalars_logged", AfterRun, offload="thread")
    late = Value(1, ready=False)
    bus.post(late, ScalarsLogged)
    bus.post(Value(2), ScalarsLogged)
    bus.emit(AfterRun())
    assert not bus.flush(0.0)
    late.there = True

    assert bus.flush(DEADLINE)
    assert seen == [ScalarsLogged(step=1), ScalarsLogged(step=2), AfterRun()]
    assert bus.latest(ScalarsLogged) == ScalarsLogged(step=2)


class Prompt(Value):
    """One that never hangs, and says so."""

    prompt = True


@pytest.mark.parametrize("kind", [Value, Prompt])
def test_events_before_and_after_keep_their_places(bus: Bus, kind: type[Value]) -> None:
    """Whether or not they are handed over with those of the deferred, of which some are measured on their own."""
    seen: list[Any] = []
    bus.subscribe(seen.append, "*", offload="thread")
    for step in range(300):
        bus.emit(AfterTrain(iter=step))
        bus.post(kind(step), ScalarsLogged)

    assert bus.flush(DEADLINE)
    steps = [event.iter if isinstance(event, AfterTrain) else event.step for event in seen]
    assert steps == [step for step in range(300) for _ in range(2)]
    assert [type(event) for event in seen] == [AfterTrain, ScalarsLogged] * 300


@pytest.mark.parametrize("error", [ValueError("no value"), SystemExit("no value")])
def test_deferred_that_fails_holds_nobody_up(
    bus: Bus, caplog: pytest.LogCaptureFixture, error: BaseException
) -> None:
    """Its events are dropped, counted and logged; those behind it are delivered."""
    seen: list[Any] = []
    subscription = bus.subscribe(seen.append, "scalars_logged", offload="thread")
    bus.post(Value(1, error=error), ScalarsLogged)
    bus.post(Value(2), ScalarsLogged)

    assert bus.flush(DEADLINE)
    assert [event.step for event in seen] == [2]
    assert subscription.stats.dropped == 1
    assert f"{type(error).__name__}: no value" in caplog.text


def test_deferred_that_never_gets_ready_is_counted_at_the_close() -> None:
    """What could not be made in time is reported as dropped."""
    bus = Bus()
    subscription = bus.subscribe(lambda event: None, "scalars_logged", offload="thread")
    bus.post(Value(1, ready=False), ScalarsLogged)

    assert not bus.close(0.1)
    assert subscription.stats.dropped == 1
