"""What a power cut may leave, at every moment of a commit."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.crash_states import SCENARIOS, check_crash, crashes


@pytest.mark.representative(2)
@pytest.mark.parametrize("name", SCENARIOS)
def test_a_power_cut_leaves_the_old_or_the_new(directory: Path, name: str) -> None:
    """Of what was not synced, any part may be missing: the old checkpoint is found whole or the new one, never
    neither, and never anything else; the new one from the moment it is announced."""
    for crash in crashes(directory / "disk", SCENARIOS[name]):
        check_crash(directory / "left", crash)
