"""The threads of the background are started when a subscriber needs them first."""

from __future__ import annotations

import threading
from typing import Any

import anyio
import pytest

from eventloop.bus import Bus
from eventloop.events import AfterTrainIter
from tests.conftest import DEADLINE
from tests.support.process_support import emit, until


async def ignores(event: AfterTrainIter) -> None:
    pass


def threads_called(name: str) -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == f"eventloop {name}"]


def test_a_loop_that_cannot_be_started_holds_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """The line that needs it raises why; later it may be there."""
    bus = Bus()

    def no_descriptors(main: Any) -> None:
        raise OSError(24, "Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(anyio, "run", no_descriptors)
        with pytest.raises(
            RuntimeError, match=r"the background loop could not be started: .*Too many open files"
        ):
            bus.subscribe(ignores, "after_train_iter")
    subscription = bus.subscribe(ignores, "after_train_iter")
    emit(bus, 3)

    assert bus.close(DEADLINE).complete
    assert subscription.stats.delivered == 3


def test_a_ctrl_c_while_the_loop_is_started_leaves_one_that_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """It runs by then: a later subscriber uses it, and a close ends it."""
    bus, start = Bus(), threading.Thread.start

    def interrupted(thread: threading.Thread) -> None:
        start(thread)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", interrupted)
        with pytest.raises(KeyboardInterrupt):
            bus.warm_up()
    subscription = bus.subscribe(ignores, "after_train_iter")
    emit(bus, 3)

    assert len(threads_called("background")) == 1
    assert bus.close(DEADLINE).complete
    assert subscription.stats.delivered == 3
    until(lambda: not threads_called("background"))
