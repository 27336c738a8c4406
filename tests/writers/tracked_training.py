"""A training with all four trackers, each 50 ms slower than it is, for a process of its own.

    python -c 'from tests.writers.tracked_training import main; main()' WORK_DIR COLLECTOR_URL [--kill-at ITERATION]

It resumes if there is a checkpoint. Its last line counts the calls that the training thread made into a tracker.
"""

from __future__ import annotations

import argparse
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import torch

from eventloop import Trainer
from eventloop.events import AfterTrainIter, Timed
from eventloop.hooks import CheckpointHook, LoggerHook
from eventloop.writers import (
    EventLogWriter,
    JSONLWriter,
    MLflowWriter,
    OpenTelemetryWriter,
    TrackioWriter,
    WandbWriter,
)
from eventloop.writers.tracker import TrackerWriter
from tests.support.trainers import batches, build_trainer

LATENCY = 0.05
ITERATIONS, EPOCHS, CHECKPOINT_EVERY = 40, 3, 25
KEY = "s3cr3t-of-the-collector"
KEYS = {
    "WANDB_API_KEY": "w4ndb" * 8,
    "MLFLOW_TRACKING_TOKEN": "s3cr3t-token-of-mlflow",
    "MLFLOW_TRACKING_PASSWORD": "s3cr3t-password-of-mlflow",
    "HF_TOKEN": "hf_s3cr3t0123456789",
}
"""Environment variables with keys of the trackers."""
METRICS = {"accuracy": 0.0}

on_training_thread: list[str] = []


class Slow:
    """Make each request of a tracker wait, and note calls on the program's main thread."""

    batch = 8  # so that a kill finds each tracker with a part of the run

    def send(self: Any, events: list[Timed]) -> None:
        _record("send")
        time.sleep(LATENCY)
        super().send(events)  # type: ignore[misc]

    def connect(self: Any, *args: Any) -> Any:
        _record("connect")
        time.sleep(LATENCY)
        return super().connect(*args)  # type: ignore[misc]

    def write_batch(self: Any, events: Any) -> None:
        _record("write_batch")
        super().write_batch(events)  # type: ignore[misc]


class SlowWandb(Slow, WandbWriter):
    """W&B, 50 ms away."""


class SlowMLflow(Slow, MLflowWriter):
    """MLflow, 50 ms away."""


class SlowTrackio(Slow, TrackioWriter):
    """Trackio, 50 ms away."""


class SlowOTLP(Slow, OpenTelemetryWriter):
    """A collector, 50 ms away."""


def _record(what: str) -> None:
    if threading.current_thread() is threading.main_thread() and os.environ.get("TRAINING") == str(
        os.getpid()
    ):
        on_training_thread.append(what)


def trackers(work_dir: Path, url: str, offload: str) -> list[TrackerWriter]:
    """All four, offline."""
    headers = {"authorization": KEY}
    return [
        SlowWandb("digits", mode="offline", offload=offload),
        SlowMLflow(f"sqlite:///{work_dir.parent}/mlflow.db", "digits", offload=offload),
        SlowTrackio("digits", offload=offload),
        SlowOTLP(url, headers=headers, offload=offload),
    ]


def make_training(work_dir: Path, url: str, offload: str) -> Trainer:
    """Return a trainer of some seconds, with a checkpoint in each epoch and a validation after it."""
    torch.manual_seed(0)
    return build_trainer(
        work_dir,
        train_loader=batches(ITERATIONS),
        val_loader=batches(2),
        max_epochs=EPOCHS,
        hooks=[CheckpointHook(CHECKPOINT_EVERY, by_epoch=False), LoggerHook(interval=1)],
        writers=[JSONLWriter(), EventLogWriter(), *trackers(work_dir, url, offload)],
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("work_dir", type=Path)
    parser.add_argument("url")
    parser.add_argument("--offload", default="auto")
    parser.add_argument("--kill-at", type=int)
    options = parser.parse_args()
    os.environ["TRAINING"] = str(os.getpid())
    trainer = make_training(options.work_dir, options.url, options.offload)
    if any(options.work_dir.glob("iter_*")):
        trainer.resume("auto")

    @trainer.bus.on("after_train_iter", priority=90)
    def pace(trainer: Trainer, event: AfterTrainIter) -> None:
        time.sleep(0.005)
        if event.iter == options.kill_at:
            _wait_for_files(trainer)
            os.kill(os.getpid(), signal.SIGKILL)

    trainer.train()
    trainer.close()
    failed = {stats.name: stats.error for stats in trainer.bus.stats() if stats.failed or stats.dropped}
    print(f"calls on the training thread: {on_training_thread}; failed: {failed}")  # noqa: T201


def _wait_for_files(trainer: Trainer) -> None:
    """Wait until the checkpoint and the run's own files are written, and each tracker has a part of the run."""
    while True:
        stats = {each.name: each for each in trainer.bus.stats()}
        own = not any(stats[name].queued for name in ("JSONLWriter", "EventLogWriter"))
        begun = all(stats[type(each).__name__].delivered for each in trainer.writers[2:])
        if own and begun and any(trainer.work_dir.glob("iter_*")):
            return
        time.sleep(0.01)
