"""A sync handler that raises: whose error it is, and who still runs."""

from __future__ import annotations

import traceback
from typing import Any

import pytest

from eventloop.bus import Bus
from eventloop.events import AfterTrainIter, BeforeTrainIter, Event, HandlerFailed

AFTER = AfterTrainIter(iter=4, epoch=1)
BEFORE = BeforeTrainIter(iter=4, epoch=1)


def breaks(event: Event) -> None:
    raise KeyError("breaks")


def breaks_too(event: Event) -> None:
    raise LookupError("too")


def interrupts(event: Event) -> None:
    raise KeyboardInterrupt


@pytest.fixture(params=[0, 100], ids=["measured", "compiled"])
def warm(request: pytest.FixtureRequest) -> int:
    """The number of emits before: the first ones run the measured plan."""
    count: int = request.param
    return count


def emit(bus: Bus, event: Event, times: int) -> None:
    for _ in range(times):
        bus.emit(event)


def test_error_keeps_its_traceback_and_names_its_handler(bus: Bus, warm: int) -> None:
    """The exception is the handler's own, with a note: handler, priority, event and counters."""
    bus.subscribe(lambda event: None, BeforeTrainIter, priority=10)
    emit(bus, BEFORE, warm)
    bus.subscribe(breaks, BeforeTrainIter, priority=30)
    bus.subscribe(lambda event: None, BeforeTrainIter, priority=70)

    with pytest.raises(KeyError, match="breaks") as caught:
        bus.emit(BEFORE)

    assert traceback.extract_tb(caught.value.__traceback__)[-1].name == "breaks"
    assert caught.value.__notes__ == [f"raised by handler breaks (priority 30, 2 of 3) on {BEFORE!r}"]
    assert "iter=4, epoch=1" in caught.value.__notes__[0]


def stops_iterating(event: Event) -> None:
    next(iter([]))


def test_stop_iteration_names_its_handler(bus: Bus, warm: int) -> None:
    """It would end the generator of a training loop; the error that comes instead says whose it was."""
    reached: list[Event] = []
    bus.subscribe(lambda event: None, AfterTrainIter)
    emit(bus, AFTER, warm)
    bus.subscribe(stops_iterating, AfterTrainIter)
    bus.subscribe(reached.append, AfterTrainIter, priority=70)

    with pytest.raises(RuntimeError, match=r"handler stops_iterating raised StopIteration: .*trainer\.stop"):
        bus.emit(AFTER)

    assert reached == [AFTER]


def broken(event: Event) -> bool:
    raise KeyError("of the filter")


@pytest.mark.parametrize(
    "options", [{}, {"every": 5}, {"every": 10}, {"once": True}, {"when": broken}, {"connect": True}]
)
def test_note_names_the_handler(bus: Bus, warm: int, options: dict[str, Any]) -> None:
    """However the plan calls it, also if its `when=` raises, or if it is a receiver connected blinker's way."""

    def receiver(sender: Any, event: Event) -> None:
        raise KeyError("foreign")

    bus.subscribe(lambda event: None, "after_train_iter", name="other")
    emit(bus, AfterTrainIter(iter=9), warm)
    if "connect" in options:
        bus.signal("after_train_iter").connect(receiver)
    else:
        bus.subscribe(breaks, "after_train_iter", **options)

    with pytest.raises(KeyError) as caught:
        bus.emit(AfterTrainIter(iter=9))

    note = caught.value.__notes__[0]
    assert note.startswith("raised by handler ")
    assert ("receiver" if "connect" in options else "breaks") + " (priority 50, 2 of 2)" in note


@pytest.mark.parametrize(
    ("event", "fails", "error"), [(BEFORE, breaks, KeyError), (AFTER, interrupts, KeyboardInterrupt)]
)
def test_the_rest_is_not_called(
    bus: Bus, warm: int, event: Event, fails: Any, error: type[BaseException]
) -> None:
    """What a failed preparation was for does not happen; Ctrl-C is not a failure to be tidied up after."""
    seen: list[Event] = []
    emit(bus, event, warm)
    bus.subscribe(fails, type(event))
    bus.subscribe(seen.append, type(event))

    with pytest.raises(error):
        bus.emit(event)

    assert seen == []


def test_after_event_still_reaches_the_rest(bus: Bus, warm: int) -> None:
    """Everybody may close; each remaining handler runs once, then the error propagates."""
    seen: list[Event] = []
    bus.subscribe(seen.append, AfterTrainIter, priority=10)
    emit(bus, AFTER, warm)
    bus.subscribe(breaks, AfterTrainIter)
    bus.subscribe(seen.append, AfterTrainIter, priority=60)
    bus.subscribe(seen.append, AfterTrainIter, priority=60, every=5)
    seen.clear()

    with pytest.raises(KeyError):
        bus.emit(AFTER)

    assert seen == [AFTER] * 3


def test_later_errors_come_with_the_first(bus: Bus, warm: int, caplog: pytest.LogCaptureFixture) -> None:
    """The first error propagates; the others are in its notes, each with its own handler, and in the log."""
    emit(bus, AFTER, warm)
    for fn in (breaks, breaks_too, breaks_too):
        bus.subscribe(fn, AfterTrainIter)

    with pytest.raises(KeyError) as caught:
        bus.emit(AFTER)

    notes = caught.value.__notes__
    starts = ["raised by handler", "then also failed:", "then also failed:"]
    assert [note.splitlines()[0][:17] for note in notes] == starts
    assert "LookupError: too" in notes[1]
    assert "raised by handler breaks_too (priority 50, 2 of 3)" in notes[1]
    assert "raised by handler breaks_too #2 (priority 50, 3 of 3)" in notes[2]
    assert "breaks_too failed while closing after another error" in caplog.text


def test_remaining_handler_sees_that_an_error_is_under_way(bus: Bus) -> None:
    """`bus.failing` is the error while the rest of a closing event runs, and None otherwise."""
    seen: list[BaseException | None] = []
    bus.subscribe(lambda event: seen.append(bus.failing), AfterTrainIter, priority=10)
    bus.subscribe(breaks, AfterTrainIter)
    bus.subscribe(lambda event: seen.append(bus.failing), AfterTrainIter, priority=60)

    with pytest.raises(KeyError) as caught:
        bus.emit(AFTER)

    assert seen == [None, caught.value]
    assert bus.failing is None


def test_error_passes_through_nested_emits(bus: Bus) -> None:
    """Each plan the error passes through adds its note, innermost first."""

    def nests(event: Event) -> None:
        bus.emit(BEFORE)

    bus.subscribe(nests, AfterTrainIter)
    bus.subscribe(breaks, BeforeTrainIter)

    with pytest.raises(KeyError) as caught:
        bus.emit(AFTER)

    assert [note.split()[3] for note in caught.value.__notes__] == ["breaks", "nests"]


def test_handler_that_was_not_reached_is_not_counted(bus: Bus, warm: int) -> None:
    """`calls` are invocations: a handler behind an error was not called."""
    bus.subscribe(lambda event: None, BeforeTrainIter, name="first")
    last = bus.subscribe(lambda event: None, BeforeTrainIter, priority=70, name="last")
    emit(bus, BEFORE, warm)
    bus.subscribe(breaks, BeforeTrainIter)

    with pytest.raises(KeyError):
        bus.emit(BEFORE)

    assert [record.calls for record in bus.stats()] == [warm + 1, warm, 1]
    assert last.stats.calls == warm


def test_sync_handler_of_a_health_event_fails_like_any_other(bus: Bus) -> None:
    """An event delivered by `poll` gives its error the same note."""

    async def fails(event: Event) -> None:
        raise ValueError("background")

    bus.subscribe(breaks, HandlerFailed)
    bus.subscribe(fails, AfterTrainIter)
    bus.emit(AFTER)
    bus.flush()

    with pytest.raises(KeyError) as caught:
        bus.poll()

    assert "raised by handler breaks" in caught.value.__notes__[0]
