"""Test that two ranks go back together, whichever of them asks, also with a sharded model."""

from __future__ import annotations

from typing import Any

import pytest

from tests.ranks import run_ranks

pytestmark = pytest.mark.slow

PROGRAM = """
import runpy
runpy.run_module("tests.steering.rollback_ranks", run_name="__main__")
"""


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Return what each of the two ranks has to say."""
    return run_ranks(PROGRAM, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("kind", ["DDP", "FSDP2"])
def test_one_rank_asks_and_both_go_back(ranks: list[dict[str, Any]], kind: str) -> None:
    """Both ranks go back after the same iteration, and each equals its rank of two new processes."""
    for rank in ranks:
        case = rank[f"asks {kind}"]
        assert case["events"] == [["RolledBack", 6, 3, ""]]
        assert case["went"] == case["fresh"]
        assert case["went"]["epoch"] == 2


@pytest.mark.parametrize("kind", ["DDP", "FSDP2"])
def test_resume_behind_a_rollback_skips_on_both_ranks(ranks: list[dict[str, Any]], kind: str) -> None:
    """A run that is stopped behind a rollback, and resumed, equals one that is not stopped, on each rank."""
    for rank in ranks:
        case = rank[f"resumes {kind}"]
        assert case["stopped"] == 7
        assert case["resumed"] == case["expected"]


def test_refusal_leaves_both_ranks_unharmed(ranks: list[dict[str, Any]]) -> None:
    """A checkpoint that does not exist is refused on both ranks, whose training goes on as if nobody had asked."""
    for rank in ranks:
        case = rank["refused"]
        assert [each[0] for each in case["events"]] == ["CommandRefused"]
        assert "no checkpoint at iter_5" in case["events"][0][3]
        assert case["asked"] == case["plain"]


def test_hook_of_rank_0_decides_for_both(ranks: list[dict[str, Any]]) -> None:
    """A metric that only rank 0 loses leads both ranks back, and stops both once the rollbacks are used up."""
    first, second = (rank["hook"] for rank in ranks)

    assert first["events"] == second["events"]
    assert [each[0] for each in first["events"]] == ["RolledBack", "RolledBack", "StopRequested"]
    assert first["reason"].endswith("max_rollbacks=1 are used up")
    assert (first["iter"], first["epoch"]) == (second["iter"], second["epoch"])
