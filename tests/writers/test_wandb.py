"""WandbWriter: what the `.wandb` files hold, offline."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from eventloop.events import (
    AfterRun,
    BeforeTrain,
    CheckpointSaved,
    HistogramLogged,
    ImageLogged,
    RunInfo,
    TextLogged,
)
from eventloop.writers import EventLogWriter, WandbWriter
from eventloop.writers.wandb_files import read_history, read_records
from tests.forked import ROOT
from tests.writers.conftest import Account, Attach, emit, train, val, write

if importlib.util.find_spec("wandb") is None:
    pytest.skip(
        "wandb is not installed, so WandbWriter is NOT tested: pip install 'torch-eventloop[wandb]'",
        allow_module_level=True,
    )


def run_id(folder: Path) -> str:
    return str(msgspec.json.decode((folder / "wandb_run.json").read_bytes())["id"])


def points(folder: Path) -> list[tuple[str, int, Any]]:
    """Every value of the run's files, with its name and step."""
    own = {"step", "_step", "_timestamp", "_runtime"}
    rows = read_history(folder, run_id(folder))
    return [(name, row["step"], value) for row in rows for name, value in row.items() if name not in own]


def make(**options: Any) -> WandbWriter:
    return WandbWriter("digits", mode="offline", **{"offload": "thread", **options})


KEY = "a1b2c3d4" * 5


def run_script(script: str, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a script, with a folder as its argument, in a process of its own: wandb reads the environment once."""
    return subprocess.run(
        [sys.executable, "-c", script, str(folder)],
        env={**os.environ, "PYTHONPATH": ROOT, **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )


@pytest.mark.slow
@pytest.mark.parametrize("offload", ["thread", "process"])
def test_every_value_is_in_the_file(attach: Attach, tmp_path: Path, offload: str) -> None:
    """Each value has its mode, name and step, whichever way the writer runs."""
    write(attach(make(offload=offload)), *train(1, 2, 3), val(3, acc=0.5), AfterRun())

    expected = [("train/loss", step, step / 4) for step in (1, 2, 3)]
    assert points(tmp_path) == [*expected, ("val/acc", 3, 0.5)]


@pytest.mark.slow
@pytest.mark.parametrize("offload", ["thread", "process"])
def test_a_disabled_run_writes_nothing(
    attach: Attach, account: Account, tmp_path: Path, offload: str, caplog: pytest.LogCaptureFixture
) -> None:
    """wandb has no folder, and no step is noted as written: a run that goes on offline writes all from the log."""
    write(attach(EventLogWriter()), BeforeTrain(), *train(1, 2), AfterRun())
    bus = attach(WandbWriter("digits", mode="disabled", best={"train/loss": "min"}, offload=offload))
    write(bus, BeforeTrain(), *train(1, 2), TextLogged(step=2, name="note", text="a"), AfterRun())

    logged = [record.getMessage() for record in caplog.records if record.name == "eventloop"]
    assert (account(bus).failed, account(bus).dropped, logged) == (0, 0, [])
    assert not [path for path in tmp_path.glob("wandb*") if path.suffix != ".lock"]

    write(attach(make(), start_iter=2), BeforeTrain(iter=2), *train(3), AfterRun())

    assert points(tmp_path) == [("train/loss", step, step / 4) for step in (1, 2, 3)]


@pytest.mark.slow
def test_a_disabled_run_is_not_continued_as_the_one_before(attach: Attach, tmp_path: Path) -> None:
    """A run of W&B that is in the work dir already is another run than the disabled one, and than its resumed part."""
    write(attach(make(), trainer_id="a"), BeforeTrain(), *train(1, 2, 3), AfterRun())
    first = run_id(tmp_path)
    disabled = WandbWriter("digits", mode="disabled", offload="thread")
    write(attach(disabled, trainer_id="b"), BeforeTrain(), *train(1, 2), AfterRun())

    write(attach(make(), trainer_id="c", start_iter=2), BeforeTrain(iter=2), *train(3), AfterRun())

    assert run_id(tmp_path) != first
    assert points(tmp_path) == [("train/loss", 3, 0.75)]


@pytest.mark.slow
def test_a_resumed_run_has_each_step_once(attach: Attach, tmp_path: Path) -> None:
    """The resumed run has the same id, steps that are run again are left out, and W&B's own step goes on."""
    write(attach(make()), BeforeTrain(), *train(1, 2, 3, loss=1.0))
    first = run_id(tmp_path)

    write(attach(make(), start_iter=2), BeforeTrain(iter=2), *train(3, 4, loss=2.0), AfterRun())

    assert run_id(tmp_path) == first
    assert points(tmp_path) == [("train/loss", step, 1.0 if step < 4 else 2.0) for step in (1, 2, 3, 4)]
    assert [row["_step"] for row in read_history(tmp_path, first)] == [0, 1, 2, 3]


@pytest.mark.slow
def test_what_a_kill_took_from_wandb_is_written_again(attach: Attach, tmp_path: Path) -> None:
    """A file with nothing but its header, as a kill soon after the begin leaves it, has no step yet."""
    write(attach(EventLogWriter()), *train(1, 2))
    write(attach(make()), BeforeTrain(), *train(1, 2))
    (file,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    file.write_bytes(file.read_bytes()[:7])

    write(attach(make(), start_iter=2), BeforeTrain(iter=2), *train(3), AfterRun())

    assert points(tmp_path) == [("train/loss", step, step / 4) for step in (1, 2, 3)]


@pytest.mark.slow
def test_values_that_are_not_finite_come_back(attach: Attach, tmp_path: Path) -> None:
    """They are kept, and a resumed run can read the file."""
    values = (math.nan, math.inf, -math.inf)
    write(attach(make()), *(train(step, loss=value)[0] for step, value in enumerate(values, start=1)))
    write(attach(make(), start_iter=2), BeforeTrain(iter=2), *train(3, 4), AfterRun())

    assert repr([value for _, _, value in points(tmp_path)]) == "[nan, inf, -inf, 1]"


@pytest.mark.slow
def test_media_settings_and_the_best_value_are_in_the_run(
    attach: Attach, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Images, histograms and texts are in the history; config, facts and the best value in the run."""
    image = np.arange(48, dtype=np.uint8).reshape(4, 4, 3)
    values = np.array([1.0, 2.0, math.nan], np.float32)
    write(
        attach(make(config={"lr": 0.1, "data": tmp_path}, best={"val/acc": "max"}, checkpoints=True)),
        RunInfo(info={"model": "Net"}, config={"lr": 0.2, "size": 3}, options={"optimizer": {"lr": 0.1}}),
        *(val(step, acc=acc) for step, acc in ((1, 0.5), (2, 0.75), (3, 0.25))),
        ImageLogged(step=3, name="sample", data=image.tobytes(), shape=image.shape),
        HistogramLogged(step=3, name="grads", data=values.tobytes(), shape=values.shape),
        TextLogged(step=3, name="note", text="hello"),
        CheckpointSaved(path=str(make_checkpoint(tmp_path)), iter=3),
        CheckpointSaved(path=str(tmp_path / "gone"), iter=3),
        AfterRun(),
    )

    names = {name for name, _, _ in points(tmp_path)}
    assert {"train/sample", "train/grads", "train/note"} <= names
    records = [*read_records(tmp_path, run_id(tmp_path))]
    summary = {i.key or i.nested_key[0]: i.value_json for r in records for i in r.summary.update}
    assert summary["best/val/acc"] == "0.75"
    assert summary["best/val/acc_step"] == "2"
    items = (item for r in records for item in (*r.run.config.update, *r.config.update))
    config = {item.key: item.value_json for item in items}
    assert (config["lr"], config["size"]) == ("0.1", "3")  # the writer's own lr counts
    assert json.loads(config["eventloop"]) == {"model": "Net", "optimizer": {"lr": 0.1}}
    assert config["data"] == f'"{tmp_path}"'
    (artifact,) = [record.artifact for record in records if record.WhichOneof("record_type") == "artifact"]
    assert [entry.path for entry in artifact.manifest.contents] == ["weights.pth"]
    assert "wandb:" not in "".join(capfd.readouterr())  # it prints nothing


@pytest.mark.slow
@pytest.mark.parametrize(
    ("names", "shown"),
    [({"name": "baseline"}, "baseline"), ({"name": "first", "run_name": "run 7"}, "run 7")],
)
def test_the_run_has_its_name_and_its_axis(
    attach: Attach, tmp_path: Path, names: dict[str, str], shown: str
) -> None:
    """The run is named by `run_name`, else by `name`; the metrics of a mode are over `step`."""
    write(attach(make(entity="team", tags=["a", "b"], group="g", **names)), *train(1), AfterRun())

    (file,) = tmp_path.glob("wandb_run*.json")
    records = [*read_records(tmp_path, json.loads(file.read_bytes())["id"])]
    (run,) = [record.run for record in records if record.WhichOneof("record_type") == "run"]
    assert (run.display_name, run.entity, [*run.tags], run.run_group) == (shown, "team", ["a", "b"], "g")
    axes = {(r.metric.glob_name or r.metric.name): r.metric.step_metric for r in records}
    assert axes["train/*"] == "step"


@pytest.mark.slow
def test_a_resumed_run_goes_on_from_its_best_value(attach: Attach, tmp_path: Path) -> None:
    """The best value is that of all parts of the run, and NaN is none."""
    best = {"val/acc": "max"}
    write(attach(make(best=best)), BeforeTrain(), val(1, acc=math.nan), val(2, acc=0.5), val(3, acc=math.nan))
    resumed = attach(make(best=best), start_iter=3)

    write(resumed, BeforeTrain(iter=3), val(4, acc=0.25), val(5, acc=0.75), AfterRun())

    updates = [i for r in read_records(tmp_path, run_id(tmp_path)) for i in r.summary.update]
    noted = [item.value_json for item in updates if "best/val/acc" in (item.key, *item.nested_key)]
    assert noted == ["0.5", "0.75"]


def make_checkpoint(folder: Path) -> Path:
    checkpoint = folder / "epoch_1"
    checkpoint.mkdir()
    (checkpoint / "weights.pth").write_bytes(b"weights")
    return checkpoint


@pytest.mark.slow
def test_a_value_without_a_picture_is_told_once(
    attach: Attach, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """An image of a wrong shape is named, and what comes after it is written."""
    bad = ImageLogged(step=1, name="sample", data=b"123", shape=(3,))

    write(attach(make()), bad, bad, *train(1), AfterRun())

    assert [r.getMessage() for r in caplog.records if "W&B" in r.getMessage()] == [
        "W&B: train/sample is left out: image 'sample' must have the shape (height, width, channels) with 1 to 4 channels, got (3,)"
    ]
    assert points(tmp_path) == [("train/loss", 1, 0.25)]


@pytest.mark.slow
def test_a_refused_login_is_one_line(
    attach: Attach,
    account: Account,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Without a server, or with a wrong key, the writer is disabled and the key is in no message; wandb prints
    nothing."""
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    # in a process of its own, because wandb reads the environment once
    bus = attach(WandbWriter("digits", mode="online", offload="process"))

    emit(bus, *train(1))

    (line,) = [r.getMessage() for r in caplog.records if r.name == "eventloop"]
    assert "W&B cannot be used" in line
    assert KEY not in line
    assert account(bus).failed + account(bus).dropped == 1
    assert "wandb:" not in "".join(capfd.readouterr())


@pytest.mark.slow
def test_a_login_on_a_thread_prints_nothing(tmp_path: Path) -> None:
    """wandb's own information is back once the run is begun, and its errors were never silenced."""
    script = """
import sys, wandb
from wandb.errors import term
from eventloop import Bus
from eventloop.events.run import Run
from eventloop.writers import WandbWriter
from tests.writers.conftest import train

bus = Bus()
WandbWriter("digits", mode="online", offload="thread").attach(bus, lambda: Run(sys.argv[1]))
init = wandb.init
def init_soon(**options):
    term.termerror("loud")
    options["settings"].init_timeout = 1
    return init(**options)
wandb.init = init_soon
bus.emit(train(1)[0])
bus.flush()
term.termlog("back")
bus.close()
"""
    ran = run_script(script, tmp_path, WANDB_API_KEY=KEY, WANDB_BASE_URL="http://127.0.0.1:9")

    assert [line for line in ran.stderr.splitlines() if line.startswith("wandb:")] == [
        "wandb: ERROR loud",
        "wandb: back",
    ], ran.stderr


@pytest.mark.slow
def test_a_refused_login_on_a_thread_is_one_line(tmp_path: Path) -> None:
    """Nothing else is printed, also where the program logs everything, and the program goes on."""
    script = """
import logging, sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

class Refusing(BaseHTTPRequestHandler):
    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"] or 0))
        self.send_response(401)
        self.end_headers()
    do_GET = do_POST
    def log_message(self, *args):
        pass

server = ThreadingHTTPServer(("127.0.0.1", 0), Refusing)
Thread(target=server.serve_forever, daemon=True).start()

import os
os.environ["WANDB_BASE_URL"] = f"http://127.0.0.1:{server.server_address[1]}"
from eventloop import Bus
from eventloop.events.run import Run
from eventloop.writers import WandbWriter
from tests.writers.conftest import train

logging.basicConfig(level=logging.INFO)
bus = Bus()
WandbWriter("digits", mode="online", offload="thread").attach(bus, lambda: Run(sys.argv[1]))
bus.emit(train(1)[0])
bus.close()
"""
    ran = run_script(script, tmp_path, WANDB_API_KEY=KEY)

    (line,) = ran.stderr.splitlines()
    assert "W&B cannot be used: " in line
    assert "401" in line
    assert ran.stdout == ""


def test_a_truncated_file_gives_its_whole_rows(tmp_path: Path) -> None:
    """A kill may cut the file anywhere, also in its header."""
    folder = tmp_path / "wandb" / "offline-run-1-abc"
    folder.mkdir(parents=True)
    for data in (b"", b":W&B", b":W&B\xe1\xbe\x00\x01\x02"):
        (folder / "run-abc.wandb").write_bytes(data)

        assert [*read_history(tmp_path, "abc")] == []


@pytest.mark.slow
def test_records_of_more_than_a_block_are_read(attach: Attach, tmp_path: Path) -> None:
    """A text that crosses two blocks of the file comes back whole."""
    text = "x" * 100_000

    write(attach(make()), TextLogged(step=1, name="note", text=text), *train(1), AfterRun())

    assert points(tmp_path) == [("train/note", 1, text), ("train/loss", 1, 0.25)]


def test_a_hang_is_of_a_server_whose_log_is_named(
    attach: Attach, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The URL has no password."""
    writer = make()
    attach(writer)

    assert writer.waits_for == f"W&B, whose log is {tmp_path}/wandb/debug-internal.log"
    monkeypatch.setenv("WANDB_BASE_URL", "http://me:pw1@host")
    assert writer.waits_for.startswith("W&B at http://me:***@host, whose log is ")


@pytest.mark.slow
def test_a_script_that_closes_nothing_ends_without_a_failure(tmp_path: Path) -> None:
    """At exit the writer on a thread ends its run before wandb ends its service."""
    script = """
import sys
import torch
from eventloop import Trainer
from eventloop.writers import WandbWriter

model = torch.nn.Linear(2, 1)
Trainer(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), loss_fn=torch.nn.functional.mse_loss,
        train_loader=[(torch.ones(4, 2), torch.ones(4, 1))] * 20, max_epochs=1, work_dir=sys.argv[1],
        writers=[WandbWriter("digits", mode="offline", offload="thread")]).train()
"""
    ran = run_script(script, tmp_path, WANDB_SILENT="true")

    assert "WandbWriter" not in ran.stderr
    assert [step for name, step, _ in points(tmp_path) if name == "train/loss"] == [10, 20]


@pytest.mark.slow
def test_texts_that_are_not_utf8_have_escapes(attach: Attach, tmp_path: Path) -> None:
    """The name of a run, its group and its tags may be names of files, and wandb takes no other texts."""
    bad = os.fsdecode(b"caf\xe9")
    write(attach(make(run_name=bad, group=bad, tags=[bad])), *train(1), AfterRun())

    runs = [record.run for record in read_records(tmp_path, run_id(tmp_path)) if record.HasField("run")]
    run = runs[0]
    assert (run.display_name, run.run_group, [*run.tags]) == ("caf\\udce9", "caf\\udce9", ["caf\\udce9"])
    assert points(tmp_path) == [("train/loss", 1, 0.25)]
