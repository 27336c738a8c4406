"""What the tests share."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from eventloop.bus import Bus

DEADLINE = 20.0
"""Seconds against hangs; no test waits as long while all is well."""


@pytest.fixture
def bus() -> Iterator[Bus]:
    """A bus, closed at the end of the test."""
    with Bus(drain_timeout=DEADLINE) as bus:
        yield bus


@pytest.fixture
def python(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run a program in an interpreter of its own, in an empty folder, and return what it printed."""

    def run(program: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        root = str(Path(__file__).parents[1])
        return subprocess.run(
            [sys.executable, "-c", program, *arguments],
            env={"PATH": "", "PYTHONPATH": root, **environment},
            cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip

    return run
