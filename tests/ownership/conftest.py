"""What the tests of owners share: a directory, and records that others have written."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from eventloop.ownership.owner import Record, create_record

ELSEWHERE = "0123456789ab"
"""A place that is not this one."""
Forge = Callable[..., Path]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A directory of a run, which exists."""
    directory = tmp_path / "run"
    directory.mkdir()
    return directory


@pytest.fixture
def forge(run: Path) -> Forge:
    """Write a record as a process on another machine would have, `age` seconds ago."""

    def forge(age: float = 0.0, number: int = 1, **changes: Any) -> Path:
        fields: dict[str, Any] = {
            "host": "elsewhere",
            "pid": 12,
            "place": ELSEWHERE,
            "start": 5,
            "since": "2026-01-01T00:00:00+00:00",
            "state": "training",
            "directory": os.fsencode(run),
        }
        path = run / f".owner-12-{ELSEWHERE}-5-{number}"
        create_record(path, Record(**fields | changes))
        when = path.stat().st_mtime - age
        os.utime(path, (when, when))
        return path

    return forge
