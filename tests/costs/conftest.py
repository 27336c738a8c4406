"""A clock for handlers that stands still until a test moves it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from eventloop.bus import dispatch, handler
from eventloop.costs import sampling

Clock = Callable[[float], None]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Replace the clock of a bus by one that stands still; call it to let seconds pass."""
    now = [0.0]
    for module in (dispatch, handler, sampling):
        monkeypatch.setattr(module, "perf_counter", lambda: now[0])

    def advance(seconds: float) -> None:
        now[0] += seconds

    return advance
