"""How a run ended: each tracker has the same answer, which is that of the signal or error that ended the process."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tensorboard.plugins.hparams import api_pb2, metadata, plugin_data_pb2

from tests.forked import ROOT
from tests.writers.conftest import tensorboard
from tests.writers.otlp_collector import Collector, is_missing

if missing := [module for module in ("mlflow", "sqlalchemy", "opentelemetry.proto") if is_missing(module)]:
    pytest.skip(
        f"the end of a run is NOT tested with trackers, without {', '.join(missing)}: "
        "pip install 'torch-eventloop[mlflow,otlp]'",
        allow_module_level=True,
    )

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::DeprecationWarning")]

PROGRAM = """
import os, signal, sys
import torch
from eventloop import Bus, Trainer
from eventloop.hooks import PreemptionHook
from eventloop.writers import MLflowWriter, OpenTelemetryWriter, TensorBoardWriter

how, folder, url = sys.argv[1:]
writers = [
    MLflowWriter(f"sqlite:///{folder}/mlflow.db", offload="thread"), OpenTelemetryWriter(url, offload="thread"),
    TensorBoardWriter(hparams={"lr": 0.1}),
]
model = torch.nn.Linear(4, 3)
trainer = Trainer(
    model, optimizer=torch.optim.SGD(model.parameters(), 0.1),
    train_loader=[(torch.randn(2, 4), torch.zeros(2, dtype=torch.long))] * 4,
    loss_fn=torch.nn.functional.cross_entropy, max_epochs=1, work_dir=folder, hooks=[PreemptionHook()],
    writers=writers, bus=Bus(drain_timeout=60.0),
)

@trainer.bus.on("after_train_iter", start=1, once=True)
def end(event):
    if how.startswith("SIG"):
        os.kill(os.getpid(), getattr(signal, how))
    elif how == "error":
        raise ValueError("nan")
    elif how == "stop":
        trainer.stop("enough")

trainer.train()
"""


@pytest.mark.parametrize(
    ("how", "code", "mlflow", "span", "hparams"),
    [
        ("stop", 0, "FINISHED", "", "SUCCESS"),
        ("error", 1, "FAILED", "ValueError: nan", "FAILURE"),
        ("SIGTERM", 143, "KILLED", "preempted by SIGTERM", "FAILURE"),
        ("SIGINT", -2, "KILLED", "interrupted by Ctrl-C", "FAILURE"),
    ],
)
def test_each_tracker_has_the_end_of_the_process(
    tmp_path: Path, collector: Collector, how: str, code: int, mlflow: str, span: str, hparams: str
) -> None:
    """A complete or stopped run is finished, one with an error has failed, one that a signal ended was killed."""
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM, how, str(tmp_path), collector.url],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ended.returncode == code, ended.stderr

    client = importlib.import_module("mlflow").MlflowClient(f"sqlite:///{tmp_path}/mlflow.db")
    (run,) = client.search_runs([client.get_experiment_by_name("Default").experiment_id])
    assert run.info.status == mlflow
    (of_run,) = [found for found in collector.spans() if found.name == "run"]
    assert of_run.status.message.startswith(span)
    assert of_run.status.code == (2 if span else 0)
    board = tensorboard(tmp_path / "tensorboard").summary_metadata[metadata.SESSION_END_INFO_TAG]
    data = plugin_data_pb2.HParamsPluginData.FromString(board.plugin_data.content)
    assert api_pb2.Status.Name(data.session_end_info.status) == f"STATUS_{hparams}"
