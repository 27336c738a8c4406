"""Give the tests of this folder the fixtures of trainings."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(autouse=True)
def handlers_of_signals() -> Iterator[None]:
    """Put the handlers of signals back, which a Lightning trainer leaves after an evaluation within a training."""
    before = {signum: signal.getsignal(signum) for signum in (signal.SIGTERM, signal.SIGINT)}
    yield
    for signum, handler in before.items():
        signal.signal(signum, handler)


@pytest.fixture
def make_bridge(tmp_path: Path) -> Callable[..., Any]:
    """Make bridges to Lightning whose files are in the test's directory."""
    from eventloop.bridges.lightning import EventLoopCallback

    return lambda **options: EventLoopCallback(**{"work_dir": tmp_path / "attachment", **options})
