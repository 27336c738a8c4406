"""How a run ended, at the edges: a signal in its last iteration or after it, an error or a dead worker after a signal."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.forked import ROOT
from tests.writers.otlp_collector import Collector, is_missing

if is_missing("opentelemetry.proto"):
    pytest.skip(
        "opentelemetry-proto is not installed, so the end of a run is NOT tested: "
        "pip install 'torch-eventloop[otlp]'",
        allow_module_level=True,
    )

pytestmark = pytest.mark.slow

PROGRAM = """
import os, signal, sys
from pathlib import Path
import torch
from eventloop import Bus, Trainer
from eventloop.hooks import PreemptionHook
from eventloop.writers import OpenTelemetryWriter

offload, event, at, then, folder, url = sys.argv[1:]
model = torch.nn.Linear(4, 3)
trainer = Trainer(
    model, optimizer=torch.optim.SGD(model.parameters(), 0.1),
    train_loader=[(torch.randn(2, 4), torch.zeros(2, dtype=torch.long))] * 4,
    loss_fn=torch.nn.functional.cross_entropy, max_epochs=1, work_dir=folder, hooks=[PreemptionHook()],
    writers=[OpenTelemetryWriter(url, offload=offload)], bus=Bus(drain_timeout=60.0),
    default_hooks={"checkpoint": None},
)

@trainer.bus.on(event, start=int(at) - 1, once=True)
def end(event):
    os.kill(os.getpid(), signal.SIGTERM)

@trainer.bus.on("preemption_requested")
def follow(event):
    if then == "error":
        raise ValueError("nan")
    if then == "death":
        trainer.bus.flush()
        tasks = Path("/proc/self/task").glob("*/children")
        for pid in [int(pid) for task in tasks for pid in task.read_text().split()]:
            if b"eventloop" in Path(f"/proc/{pid}/cmdline").read_bytes():
                os.kill(pid, signal.SIGKILL)
                print("killed the worker", flush=True)

trainer.train()
"""


@pytest.mark.parametrize(
    ("offload", "event", "at", "then", "code", "error"),
    [
        ("thread", "after_train_iter", 4, "", 143, "preempted by SIGTERM"),
        ("thread", "after_train", 1, "", 143, ""),
        ("thread", "after_train_iter", 2, "error", 1, "ValueError: nan"),
        pytest.param(
            "process",
            "after_train_iter",
            2,
            "death",
            143,
            "preempted by SIGTERM",
            marks=pytest.mark.skipif(sys.platform != "linux", reason="finds the worker in /proc"),
        ),
    ],
    ids=["in-the-last-iteration", "after-the-training", "then-an-error", "then-a-dead-worker"],
)
def test_the_reason_of_the_run_decides(
    tmp_path: Path, collector: Collector, offload: str, event: str, at: int, then: str, code: int, error: str
) -> None:
    """The span of the run has the error, or the signal that the run took as its reason, whoever has seen what."""
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM, offload, event, str(at), then, str(tmp_path), collector.url],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ended.returncode == code, ended.stderr
    assert ("killed the worker" in ended.stdout) == (then == "death")

    (of_run,) = {span.span_id: span for span in collector.spans() if span.name == "run"}.values()
    assert of_run.status.message == error
    assert of_run.status.code == (2 if error else 0)
