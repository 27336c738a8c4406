"""A training whose own code Ctrl-C interrupts, at whatever line, leaves nothing behind."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from eventloop import Trainer
from eventloop.hooks import preemption
from eventloop.metrics import get_event_storage
from eventloop.model import training_modes
from eventloop.ownership import acquiring, holding, read_owner, run_ownership
from eventloop.state import undo
from eventloop.stops import signals, stopping
from eventloop.training import scopes
from eventloop.training import trainer as trainer_module
from tests.support.cutting import each_cut
from tests.support.trainers import build_trainer

OWN: list[ModuleType] = [
    scopes,
    trainer_module,
    undo,
    contextlib,
    run_ownership,
    acquiring,
    holding,
    signals,
    stopping,
    preemption,
    training_modes,
]
"""The modules that begin and end a run; Python itself drops an interrupt in a generator that it frees, as `loops` has."""


def left(trainer: Trainer) -> dict[str, Any]:
    """What a run changes outside of the model and its counters."""
    with pytest.raises(RuntimeError, match="found no storage"):
        get_event_storage()
    return {
        "running": (trainer.running, trainer.delivering, trainer.passing, trainer.mode),
        "owner": read_owner(trainer.work_dir),
        "signals": [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)],
        **{stats.name: "subscribed" for stats in trainer.bus.stats()},
        "modes": [module.training for module in trainer.model.modules()],
        "heartbeats": [each.name for each in threading.enumerate() if each.name == "eventloop heartbeat"],
        "open": sorted(os.readlink(f"/proc/self/fd/{each}") for each in _descriptors()),
    }


def _descriptors() -> list[str]:
    """The open directories: those of files and pipes come and go with threads."""
    found = os.listdir("/proc/self/fd")
    return [each for each in found if os.path.isdir(f"/proc/self/fd/{each}") and _is_of_a_run(each)]


def _is_of_a_run(descriptor: str) -> bool:
    with contextlib.suppress(OSError):
        return os.readlink(f"/proc/self/fd/{descriptor}").endswith("/run")
    return False


def by_hand(trainer: Trainer) -> None:
    """Train in a loop of one's own."""
    for _ in trainer.epochs():
        for inputs, target in trainer.batches(trainer.train_loader or []):
            trainer.outputs = {"loss": trainer.loss_fn(trainer.model(inputs), target)}  # type: ignore[misc]


WAYS: dict[str, Callable[[Trainer], object]] = {"train": Trainer.train, "by hand": by_hand}


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="needs the list of open files")
@pytest.mark.parametrize(
    ("way", "modules"),
    [
        pytest.param("train", [scopes, holding], id="some lines"),
        pytest.param("train", OWN, marks=pytest.mark.slow, id="train"),
        pytest.param("by hand", OWN, marks=pytest.mark.slow, id="by hand"),
    ],
)
def test_an_interrupted_training_leaves_nothing(tmp_path: Path, way: str, modules: list[ModuleType]) -> None:
    """No owner, no handler of a signal, no open directory, no storage; and it can be trained on to the end."""
    trainer, work = build_trainer(tmp_path / "run", max_iters=1), WAYS[way]
    lines = 0

    def train() -> None:
        trainer.iter = 0
        work(trainer)

    train()
    before = left(trainer)
    for line in each_cut(modules, train):
        assert left(trainer) == before, f"line {line}"
        train()
        assert (trainer.iter, left(trainer)) == (1, before), f"line {line}"
        lines += 1

    assert lines > 50
    trainer.close()
