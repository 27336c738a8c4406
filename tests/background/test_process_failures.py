"""Worker processes that die, raise or hang: nothing is lost silently, and nobody waits for them."""

from __future__ import annotations

import logging
import os
import signal
from time import monotonic

import pytest

from eventloop.background.workers.protocol import WorkerTraceback
from eventloop.background.workers.restarts import DEATHS_IN_A_ROW
from eventloop.background.workers.subscriber import IN_FLIGHT
from eventloop.bus import Bus
from eventloop.events import AfterTrainIter, HandlerFailed
from tests.conftest import DEADLINE
from tests.support import process_handlers as handlers
from tests.support.process_support import Lines, Start, adds_up, emit, kill, lane_of, pid_of, until

pytest_plugins = ("tests.support.process_fixtures",)

# --- it dies -----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_worker_killed_five_times_loses_nothing(
    bus: Bus, start: Start, lines: Lines, told: list[HandlerFailed], caplog: pytest.LogCaptureFixture
) -> None:
    """What was not acknowledged is sent again, in order; the account counts each event once."""
    far = start(handlers.note_slowly)
    killed: set[int] = set()
    emit(bus, 60)
    for _ in range(5):
        seen = far.account().delivered
        until(lambda seen=seen: far.account().delivered > seen + 2)  # type: ignore[misc]
        killed.add(kill(far))
        until(lambda: lane_of(far).worker is not None and pid_of(far) not in killed)

    assert bus.flush(DEADLINE)
    bus.poll()
    assert len(killed) == lane_of(far).deaths == 5
    assert sorted({int(line) for line in lines()}) == [*range(60)]
    stats = far.stats
    assert (stats.delivered, stats.failed, stats.dropped, stats.queued) == (60, 0, 0, 0)
    assert told == []
    assert len(lines()) - 60 <= 5 * 5, "the acknowledged ones were sent again"
    assert "died (killed by SIGKILL) and is started again" in caplog.text


@pytest.mark.slow
def test_killed_worker_of_a_batch_gets_the_batch_again(bus: Bus, start: Start, lines: Lines) -> None:
    """A delivery is acknowledged as a whole."""
    far = start(handlers.note_batch, batch=True)
    assert lane_of(far).wait_ready(DEADLINE)
    os.kill(pid_of(far), signal.SIGSTOP)
    emit(bus, 30)
    bus.stats()
    until(lambda: lane_of(far)._flights.sent)
    kill(far)

    assert bus.flush(DEADLINE)
    assert {int(i) for line in lines() for i in line.split()} == {*range(30)}
    assert far.stats.delivered == 30


@pytest.mark.slow
def test_idle_worker_that_is_killed_is_replaced(bus: Bus, start: Start, lines: Lines) -> None:
    """The next event finds a living one."""
    far = start(handlers.note)
    emit(bus, 1)
    bus.flush(DEADLINE)
    kill(far)
    emit(bus, 2)

    assert bus.flush(DEADLINE)
    assert lines() == ["0", "0", "1"]


@pytest.mark.slow
def test_event_that_kills_every_worker_disables_the_subscriber(
    bus: Bus, start: Start, lines: Lines, told: list[HandlerFailed]
) -> None:
    """After some deaths in a row over one event: what it had been sent has failed, what waited is dropped."""
    far = start(handlers.die_at_two, overflow="drop_oldest", queue=20)
    assert lane_of(far).wait_ready(DEADLINE)
    emit(bus, 5)
    bus.flush(DEADLINE)
    emit(bus, 10)
    bus.flush(DEADLINE)
    bus.poll()

    assert lines().count("2") == 1 + DEATHS_IN_A_ROW  # the first death may have been over any of those it had
    stats = far.stats
    assert (stats.delivered, stats.failed, stats.dropped, stats.queued) == (2, 3, 10, 0)
    assert [report.handler for report in told] == ["far"]
    assert "died 3 times in a row over after_train_iter of iteration 2" in told[0].error
    assert "(the last: killed by SIGKILL); 3 events lost" in told[0].error
    assert stats.error.startswith("[error]")


@pytest.mark.slow
def test_event_that_kills_every_worker_is_passed_over_where_errors_are_logged(
    bus: Bus, start: Start, lines: Lines
) -> None:
    """With `on_error="log"` it alone has failed."""
    far = start(handlers.die_at_two, on_error="log")
    emit(bus, 5)

    assert bus.flush(DEADLINE)
    assert [line for line in lines() if line != "2"][-4:] == ["0", "1", "3", "4"]
    assert (far.stats.delivered, far.stats.failed) == (4, 1)


@pytest.mark.slow
def test_worker_that_exits_is_named_by_its_code(bus: Bus, start: Start, told: list[HandlerFailed]) -> None:
    """`os._exit` in a handler is a death like any other."""
    start(handlers.exit_at_once)
    emit(bus, 1)
    bus.flush(DEADLINE)
    bus.poll()

    assert "the last: exit code 7" in told[0].error


@pytest.mark.slow
def test_worker_that_dies_at_its_start_is_a_failure(
    bus: Bus, start: Start, told: list[HandlerFailed], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that never gets ready is tried a few times; flush and close do not wait for it longer."""
    far = start(handlers.DiesWhenMade())
    emit(bus, 4)
    bus.flush(DEADLINE)
    bus.poll()

    assert "died 3 times in a row before it was ready (the last: exit code 9)" in told[0].error
    assert adds_up(far, 4)
    assert far.stats.queued == 0


@pytest.mark.slow
def test_worker_that_never_starts_says_how_much_is_lost(
    bus: Bus, start: Start, told: list[HandlerFailed]
) -> None:
    """What waited for it counts, as it is dropped."""
    far = start(handlers.DiesWhenTold(), on_error="log")
    emit(bus, 40)
    bus.stats()  # which routes them
    handlers.log("die")
    bus.flush(DEADLINE)
    bus.poll()

    assert "died 3 times in a row before it was ready" in told[0].error
    assert "(the last: exit code 9); 40 events lost" in told[0].error
    assert far.stats.dropped == 40


def test_no_process_at_all_is_a_failure(
    bus: Bus, start: Start, told: list[HandlerFailed], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A system that starts none is tried again, then reported."""
    monkeypatch.setattr("sys.executable", "/no/such/python")
    start(handlers.note)
    emit(bus, 1)
    bus.flush(DEADLINE)
    bus.poll()

    assert "it could not be started: [Errno 2]" in told[0].error


@pytest.mark.slow
def test_handler_that_cannot_be_made_in_the_worker_is_a_failure(
    bus: Bus, start: Start, told: list[HandlerFailed], caplog: pytest.LogCaptureFixture
) -> None:
    """It is not tried twice, and the log has the worker's traceback."""
    far = start(handlers.Refuses())
    emit(bus, 4)
    bus.flush(DEADLINE)
    bus.poll()

    assert "its worker process could not begin: Chosen: cannot be made in a worker" in told[0].error
    assert (far.stats.dropped, lane_of(far).deaths) == (4, 0)
    assert "in no_such" in caplog.text


# --- it raises ---------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_error_disables_and_brings_its_traceback(
    bus: Bus, start: Start, lines: Lines, told: list[HandlerFailed], caplog: pytest.LogCaptureFixture
) -> None:
    """`on_error="disable"`: nothing more is delivered, and the log says where in the worker it was."""
    far = start(handlers.fail, on_close=handlers.closed)
    emit(bus, 5)
    bus.flush(DEADLINE)
    bus.close(DEADLINE)
    bus.poll()

    assert lines() == ["0", "closed"]
    assert (far.stats.failed, far.stats.dropped, far.stats.calls) == (1, 4, 1)
    assert [report.error for report in told] == ["Chosen: no to 0"]
    assert 'raise Chosen(f"no to {event.iter}")' in caplog.text


@pytest.mark.slow
def test_error_is_logged_and_the_rest_delivered(bus: Bus, start: Start, lines: Lines) -> None:
    """`on_error="log"`."""
    far = start(handlers.fail, on_error="log")
    emit(bus, 5)
    bus.flush(DEADLINE)

    assert (len(lines()), far.stats.failed, far.stats.delivered) == (5, 5, 0)


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
    assert isinstance(caught.value.__cause__, WorkerTraceback)
    assert "in fail" in str(caught.value.__cause__)


@pytest.mark.slow
def test_exception_that_does_not_pickle_comes_as_its_text(bus: Bus, start: Start) -> None:
    """A `RuntimeError` that quotes it."""
    start(handlers.fail_stubbornly, on_error="raise")
    emit(bus, 1)
    bus.flush(DEADLINE)

    with pytest.raises(RuntimeError, match=r"Stubborn: no"):
        bus.poll()


@pytest.mark.slow
def test_error_that_quotes_a_path_which_is_no_utf8(bus: Bus, start: Start) -> None:
    """It comes, with an escape in its text, and costs no worker."""
    far = start(handlers.fail_over_a_path, on_error="log")
    emit(bus, 3)
    bus.flush(DEADLINE)

    assert (far.stats.failed, lane_of(far).deaths) == (3, 0)
    assert far.stats.error == r"RuntimeError: Stubborn: no caf\udce9"


def test_system_exit_in_a_handler_is_its_own_affair(bus: Bus, start: Start) -> None:
    """It ends no worker."""
    far = start(handlers.leave, on_error="log")
    emit(bus, 2)
    bus.flush(DEADLINE)

    assert (far.stats.failed, lane_of(far).deaths, far.stats.error) == (2, 0, "SystemExit: goodbye")


def test_error_in_on_close_is_reported(bus: Bus, start: Start, told: list[HandlerFailed]) -> None:
    """As that of a thread is."""
    far = start(handlers.note, on_close=handlers.fail_to_close)
    emit(bus, 1)
    bus.close(DEADLINE)
    bus.poll()

    assert [report.error for report in told] == ["Chosen: not closed"]
    assert far.stats.error == "Chosen: not closed (in on_close)"


# --- it hangs ----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_stalled_worker_is_killed(bus: Bus, start: Start, lines: Lines, told: list[HandlerFailed]) -> None:
    """After `stall_timeout` seconds in one delivery: that one has failed, the others are dropped."""
    far = start(handlers.hang_at_two, stall_timeout=0.2)
    emit(bus, 6)
    pid = pid_of(far)
    bus.flush(DEADLINE)
    until(lambda: lane_of(far).closed.is_set())
    bus.poll()

    assert lines() == ["0", "1", "2"]
    stats = far.stats
    assert (stats.delivered, stats.failed, stats.dropped, stats.queued) == (2, 1, 3, 0)
    assert "spent more than stall_timeout=0.2 s on one delivery" in told[0].error
    assert stats.error.startswith("[stalled]")
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


@pytest.mark.slow
def test_stall_is_passed_over_where_errors_are_logged(bus: Bus, start: Start, lines: Lines) -> None:
    """With `on_error="log"` a new worker goes on behind the event that stalled."""
    far = start(handlers.hang_at_two, stall_timeout=0.2, on_error="log")
    emit(bus, 5)

    assert bus.flush(DEADLINE)
    assert lines() == ["0", "1", "2", "3", "4"]
    assert (far.stats.delivered, far.stats.failed) == (4, 1)


def test_close_kills_a_worker_that_never_returns(
    bus: Bus, start: Start, lines: Lines, caplog: pytest.LogCaptureFixture
) -> None:
    """Within its deadline; what is left is in the account, and named."""
    far = start(handlers.hang)
    emit(bus, 5)
    until(lines)
    pid, began = pid_of(far), monotonic()

    report = bus.close(0.2)

    assert monotonic() - began < DEADLINE / 2
    assert not report
    assert (far.account().queued, far.account().delivered) == (5, 0)
    assert "events left undelivered: far (5)" in caplog.text
    assert lane_of(far).closed.wait(DEADLINE)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_stopped_worker_is_killed_at_close(bus: Bus, start: Start) -> None:
    """One that cannot even be asked."""
    far = start(handlers.note)
    assert lane_of(far).wait_ready(DEADLINE)
    os.kill(pid_of(far), signal.SIGSTOP)
    emit(bus, 3)

    assert not bus.close(0.2)
    assert lane_of(far).closed.wait(DEADLINE)
    assert adds_up(far, 3)


@pytest.mark.slow
def test_cancel_finishes_what_was_sent(bus: Bus, start: Start, lines: Lines) -> None:
    """Queued events are dropped, those under way are finished, and the worker ends."""
    far = start(handlers.note_slowly, on_close=handlers.closed)
    emit(bus, 200)
    until(lines)
    far.cancel()

    assert lane_of(far).closed.wait(DEADLINE)
    account = lane_of(far).account
    assert account.queued == 0
    assert account.delivered == len(lines()) - 1 <= 2 * IN_FLIGHT
    assert lines()[-1] == "closed"
    assert account.delivered + account.dropped == 200


@pytest.mark.slow
def test_restarts_are_told_in_the_log_only(bus: Bus, start: Start, caplog: pytest.LogCaptureFixture) -> None:
    """A death that costs nothing is no failure of the subscriber."""
    caplog.set_level(logging.WARNING, "eventloop")
    far = start(handlers.note)
    assert lane_of(far).wait_ready(DEADLINE)
    kill(far)
    emit(bus, 1)
    bus.flush(DEADLINE)

    assert far.stats.error == ""
    assert lane_of(far).deaths == 1
    assert [record.levelname for record in caplog.records] == ["WARNING"]
