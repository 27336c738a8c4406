"""Ranks that a signal ends leave together: who starts them ends all when one has exited, and another may be saving."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.ranks import run_ranks

pytestmark = pytest.mark.slow

Ranks = list[dict[str, Any]]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    """What the two ranks have to say."""
    script = Path(__file__).with_name("ends_script.py").read_text(encoding="utf-8")
    return run_ranks(script, tmp_path_factory.mktemp("ends"))


def test_no_rank_exits_before_the_others_have_closed(ranks: Ranks) -> None:
    """The exit is raised on both once the slower one has closed."""
    assert [said["code"] for said in ranks] == [143, 143]
    assert ranks[0]["left_alone"] is False


def test_a_second_ctrl_c_waits_for_no_rank(ranks: Ranks) -> None:
    """It ends the wait as any other, and the handlers are put back."""
    assert ranks[1]["left"] is True
    assert [said["interrupted"] for said in ranks] == [["KeyboardInterrupt", True]] * 2


def test_a_rank_that_is_gone_is_not_waited_for(ranks: Ranks) -> None:
    """It is told of, and the exit is the signal's."""
    kind, told = ranks[0]["gone"]

    assert kind == "SystemExit"
    assert [line.split(":")[0] for line in told] == ["the end of all other ranks could not be waited for"]
