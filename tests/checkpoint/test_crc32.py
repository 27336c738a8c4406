"""A save that is waited for leaves out the CRC-32 of torch's zip format, which no load looks at, and nobody else's does."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from eventloop.checkpoint import load_checkpoint
from eventloop.checkpoint.saving.crc32 import without_crc32
from eventloop.checkpoint.saving.saver import Saver, State
from eventloop.checkpoint.saving.saver_client import Job
from tests.support.saving import DEADLINE, a_state, assert_same, nothing_is_small, write


def worked_out() -> bool:
    """Whether a `torch.save` that begins now works it out."""
    return bool(torch.serialization.get_crc32_options())


@pytest.fixture(params=[True, False], ids=["on", "off"])
def before(request: pytest.FixtureRequest) -> Iterator[bool]:
    """What the program has chosen."""
    torch.serialization.set_crc32_options(request.param)
    yield request.param
    torch.serialization.set_crc32_options(True)


@pytest.mark.parametrize("awaited", [True, False])
def test_only_who_is_waited_for_leaves_it_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: bool, awaited: bool
) -> None:
    """While a training goes on, its other threads may save files of their own."""
    nothing_is_small(monkeypatch)
    seen: list[bool] = []
    thread = threading.Thread(target=lambda: seen.append(worked_out()))  # newer releases have it by thread
    thread.start()
    thread.join(DEADLINE)

    def noting(state: State, job: Job, given_up: threading.Event) -> int:
        seen.append(worked_out())
        return write(state, job, given_up)

    saver = Saver(noting)
    saver.save(a_state(1.0), Job(tmp_path / "a", awaited=awaited)).result(DEADLINE)
    saver.close()

    assert seen[1] == (seen[0] and not awaited)
    assert worked_out() == before
    assert_same(load_checkpoint(tmp_path / "a"), 1.0)


def test_an_error_puts_it_back(before: bool) -> None:
    """A full disk is no reason to change what the program has chosen."""
    with pytest.raises(OSError, match="full"), without_crc32():
        raise OSError("full")

    assert worked_out() == before


@pytest.mark.parametrize("first_ends_first", [True, False])
def test_two_at_once_put_it_back(before: bool, first_ends_first: bool) -> None:
    """In whatever order they end, as of two trainings in one process."""
    blocks = [without_crc32(), without_crc32()]
    for block in blocks:
        block.__enter__()
    assert not worked_out()

    for block in blocks if first_ends_first else blocks[::-1]:
        block.__exit__(None, None, None)

    assert worked_out() == before
