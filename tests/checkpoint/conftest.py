"""What two ranks have saved, for the tests that read it in one process."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoint.consolidated_ranks import PROGRAM
from tests.ranks import run_ranks


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """The folder of a run of two ranks, not to be changed, and the output of each rank."""
    folder = tmp_path_factory.mktemp("sharded")
    return folder, run_ranks(PROGRAM, folder)


@pytest.fixture
def printed(saved: tuple[Path, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """The output of each rank."""
    return saved[1]


@pytest.fixture
def sharded(saved: tuple[Path, list[dict[str, Any]]], tmp_path: Path) -> Path:
    """A copy of the run's directory, next to what the ranks have saved besides."""
    shutil.copytree(saved[0], tmp_path / "copy")
    return tmp_path / "copy" / "run"
