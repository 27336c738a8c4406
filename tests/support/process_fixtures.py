"""The fixtures of the tests of worker processes; a plugin of theirs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from eventloop.bus import Bus
from eventloop.bus.subscription import Subscription
from eventloop.events import HandlerFailed
from tests.support.process_support import Lines, Start


@pytest.fixture
def lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Lines:
    """What the handlers have logged so far."""
    path = tmp_path / "log.txt"
    path.touch()
    monkeypatch.setenv("LOG", str(path))
    return lambda: path.read_text(encoding="utf-8").splitlines()


@pytest.fixture
def start(bus: Bus, lines: Lines) -> Start:
    """Subscribe a handler in a process, to after_train_iter if nothing else is said."""

    def subscribe(fn: Any, *events: Any, **options: Any) -> Subscription:
        return bus.subscribe(fn, *(events or ("after_train_iter",)), offload="process", name="far", **options)

    return subscribe


@pytest.fixture
def failures(bus: Bus) -> list[HandlerFailed]:
    """The reports of failures that reached a sync handler, after a poll."""
    seen: list[HandlerFailed] = []
    bus.subscribe(seen.append, "handler_failed")
    return seen
