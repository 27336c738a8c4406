"""`eventloop replay --to wandb|mlflow|trackio|otlp`: a run that was offline is uploaded later."""

from __future__ import annotations

import importlib
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from eventloop import Bus, cli
from eventloop.eventlog.undelivered import store_undelivered
from eventloop.events import AfterRun, BeforeTrain, Event, ScalarsLogged
from eventloop.events.run import CurrentRun, Run
from eventloop.writers import EventLogWriter, read_jsonl
from tests.conftest import DEADLINE
from tests.writers.otlp_collector import Collector, is_missing

KEY = "s3cr3t"
Points = list[tuple[str, int, float]]
EXPECTED: Points = [*(("train/loss", step, step / 4) for step in range(1, 6)), ("val/acc", 5, 0.5)]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with an event log, which was resumed at step 3."""
    folder = tmp_path / "run"
    folder.mkdir()
    bus = Bus()
    EventLogWriter().attach(bus, lambda: Run(work_dir=str(folder)))
    events: list[Event] = [BeforeTrain(), *map(loss, (1, 2, 3, 4)), BeforeTrain(iter=3), *map(loss, (4, 5))]
    for event in [*events, ScalarsLogged(mode="val", step=5, scalars={"acc": 0.5}), AfterRun()]:
        bus.emit(event)
    bus.close()
    return folder


def loss(step: int) -> ScalarsLogged:
    return ScalarsLogged(step=step, scalars={"loss": step / 4})


@pytest.fixture
def collector() -> Iterator[Collector]:
    collector = Collector()
    yield collector
    collector.close()


def need(module: str, extra: str) -> None:
    if is_missing(module):
        pytest.skip(f"{module} is not installed: pip install 'torch-eventloop[{extra}]'")


def replay(run: Path, *arguments: str) -> None:
    assert cli.main(["replay", str(run), *arguments]) == 0


def state(run: Path, service: str) -> str:
    return str(msgspec.json.decode((run / f"replay/{service}_run.json").read_bytes())["id"])


def test_a_run_is_sent_to_a_collector(
    run: Path, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The headers come from the environment, and the times are those of the run."""
    need("opentelemetry.proto", "otlp")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", f"authorization=Bearer%20{KEY}")

    replay(run, "--to", "otlp", "--set", f"endpoint={collector.url}")
    replay(run, "--to", "otlp", "--set", f"endpoint={collector.url}")  # a second time sends nothing more

    assert collector.points() == EXPECTED
    assert {headers["authorization"] for headers in collector.headers} == {f"Bearer {KEY}"}


@pytest.mark.slow
def test_a_run_is_written_for_wandb(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file is ready for `wandb sync`, and its rows have the times of the run."""
    need("wandb", "wandb")
    files: Any = importlib.import_module("eventloop.writers.wandb_files")
    monkeypatch.setenv("WANDB_PROJECT", "digits")

    for _ in range(2):  # the second finds the links that W&B makes, and adds no step
        replay(run, "--to", "wandb", "--set", "mode=offline")

    rows = list(files.read_history(run / "replay", state(run, "wandb")))
    own = {"step", "_step", "_timestamp", "_runtime"}
    assert [(name, row["step"], row[name]) for row in rows for name in row.keys() - own] == EXPECTED
    assert all(row["_timestamp"] <= (run / "events.evl").stat().st_mtime + 1 for row in rows)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_a_run_is_written_to_mlflow(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """MLflow has each step once, and the run is FINISHED."""
    need("mlflow", "mlflow")
    need("sqlalchemy", "mlflow")
    uri = f"sqlite:///{tmp_path}/mlflow.db"

    for _ in range(2):  # the second time adds no step
        replay(
            run,
            "--to",
            "mlflow",
            "--set",
            f"tracking_uri={uri}",
            "--set",
            "experiment=digits",
            "--set",
            'params={"lr": 0.1}',
        )

    first, second = capsys.readouterr().err.splitlines()[-2:]
    assert first.endswith("; 6 new values for MLflow")
    assert second.endswith("; nothing new for MLflow, which had all 6 values already")
    client = importlib.import_module("mlflow").MlflowClient(uri)
    found = client.get_run(state(run, "mlflow"))
    history = client.get_metric_history(found.info.run_id, "train/loss")
    assert [("train/loss", metric.step, metric.value) for metric in history] == EXPECTED[:-1]
    assert found.data.params["lr"] == "0.1"
    assert found.info.status == "FINISHED"
    assert found.info.run_name == "run"  # that of the run's folder, not of the replay's in it


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_run_is_written_to_trackio(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The database has each step once."""
    need("trackio", "trackio")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    monkeypatch.setattr("trackio.sqlite_storage.TRACKIO_DIR", tmp_path / "trackio")

    replay(run, "--to", "trackio", "--set", "project=digits")

    with sqlite3.connect(tmp_path / "trackio/digits.db") as db:
        rows = db.execute("SELECT step, metrics FROM metrics ORDER BY id").fetchall()
    db.close()
    assert [(n, step, v) for step, row in rows for n, v in msgspec.json.decode(row).items()] == EXPECTED


def test_json_is_an_argument_of_the_writer(run: Path) -> None:
    """A list of events is given as such to the writer."""
    replay(run, "--to", "jsonl", "--set", 'events=["before_train"]')

    assert [line["iter"] for line in read_jsonl(run / "replay/metrics.jsonl")] == [0, 3]


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("project", "expected NAME=VALUE, such as project=digits, got 'project'"),
        ("=x", "expected NAME=VALUE, such as project=digits, got '=x'"),
        (
            "config={lr: 0.1}",
            "argument --set: config: expected JSON, because it begins with {, got {lr: 0.1}: Expecting property",
        ),
        ("tags=[a]", "tags: expected JSON, because it begins with [, got [a]: Expecting value"),
    ],
)
def test_an_argument_of_another_form_is_refused(
    argument: str, message: str, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The message shows the form."""
    with pytest.raises(SystemExit):
        cli.main(["replay", str(run), "--to", "csv", "--set", argument])

    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--to", "csv", "--set", "filname=x.csv"],
            "CSVWriter has no argument 'filname': did you mean 'filename'",
        ),
        (["--to", "otlp", "--set", "endpoint=nowhere"], "endpoint must be an http or https URL"),
    ],
)
def test_a_wrong_argument_of_the_writer_is_one_line(
    arguments: list[str], message: str, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is the writer's own message, and exit code 2."""
    assert cli.main(["replay", str(run), *arguments]) == 2

    errors = capsys.readouterr().err
    assert message in errors
    assert errors.count("\n") == 1


def test_a_key_is_not_kept_with_undelivered_events(tmp_path: Path, collector: Collector) -> None:
    """The file from which the writer is made again has the endpoint and no header."""
    need("opentelemetry.proto", "otlp")
    from eventloop.writers import OpenTelemetryWriter

    writer = OpenTelemetryWriter(collector.url, headers={"authorization": KEY}, offload="thread")
    facts = CurrentRun(Run(work_dir=str(tmp_path)))
    collector.delay = DEADLINE
    bus = Bus(drain_timeout=0.0)
    store_undelivered(bus, facts, [writer])
    writer.attach(bus, facts)

    bus.emit(loss(1))
    bus.emit(loss(2))
    bus.close()

    recipe = (tmp_path / "undelivered/OpenTelemetryWriter.json").read_text()
    assert collector.url in recipe
    assert "headers" not in recipe
    assert [
        path for path in tmp_path.rglob("*") if path.is_file() and KEY.encode() in path.read_bytes()
    ] == []
