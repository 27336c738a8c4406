"""A rank that begins a run late or never, or leaves its loop before the others."""

from __future__ import annotations

import logging
import threading
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from eventloop.stops import rank_stop
from tests.ranks import run_ranks
from tests.support.internals import substitute

Ranks = list[dict[str, Any]]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    """What the two ranks have to say."""
    script = Path(__file__).with_name("absent_rank_script.py").read_text(encoding="utf-8")
    return run_ranks(script, tmp_path_factory.mktemp("absent"))


def test_a_rank_that_waits_says_so(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """A warning names the rank that waits at the begin of its run, and what the others need."""
    for name, value in {"get_rank": 1, "get_world_size": 2}.items():
        monkeypatch.setattr(dist, name, lambda value=value: value)
    logged = threading.Event()

    class Hearing(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            logged.set()

    receiving_signals = Hearing()
    monkeypatch.setattr(dist, "new_group", lambda backend: logged.wait(20))
    substitute(monkeypatch, "rank_stop.WAIT_SECONDS", 0.0)
    caplog.set_level(logging.WARNING)
    logging.getLogger().addHandler(receiving_signals)

    rank_stop.Agreement()

    logging.getLogger().removeHandler(receiving_signals)
    (message,) = caplog.messages
    assert message == (
        "rank 1 of 2 has waited 0 s for the other ranks to begin the run: begin it on every rank; in another engine's "
        "loop, every rank needs the bridge"
    )


@pytest.mark.slow
def test_a_late_rank_is_not_waited_for_silently(ranks: Ranks) -> None:
    """The line comes while rank 0 is late, before the ranks agree on who owns the directory."""
    assert ranks[0]["late"] is True
    assert ranks[1]["late"][0].startswith("rank 1 of 2 has waited 0 s for the other ranks to begin the run")


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_leaves_its_loop_waits_for_no_other(ranks: Ranks, rank: int) -> None:
    """Its run ends, with its checkpoint hook, while the other rank does something else in its own loop."""
    assert ranks[1 - rank][f"left by {rank}"] is True


@pytest.mark.slow
def test_a_rank_does_not_wait_for_ever_for_one_that_left(ranks: Ranks) -> None:
    """Once the program of the rank that left has ended, the other one's next exchange raises an error."""
    assert "goes on" in ranks[0]
