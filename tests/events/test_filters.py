"""Filters: `every`, `start`, `when` and `once`, on each kind of counter."""

from __future__ import annotations

from typing import Any

import pytest

from eventloop.bus import Bus
from eventloop.events import (
    AfterTrainEpoch,
    AfterTrainIter,
    AfterValEpoch,
    AfterValIter,
    BeforeTrainIter,
    Event,
    StopRequested,
)
from eventloop.events.filters import describe_filter, make_filter


@pytest.mark.parametrize(
    ("every", "start", "fires"),
    [
        (1, 0, [1, 2, 3, 4, 5, 6, 7, 8, 9]),
        (3, 0, [3, 6, 9]),
        (3, 2, [5, 8]),
        (1, 7, [8, 9]),
        (4, 4, [8]),
        (10, 0, []),
    ],
)
@pytest.mark.parametrize("offload", [None, "thread"])
def test_iter_event_fires_by_completed_iterations(
    bus: Bus, every: int, start: int, fires: list[int], offload: str | None
) -> None:
    """A handler fires where `c > start and (c - start) % every == 0`, `c = iter + 1`; what its filter holds back is not
    in the account of a background subscriber."""
    seen: list[Any] = []
    subscription = bus.subscribe(seen.append, "after_train_iter", every=every, start=start, offload=offload)

    for i in range(9):
        bus.emit(AfterTrainIter(iter=i))
    bus.flush()

    assert [event.iter + 1 for event in seen] == fires
    assert subscription.stats.delivered == len(fires)


@pytest.mark.parametrize(
    ("events", "fires"),
    [
        ([AfterTrainEpoch(epoch=n, iter=100 * n) for n in range(5)], [1, 3]),
        ([AfterValEpoch(epoch=n, max_epochs=5) for n in range(1, 6)], [1, 3]),
        ([AfterValEpoch(iter=n) for n in range(1, 6)], [1, 3]),
        ([AfterValIter(iter=77, batch_idx=n) for n in range(5)], [1, 3]),
        ([AfterTrainIter(iter=n) for n in range(7, 12)], [0, 2, 4]),
    ],
    ids=["completed epochs", "epochs before a validation", "validations", "batches", "resumed run"],
)
def test_each_event_has_a_counter(bus: Bus, events: list[Any], fires: list[int]) -> None:
    """`epoch + 1` in a training, and `epoch`, which is completed, after a validation; the validations themselves where
    `epoch` stands still; `batch_idx + 1` in a validation. A resumed run fires where the first would have."""
    seen: list[Any] = []
    bus.subscribe(seen.append, type(events[0]), every=2)

    for event in events:
        bus.emit(event)

    assert seen == [events[i] for i in fires]


def test_other_events_count_their_occurrences(bus: Bus) -> None:
    """An event without a counter of its own is counted as it comes, by each subscription for itself."""
    first: list[Any] = []
    late: list[Any] = []
    bus.subscribe(first.append, "stop_requested", every=2, name="first")
    bus.emit(StopRequested(reason="1"))
    bus.subscribe(late.append, "stop_requested", every=2, name="late")

    for reason in "234":
        bus.emit(StopRequested(reason=reason))

    assert [event.reason for event in first] == ["2", "4"]
    assert [event.reason for event in late] == ["3"]


def test_when_decides_by_the_event(bus: Bus) -> None:
    """A predicate sees the event and lets pass what it likes, asked only where `every` lets pass."""
    asked, seen = list[int](), list[Any]()

    def late(event: AfterTrainIter) -> bool:
        asked.append(event.iter)
        return event.iter > 4

    bus.subscribe(seen.append, "after_train_iter", every=2, when=late)
    for i in range(10):
        bus.emit(AfterTrainIter(iter=i))

    assert asked == [1, 3, 5, 7, 9]
    assert [event.iter for event in seen] == [5, 7, 9]


def test_once_fires_a_single_time(bus: Bus) -> None:
    """`once=True` fires at the first event that passes, of all its types, then is off the bus."""
    seen: list[Any] = []
    subscription = bus.subscribe(seen.append, BeforeTrainIter, AfterTrainIter, every=3, once=True)

    for i in range(9):
        bus.emit(AfterTrainIter(iter=i))
        bus.emit(BeforeTrainIter(iter=i))

    assert seen == [AfterTrainIter(iter=2)]
    assert not bus.wants(AfterTrainIter)
    assert not bus.wants(BeforeTrainIter)
    assert subscription.stats.calls == 1


def test_once_fires_a_single_time_when_an_earlier_handler_emits_the_same_event(bus: Bus) -> None:
    """The emit under way keeps its plan, but not a second firing of what fired meanwhile."""
    seen: list[Any] = []

    @bus.on("stop_requested", priority=10)
    def again(event: StopRequested) -> None:
        if event.reason == "first":
            bus.emit(StopRequested(reason="second"))

    bus.subscribe(seen.append, "stop_requested", once=True)
    bus.emit(StopRequested(reason="first"))

    assert seen == [StopRequested(reason="second")]


@pytest.mark.parametrize("offload", [None, "thread"])
def test_once_holds_in_the_background(bus: Bus, offload: str | None) -> None:
    """A background subscriber with `once=True` hears one event, too."""
    seen: list[Event] = []

    async def later(event: Event) -> None:
        seen.append(event)

    bus.subscribe(seen.append if offload else later, "after_train_iter", offload=offload, once=True)
    for i in range(5):
        bus.emit(AfterTrainIter(iter=i))
    bus.flush()

    assert seen == [AfterTrainIter(iter=0)]


def test_description_names_only_what_filters() -> None:
    """The plan prints a filter in the words of `bus.on`, and nothing for one that lets all pass, which costs no call."""

    def healthy(event: Event) -> bool:
        return True

    assert describe_filter(1, 0, False, None) == ""
    assert make_filter(AfterTrainIter, 1, 0, None) is None
    assert describe_filter(10, 5, True, healthy) == "every=10 start=5 when=healthy once"


def test_description_of_a_predicate_is_one_line() -> None:
    """A predicate whose repr spans lines does not break the table, nor the compiled plan."""

    class Odd:
        def __call__(self, event: Event) -> bool:
            return True

        def __repr__(self) -> str:
            return "Odd(\n  raise\n)"

    bus = Bus()
    seen: list[Event] = []
    bus.subscribe(seen.append, "after_train_iter", when=Odd())
    bus.emit(AfterTrainIter())

    assert bus.plan("after_train_iter")[0].filter == "when=Odd( raise )"
    assert len(seen) == 1
