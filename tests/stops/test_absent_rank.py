"""A rank that begins a run which no other rank begins."""

from __future__ import annotations

import logging
import threading

import pytest
import torch.distributed as dist

from eventloop.stops import rank_stop


def test_a_rank_that_waits_says_so(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """A warning names the rank that waits at the begin of its run, and what the others need."""
    for name, value in {"get_rank": 1, "get_world_size": 2}.items():
        monkeypatch.setattr(dist, name, lambda value=value: value)
    logged = threading.Event()

    class Hearing(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            logged.set()

    hearing = Hearing()
    monkeypatch.setattr(dist, "new_group", lambda backend: logged.wait(20))
    monkeypatch.setattr(rank_stop, "WAIT_SECONDS", 0.0)
    caplog.set_level(logging.WARNING)
    logging.getLogger().addHandler(hearing)

    rank_stop.Agreement()

    logging.getLogger().removeHandler(hearing)
    (message,) = caplog.messages
    assert message == (
        "rank 1 of 2 has waited 0 s for the other ranks to begin the run: begin it on every rank; in another engine's "
        "loop, every rank needs the bridge"
    )
