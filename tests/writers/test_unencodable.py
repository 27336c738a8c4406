"""Events that a file has no form for: left out of it one by one, counted, and named."""

from __future__ import annotations

import logging
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from eventloop import read_events
from eventloop.bus.subscription import SubscriptionStats
from eventloop.events import AfterTrainIter, Event, ScalarsLogged
from eventloop.writers import EventLogWriter, JSONLWriter, Writer, read_jsonl
from tests.support.process_handlers import MealServed
from tests.writers.conftest import Account, Attach, emit, in_process, write

Make = Callable[[], Writer]
Read = Callable[[Path], list[dict[str, Any]]]


class Odd(Event):
    """An event that may hold anything."""

    step: int = 0
    value: Any = None


class Mute:
    """An object without a text."""

    def __str__(self) -> str:
        raise RuntimeError("no text")


def in_log(folder: Path) -> list[dict[str, Any]]:
    records = list(read_events(folder))
    assert [record.sequence for record in records] == [*range(len(records))]
    return [msgspec.structs.asdict(record.event) for record in records]


def in_lines(folder: Path) -> list[dict[str, Any]]:
    return list(read_jsonl(folder / "metrics.jsonl"))


in_each_file = pytest.mark.parametrize(
    ("make", "read"),
    [
        pytest.param(EventLogWriter, in_log, id="event log"),
        pytest.param(lambda: JSONLWriter(events="*"), in_lines, id="jsonl"),
    ],
)


def steps(rows: list[dict[str, Any]]) -> list[Any]:
    return [row.get("step") for row in rows]


def numbers(stats: SubscriptionStats) -> tuple[int, int, int, int]:
    return stats.delivered, stats.failed, stats.dropped, stats.queued


@in_each_file
@pytest.mark.parametrize(
    ("value", "why"),
    [
        (
            torch.zeros(2),
            "a torch.Tensor: NoPlainValue: a Tensor with 2 elements cannot be converted to Scalar",
        ),
        (np.eye(2), "a numpy.ndarray: NoPlainValue: can only convert an array of size 1 to a Python scalar"),
        ({"a": [1, np.ones(3)]}, "a dict: NoPlainValue: can only convert an array of size 1"),
        (
            torch.empty((), device="meta"),
            "a torch.Tensor: NoPlainValue: Tensor.item() cannot be called on meta",
        ),
        ({"caf\udce9": np.eye(2)}, "a dict: NoPlainValue: can only convert an array of size 1"),
        (Mute(), f"a {__name__}.Mute: RuntimeError: no text"),
    ],
    ids=["tensor", "array", "nested", "meta", "with a surrogate", "mute"],
)
def test_an_event_that_cannot_be_encoded_costs_itself_alone(
    attach: Attach,
    account: Account,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    make: Make,
    read: Read,
    value: Any,
    why: str,
) -> None:
    """The others are written in order, the writer goes on, and the log names event and field once."""
    bus = attach(make())

    write(bus, *(Odd(step=i, value=value if i % 3 == 1 else i) for i in range(200)))

    assert steps(read(tmp_path)) == [i for i in range(200) if i % 3 != 1]
    assert numbers(account(bus)) == (133, 67, 0, 0)
    (line,) = [r.getMessage() for r in caplog.records if r.levelno == logging.ERROR]
    assert line.startswith(f"{account(bus).name}: odd cannot be encoded for its field value, {why}")
    assert account(bus).error.startswith(f"Unencodable: odd cannot be encoded for its field value, {why}")


@in_each_file
def test_a_delivery_of_nothing_else_writes_nothing(
    attach: Attach, account: Account, tmp_path: Path, caplog: pytest.LogCaptureFixture, make: Make, read: Read
) -> None:
    """Later events are written. Of two odd fields the message names the one without a text, also in an event of
    eventloop's own."""
    bus = attach(make())
    emit(bus, Odd(step=2**70, value=np.eye(2)))
    before = steps(read(tmp_path))
    bad: dict[str, Any] = {"loss": torch.zeros(2)}
    write(bus, Odd(step=5), ScalarsLogged(step=6, scalars=bad), ScalarsLogged(step=7))

    assert (before, steps(read(tmp_path))) == ([], [5, 7])
    assert numbers(account(bus)) == (2, 2, 0, 0)
    assert "odd cannot be encoded for its field value, a numpy.ndarray" in caplog.text
    assert "scalars_logged cannot be encoded for its field scalars, a dict" in caplog.text


@in_each_file
def test_what_has_a_plain_form_is_written(
    attach: Attach, account: Account, tmp_path: Path, make: Make, read: Read
) -> None:
    """Numbers of numpy, tensors of one element, large numbers, keys of any type and objects with a text are written."""
    values = [np.float32(0.5), torch.tensor(2.0), np.ones(1), Path("a"), object, 2**70, {(1, 2): 3}, 1j]
    bus = attach(make())

    write(bus, *(Odd(step=i, value=value) for i, value in enumerate(values)))

    assert steps(read(tmp_path)) == [*range(len(values))]
    assert numbers(account(bus)) == (len(values), 0, 0, 0)


BAD, GOOD = "caf\udce9", "caf\\udce9"
"""A text with a lone surrogate, as each path is that is no UTF-8, and its form with an escape."""


@in_each_file
@pytest.mark.parametrize(
    ("value", "written"),
    [
        (BAD, GOOD),
        ({BAD: [1, {"a": (BAD,)}]}, {GOOD: [1, {"a": [GOOD]}]}),
        ({"a": Path(BAD), "b": np.float32(0.5)}, {"a": GOOD, "b": 0.5}),
        (MealServed(dish=BAD), None),
        ([2**70, BAD], None),
        ("\ud83d", "\\ud83d"),
    ],
    ids=["text", "nested", "objects", "struct", "large number", "of a pair"],
)
def test_a_text_with_a_lone_surrogate_is_written(
    attach: Attach, account: Account, tmp_path: Path, make: Make, read: Read, value: Any, written: Any
) -> None:
    """It has escapes, and its neighbours are what they were."""
    bus = attach(make())

    write(bus, Odd(value="größe"), Odd(value=value), Odd(value="naïve"))

    first, odd, last = (row["value"] for row in read(tmp_path))
    assert (first, last) == ("größe", "naïve")
    assert odd == written if written is not None else GOOD in str(odd).replace("\\\\", "\\")
    assert numbers(account(bus)) == (3, 0, 0, 0)


def test_bytes_and_times_beside_one_stay_what_they_are(attach: Attach, tmp_path: Path) -> None:
    """The event log has forms for them."""
    now = datetime.now(UTC)

    write(attach(EventLogWriter()), Odd(value=[b"\xff", now, BAD]))

    assert [row["value"] for row in in_log(tmp_path)] == [[b"\xff", now, GOOD]]


def test_the_sequence_goes_on_behind_it(attach: Attach, tmp_path: Path) -> None:
    """An event that was not written has no number, in a resumed run's log either."""
    for start in (0, 3):
        write(attach(EventLogWriter()), Odd(step=start), Odd(value=np.eye(2)), Odd(step=start + 1))

    assert steps(in_log(tmp_path)) == [0, 1, 3, 4]


@pytest.mark.slow
@in_each_file
def test_in_a_process(
    attach: Attach, account: Account, tmp_path: Path, make: Make, read: Read, caplog: pytest.LogCaptureFixture
) -> None:
    """An event that the pipe can encode and the file cannot fails alone in the worker, which goes on."""
    bus = attach(in_process(make()))

    dishes: list[Any] = ["soup", np.eye(2), "bread", lambda: 1, "cake"]
    write(bus, *(MealServed(dish=dish) for dish in dishes), AfterTrainIter(iter=3))

    assert len(steps(read(tmp_path))) == 4
    assert numbers(account(bus)) == (4, 2, 0, 0)
    assert "meal_served cannot be encoded for its field dish, a numpy.ndarray: NoPlainValue: " in caplog.text
    assert "meal_served cannot be encoded for its field dish, a function: " in caplog.text
