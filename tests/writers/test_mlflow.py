"""MLflowWriter: what MLflow's own client finds in a database."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import math
import os
import sqlite3
import threading
from contextlib import closing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from eventloop.bus import Bus
from eventloop.events import (
    AfterRun,
    BeforeTrain,
    CheckpointSaved,
    ImageLogged,
    RunInfo,
    ScalarsLogged,
    TextLogged,
)
from eventloop.events.run import Run
from eventloop.writers import EventLogWriter, MLflowWriter
from eventloop.writers.tracker_state import Known
from tests.support.internals import substitute
from tests.writers.conftest import Account, Attach, emit, train, val, write

if importlib.util.find_spec("mlflow") is None or importlib.util.find_spec("sqlalchemy") is None:
    pytest.skip(
        "mlflow is not installed, so MLflowWriter is NOT tested: pip install 'torch-eventloop[mlflow]'",
        allow_module_level=True,
    )

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


@pytest.fixture(autouse=True)
def folder_of_artifacts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """MLflow keeps the artifacts of a database's runs in the current directory."""
    monkeypatch.chdir(tmp_path)


def uri(folder: Path) -> str:
    return f"sqlite:///{folder}/mlflow.db"


def make(folder: Path, **options: Any) -> MLflowWriter:
    return MLflowWriter(uri(folder), "digits", **{"offload": "thread", **options})


def the_run(folder: Path, work_dir: Path | None = None) -> Any:
    """The run of the work dir, by default the folder, as MLflow's client returns it."""
    state = (work_dir or folder) / "mlflow_run.json"
    return client(folder).get_run(msgspec.json.decode(state.read_bytes())["id"])


def client(folder: Path) -> Any:
    return importlib.import_module("mlflow").MlflowClient(uri(folder))


def history(folder: Path, key: str) -> list[tuple[int, float]]:
    found = client(folder).get_metric_history(the_run(folder).info.run_id, key)
    return [(metric.step, metric.value) for metric in found]


def test_letters_of_all_languages_are_a_name(attach: Attach, tmp_path: Path) -> None:
    """MLflow takes them, and so does the writer."""
    write(attach(make(tmp_path)), ScalarsLogged(step=1, scalars={"é": 0.5, "准确率": 0.25}), AfterRun())

    assert [history(tmp_path, f"train/{name}") for name in ("é", "准确率")] == [[(1, 0.5)], [(1, 0.25)]]


@pytest.mark.slow
@pytest.mark.parametrize("offload", ["thread", "process"])
def test_every_value_is_in_the_database(attach: Attach, tmp_path: Path, offload: str) -> None:
    """Each value has its mode, name and step, in more than one batch, and the run is FINISHED."""
    names = [f"m{i}" for i in range(30)]
    events = [ScalarsLogged(step=step, scalars=dict.fromkeys(names, step / 4)) for step in range(1, 51)]

    write(attach(make(tmp_path, offload=offload)), *events, val(50, acc=math.nan), AfterRun())

    assert history(tmp_path, "train/m29") == [(step, step / 4) for step in range(1, 51)]
    ((step, value),) = history(tmp_path, "val/acc")
    assert step == 50
    assert math.isnan(value)
    assert the_run(tmp_path).info.status == "FINISHED"


@pytest.mark.slow
def test_a_resumed_run_has_each_step_once(attach: Attach, tmp_path: Path) -> None:
    """A killed run goes on as the same run, and steps that are run again keep their first values."""
    write(attach(make(tmp_path)), BeforeTrain(), *train(1, 2, 3, loss=1.0))
    assert the_run(tmp_path).info.status == "KILLED"
    first = the_run(tmp_path).info.run_id

    write(
        attach(make(tmp_path), start_iter=2),
        BeforeTrain(iter=2),
        *train(3, 4, loss=2.0),
        AfterRun(error="ValueError: no"),
    )

    assert the_run(tmp_path).info.run_id == first
    assert history(tmp_path, "train/loss") == [(1, 1.0), (2, 1.0), (3, 1.0), (4, 2.0)]
    assert the_run(tmp_path).info.status == "FAILED"


class _Refusing(BaseHTTPRequestHandler):
    """A server that refuses each login."""

    def do_GET(self) -> None:
        self.send_response(401)
        self.end_headers()

    do_POST = do_GET

    def log_message(self, *args: object) -> None:
        """Print nothing."""


@pytest.mark.slow
def test_a_refused_login_is_one_line(
    attach: Attach, account: Account, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The line has the answer of the server and no password; the writer takes no more events."""
    monkeypatch.setenv("MLFLOW_TRACKING_USERNAME", "me")
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", "s3cr3t-word")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    with ThreadingHTTPServer(("127.0.0.1", 0), _Refusing) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_address[1]}"
        bus = attach(MLflowWriter(address, "digits", offload="thread"))

        with caplog.at_level(logging.WARNING, "eventloop"):
            emit(bus, *train(1, 2))
        server.shutdown()

    (line,) = [record.getMessage() for record in caplog.records if record.name == "eventloop"]
    assert "MLflow cannot be used: " in line
    assert "401" in line
    assert "s3cr3t" not in line + account(bus).error


@pytest.mark.slow
@pytest.mark.parametrize("offload", ["thread", "process"])
def test_a_broken_database_is_told_without_lines_of_mlflow(
    attach: Attach, tmp_path: Path, account: Account, capfd: pytest.CaptureFixture[str], offload: str
) -> None:
    """The error of the database is in this writer's warning; MLflow's own log would print a traceback of each try."""
    bus = attach(make(tmp_path, offload=offload))
    emit(bus, *train(1))
    capfd.readouterr()
    with closing(sqlite3.connect(tmp_path / "mlflow.db")) as database:
        database.execute("drop table metrics")
        database.commit()

    write(bus, *train(2))

    assert "1 event was not written to MLflow: " in account(bus).error
    assert "mlflow.store" not in capfd.readouterr().err


@pytest.mark.slow
def test_lines_of_mlflow_in_the_program_are_printed(
    attach: Attach, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The writer silences its own thread only, and only while MLflow runs on it."""
    log = logging.getLogger("mlflow.store.db")
    called, logged = threading.Event(), threading.Event()

    class Loud(MLflowWriter):
        def connect(self, run: Run, known: Known) -> Known:
            connected = super().connect(run, known)
            log.warning("of the thread, after a call")
            return connected

        def _experiment_id(self) -> str:
            log.warning("of the thread, within a call")
            called.set()
            assert logged.wait(60)
            return super()._experiment_id()

    bus = attach(Loud(f"sqlite:///{tmp_path}/mlflow.db", offload="thread"))
    bus.emit(*train(1))
    assert called.wait(60)
    log.warning("of the program")
    logged.set()
    bus.close()

    printed = capfd.readouterr().err
    assert "of the thread, after a call" in printed
    assert "of the program" in printed
    assert "of the thread, within a call" not in printed
    assert "Creating initial" not in printed


@pytest.mark.slow
def test_a_run_whose_end_is_not_taken_is_told_without_lines_of_mlflow(
    attach: Attach, tmp_path: Path, account: Account, capfd: pytest.CaptureFixture[str]
) -> None:
    """The error is in this writer's warning."""
    bus = attach(make(tmp_path))
    emit(bus, *train(1))
    capfd.readouterr()
    with closing(sqlite3.connect(tmp_path / "mlflow.db")) as database:
        database.execute("drop table runs")
        database.commit()

    bus.close()

    assert "MLflow did not take the end of the run: " in account(bus).error
    assert "mlflow.store" not in capfd.readouterr().err


@pytest.mark.slow
def test_the_run_has_the_name_of_the_writer(attach: Attach, tmp_path: Path) -> None:
    """Without a `run_name` the run in MLflow has the writer's name, if it has one."""
    write(attach(make(tmp_path, name="baseline")), *train(1), AfterRun())

    (run,) = client(tmp_path).search_runs(["1"])
    assert run.info.run_name == "baseline"


@pytest.mark.slow
def test_parameters_facts_and_files_are_in_the_run(
    attach: Attach, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parameters of more than one request, tags, images, texts and checkpoints arrive."""
    monkeypatch.chdir(tmp_path)  # the artifacts of a database are in the current directory
    params = {f"p{i}": i for i in range(150)}
    image = np.zeros((4, 4, 3), np.uint8)
    checkpoint = tmp_path / "epoch_1"
    checkpoint.mkdir()
    (checkpoint / "weights.pth").write_bytes(b"weights")

    write(
        attach(make(tmp_path, params=params, tags={"team": "a"}, checkpoints=True)),
        RunInfo(
            info={"model": "Net"},
            config={"p1": "of the program", "size": 3},
            options={"optimizer": {"lr": 0.1}},
        ),
        ImageLogged(step=3, name="sample", data=image.tobytes(), shape=image.shape),
        TextLogged(step=3, name="note", text="hello"),
        CheckpointSaved(path=str(checkpoint), iter=3),
        AfterRun(),
    )

    run = the_run(tmp_path)
    settings = {"size": 3, "optimizer.lr": 0.1}  # the writer's own p1 counts
    assert run.data.params == {key: str(value) for key, value in (params | settings).items()}
    assert run.data.tags["team"] == "a"
    assert run.data.tags["eventloop.model"] == "Net"
    paths = {
        found.path
        for folder in ("train/sample", "train/note", "checkpoints/epoch_1")
        for found in client(tmp_path).list_artifacts(run.info.run_id, folder)
    }
    assert paths == {"train/sample/3.png", "train/note/3.txt", "checkpoints/epoch_1/weights.pth"}


@pytest.mark.slow
def test_a_fact_that_mlflow_refuses_is_told(
    attach: Attach, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A text is cut at MLflow's limit and a name of other characters is left out, each with one line; the others
    arrive."""
    facts = RunInfo(info={"model": "Net", "config": "x" * 9000, "b?d": "y", "plan": "z" * 9000})

    write(attach(make(tmp_path)), facts, facts, AfterRun())

    tags = the_run(tmp_path).data.tags
    assert tags["eventloop.model"] == "Net"
    assert len(tags["eventloop.config"]) == 5000
    assert "eventloop.plan" not in tags
    assert [record.getMessage().partition(": expected")[0] for record in caplog.records] == [
        "MLflow: the tag 'eventloop.config' of 9,000 characters is cut after 5,000",
        "MLflow: the tag 'eventloop.b?d' is left out",
    ]


@pytest.mark.slow
def test_the_experiment_of_the_environment(
    attach: Attach, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MLFLOW_EXPERIMENT_ID is an experiment, as for MLflow's own functions; a name goes before it."""
    monkeypatch.setenv("MLFLOW_EXPERIMENT_ID", made := client(tmp_path).create_experiment("mine"))

    write(attach(MLflowWriter(uri(tmp_path), offload="thread")), *train(1), AfterRun())

    assert the_run(tmp_path).info.experiment_id == made
    (other := tmp_path / "b").mkdir()
    write(attach(make(tmp_path), work_dir=str(other)), *train(1), AfterRun())
    assert the_run(tmp_path, other).info.experiment_id != made


@pytest.mark.slow
def test_files_that_are_not_taken_hold_up_no_number(
    attach: Attach, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """With a full artifact store the metrics arrive; the files wait for it, and arrive once."""
    substitute(monkeypatch, "tracker.RETRY_SECONDS", 0.0)
    store = tmp_path / "artifacts"
    store.write_text("a file, where a folder is needed")
    client(tmp_path).create_experiment("digits", artifact_location=store.as_uri())
    bus = attach(make(tmp_path))
    note = TextLogged(step=1, name="note", text="hello")

    emit(bus, note, *train(1))
    emit(bus, *train(2))
    assert history(tmp_path, "train/loss") == [(1, 0.25), (2, 0.5)]

    store.unlink()
    write(bus, *train(3), AfterRun())

    assert history(tmp_path, "train/loss") == [(1, 0.25), (2, 0.5), (3, 0.75)]
    assert [path.name for path in store.rglob("*.txt")] == ["1.txt"]
    lines = [r.getMessage() for r in caplog.records if r.name == "eventloop"]
    assert ["MLflow does not take the events" in line for line in lines] == [True]


@pytest.mark.slow
def test_a_resumed_run_sends_the_checkpoints_that_a_kill_took(
    attach: Attach, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Those of the event log that MLflow lacks and that are there, each once; what the run saves again replaces it."""
    caplog.set_level(logging.WARNING)
    removed = CheckpointSaved(path=str(tmp_path / "iter_0"), iter=0)
    saved = []
    for number in (1, 2, 3):
        (folder := tmp_path / f"iter_{number}").mkdir()
        (folder / "state.pth").write_bytes(b"weights")
        saved.append(CheckpointSaved(path=str(folder), iter=number))
    EventLogWriter().attach(log := Bus(), lambda: Run(work_dir=str(tmp_path)))
    write(log, BeforeTrain(), removed, *train(1), saved[0], *train(2), saved[1], *train(3), saved[2])
    write(
        attach(make(tmp_path, checkpoints=True), trainer_id="a"), BeforeTrain(), *train(1), saved[0], saved[2]
    )
    for number in (1, 3):
        (tmp_path / f"iter_{number}/state.pth").write_bytes(b"changed")

    again = attach(make(tmp_path, checkpoints=True), trainer_id="b", start_iter=2)
    write(again, BeforeTrain(iter=2), *train(3), saved[2], AfterRun())

    run, store = the_run(tmp_path), client(tmp_path)
    found = {folder.path for folder in store.list_artifacts(run.info.run_id, "checkpoints")}
    assert found == {f"checkpoints/iter_{number}" for number in (1, 2, 3)}
    held = [
        Path(store.download_artifacts(run.info.run_id, f"checkpoints/iter_{number}/state.pth")).read_bytes()
        for number in (1, 2, 3)
    ]
    assert held == [b"weights", b"weights", b"changed"]  # the last was saved again by the resumed run
    assert caplog.messages == []


@pytest.mark.slow
def test_a_resumed_run_sends_no_file_again(
    attach: Attach, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files that MLflow has are not read from the event log once more."""
    monkeypatch.chdir(tmp_path)
    with_log = Bus()
    EventLogWriter().attach(with_log, lambda: Run(work_dir=str(tmp_path)))
    note = TextLogged(step=1, name="note", text="hello")
    write(with_log, BeforeTrain(), note, *train(1, 2))
    write(attach(make(tmp_path)), BeforeTrain(), note, *train(1, 2))
    (sent,) = tmp_path.rglob("note/1.txt")
    sent.unlink()

    write(attach(make(tmp_path), start_iter=2), BeforeTrain(iter=2), *train(3), AfterRun())

    assert not sent.exists()
    assert [step for step, _ in history(tmp_path, "train/loss")] == [1, 2, 3]


@pytest.mark.slow
def test_a_name_that_mlflow_refuses_is_told_once(
    attach: Attach, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Such a metric is left out, and the others of its event are written."""
    event = ScalarsLogged(step=1, scalars={"größe, (m)": 1.0, "loss": 0.5})

    write(attach(make(tmp_path)), event, event, AfterRun())

    lines = [r.getMessage() for r in caplog.records if "MLflow: " in r.getMessage()]
    (line,) = lines
    assert line.startswith("MLflow: 'train/größe, (m)' is left out: expected at most 250 letters, digits and")
    assert history(tmp_path, "train/loss")[0] == (1, 0.5)


@pytest.mark.slow
@pytest.mark.parametrize("offload", ["thread", "process"])
def test_a_server_that_is_away_is_one_line(
    attach: Attach,
    account: Account,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    offload: str,
) -> None:
    """The writer is disabled, and the user's password is in no message; a process needs no setting for that."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://me:s3cr3t@127.0.0.1:9")
    if offload == "thread":
        monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")  # urllib3 would log the second try
    bus = attach(MLflowWriter(offload=offload))

    emit(bus, *train(1))

    (line,) = [record.getMessage() for record in caplog.records]
    assert "MLflow cannot be used" in line
    assert "s3cr3t" not in line
    assert account(bus).failed + account(bus).dropped == 1


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({}, ValueError, "MLflowWriter needs tracking_uri, got None: pass tracking_uri=, or set MLFLOW_"),
        ({"tracking_uri": 3}, TypeError, "tracking_uri must be a str, got int"),
        (
            {"tracking_uri": "postgresql://me:pw1@host/db"},
            ValueError,
            r"tracking_uri must not contain a password, got postgresql://me:\*\*\*@host/db: pass it in MLFLOW_TR",
        ),
        (
            {"tracking_uri": "localhost:5000"},
            ValueError,
            "tracking_uri must be a server or a database, such as http://localhost:5000 .*, got 'localhost:5000'",
        ),
        (
            {"tracking_uri": "http://"},
            ValueError,
            "tracking_uri must be a server .*, got 'http://': .* No host",
        ),
        (
            {"tracking_uri": "http://h:port"},
            ValueError,
            "tracking_uri must be a server .*, got 'http://h:port'",
        ),
        (
            {"tracking_uri": "http://[::1"},
            ValueError,
            r"tracking_uri must be a server .*, got 'http://\[::1'",
        ),
        (
            {"tracking_uri": "http://localhost:5000/#/experiments/0"},
            ValueError,
            r"tracking_uri must .*, got 'http://localhost:5000/#/experiments/0': .* no \? and no #",
        ),
        ({"tracking_uri": "ftp://h"}, ValueError, "tracking_uri must be a server .*, got 'ftp://h'"),
        (
            {"tracking_uri": "databricks-uc"},
            ValueError,
            "tracking_uri must be .*, got 'databricks-uc': MLflow takes the schemes http, https, ",
        ),
        (
            {"tracking_uri": "sqlite://mlflow.db"},
            ValueError,
            "tracking_uri must be .*, got 'sqlite://mlflow.db': ArgumentError: Invalid SQLite URL",
        ),
        (
            {"tracking_uri": "postgresql+nope://h/db"},
            ValueError,
            r"tracking_uri must be .*, got 'postgresql\+nope://h/db': NoSuchModuleError",
        ),
        (
            {"tracking_uri": "postgresql://host/db?user=me&password=pw1"},
            ValueError,
            r"must not contain a password, got postgresql://host/db\?user=me&password=\*\*\*: pass it in MLFLOW_TR",
        ),
        ({"experiment": "x" * 501}, ValueError, "experiment must have at most 500 characters, got 501"),
        ({"experiment": 3}, TypeError, "experiment must be a str or None, got int"),
        ({"params": {"a, b": 1}}, ValueError, "the names in params must have at most 250 .*, got 'a, b'"),
        ({"params": [1]}, TypeError, "params must be a mapping of names to values, got list"),
        ({"tags": {"/a": 1}}, ValueError, "the names in tags must have at most 250 .*, got '/a'"),
        ({"checkpoints": "no"}, TypeError, "checkpoints must be True or False, got 'no'"),
    ],
)
def test_bad_arguments(
    options: dict[str, Any], error: type[Exception], text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wrong argument is an error where the writer is made."""
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    if options and "tracking_uri" not in options:
        options = {"tracking_uri": "sqlite:///x.db", **options}

    with pytest.raises(error, match=text):
        MLflowWriter(**options)


def test_a_long_experiment_of_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is an error where the writer is made, unless it is given another."""
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "x" * 501)
    uri = f"sqlite:///{tmp_path}/mlflow.db"

    with pytest.raises(ValueError, match="MLFLOW_EXPERIMENT_NAME must have at most 500 characters, got 501"):
        MLflowWriter(uri)

    MLflowWriter(uri, "digits")


@pytest.mark.slow
def test_texts_that_are_not_utf8_have_escapes(attach: Attach, tmp_path: Path) -> None:
    """The name of the work dir, parameters and tags may be paths, and MLflow takes no other texts."""
    bad, good = os.fsdecode(b"caf\xe9"), "caf\\udce9"
    work_dir = tmp_path / bad
    work_dir.mkdir()
    options = {"params": {"data": bad}, "tags": {"data": bad}}
    write(attach(make(tmp_path, **options), work_dir=str(work_dir)), *train(1), AfterRun())

    run = the_run(tmp_path, work_dir)
    assert run.info.run_name == good
    assert (run.data.params["data"], run.data.tags["data"]) == (good, good)
    assert run.data.metrics == {"train/loss": 0.25}


def test_a_hang_is_of_a_server_without_its_password(monkeypatch: pytest.MonkeyPatch) -> None:
    """The message about a call that hangs has the URI of the environment, and not the password in it."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://me:pw1@host:5000")

    assert MLflowWriter(offload="thread").waits_for == "MLflow at http://me:***@host:5000"
