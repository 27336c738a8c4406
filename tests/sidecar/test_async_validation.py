"""Test the hook that validates in another process, with real child processes."""

from __future__ import annotations

import copy
import os
import random
import re
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from eventloop import Trainer
from eventloop.checkpoint import load_checkpoint
from eventloop.commands.record import NAME, read_record
from eventloop.evaluation.schedule import Never
from eventloop.hooks import AsyncValidationHook, CheckpointHook, EMAHook
from eventloop.hooks.checkpoint import CheckpointHook as Saves
from eventloop.sidecar.child import EvaluatorProcess
from eventloop.writers.jsonl import read_jsonl
from tests.sidecar.jobs import BUILD, EPOCHS, build, build_aside, build_both, build_both_aside
from tests.support.interrupted import assert_same
from tests.support.trainers import DEADLINE, MakeTrainer, batches, collect, shuffled

torch.set_num_threads(1)


def weights(trainer: Trainer) -> dict[str, Any]:
    """The weights and buffers of a trainer."""
    return {name: value.tolist() for name, value in trainer.model.state_dict().items()}


def validations(trainer: Trainer) -> list[dict[str, Any]]:
    """The rows of the validations that a writer got, sorted by step."""
    rows = [row for row in read_jsonl(trainer.work_dir / "metrics.jsonl") if row.get("mode") == "val"]
    return sorted(rows, key=lambda row: row["step"])


@pytest.mark.slow
def test_a_run_is_the_same_with_it(tmp_path: Path) -> None:
    """Weights are to the bit those of a run without validations, metrics those of validations within, before the training
    too, and the best checkpoint is the same; each checkpoint counts once, in order."""
    plain, within, aside = (
        build(tmp_path / "plain"),
        build(tmp_path / "within", val_before_train=True),
        build_aside(tmp_path / "aside", val_before_train=True),
    )
    plain.schedule = Never()
    came = collect(aside, "checkpoint_evaluated")
    for trainer in (plain, within, aside):
        torch.manual_seed(1)
        trainer.train()
        trainer.close()

    assert weights(aside) == weights(plain)
    assert validations(aside) == validations(within)
    assert [event.epoch for event in came] == [*range(EPOCHS + 1)]
    best = [next(hook for hook in each.hooks if isinstance(hook, Saves)).best for each in (within, aside)]
    assert best[0] == best[1]


@pytest.mark.slow
def test_both_weights_come_back(tmp_path: Path) -> None:
    """With validate="both" the child reports the metrics of the weights and of the average, those of validations within,
    and the best checkpoint by the average's is the same."""
    within, aside = build_both(tmp_path / "within"), build_both_aside(tmp_path / "aside")
    for trainer in (within, aside):
        torch.manual_seed(1)
        trainer.train()
        trainer.close()

    assert validations(aside) == validations(within)
    assert "ema/accuracy" in validations(aside)[-1]
    best = [next(hook for hook in each.hooks if isinstance(hook, Saves)).best for each in (within, aside)]
    assert best[0] == best[1]


def kill_at_random(trainer: Trainer, seed: int) -> Callable[[], int]:
    """Kill the evaluator of a training at random moments, until the returned function is called, which counts."""
    hook = next(hook for hook in trainer.hooks if isinstance(hook, AsyncValidationHook))
    drawn, ended, kills = random.Random(seed), threading.Event(), list[int]()

    def kill() -> None:
        while not ended.wait(drawn.uniform(0.1, 6) if kills else 0.1):  # its start takes some three seconds
            process: EvaluatorProcess | None = vars(hook)["_process"]
            if process is not None and (pid := process.pid) is not None and len(kills) < 3:
                os.kill(pid, signal.SIGKILL)
                kills.append(pid)

    thread = threading.Thread(target=kill)
    thread.start()

    def end() -> int:
        ended.set()
        thread.join()
        return len(kills)

    return end


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_an_evaluator_may_be_killed(tmp_path: Path, seed: int) -> None:
    """Whenever evaluators are killed, each checkpoint counts exactly once, in order, with the same metrics."""
    within, aside = build(tmp_path / "within"), build_aside(tmp_path / "aside")
    came = collect(aside, "checkpoint_evaluated")
    torch.manual_seed(1)
    within.train()
    end = kill_at_random(aside, seed)
    try:
        torch.manual_seed(1)
        aside.train()
    finally:
        kills = end()

    assert kills
    assert [event.epoch for event in came] == [*range(1, EPOCHS + 1)]
    assert validations(aside) == validations(within)
    recorded = [each.arguments["epoch"] for each in read_record(aside.work_dir / NAME)]
    assert recorded == [*range(1, EPOCHS + 1)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("function", "text"),
    [
        ("build_wrongly", "RuntimeError: the data set is not there"),
        ("build_with_faulty_validation", "RuntimeError: the validation is wrong"),
    ],
)
def test_an_evaluator_that_fails(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, function: str, text: str
) -> None:
    """An evaluator that fails is reported once, with its error; the training goes on, and does not wait for it."""
    hooks = [
        CheckpointHook(1),
        EMAHook(),
        AsyncValidationHook(f"tests.sidecar.jobs:{function}", wait=DEADLINE),
    ]
    trainer = build(tmp_path / "run", hooks=hooks)
    trainer.train()

    assert trainer.epoch == EPOCHS
    errors = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert len(errors) == 1
    assert "are not validated from now on, and the training goes on" in errors[0]
    assert text in errors[0]
    assert text in (trainer.work_dir / "evaluator" / "output.log").read_text()


@pytest.mark.slow
def test_the_evaluator_ends_with_the_training(tmp_path: Path) -> None:
    """No process is left when `train` returns, whether it has validated everything or not."""
    hook, pids = AsyncValidationHook(BUILD, wait=0), list[int]()
    trainer = build(tmp_path / "run", hooks=[CheckpointHook(1), EMAHook(), hook])

    def handle(trainer: Trainer, event: Any) -> None:
        for look in trainer.ownership.each_second:
            look()
        pids.append(vars(hook)["_process"].pid)

    trainer.bus.subscribe(handle, "after_train_iter", once=True, name="handle")
    trainer.train()

    assert pids
    with pytest.raises(ProcessLookupError):
        os.kill(pids[0], 0)


def child_processes() -> set[str]:
    """The ids of the child processes of this process, of all its threads."""
    return {pid for file in Path("/proc/self/task").glob("*/children") for pid in file.read_text().split()}


def test_an_evaluator_that_is_started_by_several_threads(tmp_path: Path) -> None:
    """One process is started, whichever threads poll at one moment, and none is left after the end."""
    before = child_processes()
    for number in range(5):
        (run := tmp_path / str(number)).mkdir()
        evaluator = EvaluatorProcess(run, BUILD, None, 1)
        with ThreadPoolExecutor(4) as threads:
            list(threads.map(EvaluatorProcess.poll, [evaluator] * 4))
            assert len(child_processes() - before) == 1
            list(threads.map(lambda call: call(), [evaluator.poll, evaluator.end, evaluator.poll]))

    assert child_processes() <= before


# --- without a child ---------------------------------------------------------------------------------------


def aside(make_trainer: MakeTrainer, hook: AsyncValidationHook, **changes: Any) -> Trainer:
    """A training whose checkpoints are validated elsewhere, if at all."""
    return make_trainer(
        **{
            "train_loader": batches(1),
            "val_loader": batches(1),
            "hooks": [CheckpointHook(1), hook],
            **changes,
        }
    )


def test_the_training_does_not_validate(make_trainer: MakeTrainer) -> None:
    """With the hook no validation is scheduled, also where the trainer was given an interval."""
    trainer = aside(make_trainer, AsyncValidationHook(None, wait=0), val_interval=1)
    seen = collect(trainer, "before_val")
    trainer.train()

    assert seen == []


def test_initial_weights_are_saved_for_their_validation(make_trainer: MakeTrainer) -> None:
    """With `val_before_train=True` there is a checkpoint of iteration 0; a run resumed from it saves it no second time,
    and ends with the same weights."""
    changes = {"train_loader": shuffled(2), "val_before_train": True}
    trainer = aside(make_trainer, AsyncValidationHook(None, wait=0), **changes)
    initial = dict(copy.deepcopy(trainer.model.state_dict()))
    trainer.train()
    resumed = aside(
        make_trainer, AsyncValidationHook(None, wait=0), **{**changes, "train_loader": shuffled(2)}
    )
    resumed.resume("epoch_0")
    saved = collect(resumed, "checkpoint_saved")
    resumed.train()

    assert_same(load_checkpoint(trainer.work_dir / "epoch_0")["state_dict"], initial)
    assert [Path(event.path).name for event in saved] == ["epoch_1", "epoch_2"]
    assert weights(resumed) == weights(trainer)


def test_a_dev_run_validates_within(make_trainer: MakeTrainer) -> None:
    """`fast_dev_run` starts no evaluator, and validates at its end to show that it works."""
    trainer = aside(make_trainer, AsyncValidationHook(BUILD), fast_dev_run=True)
    seen = collect(trainer, "after_val")
    trainer.train()

    assert len(seen) == 1
    assert not (trainer.work_dir / "evaluator").exists()


def test_the_wait_at_the_end_is_bounded(make_trainer: MakeTrainer, caplog: pytest.LogCaptureFixture) -> None:
    """If nobody validates, the end of the training waits no longer than `wait` seconds, and says what is left."""
    trainer = aside(make_trainer, AsyncValidationHook(None, wait=0.3))
    began = time.monotonic()
    trainer.bus.subscribe(lambda trainer, event: None, "after_train")
    trainer.train()

    assert time.monotonic() - began >= 0.3
    assert re.search(
        "2 checkpoints of .* are not validated: `eventloop evaluate` validates them", caplog.text
    )


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"val_loader": None}, "AsyncValidationHook needs a validation: give the Trainer a val_loader"),
        (
            {"hooks": [CheckpointHook(), AsyncValidationHook(None)]},
            r"validates checkpoints, and no CheckpointHook sav",
        ),
    ],
)
def test_trainers_it_refuses(make_trainer: MakeTrainer, changes: dict[str, Any], match: str) -> None:
    """A trainer without validations, or without checkpoints at an interval, is refused."""
    with pytest.raises(ValueError, match=match):
        aside(make_trainer, AsyncValidationHook(None), **changes)


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"build": "build"}, ValueError, "expected 'module:function' or .*, got 'build'"),
        (
            {"build": "__main__:build"},
            ValueError,
            "a module that another process can import, got '__main__:build'",
        ),
        ({"wait": -1}, ValueError, "wait must be at least 0, got -1"),
        ({"max_waiting": 0}, ValueError, "max_waiting must be at least 1, got 0"),
    ],
)
def test_options_it_refuses(options: dict[str, Any], error: type[Exception], match: str) -> None:
    """Options out of range are refused, and names of functions that another process cannot find."""
    with pytest.raises(error, match=match):
        AsyncValidationHook(**{"build": None, **options})
