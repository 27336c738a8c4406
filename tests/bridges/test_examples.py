"""The examples of the bridges run."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from eventloop.costs.records import read_costs
from eventloop.writers import read_jsonl
from tests import forked
from tests.test_examples import EXAMPLES


@pytest.mark.slow
@pytest.mark.parametrize("host", ["ignite", "lightning", "mmengine", "transformers"])
def test_example(host: str) -> None:
    """The example of a host trains, and its handlers print losses."""
    if find_spec(host) is None:
        pytest.skip(f"{host} is not installed: pip install 'torch-eventloop[{host}]'")

    ran = forked.run([EXAMPLES / f"{host}_bridge.py"], env={**os.environ, "PYTHONPATH": forked.ROOT})

    assert ran.returncode == 0, ran.stderr
    assert "\n31 " in "\n" + ran.stdout


OTHERS = {
    "lightning_callbacks": (
        "EarlyStopping.on_train_epoch_end (lightning)",
        "EarlyStopping of Lightning set trainer.should_stop",
    ),
    "transformers_callbacks": (
        "EarlyStoppingCallback.on_evaluate (transformers)",
        "{'eval_accuracy': '0.9",  # of PrinterCallback
        "EarlyStoppingCallback of Transformers set control.should_training_stop",
        "{'accuracy': 0.9",  # of the best weights
    ),
    "ignite_handlers": (
        "Engine.EarlyStopping at COMPLETED (ignite)",
        "epoch 1: lr 0.489, running average of the loss ",
        "EarlyStopping of an ignite engine called terminate()",
    ),
    "mmengine_hooks": (
        "EMAHook.before_val_epoch (mmengine)",
        "accuracy of the average 0.9",
        "EarlyStoppingHook of MMEngine set stop_training",
    ),
}
"""The examples of other engines' callbacks, each with what it prints: a row of the plan, an effect, why it stopped."""


@pytest.mark.slow
@pytest.mark.parametrize("example", OTHERS)
def test_example_of_callbacks(example: str) -> None:
    """Callbacks of another engine have their rows in the plan, and one of them stops the training."""
    host = example.partition("_")[0]
    if find_spec(host) is None:
        pytest.skip(f"{host} is not installed: pip install 'torch-eventloop[{host}]'")

    ran = forked.run([EXAMPLES / f"{example}.py"], env={**os.environ, "PYTHONPATH": forked.ROOT})

    assert ran.returncode == 0, ran.stderr
    assert [text for text in OTHERS[example] if text not in ran.stdout] == []


needs_accelerate = pytest.mark.skipif(
    find_spec("accelerate") is None, reason="accelerate is not installed: pip install accelerate"
)


@pytest.mark.slow
@needs_accelerate
def test_accelerate_example(tmp_path: Path) -> None:
    """The loop with Accelerate learns digits, and is stopped by a hook of eventloop."""
    ran = forked.run(
        [EXAMPLES / "accelerate_loop.py", tmp_path], env={**os.environ, "PYTHONPATH": forked.ROOT}
    )

    assert ran.returncode == 0, ran.stderr
    assert "early stopping: accuracy has not become better" in ran.stdout
    assert max(validated(tmp_path)) > 0.9


@pytest.mark.slow
@needs_accelerate
def test_accelerate_example_on_two_ranks(tmp_path: Path) -> None:
    """Two processes share the batches, stop after the same epoch, and write one metrics file."""
    ran = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
            *(EXAMPLES / "accelerate_loop.py", tmp_path),
        ],
        env={
            **os.environ,
            "PYTHONPATH": forked.ROOT,
            "ACCELERATE_USE_CPU": "1",
            "GLOO_SOCKET_IFNAME": "lo",
            "OMP_NUM_THREADS": "1",
        },
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )

    assert ran.returncode == 0, ran.stdout + ran.stderr
    epochs = len(validated(tmp_path))
    assert ran.stdout.count("accuracy 0.") == epochs  # `accelerator.print` prints on rank 0 alone
    iterations = [read_costs(tmp_path, rank).phases.iterations for rank in range(2)]
    assert iterations == [epochs * 23] * 2  # 1,437 digits in 45 batches


def validated(folder: Path) -> list[float]:
    """Return the accuracies in the metrics file of a run."""
    lines = read_jsonl(folder / "metrics.jsonl")
    return [line["accuracy"] for line in lines if line.get("mode") == "val"]
