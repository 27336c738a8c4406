"""Test `eventloop evaluate` as a user runs it."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from eventloop.commands.messages import Answer
from eventloop.sidecar.evaluator import owning_evaluations
from eventloop.writers.jsonl import read_jsonl
from tests import forked
from tests.cli.conftest import ENVIRONMENT
from tests.forked import Forked
from tests.sidecar.jobs import EPOCHS, build

Evaluate = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run that has ended, of the job in a file of its own."""
    (tmp_path / "job.py").write_text("from tests.sidecar.jobs import *\n")
    trainer = build(tmp_path / "run")
    trainer.train()
    trainer.close()
    return trainer.work_dir


@pytest.fixture
def evaluate(tmp_path: Path) -> Evaluate:
    """Run the command in the folder of the job."""

    def call(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
        return forked.run(["-m", "eventloop", "evaluate", *arguments], cwd=tmp_path, env=ENVIRONMENT)

    return call


def test_a_run_that_ended_is_validated(run: Path, evaluate: Evaluate) -> None:
    """A line is printed for each checkpoint, the oldest first, and a second call has nothing left to do."""
    ran = evaluate(run, "job:build")
    assert (ran.returncode, ran.stderr) == (0, "")
    within = [row for row in read_jsonl(run / "metrics.jsonl") if row.get("mode") == "val"]
    assert ran.stdout.splitlines() == [
        f"epoch_{row['epoch']} (iteration {row['step']}): accuracy {row['accuracy']:.6g}, loss {row['loss']:.6g}"
        for row in within
    ]

    again = evaluate(run, "job:build", "--follow")
    assert (again.returncode, again.stdout) == (0, "")
    assert f"{EPOCHS} checkpoints were validated before" in again.stderr


def test_the_best_one_is_shown_again(run: Path, evaluate: Evaluate) -> None:
    """The best checkpoint that was validated before is printed with its metrics, or with the word that nobody has them."""
    validated = evaluate(run, "job:build", "--checkpoints", "best").stdout
    name = validated.partition(" ")[0]

    again = evaluate(run, "job:build", "--checkpoints", "best")

    assert again.stdout == validated.replace(":", ", validated before:", 1)
    assert again.stderr == (
        f"eventloop: 1 checkpoint was validated before: --checkpoints {name}, its name, validates it again\n"
    )

    for sent in (run / "inbox").glob("*.json"):
        answer = Answer(id=sent.stem, command="evaluated", outcome="refused", reason="no run has saved it")
        (run / "outbox").mkdir(exist_ok=True)
        (run / "outbox" / sent.name).write_bytes(msgspec.json.encode(answer))
        sent.unlink()
    lost = evaluate(run, "job:build", "--checkpoints", "best")
    assert lost.stdout.endswith(", validated before: its metrics are no longer known\n")


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (["elsewhere", "job:build"], "no directory at elsewhere: give the directory of a run"),
        (["run", "job"], "expected 'module:function' or 'path/to/file.py:function', got 'job'"),
        (["run", "jab:build"], "expected a module 'jab' in"),
        (["run", "job:bald"], "expected a function 'bald' in job, which has"),
        (["run", "job:build", "--checkpoints", "epoch_9"], "expected a checkpoint 'epoch_9'"),
        (
            ["run", "job:build", "--checkpoints", "all", "epoch_1"],
            "--checkpoints takes 'all' alone, got all epoch_1",
        ),
    ],
)
def test_bad_input(run: Path, evaluate: Evaluate, arguments: list[str], match: str) -> None:
    """Bad input is one line and exit code 2."""
    ran = evaluate(*arguments)

    assert ran.returncode == 2
    assert len(ran.stderr.splitlines()) == 1
    assert match in ran.stderr


def test_an_error_of_the_function_has_its_traceback(run: Path, evaluate: Evaluate) -> None:
    """An error of the program's own function is shown as Python shows it, with exit code 1."""
    ran = evaluate(run, "job:build_wrongly")

    assert ran.returncode == 1
    assert "Traceback" in ran.stderr
    assert "RuntimeError: the data set is not there" in ran.stderr


def test_a_damaged_checkpoint_is_exit_code_1(run: Path, evaluate: Evaluate) -> None:
    """A checkpoint that cannot be read is exit code 1; the others are validated."""
    (run / "epoch_1" / "state.pth").write_bytes(b"")
    ran = evaluate("run", "job:build")

    assert ran.returncode == 1
    assert "epoch_1 (iteration 4) was not validated" in ran.stdout
    assert len(ran.stdout.splitlines()) == EPOCHS


def test_another_evaluator_is_exit_code_2(run: Path, evaluate: Evaluate) -> None:
    """A second evaluator of a run is one line and exit code 2."""
    with owning_evaluations(run):
        ran = evaluate("run", "job:build")

    assert ran.returncode == 2
    assert "one evaluator at a time validates the checkpoints of a run" in ran.stderr


def test_a_live_run_is_followed(tmp_path: Path) -> None:
    """A follower reports to a training of another process while that lives, and ends after it with exit code 0."""
    (tmp_path / "job.py").write_text("from tests.sidecar.jobs import *\n")
    program = (
        "import json, time\n"
        "from tests.sidecar.jobs import build, EPOCHS\n"
        "from eventloop.hooks import CheckpointHook, EMAHook, AsyncValidationHook\n"
        "trainer = build('run', hooks=[CheckpointHook(1), EMAHook(), AsyncValidationHook(None, wait=100)])\n"
        "came = []\n"
        "trainer.bus.subscribe(lambda event: came.append(event.epoch), 'checkpoint_evaluated')\n"
        "trainer.bus.subscribe(lambda event: print('began', flush=True), 'before_train_epoch', once=True)\n"
        "trainer.train()\n"
        "print(json.dumps(came))\n"
    )
    options: dict[str, Any] = {"cwd": tmp_path, "env": ENVIRONMENT, "stdout": subprocess.PIPE}
    with Forked(["-c", program], **options) as training:
        assert training.stdout is not None
        assert training.stdout.readline() == "began\n"
        with Forked(["-m", "eventloop", "evaluate", "run", "job:build", "--follow"], **options) as follower:
            shown, _ = follower.communicate(timeout=120)
        out, _ = training.communicate(timeout=120)

    assert json.loads(out) == [*range(1, EPOCHS + 1)]
    assert (follower.returncode, training.returncode) == (0, 0)
    assert len(shown.splitlines()) == EPOCHS


def test_sigterm_cuts_a_validation_short(run: Path, tmp_path: Path) -> None:
    """A validation that a signal cuts short is not reported, and a later call does it again."""
    (tmp_path / "slow_job.py").write_text(
        "import time\n"
        "from tests.sidecar.jobs import build as other\n"
        "def step(trainer, batch):\n"
        "    print('validates', flush=True)\n"
        "    while not trainer.asked_to_stop:\n"
        "        time.sleep(0.01)\n"
        "    return {'accuracy': 0.0}\n"
        "def build():\n"
        "    return other(val_step=step)\n"
    )
    options: dict[str, Any] = {"cwd": tmp_path, "env": ENVIRONMENT, "stdout": subprocess.PIPE}
    with Forked(["-m", "eventloop", "evaluate", "run", "slow_job:build"], **options) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "validates\n"
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)

    assert process.returncode == 143
    assert not (run / "inbox").exists()
