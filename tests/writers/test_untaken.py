"""Events that a tracker has not taken yet: they count as queued, a death of the worker loses none, an end names them."""

from __future__ import annotations

import os
import signal
import sqlite3
from pathlib import Path
from typing import Any, Self

import msgspec
import pytest

from eventloop.events import AfterRun, BeforeRun, BeforeTrain
from tests.support.process_support import until
from tests.writers.conftest import Account, Attach, emit, train, worker_of
from tests.writers.otlp_collector import is_missing

if is_missing("trackio"):
    pytest.skip(
        "trackio is not installed, so TrackioWriter is NOT tested: pip install 'torch-eventloop[trackio]'",
        allow_module_level=True,
    )

from eventloop.writers import TrackioWriter
from tests.support.internals import substitute

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::DeprecationWarning")]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of trackio's databases, also for a worker process."""
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    monkeypatch.setattr("trackio.sqlite_storage.TRACKIO_DIR", tmp_path / "trackio")
    substitute(monkeypatch, "tracker.RETRY_SECONDS", 0.0)
    return tmp_path / "trackio"


class Barred:
    """Make trackio's database impossible to write, with a trigger that refuses each row."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "digits.db"

    def _do(self, statement: str) -> None:
        database = sqlite3.connect(self._path, timeout=60)
        database.execute(statement)
        database.commit()
        database.close()

    def __enter__(self) -> Self:
        self._do("CREATE TRIGGER barred BEFORE INSERT ON metrics BEGIN SELECT RAISE(ABORT, 'barred'); END")
        return self

    def __exit__(self, *error: object) -> None:
        self._do("DROP TRIGGER barred")


def steps(folder: Path) -> list[int]:
    """The steps in the database, read with sqlite alone."""
    database = sqlite3.connect(folder / "digits.db", timeout=60)
    rows = database.execute("SELECT step, metrics FROM metrics ORDER BY id").fetchall()
    database.close()
    return [step for step, row in rows if "train/loss" in msgspec.json.decode(row)]


@pytest.mark.parametrize("offload", ["thread", "process"])
def test_what_a_tracker_does_not_take_is_queued(
    attach: Attach, account: Account, folder: Path, offload: str
) -> None:
    """The account has as delivered what is in the database, and as queued what waits for it."""
    bus = attach(TrackioWriter("digits", offload=offload))
    emit(bus, *train(1, 2))
    assert (account(bus).delivered, account(bus).queued) == (2, 0)

    with Barred(folder):
        emit(bus, *train(3, 4, 5))
        assert (account(bus).delivered, account(bus).queued) == (2, 3)
        assert steps(folder) == [1, 2]
    emit(bus, *train(6))

    assert (account(bus).delivered, account(bus).queued) == (6, 0)
    assert steps(folder) == [1, 2, 3, 4, 5, 6]


def test_a_killed_worker_loses_no_event_that_waits(
    attach: Attach, account: Account, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The next worker gets them again, though they were acknowledged; each step is in the database once."""
    bus = attach(TrackioWriter("digits", offload="process"), trainer_id="a")
    emit(bus, BeforeRun(), BeforeTrain(), *train(*range(1, 71)))
    with Barred(folder):
        emit(bus, *train(*range(71, 151)))
        assert account(bus).queued == 80
        pid = worker_of(bus)
        os.kill(pid, signal.SIGKILL)
        until(lambda: "is started again" in caplog.text)
    report: Any = bus.close()

    assert "80 events are sent again" in caplog.text
    assert steps(folder) == [*range(1, 151)]
    (stats,) = report.stats
    assert (stats.delivered, stats.failed, stats.dropped, stats.queued) == (152, 0, 0, 0)


@pytest.mark.parametrize("offload", ["thread", "process"])
def test_what_was_never_taken_has_failed(
    attach: Attach, folder: Path, offload: str, caplog: pytest.LogCaptureFixture
) -> None:
    """At the close such events are no deliveries, and the report is not `ok`."""
    bus = attach(TrackioWriter("digits", offload=offload))
    emit(bus, *train(1, 2))
    with Barred(folder):
        emit(bus, *train(3, 4, 5), AfterRun())
        report = bus.close()

    (stats,) = report.stats
    assert not report.ok
    assert (stats.delivered, stats.failed, stats.dropped, stats.queued) == (2, 4, 0, 0)
    assert "4 events were not written to trackio" in caplog.text
    assert steps(folder) == [1, 2]
