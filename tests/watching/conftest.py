"""What the tests of watching share: statuses that a run elsewhere has written, and readers that wait for a state."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from eventloop.eventlog.jsonl import FILE_NAME, key_of, to_json_value
from eventloop.ownership.status import RunStatus, write_status
from eventloop.watching import RunReader, RunView
from tests.ownership.conftest import ELSEWHERE, forge, run

__all__ = ["forge", "run"]

DEADLINE = 60.0
"""Seconds against hangs; no test waits as long while all is well."""


def status(**changes: Any) -> RunStatus:
    """The status of a training of process 12 elsewhere, which has just ended its iteration 30."""
    fields: dict[str, Any] = {
        "host": "elsewhere",
        "pid": 12,
        "place": ELSEWHERE,
        "start": 5,
        "begun": 1000.0,
        "time": 1060.0,
        "state": "training",
        "iter": 30,
        "first_iter": 0,
        "epoch": 2,
        "max_iters": 100,
        "max_epochs": 5,
        "speed": 2.0,
        "moved": 1060.0,
        "ranks": 1,
        "checkpoints": ["."],
    }
    return RunStatus(**fields | changes)


Write = Callable[..., None]


@pytest.fixture
def heartbeat(run: Path) -> Write:
    """Write the status of `status` with some changes into the run."""

    def write(**changes: Any) -> None:
        write_status(run, status(**changes))

    return write


def read_until(reader: RunReader, ready: Callable[[RunView], object]) -> RunView:
    """Read again and again, until a view is as expected."""
    deadline, pause = time.monotonic() + DEADLINE, threading.Event()
    while not ready(view := reader.read()):
        assert time.monotonic() < deadline, view
        pause.wait(0.02)
    return view


def add_rows(run: Path, *rows: dict[str, Any], end: bytes = b"") -> Path:
    """Append rows to `metrics.jsonl` as JSONLWriter does, and then bytes."""
    path = run / FILE_NAME
    with path.open("ab") as file:
        file.write(b"".join(msgspec.json.encode(to_json_value(row)) + b"\n" for row in rows) + end)
    return path


def row(step: int, mode: str = "train", **scalars: float) -> dict[str, Any]:
    """A row of scalars."""
    own = {key_of(name): value for name, value in scalars.items()}
    return {"mode": mode, "step": step, "iter": step - 1, "epoch": 0, **own}


def scalar(step: int, name: str, value: float) -> dict[str, Any]:
    """A row of one scalar with any name."""
    return row(step) | {key_of(name): value}


HOST = socket.gethostname()
