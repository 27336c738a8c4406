"""The loop is started by whoever needs it first, and any thread may: who comes meanwhile waits for it."""

from __future__ import annotations

import threading
from typing import Any

import anyio
import pytest

from eventloop.background.loop import Background
from eventloop.background.runners import ThreadLane
from eventloop.bus import Bus
from eventloop.events import AfterTrainIter
from eventloop.util.waiting import Latch
from tests.conftest import DEADLINE
from tests.support.process_support import emit, until


class Counting(Latch):
    """Knows how many have come to wait for it."""

    def __init__(self) -> None:
        super().__init__()
        self.came = 0

    def wait(self, timeout: float | None = None) -> bool:
        self.came += 1
        return super().wait(DEADLINE if timeout is None else timeout)


async def ignores(event: AfterTrainIter) -> None:
    pass


def threads_called(name: str) -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == f"eventloop {name}"]


@pytest.mark.slow
def test_a_coroutine_that_comes_while_the_loop_is_started_is_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who subscribes while another thread starts the loop is heard by it, and starts no second one."""
    bus, run = Bus(), anyio.run
    started = bus._background._started = Counting()

    def run_late(main: Any) -> None:
        until(lambda: started.came == 2)
        run(main)

    monkeypatch.setattr(anyio, "run", run_late)
    first = threading.Thread(target=bus.warm_up)
    first.start()
    until(lambda: started.came == 1)
    subscription = bus.subscribe(ignores, "after_train_iter")
    first.join()
    emit(bus, 3)

    assert len(threads_called("background")) == 1
    assert bus.close(DEADLINE).complete
    assert subscription.stats.delivered == 3


def test_a_loop_that_cannot_be_started_holds_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who needs it is told why; later it may be there."""
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
    """It runs by then: who comes later is heard by it, and a close ends it."""
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


@pytest.mark.parametrize("running", [False, True])
def test_who_comes_while_the_bus_is_closed_is_refused(monkeypatch: pytest.MonkeyPatch, running: bool) -> None:
    """A close on another thread that does not know of a new subscriber leaves no thread of it, nor a loop's."""
    bus = Bus()
    if running:
        bus.warm_up()

    def close() -> None:
        closing = threading.Thread(target=bus.close, args=[DEADLINE])
        closing.start()
        closing.join()

    start, start_lane = Background.start, ThreadLane.start

    def start_when_closed(background: Background) -> None:  # it was seen to be open
        close()
        start(background)

    def start_lane_and_close(lane: ThreadLane) -> None:
        start_lane(lane)
        close()

    if running:
        monkeypatch.setattr(ThreadLane, "start", start_lane_and_close)
    else:
        monkeypatch.setattr(Background, "start", start_when_closed)

    with pytest.raises(RuntimeError, match="cannot subscribe late: the bus is closed and delivers no more"):
        bus.subscribe(lambda event: None, "after_train_iter", offload="thread", name="late")
    until(lambda: not threads_called("late") and not threads_called("background"))
    assert bus.stats() == []
