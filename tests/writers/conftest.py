"""What the tests of the writers share: a real bus, and a run in a temporary folder."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from eventloop.bus import Bus
from eventloop.bus.subscription import SubscriptionStats
from eventloop.events.run import Run
from eventloop.writers import Writer
from tests.conftest import DEADLINE

Attach = Callable[..., Bus]
Account = Callable[[Bus], SubscriptionStats]


@pytest.fixture
def attach(tmp_path: Path) -> Iterator[Attach]:
    """`attach(writer, **facts)` puts a writer on a bus of its own, which is closed after the test."""
    buses: list[Bus] = []

    def make(writer: Writer, **facts: Any) -> Bus:
        bus = Bus(drain_timeout=DEADLINE)
        buses.append(bus)
        run = Run(**({"work_dir": str(tmp_path)} | facts))
        writer.attach(bus, lambda: run)
        return bus

    yield make
    for bus in buses:
        bus.close()


@pytest.fixture
def account() -> Account:
    """The account of the one subscription of a bus."""

    def find(bus: Bus) -> SubscriptionStats:
        (stats,) = bus.stats()
        return stats

    return find
