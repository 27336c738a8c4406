"""Waits that nobody would miss at once."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from eventloop.checkpoint.saving.save_timeout import SavePromise, SaveTimeouts
from eventloop.checkpoint.saving.saver_client import SaverProcess, Written


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="needs Linux's memfd_create")
def test_a_process_that_writes_in_time_is_left_alone(tmp_path: Path) -> None:
    """Who waits for a save without a bound ends the process only when that has taken too long."""
    process = SaverProcess()
    owed = SavePromise(tmp_path / "iter_1", SaveTimeouts())
    owed.process = process
    owed.set_result(Written(1, 0.0))

    waited = owed.wait()

    assert waited
    assert not owed.hurried
    assert process.alive
    process.kill()
    process.close()
