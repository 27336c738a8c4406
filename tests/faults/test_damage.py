"""Checkpoints that were changed after they were saved. The long form: `scripts/torture damage`."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from eventloop.checkpoint import CheckpointError, load_checkpoint
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
    """The same for what somebody has moved, removed or made up."""
    ON_PURPOSE[what](damaged)

    damaged.check(automatic=True)


@pytest.mark.parametrize("make", HOSTILE, ids=lambda make: make.__name__)
def test_nothing_is_executed(damaged: Damaged, directory: Path, make: Callable[[Path], bytes]) -> None:
    """A state that would execute something when it is read, under a manifest that fits it, is refused."""
    mark = directory / "executed"
    damage.replace_payload(damaged.newer, make(mark))

    damaged.check(automatic=True)

    assert not mark.exists()


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("a state with more behind it", r"is damaged: it has \d+ bytes, \d+ were saved"),
        ("a state of as many other bytes", "its SHA-256 is not that of what was saved"),
        ("no manifest", "has no readable manifest.json: it was not completed"),
        ("no state", "is incomplete, state.pth cannot be read"),
        ("a manifest nested too deep", "is damaged: maximum recursion depth exceeded"),
        ("a manifest that is a pipe", "has no readable manifest.json: .*it is not a regular file"),
        ("a state that is a pipe", "is incomplete, state.pth cannot be read: .*it is not a regular file"),
        ("a later schema", "has schema 2, this version of eventloop reads 1: update eventloop"),
        ("a field of another type", "is not a manifest: Expected `object`"),
        (
            "a file that none can be",
            r"is not a manifest: files: expected names of files in the directory, got 'a\\x00b'",
        ),
        (
            "the best of nothing",
            "is not a manifest: best names 'f1', expected a score of it in metrics, got none",
        ),
        ("the best by a text", "is not a manifest: could not convert string to float: 'much'"),
        ("no file named", "has no state.pth: its manifest lists no file"),
        ("a state that is no mapping", "expected a mapping with a 'state_dict'"),
    ],
)
def test_the_error_says_what_is_wrong(damaged: Damaged, what: str, message: str) -> None:
    """And which file it is about."""
    ON_PURPOSE[what](damaged)

    with pytest.raises(CheckpointError, match=message) as caught:
        load_checkpoint(damaged.newer)

    assert str(damaged.newer) in str(caught.value)


def test_a_manifest_with_more_behind_it_is_damaged(damaged: Damaged, directory: Path) -> None:
    """Not even a space, which JSON would allow."""
    manifest = damaged.newer / "manifest.json"
    manifest.write_bytes(manifest.read_bytes() + b" ")

    with pytest.raises(CheckpointError, match="is damaged: it holds more than was saved"):
        load_checkpoint(damaged.newer)
