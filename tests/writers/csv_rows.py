"""What the tests of `CSVWriter` share: events to write, and the rows that came of them."""

from __future__ import annotations

import csv
from pathlib import Path

from eventloop.bus import Bus
from eventloop.events import Event, ScalarsLogged

Row = dict[str, str]


def write(bus: Bus, *events: Event) -> None:
    for event in events:
        bus.emit(event)
    bus.close()


def one_by_one(bus: Bus, *events: Event) -> None:
    """Each event in a delivery of its own."""
    for event in events:
        bus.emit(event)
        bus.flush()
    bus.close()


def rows(path: Path) -> list[Row]:
    with open(path, encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file, strict=True))


def train(*steps: int, **scalars: float) -> list[ScalarsLogged]:
    return [ScalarsLogged(step=step, iter=step - 1, scalars=scalars or {"loss": step / 4}) for step in steps]


def val(step: int, **scalars: float) -> ScalarsLogged:
    return ScalarsLogged(mode="val", step=step, iter=step, scalars=scalars)
