"""The logs that tests of replays read, and the trainers that tests of event logs run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from eventloop.bus import Bus
from eventloop.events import AfterTrainIter, AfterValEpoch, BeforeTrain, Event, ScalarsLogged
from eventloop.events.run import Run
from eventloop.writers import EventLogWriter

EVENTS: list[Event] = [
    BeforeTrain(max_epochs=2),
    AfterTrainIter(iter=0),
    ScalarsLogged(step=1, scalars={"loss": float("inf")}),
    AfterTrainIter(iter=1),
    ScalarsLogged(step=2, scalars={"loss": 0.5}),
    AfterValEpoch(metrics={"accuracy": 0.5}),
]
Record = Callable[..., Path]


@pytest.fixture
def record(tmp_path: Path) -> Record:
    """Write the log of a run with these events."""

    def record(events: Sequence[Event] = EVENTS, **facts: Any) -> Path:
        with Bus() as bus:
            run = Run(work_dir=str(tmp_path), **facts)
            EventLogWriter().attach(bus, lambda: run)
            for event in events:
                bus.emit(event)
        return tmp_path

    return record
