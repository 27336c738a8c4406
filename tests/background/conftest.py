"""What the tests of the core share."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from tests.support.internals import substitute
from tests.support.keeper import prompt_keeper

__all__ = ["prompt_keeper", "small_files"]


@pytest.fixture
def small_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of spill files, with chunks and segments so small that a few events fill several."""
    folder = tmp_path / "spill"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    substitute(monkeypatch, "spill.CHUNK_BYTES", 400)
    substitute(monkeypatch, "subscriber.HELD_SECONDS", 0.0)  # each look at an account spills
    return folder
