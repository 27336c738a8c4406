"""What the fault tests share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.support.in_memory import directory_in_memory

torch.set_num_threads(1)


@pytest.fixture
def directory() -> Iterator[Path]:
    """An empty directory, in memory where there is one: thousands of files are synced in it."""
    with directory_in_memory() as path:
        yield path
