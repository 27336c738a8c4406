"""Give the tests of this folder the fixtures of trainings."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.trainers import default_handlers, make_trainer

__all__ = ["default_handlers", "make_bridge", "make_trainer"]


@pytest.fixture
def make_bridge(tmp_path: Path) -> Callable[..., Any]:
    """Make bridges to Lightning whose files are in the test's directory."""
    from eventloop.bridges.lightning import EventLoopCallback

    return lambda **options: EventLoopCallback(**{"work_dir": tmp_path / "ride", **options})
