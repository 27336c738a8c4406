"""A recorder on a bus: spans of events, handlers and deliveries, and depths of queues."""

from __future__ import annotations

import gc
import threading
import weakref
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from eventloop.bus import Bus
from eventloop.costs.spans import Span, SpanRecorder
from eventloop.events import AfterTrainIter, AfterVal, Event
from tests.conftest import DEADLINE, Held
from tests.support import process_handlers
from tests.support.internals import substitute
from tests.support.process_support import until

EDGES = [0, 1, 63, 64, 65, 191, 318]


class TeaPoured(Event):
    """A user's event, which has no iteration."""


@pytest.fixture
def recorder() -> SpanRecorder:
    return SpanRecorder()


def nothing(event: Event) -> None:
    pass


async def nothing_later(event: Event) -> None:
    pass


def emit(bus: Bus, times: int) -> None:
    for i in range(times):
        bus.emit(AfterTrainIter(iter=i))


def of(recorder: SpanRecorder, kind: str) -> list[Span]:
    return [span for span in recorder.spans if span.kind == kind]


def inside(inner: Span, outer: Span) -> bool:
    return outer.began <= inner.began and inner.began + inner.seconds <= outer.began + outer.seconds


# --- events and handlers -----------------------------------------------------------------------------------


def test_every_handler_of_every_event_leaves_a_span(bus: Bus, recorder: SpanRecorder) -> None:
    """In its order, with its event, iteration and priority, within the span of the event."""
    bus.subscribe(nothing, "after_train_iter", name="late", priority=70)
    bus.subscribe(lambda trainer, event: None, "after_train_iter", name="soon", priority=10)

    with bus.record(recorder):
        emit(bus, 200)

    events, handlers = of(recorder, "event"), of(recorder, "handler")
    assert [(s.name, s.iter) for s in events] == [("after_train_iter", i) for i in range(200)]
    assert [(s.name, s.number, s.iter, s.event) for s in handlers[2:4]] == [
        ("soon", 10, 1, "after_train_iter"),
        ("late", 70, 1, "after_train_iter"),
    ]
    assert len(handlers) == 400
    for i, event in enumerate(events):
        assert inside(handlers[2 * i], event)
        assert inside(handlers[2 * i + 1], event)
        assert handlers[2 * i].began + handlers[2 * i].seconds <= handlers[2 * i + 1].began
    assert all(one.began + one.seconds <= other.began for one, other in pairwise(events))


def test_what_is_emitted_in_a_handler_lies_within_it(bus: Bus, recorder: SpanRecorder) -> None:
    """Spans are nested as the calls were."""
    bus.subscribe(lambda event: bus.emit(TeaPoured()), "after_train_iter", name="outer")
    bus.subscribe(nothing, TeaPoured, name="inner")

    with bus.record(recorder):
        emit(bus, 1)

    inner, tea, outer, iteration = recorder.spans
    assert [s.name for s in recorder.spans] == ["inner", "tea_poured", "outer", "after_train_iter"]
    assert inside(inner, tea)
    assert inside(tea, outer)
    assert inside(outer, iteration)


@pytest.mark.parametrize("every", [3, 10])
def test_a_handler_that_its_filter_held_back_leaves_none(
    bus: Bus, recorder: SpanRecorder, every: int
) -> None:
    """Nor is the filter asked twice."""
    subscription = bus.subscribe(nothing, TeaPoured, every=every)

    with bus.record(recorder):
        for _ in range(30):
            bus.emit(TeaPoured())

    assert len(of(recorder, "handler")) == 30 // every == subscription.stats.calls


def test_a_handler_that_raises_leaves_a_span(bus: Bus, recorder: SpanRecorder) -> None:
    """And its error has the note it always has; the handlers after it are not counted."""

    def fails(event: Event) -> None:
        raise KeyError("on purpose")

    bus.subscribe(fails, TeaPoured)
    after = bus.subscribe(nothing, TeaPoured)
    with bus.record(recorder), pytest.raises(KeyError, match="on purpose") as raised:
        bus.emit(TeaPoured())

    assert "raised by handler" in raised.value.__notes__[0]
    assert [(s.kind, s.event) for s in recorder.spans] == [("handler", "tea_poured"), ("event", "")]
    assert after.stats.calls == 0


def test_other_threads_have_tracks_of_their_own(bus: Bus, recorder: SpanRecorder) -> None:
    """Named as the threads are."""
    bus.subscribe(nothing, TeaPoured)

    with bus.record(recorder):
        bus.emit(TeaPoured())
        other = threading.Thread(target=lambda: bus.emit(TeaPoured()), name="kitchen")
        other.start()
        other.join(DEADLINE)

    here = threading.get_ident()
    assert recorder.threads[here] == threading.current_thread().name
    assert "kitchen" in recorder.threads.values()
    assert [s.track == here for s in of(recorder, "handler")] == [True, False]


def test_a_subscriber_added_meanwhile_is_recorded(bus: Bus, recorder: SpanRecorder) -> None:
    """Of an event that had no signal yet, too."""
    with bus.record(recorder) as recording:
        bus.subscribe(nothing, TeaPoured, name="sync")
        bus.subscribe(nothing, TeaPoured, name="thread", offload="thread")
        bus.emit(TeaPoured())
    assert recording.wait(DEADLINE)

    assert [s.name for s in of(recorder, "handler")] == ["sync"]
    assert [s.track for s in of(recorder, "delivery")] == ["thread"]


# --- beginning and ending ----------------------------------------------------------------------------------


@pytest.mark.parametrize("before", EDGES)
@pytest.mark.parametrize("meanwhile", [0, 1, 200])
def test_calls_stay_exact_across_a_recording(
    bus: Bus, recorder: SpanRecorder, before: int, meanwhile: int
) -> None:
    """Nothing is counted twice or not at all where plans are exchanged."""
    plain = bus.subscribe(nothing, "after_train_iter")
    seventh = bus.subscribe(nothing, "after_train_iter", every=7)

    emit(bus, before)
    with bus.record(recorder):
        emit(bus, meanwhile)
    emit(bus, 100)

    assert plain.stats.calls == bus.signal("after_train_iter").emitted == before + meanwhile + 100
    assert seventh.stats.calls == before // 7 + meanwhile // 7 + 100 // 7
    assert len(of(recorder, "event")) == meanwhile


def test_a_handler_may_begin_and_end_it(bus: Bus, recorder: SpanRecorder) -> None:
    """It takes effect with the next event; the one under way is recorded to its end."""
    recordings: list[Any] = []

    def switch(event: AfterTrainIter) -> None:
        if event.iter == 2:
            recordings.append(bus.record(recorder))
        elif event.iter == 5:
            recordings[0].stop()

    subscription = bus.subscribe(switch, "after_train_iter")
    emit(bus, 10)

    assert [s.iter for s in of(recorder, "event")] == [3, 4, 5]
    assert subscription.stats.calls == 10


def test_afterwards_nothing_is_left_of_it(bus: Bus, recorder: SpanRecorder) -> None:
    """The plan is the one there was, which measures as seldom, and nobody holds what was recorded."""
    bus.subscribe(nothing, "after_train_iter")
    bus.subscribe(nothing_later, "after_train_iter")
    emit(bus, 1)
    bus.flush(DEADLINE)
    code = bus.signal("after_train_iter").dispatch.__code__

    recording = bus.record(recorder)
    emit(bus, 100)
    assert recording.wait(DEADLINE)
    taken = len(recorder.spans)
    emit(bus, 100)
    assert bus.flush(DEADLINE)

    assert bus.signal("after_train_iter").dispatch.__code__ is code
    assert len(recorder.spans) == taken
    gone = weakref.ref(recording)
    del recording
    gc.collect()
    assert gone() is None


class OnADevice:
    """The tea of a deferred, whose values leave the device when `ready_now` is set."""

    def __init__(self) -> None:
        self.requested, self.ready_now = 0, False

    def ready(self) -> bool:
        self.requested += 1
        return self.ready_now

    def events(self) -> list[Event]:
        return [TeaPoured()]


def test_deferred_events_of_before_its_end_are_recorded(bus: Bus, recorder: SpanRecorder) -> None:
    """Also if their values leave the device only after the end."""
    tea = OnADevice()
    bus.subscribe(nothing, TeaPoured, offload="thread", name="guest")
    with bus.record(recorder) as recording:
        bus.post(tea, TeaPoured)
    until(lambda: tea.requested > 3)
    tea.ready_now = True

    assert recording.wait(DEADLINE)
    assert [span.name for span in of(recorder, "delivery")] == ["tea_poured"]


def test_stopping_again_does_nothing(bus: Bus, recorder: SpanRecorder) -> None:
    """Not even to the recorder that is on the bus by then, which has to be stopped before another one. Without background
    subscribers a recording is finished at once."""
    told: list[str] = []
    first = bus.record(recorder)
    first.stop(lambda: told.append("finished"))
    assert told == ["finished"]
    assert first.wait(0.0)
    bus.subscribe(nothing, TeaPoured)
    second = SpanRecorder()
    with bus.record(second):
        with pytest.raises(RuntimeError, match="another recorder is on this bus: stop its"):
            bus.record(recorder)
        first.stop()
        first.finish()
        bus.emit(TeaPoured())

    assert [(s.kind, s.iter) for s in second.spans] == [("handler", None), ("event", None)]


def test_a_closed_bus_can_be_recorded(recorder: SpanRecorder) -> None:
    """Its synchronous handlers go on working."""
    bus = Bus()
    bus.subscribe(nothing, TeaPoured)
    bus.subscribe(nothing, TeaPoured, offload="thread")
    bus.close(DEADLINE)

    recording = bus.record(recorder)
    bus.emit(TeaPoured())

    assert recording.wait(0.0)
    assert [s.kind for s in recorder.spans] == ["handler", "event"]


# --- the background ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("offload", [None, "thread"])
def test_a_delivery_leaves_a_span_on_its_subscribers_track(
    bus: Bus, recorder: SpanRecorder, offload: Any
) -> None:
    """With the event and its iteration, although it fails, or comes when the recording is stopped already."""

    def fails(event: AfterTrainIter) -> None:
        raise KeyError("on purpose")

    fn = fails if offload else nothing_later
    bus.subscribe(fn, "after_train_iter", offload=offload, name="writer", on_error="log")

    with bus.record(recorder) as recording:
        emit(bus, 5)
    assert recording.wait(DEADLINE)

    deliveries = of(recorder, "delivery")
    assert [(s.track, s.name, s.iter, s.number) for s in deliveries] == [
        ("writer", "after_train_iter", i, 1) for i in range(5)
    ]
    assert recorder.lanes == {"writer": offload or "loop"}
    assert all(one.began + one.seconds <= other.began for one, other in pairwise(deliveries))


def test_a_batch_is_one_span(bus: Bus, recorder: SpanRecorder, held: Held) -> None:
    """That says how many events it is, and of which type if there is one."""
    bus.subscribe(held, "*", offload="thread", batch=True, name="batches")
    with bus.record(recorder) as recording:
        emit(bus, 1)
        bus.flush(0.01)
        assert held.entered.wait(DEADLINE)
        emit(bus, 3)
        bus.emit(AfterVal(iter=3))
        held.let_go()
    assert recording.wait(DEADLINE)

    assert [(s.name, s.iter, s.event, s.number) for s in of(recorder, "delivery")] == [
        ("1 × after_train_iter", 0, "after_train_iter", 1),
        ("4 × events", 3, "", 4),
    ]


def test_a_delivery_that_hangs_is_there_up_to_the_end(bus: Bus, recorder: SpanRecorder, held: Held) -> None:
    """It is what one looks for in such a trace; and it is not waited for any longer."""
    bus.subscribe(held, "after_train_iter", offload="thread", name="hangs")
    recording = bus.record(recorder)
    emit(bus, 3)
    bus.flush(0.01)
    assert held.entered.wait(DEADLINE)

    assert not recording.wait(0.01)

    assert [(s.track, s.name, s.iter) for s in of(recorder, "delivery")] == [
        ("hangs", "after_train_iter (under way)", 0)
    ]
    held.let_go()
    assert bus.flush(DEADLINE)
    assert len(of(recorder, "delivery")) == 1


@pytest.mark.parametrize("end", ["time", "another"])
def test_a_subscriber_that_lags_behind_is_recorded_for_a_while(
    bus: Bus, recorder: SpanRecorder, held: Held, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    """Then the recording is finished, as by the begin of another one, and its callback called, once."""
    if end == "time":
        substitute(monkeypatch, "recording.LINGER_SECONDS", 0.02)
    bus.subscribe(held, "after_train_iter", offload="thread")
    told: list[int] = []
    recording = bus.record(recorder)
    emit(bus, 1)
    assert held.entered.wait(DEADLINE)

    recording.stop(lambda: told.append(len(recorder.spans)))
    if end == "another":
        bus.record(SpanRecorder()).stop()

    until(lambda: told)
    recording.finish()
    assert told == [2]  # the event, and the delivery under way


def test_depths_of_the_queues_are_taken(bus: Bus, recorder: SpanRecorder, held: Held) -> None:
    """Of all queues whenever the keeper looks and a delivery ends."""
    bus.subscribe(held, "after_train_iter", offload="thread", name="writer")
    with bus.record(recorder) as recording:
        emit(bus, 4)
        held.let_go()
    assert recording.wait(DEADLINE)

    writer = [depth.events for depth in recorder.depths if depth.queue == "writer"]
    assert {3, 2, 1, 0} <= set(writer)
    assert max(writer) <= 4


def test_deliveries_in_another_process_are_recorded_there(
    bus: Bus, recorder: SpanRecorder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the one clock that all processes have; those before and after the recording are not."""
    monkeypatch.setenv("LOG", str(tmp_path / "log"))
    subscription = bus.subscribe(process_handlers.record, "after_train_iter", offload="process", name="away")
    emit(bus, 3)
    assert bus.flush(DEADLINE)

    with bus.record(recorder) as recording:
        for i in range(10, 14):
            bus.emit(AfterTrainIter(iter=i))
    assert bus.flush(DEADLINE)
    assert recording.wait(DEADLINE)
    emit(bus, 3)
    assert bus.flush(DEADLINE)

    deliveries = of(recorder, "delivery")
    assert [(s.track, s.name, s.iter) for s in deliveries] == [
        ("away", "after_train_iter", i) for i in range(10, 14)
    ]
    assert recorder.lanes == {"away": "process"}
    emitted = of(recorder, "event")
    for event, delivery in zip(emitted, deliveries, strict=True):
        assert event.began < delivery.began
    assert all(one.began + one.seconds <= other.began for one, other in pairwise(deliveries))
    assert subscription.stats.delivered == 10


# --- the recorder ------------------------------------------------------------------------------------------


def test_a_recorder_is_bounded(bus: Bus) -> None:
    """What is beyond the limit is counted; a limit that is no positive int is refused."""
    recorder = SpanRecorder(limit=5)
    bus.subscribe(nothing, TeaPoured)

    with bus.record(recorder):
        for _ in range(4):
            bus.emit(TeaPoured())

    assert len(recorder.spans) == 5
    assert recorder.lost == 3
    with pytest.raises(ValueError, match="limit must be at least 1, got 0"):
        SpanRecorder(0)
    with pytest.raises(TypeError, match="limit must be an int, got True"):
        SpanRecorder(True)
