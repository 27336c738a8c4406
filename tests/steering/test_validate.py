"""Test that the command `validate` changes nothing but the log."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader

from eventloop import Trainer
from eventloop.checkpoint import load_checkpoint
from eventloop.hooks import CheckpointHook, EarlyStoppingHook, EMAHook
from eventloop.writers import JSONLWriter
from tests.steering.job import PER_EPOCH, Plan, build, collected, noisy_model, steer, weights
from tests.support.trainers import samples

EACH: Plan = {at: [("validate",), ("validate",)] for at in (1, 2, 4, 5, 7, 8, 11)}


def trained(folder: Path, plan: Plan, **options: Any) -> tuple[Trainer, dict[str, Any]]:
    """Train, and return the trainer and the state of its last checkpoint."""
    trainer = build(folder, **options)
    steer(trainer, plan)
    trainer.train()
    trainer.close()
    return trainer, load_checkpoint(trainer.checkpoint_dir / "epoch_3")


def plateau(trainer_options: dict[str, Any]) -> dict[str, Any]:
    """Return options of a run whose end depends on each validation that counts."""
    return {
        "hooks": [
            CheckpointHook(save_best="loss", keep_best=-1),
            EarlyStoppingHook("loss", patience=3, min_delta=10.0),
            EMAHook(momentum=0.1),
        ],
        **trainer_options,
    }


def with_plateau(folder: Path, plan: Plan) -> tuple[Trainer, dict[str, Any]]:
    """Train with a scheduler that every validation without a better loss steps down."""
    model = noisy_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedulers = [ReduceLROnPlateau(optimizer, patience=0, threshold=10.0)]
    options = plateau({"model": model, "optimizer": optimizer, "schedulers": schedulers})
    return trained(folder, plan, **options)


def test_a_run_with_validate_ends_bitwise_as_the_run_without(tmp_path: Path) -> None:
    """Weights, running averages, optimizer and random states are those of the run that nobody asked."""
    plain, plain_state = trained(tmp_path / "plain", {}, hooks=[CheckpointHook()])
    asked, state = trained(tmp_path / "asked", EACH, hooks=[CheckpointHook()])

    assert weights(asked) == weights(plain)
    assert torch.equal(state["rng"]["torch"], plain_state["rng"]["torch"])
    assert len(asked.applied_commands) == sum(map(len, EACH.values()))


@pytest.mark.parametrize("by_epoch", [True, False])
def test_a_plain_val_loader_that_draws_from_the_global_generator(tmp_path: Path, by_epoch: bool) -> None:
    """The global generators, and those of the model's modules, are restored after each pass."""

    def options() -> dict[str, Any]:
        val_loader = DataLoader(samples(8), batch_size=4, shuffle=True)
        return {"val_loader": val_loader, "by_epoch": by_epoch, "hooks": []}

    results = []
    for name, plan in (("plain", {}), ("asked", EACH)):
        trainer = build(tmp_path / name, **options())
        steer(trainer, plan)
        trainer.train()
        trainer.close()
        results.append(weights(trainer))

    assert results[0] == results[1]


def test_validating_on_the_loader_that_trains(tmp_path: Path) -> None:
    """The pass that trains goes on where it was."""
    results = []
    for name, plan in (("plain", {}), ("asked", EACH)):
        loader = DataLoader(samples(PER_EPOCH * 4), batch_size=4, shuffle=True)
        trainer = build(tmp_path / name, train_loader=loader, val_loader=loader)
        steer(trainer, plan)
        trainer.train()
        trainer.close()
        results.append(weights(trainer))

    assert results[0] == results[1]


def test_no_score_counts(tmp_path: Path) -> None:
    """A scheduler on plateau, early stopping, the average of the weights and the best checkpoints are as without."""
    plain, plain_state = with_plateau(tmp_path / "plain", {})
    asked, state = with_plateau(tmp_path / "asked", EACH)

    assert weights(asked) == weights(plain)
    assert (asked.iter, asked.stop_reason) == (plain.iter, plain.stop_reason)
    assert state["param_schedulers"] == plain_state["param_schedulers"]
    assert state["hooks"]["EarlyStoppingHook"] == plain_state["hooks"]["EarlyStoppingHook"]
    best = [sorted(path.name for path in (tmp_path / name).glob("best_*")) for name in ("plain", "asked")]
    assert best[0] == best[1] != []


def test_the_metrics_are_answered_logged_and_marked(tmp_path: Path) -> None:
    """The answer has the metrics, the log has them at the iteration, and the closing events have the reason "command"."""
    trainer = build(tmp_path / "run", writers=[JSONLWriter()])
    ends = collected(trainer, "after_val_epoch", "after_val")
    answers = collected(trainer, "command_applied")
    steer(trainer, {6: [("validate",)]})

    trainer.train()
    trainer.close()

    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    (row,) = [row for row in rows if row.get("step") == 6 and row.get("mode") == "val"]
    (answer,) = answers
    assert answer.result == {name: row[name] for name in answer.result}
    assert {"loss", "accuracy"} <= {*answer.result}
    assert [(end.iter, end.reason) for end in ends] == [
        (at, reason)
        for at, reason in ((4, "completed"), (6, "command"), (8, "completed"), (12, "completed"))
        for _ in "ab"
    ]


def raises(trainer: Trainer, batch: Any) -> dict[str, Any]:
    """Fail in the validation of the sixth iteration."""
    if trainer.iter == 6:
        raise ValueError("a broken sample")
    return {"loss": torch.zeros(())}


def test_a_validation_that_fails_is_refused(tmp_path: Path) -> None:
    """The error is the answer; the run goes on to its end, and its last checkpoint is saved."""
    trainer = build(tmp_path / "run", val_step=raises)
    refusals, ends = collected(trainer, "command_refused"), collected(trainer, "after_train")
    steer(trainer, {6: [("validate",)]})

    trainer.train()
    trainer.close()

    assert [each.reason for each in refusals] == ["it raised ValueError: a broken sample"]
    assert trainer.model.training
    assert (trainer.iter, ends[0].reason) == (12, "completed")
    assert (tmp_path / "run" / "iter_12").exists()


def test_without_a_val_loader(tmp_path: Path) -> None:
    """A run that never validates refuses the command."""
    trainer = build(tmp_path / "run", val_loader=None, val_interval=None)
    refusals = collected(trainer, "command_refused")
    steer(trainer, {6: [("validate",)]})

    trainer.train()
    trainer.close()

    assert [each.reason for each in refusals] == ["the trainer has no val_loader"]


def test_a_stop_cuts_it_short(tmp_path: Path) -> None:
    """A validation that a stop ends has no metrics, so it is refused."""
    trainer = build(tmp_path / "run")
    refusals = collected(trainer, "command_refused")
    act: Callable[[Any], object] = lambda event: trainer.stop("enough") if event.iter == 6 else None
    trainer.bus.subscribe(act, "after_val_iter")
    steer(trainer, {6: [("validate",)]})

    trainer.train()
    trainer.close()

    assert [each.reason for each in refusals] == ["a stop has cut the validation short"]
    assert (trainer.iter, trainer.stop_reason) == (6, "enough")
