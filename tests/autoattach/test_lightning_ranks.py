"""The rank processes that Lightning starts have a bridge."""

from __future__ import annotations

import os

import pytest

from eventloop.autoattach.lightning_ranks import callbacks
from eventloop.autoattach.options import VARIABLE, RunOptions


def test_only_ranks_of_the_command_have_a_callback(monkeypatch: pytest.MonkeyPatch) -> None:
    """The entry point gives nothing to other programs, to the command itself, nor to its other children."""
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert callbacks() == []

    RunOptions().put(os.environ)
    assert callbacks() == []

    monkeypatch.delenv("LOCAL_RANK")
    RunOptions(pid=os.getpid() + 1).put(os.environ)
    assert callbacks() == []


def test_a_rank_has_a_callback_with_the_options(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has the writers of the command."""
    pytest.importorskip("lightning", reason="Lightning is not installed")
    from eventloop.bridges.lightning import EventLoopCallback

    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv(VARIABLE, "")
    RunOptions(writers=("CSVWriter",), pid=os.getpid() + 1).put(os.environ)

    (callback,) = callbacks()

    assert isinstance(callback, EventLoopCallback)
