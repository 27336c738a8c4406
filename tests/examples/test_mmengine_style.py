"""The run of MMEngine's form: what its config asks for happens, and being stopped and resumed changes nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from importlib import util
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from eventloop import HOOKS, Trainer
from eventloop.checkpoint import find_checkpoints
from eventloop.hooks import CheckpointHook, EMAHook

pytestmark = pytest.mark.slow

EXAMPLE = Path(__file__).parents[2] / "examples" / "mmengine_style.py"


class Runs(NamedTuple):
    """The same training twice: in one go, and stopped in mid-epoch and resumed by another trainer."""

    example: Any
    whole: Trainer
    resumed: Trainer

    def hook(self, trainer: Trainer, cls: type[Any]) -> Any:
        return self.example.hook_of(trainer, cls)


@pytest.fixture(scope="module")
def example() -> Iterator[Any]:
    """The example as a module, on one core: its model is too small for more. Its hook is not left in the registry."""
    spec = util.spec_from_file_location("mmengine_style", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = util.module_from_spec(spec)
    spec.loader.exec_module(module)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield module
    torch.set_num_threads(threads)
    HOOKS.forget("ScoreTableHook")


@pytest.fixture(scope="module")
def runs(example: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    """Both of them, ended by the early stop."""
    folder = tmp_path_factory.mktemp("mmengine_style")
    whole = example.build(str(folder / "whole"))
    whole.train()
    first = example.build(str(folder / "resumed"))
    example.stop_at(first, example.STOPPED_AT)
    first.train()
    first.close()
    assert (first.iter, first.batch_idx) == (example.STOPPED_AT, example.STOPPED_AT % 22)
    resumed = example.build(str(folder / "resumed"))
    resumed.resume("auto")
    resumed.train()
    yield Runs(example, whole, resumed)
    whole.close()
    resumed.close()


def test_script_runs(tmp_path: Path) -> None:
    """As a user starts it: it is stopped, resumes, stops early, and finds its best score in the best checkpoint."""
    torchs_own = (
        "ignore:Implicitly cleaning up:ResourceWarning"  # a directory of torch.distributed.nn's, in 2.6
    )
    ran = subprocess.run(
        [sys.executable, "-W", "error", "-W", torchs_own, EXAMPLE, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )

    assert ran.returncode == 0, ran.stderr
    assert ran.stderr == ""
    assert " 49  EMAHook.after_train_iter" in ran.stdout
    assert "stopped after 100 iterations: somebody needs the machine" in ran.stdout
    assert f"resuming from {tmp_path / 'iter_100'}" in ran.stdout
    assert "of 40 epochs: early stopping: accuracy has not become better in 3 validations" in ran.stdout
    best, again = ran.stdout.splitlines()[-1].removeprefix("best: ").split("; loaded and validated again: ")
    assert best.endswith(f", {again}")
    assert float(again.rstrip("%")) > 95


def test_resumed_run_ends_bitwise_as_the_uninterrupted_one(runs: Runs) -> None:
    """Weights and their average, rates, and the table of the example's own hook. The patience that was used up before the
    interruption counts, so both stop early with the same epoch; the two newest checkpoints and the best one are kept."""
    whole, resumed = runs.whole, runs.resumed
    assert whole.stop_reason == resumed.stop_reason
    assert str(whole.stop_reason).startswith("early stopping: accuracy has not become better in 3")
    assert whole.epoch == resumed.epoch < 40
    for trainer in (whole, resumed):
        best = runs.hook(trainer, CheckpointHook).best.name
        kept = {f"epoch_{trainer.epoch - 1}", f"epoch_{trainer.epoch}", best}
        assert {path.name for path in find_checkpoints(trainer.work_dir)} == kept
    averages = [runs.hook(trainer, EMAHook).ema_model.state_dict() for trainer in (whole, resumed)]
    tables = [runs.hook(trainer, runs.example.ScoreTableHook).rows for trainer in (whole, resumed)]

    for one, other in [(whole.model.state_dict(), resumed.model.state_dict()), (averages[0], averages[1])]:
        assert one.keys() == other.keys()
        assert all(torch.equal(value, other[name]) for name, value in one.items())
    assert whole.optimizer.param_groups[0]["lr"] == resumed.optimizer.param_groups[0]["lr"]
    assert tables[0] == tables[1]
    assert [epoch for epoch, _ in tables[0]] == [*range(1, whole.epoch + 1)]
