"""Checkpoints that were changed after they were saved. The long form: `scripts/torture damage`."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.faults import damage
from tests.faults.damage import BY_CHANCE, FILES, HOSTILE, ON_PURPOSE, Damaged


@pytest.fixture
def damaged(directory: Path) -> Iterator[Damaged]:
    """Two checkpoints, and a trainer."""
    made = Damaged(directory)
    yield made
    made.trainer.close()


@pytest.mark.representative(2)
@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("change", BY_CHANCE, ids=lambda change: change.__name__)
def test_any_damage_is_found(
    damaged: Damaged, change: Callable[[Path, random.Random], str], name: str
) -> None:
    """Whichever bit of whichever file is another: it is refused before anything live is touched, and `auto` takes
    the checkpoint before, and says why."""
    chance = random.Random(f"{change.__name__} {name}")
    for turn in range(20):
        change(damaged.newer / name, chance)
        damaged.check(automatic=turn == 0)
        damaged.restore()


@pytest.mark.representative(10)
@pytest.mark.parametrize("what", ON_PURPOSE)
def test_what_is_no_whole_checkpoint_is_refused(damaged: Damaged, what: str) -> None:
    """A file that was moved, removed or made up is found, too; the error says what is wrong with which checkpoint."""
    do, message = ON_PURPOSE[what]
    do(damaged)

    damaged.check(automatic=True, message=message)


@pytest.mark.parametrize("make", HOSTILE, ids=lambda make: make.__name__)
def test_nothing_is_executed(damaged: Damaged, directory: Path, make: Callable[[Path], bytes]) -> None:
    """A state that would execute something when it is read, under a manifest that fits it, is refused."""
    mark = directory / "executed"
    damage.replace_payload(damaged.newer, make(mark))

    damaged.check(automatic=True)

    assert not mark.exists()
