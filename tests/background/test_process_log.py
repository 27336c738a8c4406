"""What a worker process logs by the logger "eventloop" is logged by the program."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from eventloop.bus import Bus
from tests.conftest import DEADLINE
from tests.support import process_handlers as handlers
from tests.support.process_support import Lines, Start, emit, until

pytest_plugins = ("tests.support.process_fixtures",)

ROOT = str(Path(__file__).parents[2])


def test_warnings_of_a_worker_are_logged_by_the_program(
    bus: Bus, start: Start, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    """They are logged in order, at their level and place, before the flush returns, and are not printed."""
    start(handlers.warn)
    emit(bus, 100)

    assert bus.flush(DEADLINE)
    assert caplog.messages == [f"iteration {i}" for i in range(100)]
    first = caplog.records[0]
    assert (first.name, first.levelname, first.funcName) == ("eventloop", "WARNING", "warn")
    assert first.pathname == handlers.__file__
    assert first.threadName == "eventloop far"
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    ("level", "shown"),
    [(logging.INFO, ["INFO", "WARNING", "ERROR"]), (logging.ERROR, ["ERROR"]), (logging.CRITICAL, [])],
)
def test_level_of_the_program_applies(
    bus: Bus, start: Start, caplog: pytest.LogCaptureFixture, level: int, shown: list[str]
) -> None:
    """The worker's own default, WARNING, does not matter."""
    caplog.set_level(level, "eventloop")
    start(handlers.warn_at_all_levels)
    emit(bus, 1)

    assert bus.flush(DEADLINE)
    assert [record.levelname for record in caplog.records] == shown


def test_filters_and_factory_of_the_program_apply(
    bus: Bus, start: Start, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A format with a field of the program's own record factory finds it."""

    class Marked(logging.LogRecord):
        mark = "ours"

    before = logging.getLogRecordFactory()
    keeps = lambda record: not record.getMessage().endswith("1")
    logger = logging.getLogger("eventloop")
    monkeypatch.setattr(logger, "filters", [*logger.filters, keeps])
    logging.setLogRecordFactory(Marked)
    try:
        start(handlers.warn)
        emit(bus, 3)
        assert bus.flush(DEADLINE)
    finally:
        logging.setLogRecordFactory(before)

    assert [(record.getMessage(), type(record)) for record in caplog.records] == [
        ("iteration 0", Marked),
        ("iteration 2", Marked),
    ]


def test_traceback_and_surrogates_arrive(bus: Bus, start: Start, caplog: pytest.LogCaptureFixture) -> None:
    """The message is formatted once, and a traceback is printed below it."""
    start(handlers.warn_of_an_error)
    emit(bus, 1)

    assert bus.flush(DEADLINE)
    assert caplog.messages == [r"100% sure of no caf\udce9"]
    assert "raise Chosen(os.fsdecode" in caplog.text
    assert caplog.text.endswith("Chosen: no caf\\udce9\n")


def test_records_of_several_threads_arrive_whole(
    bus: Bus, start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    """The lines of each thread are in order."""
    far = start(handlers.warn_from_threads)
    emit(bus, 2)

    assert bus.flush(DEADLINE)
    seen = [message.split() for message in caplog.messages]
    for name in "abcd":
        assert [int(number) for by, number, _ in seen if by == name] == [*range(50), *range(50)]
    assert {text for *_, text in seen} == {"x" * 5000}
    assert far.stats.delivered == 2


def test_record_before_the_worker_is_ready(
    bus: Bus, start: Start, lines: Lines, caplog: pytest.LogCaptureFixture
) -> None:
    """A module may log while the worker imports it."""
    start(handlers.WarnsWhenMade())
    emit(bus, 1)

    assert bus.flush(DEADLINE)
    assert lines() == ["0"]
    assert caplog.messages == ["being made"]


def test_last_words_of_a_dying_worker(bus: Bus, start: Start, caplog: pytest.LogCaptureFixture) -> None:
    """What each of three workers logged just before it died comes ahead of the report of its death."""
    far = start(handlers.warn_and_die)
    emit(bus, 1)
    until(lambda: far.stats.failed)

    words = "the last words on 0"
    assert [message for message in caplog.messages if "disabled" not in message][::2] == [words] * 3


def test_fork_of_a_worker_prints(
    bus: Bus, start: Start, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    """It does not write into the pipe of the worker."""
    far = start(handlers.warn_in_a_fork)
    emit(bus, 2)

    assert bus.flush(DEADLINE)
    assert (far.stats.delivered, caplog.messages) == (2, [])
    assert capfd.readouterr().err == "from the fork\n" * 2


def test_record_that_cannot_be_formatted(
    bus: Bus, start: Start, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    """The worker prints the error of `logging`, and continues."""
    far = start(handlers.warn_wrongly)
    emit(bus, 2)

    assert bus.flush(DEADLINE)
    assert (far.stats.delivered, caplog.messages) == (2, [])
    assert capfd.readouterr().err.count("TypeError: not enough arguments for format string") == 2


def test_what_is_logged_at_the_end(
    bus: Bus, start: Start, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    """The records of `on_close` are logged; later ones, which the program no longer reads, are printed."""
    start(handlers.record, on_close=handlers.warn_at_the_close)
    emit(bus, 1)
    bus.close(DEADLINE)

    assert caplog.messages == ["closes"]
    assert capfd.readouterr().err == "after the close\n"


PROGRAM = """
import my_handlers, time
from eventloop.bus import Bus
from eventloop.events import AfterTrainIter
bus = Bus()
bus.subscribe(my_handlers.outlive, "after_train_iter", offload="process")
bus.emit(AfterTrainIter(iter=0))
time.sleep(3600)
"""

OUTLIVE = """
import logging, os, time
def outlive(event):
    parent = os.getppid()
    print("ready", flush=True)
    while os.getppid() == parent:
        time.sleep(0.01)
    logging.getLogger("eventloop").warning("the program is gone")
    print("continued", flush=True)
"""


def test_worker_without_its_program_prints(tmp_path: Path) -> None:
    """Standard error is then the only place left, and the handler sees no error."""
    (tmp_path / "my_handlers.py").write_text(OUTLIVE, encoding="utf-8")
    (tmp_path / "main.py").write_text(PROGRAM, encoding="utf-8")
    with subprocess.Popen(
        [sys.executable, str(tmp_path / "main.py")],
        env={**os.environ, "PYTHONPATH": ROOT},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as program:
        assert program.stdout is not None
        assert program.stdout.readline() == "ready\n"
        program.send_signal(signal.SIGKILL)
        out, err = program.communicate(timeout=DEADLINE)

    assert (out, err) == ("continued\n", "the program is gone\n")
