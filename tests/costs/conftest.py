"""A clock for handlers that stands still until a test moves it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.support.internals import set_clock

Clock = Callable[[float], None]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Replace the clock of a bus by one that stands still; call it to let seconds pass."""
    now = [0.0]
    set_clock(monkeypatch, lambda: now[0], "dispatch", "handler", "sampling")

    def advance(seconds: float) -> None:
        now[0] += seconds

    return advance
