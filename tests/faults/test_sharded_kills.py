"""Trainings of several ranks of which one, or its saver, is killed. The long form: `scripts/torture shards`."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from tests.faults import kills
from tests.faults.sharded_trial import choose

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="needs fork and Linux's memfd_create"),
]


@pytest.mark.parametrize(("kind", "number"), [("FSDP2", 8), ("TP", 6), ("HSDP", 3)])
def test_a_kill_of_a_rank_or_its_saver(directory: Path, kind: str, number: int) -> None:
    """After a kill at any point of a save, or between saves, what was announced as saved or something newer is found
    whole, holds the undisturbed run's values of its iteration bitwise, and the resumed run ends as that run; where
    only a saver died, the training goes on and no save fails."""
    killed, errors = kills.make(
        choose(directory, kind, random.Random(1), number), "tests.faults.sharded_trial"
    )

    assert not errors, errors[0]
    assert killed >= number / 2  # a saver may write several saves together, and get to its point less often
