"""A damaged or hostile checkpoint of several ranks is refused on all of them, and changes nothing."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.checkpoint.damaged_ranks import CASES, FORMER, HOSTILE, NEWEST, WEIGHTS_ARE_RIGHT
from tests.ranks import run_ranks

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of two ranks says, whose model FSDP2 divides."""
    folder = tmp_path_factory.mktemp("damage")
    program = (
        "import sys\nfrom tests.checkpoint.damaged_ranks import damaged\n"
        f"damaged('FSDP2', int(sys.argv[1]), sys.argv[2], {str(folder)!r})"
    )
    return run_ranks(program, folder)


@pytest.mark.parametrize("case", CASES)
def test_damage_is_refused_by_name(ranks: list[dict[str, Any]], case: str) -> None:
    """On all ranks, by a resume and by a load of the weights, which change no tensor and no counter."""
    name = re.escape(CASES[case][0])
    for said in ranks:
        assert re.match(rf"CheckpointError: (?s:.*){NEWEST}(?s:.*){name}", said["damage"][case]["refused"])
        assert re.match(rf"CheckpointError: (?s:.*){NEWEST}(?s:.*){name}", said["damage"][case]["weights"])


@pytest.mark.parametrize("case", CASES)
def test_the_former_checkpoint_is_resumed(ranks: list[dict[str, Any]], case: str) -> None:
    """By "auto" on all ranks, and rank 0 logs which file of the newer one is damaged."""
    name = CASES[case][0]

    assert [said["damage"][case]["auto"] for said in ranks] == [FORMER] * len(ranks)
    assert any(f"{NEWEST}" in line and name in line for line in ranks[0]["damage"][case]["warned"])


@pytest.mark.parametrize("case", CASES)
def test_the_command_names_the_file(ranks: list[dict[str, Any]], case: str) -> None:
    """`eventloop checkpoints RUN --verify` ends with 1, and says which file is damaged."""
    said, (name, _) = ranks[0]["damage"][case], CASES[case]
    (line,) = [line for line in said["listed"].splitlines() if line.startswith("damaged: ")]

    assert said["code"] == 1
    assert NEWEST in line
    assert name in line


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_checkpoint_is_refused(ranks: list[dict[str, Any]], case: str) -> None:
    """With the right hashes it is refused all the same, and changes no tensor; no rank runs its code."""
    for said in ranks:
        resumed, loaded = said["hostile"][case]
        assert resumed.startswith("CheckpointError: ")
        assert loaded.startswith("CheckpointError: ") or case in WEIGHTS_ARE_RIGHT
        assert not said["ran"]


def test_metadata_is_for_other_programs(ranks: list[dict[str, Any]]) -> None:
    """eventloop never reads it: with a hostile one of the right hash the checkpoint is resumed."""
    for said in ranks:
        assert said["metadata"] == NEWEST
        assert not said["ran"]


def test_verification_is_divided(ranks: list[dict[str, Any]]) -> None:
    """All ranks together read each byte about once to find that one bit of a shard is wrong."""
    read, (size, *_) = [said["verified"]["read"] for said in ranks], [s["verified"]["size"] for s in ranks]
    for said in ranks:
        assert "__0_0.distcp is damaged" in said["verified"]["said"]

    assert size <= sum(read) < 1.1 * size
    assert max(read) < 0.7 * size
