"""Stand for a system without /proc."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from eventloop.temporary import process_identity
from tests.support.internals import substitute


@pytest.fixture
def no_proc(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Look for /proc where there is none, with no identity remembered from before."""
    substitute(monkeypatch, "process_identity.PROC", tmp_path / "proc")
    process_identity._identity.cache_clear()
    yield
    monkeypatch.undo()
    process_identity._identity.cache_clear()
