"""TrackioWriter: what trackio's database holds."""

from __future__ import annotations

import importlib
import importlib.util
import math
import sqlite3
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from eventloop.events import AfterRun, BeforeTrain, HistogramLogged, RunInfo, TextLogged
from tests.writers.conftest import Account, Attach, emit, train, val, write

if importlib.util.find_spec("trackio") is None:
    pytest.skip(
        "trackio is not installed, so TrackioWriter is NOT tested: pip install 'torch-eventloop[trackio]'",
        allow_module_level=True,
    )

from eventloop.writers import TrackioWriter

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of trackio's databases, also for a worker process."""
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    monkeypatch.setattr("trackio.sqlite_storage.TRACKIO_DIR", tmp_path / "trackio")
    return tmp_path / "trackio"


def make(**options: Any) -> TrackioWriter:
    return TrackioWriter("digits", **{"offload": "thread", **options})


def rows(folder: Path) -> list[tuple[str, int, Any]]:
    """Every value of the database, with its name and step, read with sqlite alone."""
    with sqlite3.connect(folder / "digits.db") as db:
        found = db.execute("SELECT step, metrics FROM metrics ORDER BY id").fetchall()
    db.close()
    return [(name, step, value) for step, row in found for name, value in msgspec.json.decode(row).items()]


@pytest.mark.slow
@pytest.mark.parametrize("offload", ["thread", "process"])
def test_every_value_is_in_the_database(attach: Attach, folder: Path, offload: str) -> None:
    """Each value has its mode, name and step."""
    write(attach(make(offload=offload)), *train(1, 2, 3), val(3, acc=0.5), AfterRun())

    assert rows(folder) == [*(("train/loss", step, step / 4) for step in (1, 2, 3)), ("val/acc", 3, 0.5)]


@pytest.mark.slow
def test_a_resumed_run_has_each_step_once(attach: Attach, folder: Path) -> None:
    """The run keeps its id, and steps that are run again keep their first values."""
    write(attach(make()), BeforeTrain(), *train(1, 2, 3, loss=1.0))

    write(attach(make(), start_iter=2), BeforeTrain(iter=2), *train(3, 4, loss=2.0), AfterRun())

    assert [(step, value) for _, step, value in rows(folder)] == [(1, 1.0), (2, 1.0), (3, 1.0), (4, 2.0)]
    with sqlite3.connect(folder / "digits.db") as db:
        assert db.execute("SELECT count(DISTINCT run_id) FROM metrics").fetchone() == (1,)
    db.close()


@pytest.mark.slow
def test_values_that_are_not_finite_come_back(attach: Attach) -> None:
    """trackio's own reader returns them, and a resumed run can read the database."""
    values = (math.nan, math.inf, -math.inf)
    write(attach(make()), *(train(step, loss=value)[0] for step, value in enumerate(values, start=1)))
    write(attach(make(), start_iter=2), BeforeTrain(iter=2), *train(3, 4), AfterRun())

    storage = importlib.import_module("trackio.sqlite_storage").SQLiteStorage
    logs = storage.get_logs("digits", run=storage.get_runs("digits")[0])
    assert repr([row["train/loss"] for row in logs]) == "[nan, inf, -inf, 1.0]"


@pytest.mark.slow
def test_histograms_texts_and_settings_are_written(attach: Attach, folder: Path) -> None:
    """They have trackio's own types; config and facts are the run's config."""
    values = np.array([1.0, 2.0, np.nan], np.float32)
    write(
        attach(make(config={"lr": 0.1, "data": folder})),
        RunInfo(info={"model": "Net"}, config={"lr": 0.2, "size": 3}, options={"optimizer": {"lr": 0.1}}),
        HistogramLogged(step=1, name="grads", data=values.tobytes(), shape=values.shape),
        TextLogged(step=1, name="note", text="hello"),
        AfterRun(),
    )

    found = {name: value for name, _, value in rows(folder)}
    assert found["train/grads"]["_type"] == "trackio.histogram"
    assert found["train/note"] == {"_type": "trackio.markdown", "_value": "hello"}
    with sqlite3.connect(folder / "digits.db") as db:
        (config,) = db.execute("SELECT config FROM configs").fetchone()
    db.close()
    assert msgspec.json.decode(config)["lr"] == 0.1
    assert msgspec.json.decode(config)["data"] == str(folder)
    assert msgspec.json.decode(config)["size"] == 3
    assert msgspec.json.decode(config)["eventloop"] == {"model": "Net", "optimizer": {"lr": 0.1}}


@pytest.mark.slow
def test_a_folder_that_cannot_be_written_is_one_line(
    attach: Attach, account: Account, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The writer is disabled, and the run goes on."""
    folder.write_text("a file")
    bus = attach(make())

    emit(bus, *train(1))

    (line,) = [r.getMessage() for r in caplog.records if r.name == "eventloop"]
    assert "trackio cannot be used" in line
    assert account(bus).failed + account(bus).dropped == 1


@pytest.mark.slow
def test_the_longest_project_is_written(attach: Attach, account: Account, folder: Path) -> None:
    """Its database and the files that SQLite puts next to it have names that a file system takes."""
    bus = attach(TrackioWriter("p" * 244, offload="thread"))
    write(bus, *train(1), AfterRun())

    assert account(bus).failed == 0
    assert (folder / f"{'p' * 244}.db").is_file()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({}, ValueError, "TrackioWriter needs project, got None: pass project=, or set TRACKIO_PROJECT"),
        ({"project": " "}, ValueError, "TrackioWriter needs project, got ' ': pass project=, or set"),
        ({"project": 3}, TypeError, "project must be a str, got int"),
        ({"project": "model_system"}, ValueError, "project must .* allows: .*'model_system' is not allowed"),
        ({"project": "///"}, ValueError, "project must have a letter, a digit, - or _, .*, got '///'"),
        ({"project": "p" * 245}, ValueError, "project must have at most 244 bytes, got 245: 'ppp"),
        (
            {"project": "\u00e4" * 123},
            ValueError,
            "project must have at most 244 bytes, got 246: '\u00e4\u00e4",
        ),
        ({"project": "p", "config": 3}, TypeError, "config must be a mapping of names to values, got int"),
        ({"project": "p", "run_name": 3}, TypeError, "run_name must be a str or None, got int"),
    ],
)
def test_bad_arguments(
    options: dict[str, Any], error: type[Exception], text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wrong argument is an error where the writer is made."""
    monkeypatch.delenv("TRACKIO_PROJECT", raising=False)

    with pytest.raises(error, match=text):
        TrackioWriter(**options)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("project", "text"),
    [
        (
            "   ",
            "^TrackioWriter needs project, got TRACKIO_PROJECT='   ': pass project=, or set TRACKIO_PROJECT",
        ),
        ("///", "^TRACKIO_PROJECT must have a letter, a digit, - or _, which trackio keeps, got '///'"),
        (
            "model_system",
            "^TRACKIO_PROJECT must be a project that trackio allows: .*'model_system' is not all",
        ),
        ("p" * 245, "^TRACKIO_PROJECT must have at most 244 bytes, got 245: 'ppp"),
    ],
)
def test_a_wrong_project_of_the_environment(project: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is an error where the writer is made, and the message names the variable."""
    monkeypatch.setenv("TRACKIO_PROJECT", project)

    with pytest.raises(ValueError, match=text):
        TrackioWriter()
