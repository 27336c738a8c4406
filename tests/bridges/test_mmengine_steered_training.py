"""The bus in a runner of MMEngine whose hooks steer it: runs within a run, stops, errors, other optimizers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("mmengine", reason="mmengine is not installed: pip install 'torch-eventloop[mmengine]'")

from tests.bridges.test_mmengine import Accuracy, loader, runner  # isort: skip  # silences a warning of torch

from mmengine.hooks import Hook
from mmengine.optim import OptimWrapper
from mmengine.runner import Runner

from eventloop.bridges.mmengine import EventLoopHook
from eventloop.costs.records import read_costs
from eventloop.writers import JSONLWriter, read_jsonl
from tests.support.steered import callback_at, outcome

pytestmark = pytest.mark.filterwarnings("ignore")  # MMEngine's own, of every kind

PARTS = ("Run", "Train", "TrainEpoch", "Val", "ValEpoch", "Test")


def at(method: str, number: int, do: Callable[[Runner], object]) -> Any:
    """Return a hook that calls a function with the runner at one call of one method."""
    return callback_at(Hook, method, number, lambda runner, *args: do(runner))


class Count(Hook):  # type: ignore[misc]
    """Count the iterations of the training that all other hooks have seen."""

    priority = "LOWEST"
    iterations = 0

    def after_train_iter(self, *args: Any, **kwargs: Any) -> None:
        self.iterations += 1


def stop(runner: Runner) -> None:
    runner.train_loop.stop_training = True


def fail(runner: Runner) -> None:
    raise OSError("broken")


def caught(runner: Runner) -> None:
    """Catch the error of a validation within the training."""
    evaluator, runner.val_loop.evaluator = runner.val_loop.evaluator, None
    with pytest.raises(AttributeError):
        runner.val_loop.run()
    runner.val_loop.evaluator = evaluator


def validate(runner: Runner) -> None:
    runner.val()
    runner.model.train()


def run_test(runner: Runner) -> None:
    runner.test()
    runner.model.train()


def save(runner: Runner) -> None:
    runner.save_checkpoint(runner.work_dir, "mid.pth")
    runner.load_checkpoint(str(Path(runner.work_dir, "mid.pth")))


def longer(runner: Runner) -> None:
    runner.train_loop._max_epochs = 3


def other_loader(runner: Runner) -> None:
    runner.train_loop.dataloader = loader(2)


STEERS = {
    each.__name__: each for each in (stop, fail, caught, validate, run_test, save, longer, other_loader)
}
MOMENTS = {
    "before_run": 1,
    "before_train": 1,
    "before_train_epoch": 2,
    "before_train_iter": 3,
    "after_train_iter": 3,
    "after_train_epoch": 1,
    "before_val_epoch": 1,
    "after_val_iter": 1,
    "after_val_epoch": 1,
    "after_val": 1,
    "after_train": 1,
    "after_run": 1,
}


@pytest.mark.slow
@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("steer", STEERS)
def test_a_steered_runner_trains_as_without_the_bridge(tmp_path: Path, moment: str, steer: str) -> None:
    """A runner that its user steers ends with the weights, counters and errors that it has without the bridge."""
    found = []
    attachment = EventLoopHook(work_dir=tmp_path / "attachment")
    seen: list[str] = []
    attachment.bus.on("*")(lambda event: seen.append(type(event).__name__))
    for hooks in ([], [attachment]):
        steers, count = at(moment, MOMENTS[moment], STEERS[steer]), Count()
        tests: dict[str, Any] = {"test_dataloader": loader(1), "test_cfg": {}, "test_evaluator": [Accuracy()]}
        ours = runner(tmp_path, steers, *hooks, count, **tests)
        ends: list[Any] = []
        for _ in range(2):
            ends.append(outcome(ours.train))
            ends += [getattr(ours.train_loop, name, None) for name in ("iter", "epoch", "stop_training")]
        found.append((ends, [each.detach().clone() for each in ours.model.parameters()]))

    (alone, weights), (ours_ends, own) = found
    assert ours_ends == alone
    assert all(torch.equal(a, b) for a, b in zip(weights, own, strict=True))
    for part in PARTS:
        assert seen.count(f"Before{part}") == seen.count(f"After{part}"), part
    assert seen.count("AfterTrainIter") == count.iterations


def test_optimizers_that_a_program_changes(tmp_path: Path) -> None:
    """The logged rate, and the events of a step, are those of the optimizer that makes the step."""
    attachment = EventLoopHook(work_dir=tmp_path / "attachment", writers=[JSONLWriter()])
    stepped: list[str] = []
    attachment.bus.on("after_optimizer_step", "after_backward")(
        lambda event: stepped.append(type(event).__name__)
    )

    def change(runner: Runner) -> None:
        runner.optim_wrapper = OptimWrapper(torch.optim.SGD(runner.model.parameters(), lr=0.025))
        runner.optim_wrapper.initialize_count_status(runner.model, runner.iter, runner.max_iters)

    runner(tmp_path, at("before_train_epoch", 2, change), attachment).train()

    lines = list(read_jsonl(tmp_path / "attachment" / "metrics.jsonl"))
    assert [line["lr"] for line in lines if "lr" in line] == [0.1, 0.025]
    assert stepped == ["AfterBackward", "AfterOptimizerStep"] * 8


def test_another_hook_fails_at_the_end(tmp_path: Path) -> None:
    """A hook that fails after the training hides neither its error nor the next training."""
    attachment = EventLoopHook(work_dir=tmp_path / "attachment", writers=[JSONLWriter()])
    seen: list[str] = []
    attachment.bus.on("before_run", "after_run")(lambda event: seen.append(type(event).__name__))
    ours = runner(tmp_path, at("after_run", 1, fail), attachment)

    with pytest.raises(OSError, match="broken"):
        ours.train()
    longer(ours)
    ours.train()

    assert seen == ["BeforeRun", "AfterRun"] * 2
    assert ours.epoch == 3


@pytest.mark.parametrize(("number", "outcome"), [(1, "runner.train_loop.stop_training"), (8, "completed")])
def test_a_stop_of_the_host_is_the_reason(tmp_path: Path, number: int, outcome: str) -> None:
    """A training that a hook stops before its last iteration is not complete, and says who stopped it."""
    attachment = EventLoopHook(work_dir=tmp_path / "attachment")

    runner(tmp_path, at("after_train_iter", number, stop), attachment).train()

    assert read_costs(tmp_path / "attachment").outcome == outcome
