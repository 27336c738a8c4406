"""Commands to a training of MMEngine: each is applied by the runner's own means, or refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("mmengine", reason="mmengine is not installed: pip install 'torch-eventloop[mmengine]'")

from tests.bridges.test_mmengine import runner  # isort: skip  # silences a warning of torch

import mmengine.hooks
from mmengine.hooks import ParamSchedulerHook

from eventloop.bridges.mmengine import EventLoopHook
from tests.support.told import answers, outcomes, send_at

pytestmark = pytest.mark.filterwarnings("ignore")  # MMEngine's own, of every kind

POLY = {"type": "PolyLR", "by_epoch": False, "begin": 0, "end": 8, "eta_min": 0.0}
STEPS = {"type": "MultiStepLR", "by_epoch": True, "milestones": [1], "gamma": 0.1}
BY_ITER = {"by_epoch": False, "max_iters": 8, "val_interval": 4}


@pytest.fixture(autouse=True)
def _loads_its_own_checkpoints(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let MMEngine load its checkpoints, which have an object of its own that torch refuses by default."""
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")


class Rates(mmengine.hooks.Hook):  # type: ignore[misc]
    """Keep the rate of each update."""

    priority = "VERY_HIGH"

    def __init__(self) -> None:
        self.found: list[float] = []

    def before_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None) -> None:
        self.found += runner.optim_wrapper.get_lr()["lr"]


def same(one: torch.nn.Module, other: torch.nn.Module) -> bool:
    """Whether two modules have bitwise the same state."""
    pairs = zip(one.state_dict().values(), other.state_dict().values(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


def test_a_told_run(tmp_path: Path) -> None:
    """Notes, own commands, a pause and a stop are applied after their iteration; a rollback is refused by name.

    A run measured in epochs finishes its epoch, as after any stop.
    """
    attachment = EventLoopHook(work_dir=tmp_path)

    @attachment.command
    def add(trainer: Any, one: int) -> int:
        """Add one."""
        return one + 1

    told = [("note", "hello"), ("add", "1"), ("rollback",), ("pause",), ("go",)]
    send_at(attachment.bus, {2: told, 3: [("stop", "enough")]})

    ours = runner(tmp_path, attachment)
    ours.train()

    assert sorted(outcomes(tmp_path)) == sorted(
        [
            ("note", "applied", 2),
            ("add", "applied", 2),
            ("rollback", "refused", 2),
            ("pause", "applied", 2),
            ("go", "applied", 2),
            ("stop", "applied", 3),
        ]
    )
    (refused,) = [each for each in answers(tmp_path) if each.outcome == "refused"]
    assert refused.reason.endswith("the loop of MMEngine fetches its batches itself")
    assert (ours.iter, attachment.trainer.stop_reason) == (4, "enough")


@pytest.mark.parametrize("by_iter", [True, False], ids=["by iteration", "by epoch"])
def test_a_checkpoint_is_the_runners(tmp_path: Path, by_iter: bool) -> None:
    """The answer has the path of a file from which the runner resumes, after the same iteration."""
    attachment = EventLoopHook(work_dir=tmp_path)
    send_at(attachment.bus, {3: [("checkpoint",)]})
    options: dict[str, Any] = {"train_cfg": BY_ITER} if by_iter else {}
    whole = runner(tmp_path, attachment, **options)
    whole.train()

    (answer,) = answers(tmp_path)
    assert answer.result == {"path": str(tmp_path / "iter_3.pth")}
    resumed = runner(tmp_path, load_from=answer.result["path"], resume=True, **options)
    resumed.load_or_resume()
    assert (resumed.iter, resumed.epoch) == (3, 0)


@pytest.mark.parametrize("scheduler", [POLY, STEPS], ids=["by iteration", "by epoch"])
def test_a_steered_rate(tmp_path: Path, scheduler: dict[str, Any]) -> None:
    """Schedules of MMEngine go on in proportion, also in a run that resumes from the runner's checkpoint."""
    attachment, alone, told, again = EventLoopHook(work_dir=tmp_path), Rates(), Rates(), Rates()
    hooks = {"param_scheduler": {"type": "ParamSchedulerHook"}}
    options: dict[str, Any] = {"param_scheduler": scheduler, "default_hooks": hooks}
    if scheduler is POLY:
        options["train_cfg"] = BY_ITER
    send_at(attachment.bus, {2: [("set", {"lr*": 0.5})], 3: [("checkpoint",)]})
    runner(tmp_path, alone, **options).train()
    ours = runner(tmp_path, attachment, told, **options)
    ours.train()

    assert told.found == pytest.approx([*alone.found[:2], *(rate * 0.5 for rate in alone.found[2:])])
    (stepping,) = [hook for hook in ours.hooks if isinstance(hook, ParamSchedulerHook)]
    assert not {"after_train_iter", "after_train_epoch", "after_val_epoch"} & vars(stepping).keys()

    other = EventLoopHook(work_dir=tmp_path / "again")
    path = str(tmp_path / "iter_3.pth")
    runner(tmp_path, other, again, load_from=path, resume=True, **options).train()

    done = 3 if scheduler is POLY else 0  # a run measured in epochs begins its epoch again
    assert again.found == pytest.approx([rate * 0.5 for rate in alone.found[done:]])


def test_a_validation_changes_nothing(tmp_path: Path) -> None:
    """A validation by command answers with the evaluator's metrics; weights are those of a run that nobody told."""
    found = []
    for plan in ({}, {2: [("validate",)], 6: [("validate",), ("checkpoint",)]}):
        attachment = EventLoopHook(work_dir=tmp_path / "attachment")
        send_at(attachment.bus, plan)
        found.append(runner(tmp_path, attachment).train())

    assert same(*found)
    alone = runner(tmp_path, load_from=str(tmp_path / "attachment" / "iter_6.pth"))
    assert answers(tmp_path / "attachment")[1].result == pytest.approx(alone.val())


def test_what_the_runner_lacks_is_refused(tmp_path: Path) -> None:
    """A runner without a validation refuses one, and a save that fails is refused with its error."""
    attachment = EventLoopHook(work_dir=tmp_path)

    class Fails(mmengine.hooks.Hook):  # type: ignore[misc]
        def before_save_checkpoint(self, runner: Any, checkpoint: Any) -> None:
            if checkpoint["meta"]["iter"] == 2:
                raise OSError("the disk is full")

    send_at(attachment.bus, {2: [("validate",), ("checkpoint",)]})
    nothing: dict[str, Any] = {"val_dataloader": None, "val_cfg": None, "val_evaluator": None}
    ours = runner(tmp_path, attachment, Fails(), **nothing)
    ours.train()

    first, second = answers(tmp_path)
    assert first.reason == "the runner has no val_dataloader, val_cfg and val_evaluator"
    assert second.reason == "it raised OSError: the disk is full"
    assert ours.iter == 8
