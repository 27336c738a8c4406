"""Events that cannot be encoded: each costs itself alone, whatever `on_error` says, and is named once."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from eventloop.bus import Bus
from eventloop.bus.subscription import SubscriptionStats
from eventloop.events import AfterTrainIter, AfterVal, Event, HandlerFailed
from eventloop.events.encoding_errors import BadEvent, Unencodable, why_not
from tests.conftest import DEADLINE
from tests.support import process_handlers as handlers
from tests.support.process_support import Lines, Start, emit
from tests.support.spilling import Anything, total

pytest_plugins = ("tests.support.process_fixtures",)


def account(stats: SubscriptionStats) -> tuple[int, int, int, int]:
    return stats.delivered, stats.failed, stats.dropped, stats.queued


def refuse_odd(events: Event | list[Event]) -> None:
    """A subscriber that cannot encode iterations with odd numbers."""
    several = events if isinstance(events, list) else [events]
    bad = [e for e in several if isinstance(e, AfterTrainIter) and e.iter % 2]
    if bad:
        raise Unencodable([BadEvent("after_train_iter", "iter", "it is odd") for _ in bad], of=len(several))


async def refuse_odd_soon(events: Any) -> None:
    refuse_odd(events)


# --- what the lane does about them -------------------------------------------------------------------------


@pytest.mark.parametrize("on_error", ["disable", "log"])
@pytest.mark.parametrize("batch", [False, True, 3])
@pytest.mark.parametrize(("fn", "offload"), [(refuse_odd, "thread"), (refuse_odd_soon, None)])
def test_they_alone_have_failed(
    bus: Bus, fn: Any, offload: str | None, batch: bool | int, on_error: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """The rest of their deliveries counts as delivered, later ones come, and the log has one line."""
    subscription = bus.subscribe(
        fn, "after_train_iter", offload=offload, name="mine", batch=batch, on_error=on_error
    )
    emit(bus, 21)
    bus.flush(DEADLINE)
    emit(bus, 10)
    bus.flush(DEADLINE)

    assert account(subscription.stats) == (11 + 5, 10 + 5, 0, 0)
    assert subscription.stats.error.startswith(
        "Unencodable: after_train_iter cannot be encoded for its field iter: "
    )
    (message,) = caplog.messages
    assert message.startswith("mine: after_train_iter cannot be encoded for its field iter: it is odd. ")
    assert "Give the event plain fields" in message


def test_each_kind_is_told_once_as_an_event_too(bus: Bus, caplog: pytest.LogCaptureFixture) -> None:
    """The event and its field make the kind; who hears of failures hears of each kind once."""

    def refuse(event: AfterTrainIter) -> None:
        raise Unencodable([BadEvent("after_train_iter", "ab"[event.iter % 2], "no")], of=1)

    told: list[HandlerFailed] = []
    bus.subscribe(told.append, HandlerFailed)
    bus.subscribe(refuse, "after_train_iter", offload="thread", name="mine")
    emit(bus, 8)
    bus.flush(DEADLINE)
    bus.poll()

    assert [report.error for report in told] == [
        f"Unencodable: after_train_iter cannot be encoded for its field {field}: no" for field in "ab"
    ]
    assert len(caplog.records) == 2


def test_who_wants_errors_raised_gets_them(bus: Bus) -> None:
    """`on_error="raise"`: on the training thread, and the deliveries go on."""
    subscription = bus.subscribe(refuse_odd, "after_train_iter", offload="thread", on_error="raise")
    emit(bus, 4)
    bus.flush(DEADLINE)

    with pytest.raises(Unencodable, match="after_train_iter cannot be encoded for its field iter: it is odd"):
        bus.poll()
    assert account(subscription.stats) == (2, 2, 0, 0)


def test_one_that_speaks_for_a_part_of_the_delivery_is_an_error(bus: Bus) -> None:
    """Nobody knows whether the rest was dealt with: all of the batch has failed, and `on_error` holds."""
    entered, gate = threading.Event(), threading.Event()

    def one_by_one(events: list[AfterTrainIter]) -> None:
        entered.set()
        gate.wait(DEADLINE)
        for event in events:
            refuse_odd(event)

    subscription = bus.subscribe(one_by_one, "after_train_iter", offload="thread", batch=True)
    emit(bus, 1)
    assert entered.wait(DEADLINE)
    emit(bus, 4)
    gate.set()
    bus.flush(DEADLINE)

    assert account(subscription.stats) == (1, 4, 0, 0)
    assert subscription.stats.error.startswith("[error] Unencodable")


def test_what_is_wrong_is_found_field_by_field() -> None:
    """The first that fails by itself, with its type and its own error; else the event's."""

    def encode(value: object) -> None:
        if value == [1]:
            raise ValueError("no lists")

    of_field = why_not(Anything(value=[1]), TypeError("of the event"), encode)
    of_event = why_not(Anything(value=1), TypeError("of the event"), encode)
    tensor = why_not(Anything(value=torch.zeros(2)), TypeError("of the event"), lambda value: value.item())

    assert str(of_field) == "anything cannot be encoded for its field value, a list: ValueError: no lists"
    assert str(of_event) == "anything cannot be encoded: TypeError: of the event"
    assert tensor.field == "value, a torch.Tensor"
    assert str(Unencodable([of_event, of_field, tensor], of=9)) == f"{of_event} (and 2 more)"


# --- on their way to a process -----------------------------------------------------------------------------


def main_class() -> type:
    """A class of the program itself."""
    return type("Mine", (), {"__module__": "__main__"})


@pytest.mark.representative(1)
@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: threading.Lock(), r"a _thread.lock: TypeError: cannot pickle '_thread.lock' object"),
        (lambda: lambda: 1, r"a function: .*lambda"),
        (
            lambda: main_class()(),
            r"a __main__.Mine: PicklingError: Mine is defined in __main__, the program itself",
        ),
    ],
    ids=["lock", "lambda", "of the program"],
)
def test_an_event_that_cannot_be_sent_disables_nobody(
    bus: Bus, start: Start, lines: Lines, make: Callable[[], Any], why: str, caplog: pytest.LogCaptureFixture
) -> None:
    """With `on_error` as it is by default: the others arrive, before and after it."""
    far = start(handlers.record_anything, "meal_served", "after_val")
    for i in range(3):
        bus.emit(AfterVal(epoch=i))
        bus.emit(handlers.MealServed(dish=make()))
    bus.flush(DEADLINE)

    assert [line.split()[0] for line in lines()] == ["AfterVal"] * 3
    assert account(far.stats) == (3, 3, 0, 0)
    (record,) = caplog.records
    assert re.match(f"far: meal_served cannot be encoded for its field dish, {why}", record.getMessage())


@pytest.mark.slow
@pytest.mark.parametrize("batch", [False, True])
def test_a_subscriber_in_a_process_names_them_too(
    bus: Bus, start: Start, lines: Lines, batch: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """What it raises comes back: they alone have failed, and the worker goes on."""
    far = start(handlers.record_even, batch=batch)
    emit(bus, 40)
    bus.flush(DEADLINE)
    emit(bus, 2)
    bus.flush(DEADLINE)

    assert lines() == [str(i) for i in [*range(0, 40, 2), 0]]
    assert account(far.stats) == (21, 21, 0, 0)
    assert total(far.stats) == 42
    assert [record.getMessage()[:62] for record in caplog.records] == [
        "far: after_train_iter cannot be encoded for its field iter: it"
    ]
