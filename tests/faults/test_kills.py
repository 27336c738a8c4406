"""Trainings that are killed with SIGKILL. The long form: `scripts/torture kills`."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from tests.faults import kills

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="needs fork and Linux's memfd_create")


def test_a_kill_at_any_moment(directory: Path) -> None:
    """After a kill before, in or after any operation of a commit, or at a moment that nobody chose, what was
    announced as saved or something newer is resumed from, all that is taken for a checkpoint is whole, and the run
    ends as if nothing had been."""
    chance = random.Random(1)
    trials = [*kills.at_points(directory, chance, 12), *kills.at_random(directory, chance, 3)]

    killed, errors = kills.make(trials)

    assert not errors, errors[0]
    assert killed >= len(trials) / 2  # one that was resumed late may end before its point


@pytest.mark.slow
def test_a_kill_of_the_process_that_writes(directory: Path) -> None:
    """It is killed in the middle of a save, and a thread writes on."""
    killed, errors = kills.make(kills.of_processes(directory, random.Random(3), 1))

    assert not errors, errors[0]
    assert killed == 1
