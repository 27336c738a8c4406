"""All four trackers at once, each 50 ms away: a kill, a resume, and what each holds in the end."""

from __future__ import annotations

import importlib
import math
import os
import signal
import sqlite3
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from eventloop.writers import read_jsonl
from tests.forked import ROOT
from tests.writers.otlp_collector import Collector, is_missing
from tests.writers.tracked_training import KEY, KEYS

NEEDED = ("wandb", "mlflow", "sqlalchemy", "trackio", "opentelemetry.proto")


if missing := [module for module in NEEDED if is_missing(module)]:
    pytest.skip(
        f"the four trackers are NOT tested together, without {', '.join(missing)}: "
        "pip install 'torch-eventloop[wandb,mlflow,trackio,otlp]'",
        allow_module_level=True,
    )

from eventloop.writers.wandb_files import read_history

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
]

PROGRAM = (
    "from tests.writers.tracked_training import main; main()"  # a worker imports the module, not __main__
)
Values = dict[tuple[str, int], list[float]]
OWN = {"mode", "step", "iter", "epoch"}
CLOCKED = ("time", "memory", "eta", "per_second")


@pytest.fixture
def collector() -> Iterator[Collector]:
    collector = Collector(delay=0.05)
    yield collector
    collector.close()


def train(folder: Path, collector: Collector, *arguments: str) -> subprocess.CompletedProcess[str]:
    own = {name: value for name, value in os.environ.items() if name != "WANDB_SERVICE"}  # of other tests
    environment = {
        **own,
        **KEYS,
        "TRACKIO_DIR": str(folder / "trackio"),
        "WANDB_SILENT": "true",
        "MLFLOW_DISABLE_TELEMETRY": "true",
    }
    return subprocess.run(
        [sys.executable, "-c", PROGRAM, str(folder / "run"), collector.url, *arguments],
        env=environment,
        text=True,
        capture_output=True,
        timeout=120,
        check=False,
    )


# --- what each holds: the values of each name and step ----------------------------------------------------------


def in_jsonl(folder: Path) -> Values:
    rows = [row for row in read_jsonl(folder / "run/metrics.jsonl") if "event" not in row]
    return _collected(
        (f"{row['mode']}/{name}", row["step"], value)
        for row in rows
        for name, value in row.items() - _own(row)
    )


def _own(row: dict[str, Any]) -> Any:
    return {(name, row[name]) for name in OWN}


def in_wandb(folder: Path) -> Values:
    own = {"step", "_step", "_timestamp", "_runtime"}
    rows = list(read_history(folder / "run", _id(folder, "wandb")))
    assert [row["_step"] for row in rows] == list(range(len(rows)))  # else W&B would drop rows at the upload
    return _collected((name, row["step"], row[name]) for row in rows for name in row.keys() - own)


def in_mlflow(folder: Path) -> Values:
    client = importlib.import_module("mlflow").MlflowClient(f"sqlite:///{folder}/mlflow.db")
    run_id = _id(folder, "mlflow")
    names = client.get_run(run_id).data.metrics
    return _collected(
        (name, m.step, m.value) for name in names for m in client.get_metric_history(run_id, name)
    )


def in_trackio(folder: Path) -> Values:
    with sqlite3.connect(folder / "trackio/digits.db") as db:
        rows = db.execute("SELECT step, metrics FROM metrics").fetchall()
    db.close()
    return _collected((n, step, v) for step, row in rows for n, v in msgspec.json.decode(row).items())


def _id(folder: Path, service: str) -> str:
    return str(msgspec.json.decode((folder / f"run/{service}_run.json").read_bytes())["id"])


def _collected(values: Any) -> Values:
    found: Values = {}
    for name, step, value in values:
        found.setdefault((name, step), []).append(value)
    return found


def assert_same(held: Values, log: Values) -> None:
    """Each (step, name) once, with a value that the log has for it; a step that ran twice may have clocked two."""
    assert {key: n for key, n in Counter({k: len(v) for k, v in held.items()}).items() if n != 1} == {}
    assert held.keys() == log.keys()
    for (name, step), (value,) in held.items():
        logged = log[name, step]
        if not any(word in name for word in CLOCKED):
            assert len({*logged}) == 1, (name, step, logged)
        assert any(math.isclose(value, each, rel_tol=1e-12) for each in logged), (name, step, value, logged)


def assert_whole(spans: list[Any]) -> None:
    """Each span is in one that was received; one that was sent twice, as its request was, is the same both times."""
    ids = {span.span_id: span for span in spans}
    assert {span.parent_span_id for span in spans if span.name != "run"} <= {*ids}
    assert [span.name for span in spans if span != ids[span.span_id]] == []
    runs = [span.status.message for span in ids.values() if span.name == "run"]
    assert runs == ["killed", ""]


# --- the tests ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("offload", ["thread", "process"])
def test_a_killed_and_resumed_run_is_whole_in_each(
    tmp_path: Path, collector: Collector, offload: str
) -> None:
    """After kill -9 and a resume each tracker holds every (step, name) of metrics.jsonl exactly once."""
    importlib.import_module("mlflow").MlflowClient(
        f"sqlite:///{tmp_path}/mlflow.db"
    ).search_experiments()  # its tables

    killed = train(tmp_path, collector, "--offload", offload, "--kill-at", "65")
    assert killed.returncode == -signal.SIGKILL, killed.stderr

    ended = train(tmp_path, collector, "--offload", offload)

    assert ended.returncode == 0, ended.stderr
    assert "calls on the training thread: []; failed: {}" in ended.stdout
    log = in_jsonl(tmp_path)
    assert max(step for _, step in log) == 120
    for held in (in_wandb, in_mlflow, in_trackio):
        assert_same(held(tmp_path), log)
    assert_same(_collected(collector.points()), log)
    assert_whole(collector.spans())
    report = subprocess.run(
        [sys.executable, "-m", "eventloop", "report", str(tmp_path / "run"), "--all"],
        cwd=ROOT,
        text=True,
        capture_output=True,
        timeout=60,
        check=True,
    )
    printed = "".join(text for run in (killed, ended, report) for text in (run.stdout, run.stderr))
    for key in (KEY, *KEYS.values()):
        assert _files_with(key.encode(), tmp_path) == []
        assert key not in printed


def _files_with(text: bytes, folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file() and text in path.read_bytes()]
