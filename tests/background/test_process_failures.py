"""Worker processes that die, raise or hang: nothing is lost silently, and nobody waits for them."""

from __future__ import annotations

import importlib
import os
import signal
from collections.abc import Callable
from pathlib import Path
from time import monotonic

import pytest

from eventloop.bus import Bus
from eventloop.events import AfterTrainIter, HandlerFailed
from tests.conftest import DEADLINE
from tests.support import process_handlers as handlers
from tests.support.process_support import IN_FLIGHT, Lines, Start, emit, kill, pid_of, runner_of, until
from tests.support.spilling import PROMPT

pytest_plugins = ("tests.support.process_fixtures",)

# --- it dies -----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_worker_killed_five_times_loses_nothing(
    bus: Bus, start: Start, lines: Lines, failures: list[HandlerFailed], caplog: pytest.LogCaptureFixture
) -> None:
    """What was not acknowledged is sent again, in order; the account counts each event once."""
    far = start(handlers.record_slowly)
    killed: set[int] = set()
    emit(bus, 60)
    for _ in range(5):
        seen = far.account().delivered
        until(lambda seen=seen: far.account().delivered > seen + 2)  # type: ignore[misc]
        killed.add(kill(far))
        until(lambda: runner_of(far).worker is not None and pid_of(far) not in killed)

    assert bus.flush(DEADLINE)
    bus.poll()
    assert len(killed) == runner_of(far).restarts.deaths == 5
    assert sorted({int(line) for line in lines()}) == [*range(60)]
    stats = far.stats
    assert (stats.delivered, stats.failed, stats.dropped, stats.queued) == (60, 0, 0, 0)
    assert failures == []
    assert len(lines()) - 60 <= 5 * 5, "the acknowledged ones were sent again"
    assert "died (killed by SIGKILL) and is started again" in caplog.text


@pytest.mark.slow
def test_killed_worker_of_a_batch_gets_the_batch_again(bus: Bus, start: Start, lines: Lines) -> None:
    """A delivery is acknowledged as a whole."""
    far = start(handlers.record_batch, batch=True)
    assert runner_of(far).ready.wait(DEADLINE)
    os.kill(pid_of(far), signal.SIGSTOP)
    emit(bus, 30)
    bus.stats()
    until(lambda: runner_of(far).flights.sent)
    kill(far)

    assert bus.flush(DEADLINE)
    assert {int(i) for line in lines() for i in line.split()} == {*range(30)}
    assert far.stats.delivered == 30


@pytest.mark.slow
def test_idle_worker_that_is_killed_is_replaced(
    bus: Bus, start: Start, lines: Lines, caplog: pytest.LogCaptureFixture
) -> None:
    """The next event finds a living one; a death that costs nothing is a warning, and no failure of the subscriber."""
    far = start(handlers.record)
    emit(bus, 1)
    bus.flush(DEADLINE)
    kill(far)
    emit(bus, 2)

    assert bus.flush(DEADLINE)
    assert lines() == ["0", "0", "1"]
    assert (far.stats.error, runner_of(far).restarts.deaths) == ("", 1)
    assert [record.levelname for record in caplog.records] == ["WARNING"]


@pytest.mark.slow
def test_event_that_kills_every_worker_disables_the_subscriber(
    bus: Bus, start: Start, lines: Lines, failures: list[HandlerFailed]
) -> None:
    """After some deaths in a row over one event: what it had been sent has failed, what waited is dropped."""
    far = start(handlers.die_at_two, overflow="drop_oldest", queue=20)
    assert runner_of(far).ready.wait(DEADLINE)
    emit(bus, 5)
    bus.flush(DEADLINE)
    emit(bus, 10)
    bus.flush(DEADLINE)
    bus.poll()

    assert lines().count("2") == 1 + 3  # the first death may have been over any of those it had
    stats = far.stats
    assert (stats.delivered, stats.failed, stats.dropped, stats.queued) == (2, 3, 10, 0)
    assert [report.handler for report in failures] == ["far"]
    assert "died 3 times in a row over after_train_iter of iteration 2" in failures[0].error
    assert "(the last: killed by SIGKILL); 3 events lost" in failures[0].error
    assert stats.error.startswith("[error]")


@pytest.mark.slow
@pytest.mark.parametrize("fn", [handlers.die_at_two, handlers.hang_at_two])
def test_where_errors_are_logged_one_event_is_passed_over(
    bus: Bus, start: Start, lines: Lines, fn: Callable[..., None]
) -> None:
    """With `on_error="log"` the event that kills its workers, or stalls them, alone has failed."""
    far = start(fn, on_error="log", stall_timeout=0.2 if fn is handlers.hang_at_two else 60.0)
    emit(bus, 5)

    assert bus.flush(DEADLINE)
    assert [line for line in lines() if line != "2"][-4:] == ["0", "1", "3", "4"]
    assert (far.stats.delivered, far.stats.failed) == (4, 1)


# --- it cannot begin ---------------------------------------------------------------------------------------


def test_no_process_at_all_is_a_failure(
    bus: Bus, start: Start, failures: list[HandlerFailed], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A system that starts none is tried again, then reported."""
    monkeypatch.setattr("sys.executable", "/no/such/python")
    start(handlers.record)
    emit(bus, 1)
    bus.flush(DEADLINE)
    bus.poll()

    assert "it could not be started: [Errno 2]" in failures[0].error


@pytest.mark.slow
def test_worker_that_never_starts_says_how_much_is_lost(
    bus: Bus, start: Start, failures: list[HandlerFailed]
) -> None:
    """It is tried a few times; a flush does not wait for it longer, and what waited for it is counted as dropped."""
    far = start(handlers.DiesWhenTold(), on_error="log")
    emit(bus, 40)
    handlers.log("die")
    bus.flush(DEADLINE)
    bus.poll()

    assert "died 3 times in a row before it was ready" in failures[0].error
    assert "(the last: exit code 9); 40 events lost" in failures[0].error
    assert far.stats.dropped == 40


@pytest.mark.slow
def test_handler_that_cannot_be_made_in_the_worker_is_a_failure(
    bus: Bus, start: Start, failures: list[HandlerFailed], caplog: pytest.LogCaptureFixture
) -> None:
    """It is not tried twice, and the log has the worker's traceback."""
    far = start(handlers.Refuses())
    emit(bus, 4)
    bus.flush(DEADLINE)
    bus.poll()

    assert "its worker process could not begin: Chosen: cannot be made in a worker" in failures[0].error
    assert (far.stats.dropped, runner_of(far).restarts.deaths) == (4, 0)
    assert "in no_such" in caplog.text


# --- it raises ---------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_error_disables_and_brings_its_traceback(
    bus: Bus, start: Start, lines: Lines, failures: list[HandlerFailed], caplog: pytest.LogCaptureFixture
) -> None:
    """`on_error="disable"`: nothing more is delivered, and the log says where in the worker it was."""
    far = start(handlers.fail, on_close=handlers.closed)
    emit(bus, 5)
    bus.flush(DEADLINE)
    bus.close(DEADLINE)
    bus.poll()

    assert lines() == ["0", "closed"]
    assert (far.stats.failed, far.stats.dropped, far.stats.calls) == (1, 4, 1)
    assert [report.error for report in failures] == ["Chosen: no to 0"]
    assert 'raise Chosen(f"no to {event.iter}")' in caplog.text


@pytest.mark.representative(1)
@pytest.mark.parametrize(
    ("fn", "error"),
    [
        (handlers.exit_process, "SystemExit: goodbye"),
        (handlers.fail, "Chosen: no to 2"),
        (handlers.fail_over_a_path, r"RuntimeError: Stubborn: no caf\udce9"),
    ],
)
def test_error_costs_no_worker(bus: Bus, start: Start, fn: Callable[..., None], error: str) -> None:
    """Whatever it is, with `on_error="log"` the rest is delivered; one that does not pickle comes as its text."""
    far = start(fn, on_error="log")
    emit(bus, 3)
    bus.flush(DEADLINE)

    assert (far.stats.failed, far.stats.delivered, runner_of(far).restarts.deaths) == (3, 0, 0)
    assert far.stats.error == error


@pytest.mark.slow
def test_error_is_raised_on_the_training_thread(bus: Bus, start: Start) -> None:
    """`on_error="raise"`: the very exception, its cause the worker's traceback."""
    start(handlers.fail, on_error="raise")
    emit(bus, 1)
    bus.flush(DEADLINE)

    with pytest.raises(handlers.Chosen, match="no to 0") as caught:
        bus.poll()
    assert caught.value.__notes__ == [
        f"raised by background subscriber far (process) on {AfterTrainIter(iter=0)!r}"
    ]
    assert "in fail" in str(caught.value.__cause__)


def test_error_in_on_close_is_reported(bus: Bus, start: Start, failures: list[HandlerFailed]) -> None:
    """As that of a thread is."""
    far = start(handlers.record, on_close=handlers.fail_to_close)
    emit(bus, 1)
    bus.close(DEADLINE)
    bus.poll()

    assert [report.error for report in failures] == ["Chosen: not closed"]
    assert far.stats.error == "Chosen: not closed (in on_close)"


# --- it hangs ----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_stalled_worker_is_killed(
    bus: Bus, start: Start, lines: Lines, failures: list[HandlerFailed]
) -> None:
    """After `stall_timeout` seconds in one delivery: that one has failed, the others are dropped."""
    far = start(handlers.hang_at_two, stall_timeout=0.2)
    emit(bus, 6)
    pid = pid_of(far)
    bus.flush(DEADLINE)
    until(lambda: runner_of(far).account.closed.is_set())
    bus.poll()

    assert lines() == ["0", "1", "2"]
    stats = far.stats
    assert (stats.delivered, stats.failed, stats.dropped, stats.queued) == (2, 1, 3, 0)
    assert "spent more than stall_timeout=0.2 s on one delivery" in failures[0].error
    assert stats.error.startswith("[stalled]")
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


@pytest.mark.representative(1)
@pytest.mark.parametrize("how", ["hangs", "is stopped"])
def test_close_kills_a_worker_that_never_returns(
    bus: Bus, start: Start, lines: Lines, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Within its deadline; what is left is in the account, and named."""
    far = start(handlers.hang if how == "hangs" else handlers.record)
    assert runner_of(far).ready.wait(DEADLINE)
    if how == "is stopped":
        os.kill(pid_of(far), signal.SIGSTOP)
    emit(bus, 5)
    until(lambda: lines() or how == "is stopped")
    pid, began = pid_of(far), monotonic()

    report = bus.close(0.2)

    assert monotonic() - began < PROMPT
    assert not report
    assert (far.account().queued, far.account().delivered) == (5, 0)
    assert "events left undelivered: far (5)" in caplog.text
    assert runner_of(far).account.closed.wait(DEADLINE)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_close_names_a_worker_that_is_still_importing(
    bus: Bus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The account and the log say why the events are left: the worker was not ready to take any."""
    os.mkfifo(tmp_path / "never written")
    (tmp_path / "imports_forever.py").write_text(
        f"import os\nif os.getpid() != {os.getpid()}:\n    open({str(tmp_path / 'never written')!r})\n"
        "def handle(event): ...\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    handle = importlib.import_module("imports_forever").handle
    far = bus.subscribe(handle, "after_train_iter", offload="process", name="far")
    emit(bus, 5)

    assert not bus.close(0.2)

    why = "its worker process was still importing its modules"
    assert f"events left undelivered: far (5), {why}" in caplog.text
    assert far.account().error == f"[closed] {why}"


@pytest.mark.slow
def test_cancel_finishes_what_was_sent(bus: Bus, start: Start, lines: Lines) -> None:
    """Queued events are dropped, those under way are finished, and the worker ends."""
    far = start(handlers.record_slowly, on_close=handlers.closed)
    emit(bus, 200)
    until(lines)
    far.cancel()

    assert runner_of(far).account.closed.wait(DEADLINE)
    account = runner_of(far).subscriber.counts
    assert account.queued == 0
    assert account.delivered == len(lines()) - 1 <= 2 * IN_FLIGHT
    assert lines()[-1] == "closed"
    assert account.delivered + account.dropped == 200


@pytest.mark.slow
def test_worker_that_hangs_when_it_is_cancelled_is_killed(
    bus: Bus, start: Start, lines: Lines, failures: list[HandlerFailed], caplog: pytest.LogCaptureFixture
) -> None:
    """After its `stall_timeout`; it is one failure, told once, and every event is counted."""
    far = start(handlers.hang, stall_timeout=0.2)
    emit(bus, 5)
    until(lines)
    pid = pid_of(far)
    far.cancel()

    assert runner_of(far).account.closed.wait(DEADLINE)
    bus.poll()
    assert [report.error.split(":")[0] for report in failures] == ["TimeoutError"]
    assert [record.exc_info for record in caplog.records] == [None]
    stats = far.account()
    assert (stats.delivered, stats.failed, stats.dropped, stats.queued) == (0, 1, 4, 0)
    assert stats.error.startswith("[cancelled] subscriber far spent more than stall_timeout=0.2 s")
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


@pytest.mark.parametrize("callback", [None, handlers.closed])
def test_worker_killed_at_its_end_fails_in_on_close_if_it_has_one(
    bus: Bus, start: Start, failures: list[HandlerFailed], callback: Callable[[], None] | None
) -> None:
    """Without one there was nothing left to do, and there is nothing to report."""
    far = start(handlers.record, on_close=callback)
    assert runner_of(far).ready.wait(DEADLINE)
    os.kill(pid_of(far), signal.SIGSTOP)
    far.cancel()
    until(lambda: runner_of(far)._close_sent)
    kill(far)
    assert runner_of(far).account.closed.wait(DEADLINE)
    bus.poll()

    died = "ChildProcessError: its worker process died: killed by SIGKILL"
    assert [report.error for report in failures] == ([died] if callback else [])
    assert far.account().error == (f"[cancelled] {died} (in on_close)" if callback else "[cancelled]")


@pytest.mark.slow
@pytest.mark.parametrize("callback", [None, handlers.flushed])
def test_worker_killed_at_a_flush_fails_in_on_flush_if_it_has_one(
    bus: Bus, start: Start, failures: list[HandlerFailed], callback: Callable[[], None] | None
) -> None:
    """The same as for `on_close`; the worker is started again."""
    far = start(handlers.record, on_flush=callback)
    assert runner_of(far).ready.wait(DEADLINE)
    os.kill(pid_of(far), signal.SIGSTOP)
    bus.flush(0.0)
    until(lambda: runner_of(far)._unflushed)
    kill(far)
    until(lambda: runner_of(far).restarts.deaths)
    bus.poll()

    died = "ChildProcessError: its worker process died: killed by SIGKILL"
    assert [report.error for report in failures] == ([died] if callback else [])
    assert far.stats.error == (f"{died} (in on_flush)" if callback else "")
