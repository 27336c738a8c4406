"""Worker processes that hang or die while nobody needs them any more: one clean end, and no false report."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

import pytest

from eventloop.bus import Bus
from eventloop.events import HandlerFailed
from tests.conftest import DEADLINE
from tests.support import process_handlers as handlers
from tests.support.process_support import Lines, Start, emit, kill, lane_of, pid_of, until

pytest_plugins = ("tests.support.process_fixtures",)


@pytest.mark.slow
def test_worker_that_hangs_when_it_is_cancelled_is_killed(
    bus: Bus, start: Start, lines: Lines, told: list[HandlerFailed], caplog: pytest.LogCaptureFixture
) -> None:
    """After its `stall_timeout`; it is one failure, told once, and every event is counted."""
    far = start(handlers.hang, stall_timeout=0.2)
    emit(bus, 5)
    until(lines)
    pid = pid_of(far)
    far.cancel()

    assert lane_of(far).closed.wait(DEADLINE)
    bus.poll()
    assert [report.error.split(":")[0] for report in told] == ["TimeoutError"]
    assert [record.exc_info for record in caplog.records] == [None]
    stats = far.account()
    assert (stats.delivered, stats.failed, stats.dropped, stats.queued) == (0, 1, 4, 0)
    assert stats.error.startswith("[cancelled] subscriber far spent more than stall_timeout=0.2 s")
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


@pytest.mark.parametrize("on_close", [None, handlers.closed])
def test_worker_killed_at_its_end_fails_in_on_close_where_it_has_one(
    bus: Bus, start: Start, told: list[HandlerFailed], on_close: Callable[[], None] | None
) -> None:
    """Without one there was nothing left to do, and there is nothing to tell."""
    far = start(handlers.note, on_close=on_close)
    assert lane_of(far).wait_ready(DEADLINE)
    os.kill(pid_of(far), signal.SIGSTOP)
    far.cancel()
    until(lambda: lane_of(far)._close_sent)
    kill(far)
    assert lane_of(far).closed.wait(DEADLINE)
    bus.poll()

    died = "ChildProcessError: its worker process died: killed by SIGKILL"
    assert [report.error for report in told] == ([died] if on_close else [])
    assert far.account().error == (f"[cancelled] {died} (in on_close)" if on_close else "[cancelled]")


@pytest.mark.slow
@pytest.mark.parametrize("on_flush", [None, handlers.flushed])
def test_worker_killed_at_a_flush_fails_in_on_flush_where_it_has_one(
    bus: Bus, start: Start, told: list[HandlerFailed], on_flush: Callable[[], None] | None
) -> None:
    """Without one there was nothing to do, and there is nothing to tell."""
    far = start(handlers.note, on_flush=on_flush)
    assert lane_of(far).wait_ready(DEADLINE)
    os.kill(pid_of(far), signal.SIGSTOP)
    bus.flush(0.0)
    until(lambda: lane_of(far)._unflushed)
    kill(far)
    until(lambda: lane_of(far).deaths)
    bus.poll()

    died = "ChildProcessError: its worker process died: killed by SIGKILL"
    assert [report.error for report in told] == ([died] if on_flush else [])
    assert far.stats.error == (f"{died} (in on_flush)" if on_flush else "")
