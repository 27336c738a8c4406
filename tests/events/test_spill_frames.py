"""Events as bytes: what goes in comes out, or is not encoded at all."""

from __future__ import annotations

import math
import pickle
from datetime import UTC, datetime
from typing import Any

import msgspec
import numpy as np
import pytest

from eventloop.events import (
    AfterTrainIter,
    AfterVal,
    BeforeRun,
    CheckpointFailed,
    Event,
    HistogramLogged,
    ImageLogged,
    RunInfo,
    ScalarsLogged,
)
from eventloop.events.codec import Frames


class Anything(Event):
    """An event whose field may hold whatever there is."""

    value: Any = None


class Typed(Event):
    """An event of many types."""

    pair: tuple[int, str] = (0, "")
    names: set[str] = msgspec.field(default_factory=set)
    nested: dict[str, list[float]] = msgspec.field(default_factory=dict)
    when: datetime | None = None


class Tree(Event):
    """An event that holds others of its kind."""

    branches: list[Tree] = msgspec.field(default_factory=list)


def through(*events: Event) -> list[Event | Exception]:
    """Encode, and decode."""
    frames = Frames()
    return list(frames.decode(b"".join(map(frames.encode, events)), ()))


@pytest.mark.parametrize(
    "event",
    [
        BeforeRun(),
        AfterTrainIter(iter=3, epoch=1, batch_idx=2, max_iters=10, max_epochs=None),
        ScalarsLogged(step=4, scalars={"loss": 0.25, "a name with spaces ü": -1e300}),
        ScalarsLogged(scalars={"loss": math.inf}),
        AfterVal(metrics={"accuracy": 1.0}, reason="error"),
        ImageLogged(name="x", data=bytes(range(256)), shape=(8, 8, 4)),
        HistogramLogged(data=b"", shape=(0,), dtype="float64"),
        RunInfo(info={"a": "b"}),
        CheckpointFailed(path="runs/x", error="\n\0"),
        Typed(
            pair=(1, "a"), names={"b", "c"}, nested={"d": [1.0, 2.0]}, when=datetime(2026, 1, 2, tzinfo=UTC)
        ),
        Tree(branches=[Tree(), Tree(branches=[Tree()])]),
        Anything(value={"a": [1, None, "b"]}),
        AfterVal(metrics={"accuracy": None}),  # type: ignore[dict-item]  # no value is checked when an event is built
        AfterVal(metrics={"accuracy": "high"}),  # type: ignore[dict-item]
        ImageLogged(step=[1.0], shape=(1, 2, 3)),  # type: ignore[arg-type]
    ],
)
def test_event_comes_back_equal(event: Event) -> None:
    """Whatever its fields declare, and hold."""
    assert through(event) == [event]


def test_nan_comes_back() -> None:
    """The diverged run's numbers too, which JSON would lose."""
    (event,) = through(ScalarsLogged(scalars={"loss": math.nan}))

    assert isinstance(event, ScalarsLogged)
    assert math.isnan(event.scalars["loss"])


@pytest.mark.parametrize(
    "event",
    [
        Anything(value=object()),
        Anything(value=(1, 2)),
        Anything(value=np.zeros(2)),
        AfterVal(metrics={"accuracy": np.float64(0.5)}),
        AfterTrainIter(iter=2**70),
        CheckpointFailed(error="\ud800"),
    ],
)
def test_event_that_would_not_come_back_is_not_encoded(event: Event) -> None:
    """Foreign objects, and what msgpack would turn into something else."""
    with pytest.raises((TypeError, OverflowError, UnicodeEncodeError)):
        Frames().encode(event)


def test_event_kept_elsewhere_comes_in_its_place() -> None:
    """The bytes say where it belongs."""
    frames = Frames()
    kept = Anything(value=object())
    data = frames.encode(BeforeRun()) + Frames.ELSEWHERE + frames.encode(AfterVal())

    assert list(frames.decode(data, [kept])) == [BeforeRun(), kept, AfterVal()]


SURROGATES = [
    CheckpointFailed(error="\ud800"),
    ScalarsLogged(scalars={"\udcff": 1.0}),
    Anything(value=["\udcff", (1,)]),
]


def test_event_with_a_lone_surrogate_is_pickled() -> None:
    """Between others, it comes back equal."""
    frames = Frames()
    data = frames.encode(BeforeRun()) + b"".join(map(frames.pickled, SURROGATES)) + frames.encode(AfterVal())

    assert list(frames.decode(data, [])) == [BeforeRun(), *SURROGATES, AfterVal()]


def test_what_is_not_plain_is_not_pickled() -> None:
    """A tensor, say, which would be copied, and waited for."""
    with pytest.raises(TypeError, match=r"Encoding objects of type numpy\.ndarray is unsupported"):
        Frames().pickled(Anything(value=["\ud800", np.zeros(2)]))


@pytest.mark.parametrize("pickled", [False, True])
def test_damaged_event_is_an_error_in_its_place(pickled: bool) -> None:
    """The others are read."""
    frames = Frames()
    good = frames.encode(AfterTrainIter(iter=1))
    odd = frames.pickled(SURROGATES[0]) if pickled else good
    bad = odd[:8] + (b"\x00" if pickled else b"\xc1") * (len(odd) - 8)

    first, found, last = frames.decode(good + bad + good, ())

    assert first == last == AfterTrainIter(iter=1)
    assert isinstance(found, pickle.UnpicklingError if pickled else msgspec.MsgspecError)
