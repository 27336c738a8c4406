"""Test what a training does with the metrics that an evaluator reports."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite, nan
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau

from eventloop import Trainer
from eventloop.checkpoint import read_manifest
from eventloop.checkpoint.directory import scan
from eventloop.commands.messages import Answer
from eventloop.evaluation.schedule import Never
from eventloop.hooks import CheckpointHook, EarlyStoppingHook, ParamSchedulerHook
from eventloop.writers import JSONLWriter
from eventloop.writers.jsonl import read_jsonl
from tests.sidecar.jobs import report
from tests.support.trainers import MakeTrainer, batches, collect, tiny_model

LAG = 1
"""The epochs after which the metrics of a checkpoint come."""


def job(make_trainer: MakeTrainer, *hooks: Any, **changes: Any) -> Trainer:
    """A training of two iterations an epoch that validates nothing itself, unless it is given an interval."""
    trainer = make_trainer(
        hooks=[*hooks],
        **{"train_loader": batches(2), "val_loader": batches(1), "max_epochs": 6, **changes},
    )
    if "val_interval" not in changes:
        trainer.schedule = Never()
    return trainer


def reporting(trainer: Trainer, scores: Sequence[float], metric: str = "acc") -> None:
    """Report a score for each checkpoint, in the first iteration of the epoch that comes `LAG` epochs later."""

    def handle(trainer: Trainer, event: Any) -> None:
        epoch = event.epoch - LAG + 1
        if event.batch_idx == 0 and 1 <= epoch <= len(scores):
            report(trainer, f"epoch_{epoch}", **{metric: scores[epoch - 1]})

    trainer.bus.subscribe(handle, "after_train_iter", priority="LOWEST", name="reporting")


def saving(**options: Any) -> CheckpointHook:
    """A hook that saves every epoch and watches a metric."""
    return CheckpointHook(1, **{"save_best": "acc", **options})


def val_step(trainer: Trainer, batch: Any) -> dict[str, float]:
    """A validation that could report the metric; it is not run."""
    return {"acc": 0.0}


def folders(directory: Path) -> list[str]:
    """The checkpoints in a directory."""
    return sorted(path.parent.name for path in directory.glob("*/manifest.json"))


def test_the_event_has_the_counters_of_the_checkpoint(make_trainer: MakeTrainer) -> None:
    """`checkpoint_evaluated` has the iteration and the epoch of the checkpoint, not those of the training."""
    trainer = job(make_trainer, saving(), val_step=val_step)
    seen = collect(trainer, "checkpoint_evaluated")
    reporting(trainer, [0.5, 0.75])
    trainer.train()

    assert [(event.iter, event.epoch, event.metrics) for event in seen] == [
        (2, 1, {"acc": 0.5}),
        (4, 2, {"acc": 0.75}),
    ]
    assert [Path(event.path) for event in seen] == [
        trainer.work_dir / "epoch_1",
        trainer.work_dir / "epoch_2",
    ]


def test_metrics_are_logged_as_those_of_a_validation_within(make_trainer: MakeTrainer) -> None:
    """Writers get the metrics under "val", with the step and the counters of a validation within the training."""
    rows = []
    for name in ("within", "aside"):
        changes: dict[str, Any] = {"val_interval": 1} if name == "within" else {}
        trainer = job(
            make_trainer,
            saving(),
            val_step=lambda trainer, batch: {"acc": 0.5},
            writers=[JSONLWriter()],
            work_dir=make_trainer().work_dir.parent / name,
            max_epochs=3,
            **changes,
        )
        if name == "aside":
            reporting(trainer, [0.5, 0.5])
        trainer.train()
        rows.append(
            [row for row in read_jsonl(trainer.work_dir / "metrics.jsonl") if row.get("mode") == "val"]
        )

    assert rows[1] == rows[0][:2]
    assert [row["step"] for row in rows[1]] == [2, 4]


@pytest.mark.parametrize(
    ("keep", "scores", "best"),
    [(1, (0.25, 0.75, 0.5, nan, 0.75), [2]), (2, (0.25, 0.75, 0.5, nan, 0.75), [2, 5]), (1, (nan, nan), [])],
)
def test_the_best_are_marked(
    make_trainer: MakeTrainer, keep: int, scores: tuple[float, ...], best: list[int]
) -> None:
    """The best of the reported scores are marked afterwards; ties do not beat, and NaN never counts."""
    hook = saving(keep_best=keep)
    trainer = job(make_trainer, hook, val_step=val_step)
    reporting(trainer, scores)
    trainer.train()

    assert [name for name in folders(trainer.work_dir) if "best" in name] == [
        f"best_acc_epoch_{n}" for n in best
    ]
    finite = [score for score in scores if isfinite(score)]
    assert hook.best.score == max(finite, default=None)


def test_a_mark_has_the_bytes_of_the_checkpoint(make_trainer: MakeTrainer) -> None:
    """The best checkpoint is hard links to the files of the checkpoint, and does not count as newer."""
    trainer = job(make_trainer, saving(), val_step=val_step)
    reporting(trainer, [0.5])
    trainer.train()

    marked, source = trainer.work_dir / "best_acc_epoch_1", trainer.work_dir / "epoch_1"
    assert (marked / "state.pth").samefile(source / "state.pth")
    manifest = read_manifest(marked)
    assert (manifest.best, manifest.metrics, manifest.validated_at) == ({"acc": "greater"}, {"acc": 0.5}, 2)
    assert manifest.sequence == read_manifest(source).sequence
    found = scan(trainer.work_dir)
    assert (found.paths[-1].name, found.ranking("acc")) == ("epoch_6", [marked])


def test_the_former_best_goes_when_the_next_one_is_durable(make_trainer: MakeTrainer) -> None:
    """Only the best mark stays, and its checkpoint may be removed: the bytes are there."""
    trainer = job(make_trainer, saving(max_keep_ckpts=1), val_step=val_step)
    reporting(trainer, [0.25, 0.5, 0.75, 0.5])
    trainer.train()

    assert folders(trainer.work_dir) == ["best_acc_epoch_3", "epoch_6"]
    again = job(make_trainer, saving(), val_step=val_step)
    assert again.resume("best").name == "best_acc_epoch_3"
    assert again.epoch == 3


def test_the_published_best_is_one_that_was_marked(make_trainer: MakeTrainer) -> None:
    """The best checkpoint that is published at the end is one that was marked."""
    trainer = job(make_trainer, saving(published_keys="state_dict"), val_step=val_step)
    reporting(trainer, [0.5])
    trainer.train()

    published = [path.name.rpartition("-")[0] for path in trainer.work_dir.glob("*.pth")]
    assert sorted(published) == ["best_acc_epoch_1", "epoch_6"]


def test_early_stopping_counts_them(make_trainer: MakeTrainer) -> None:
    """The run stops in the iteration in which the patience of the reported scores is used up."""
    scores = [0.5, 0.75, 0.5, 0.5, 0.9]
    trainer = job(
        make_trainer, saving(), EarlyStoppingHook("acc", patience=2), val_step=val_step, max_epochs=9
    )
    reporting(trainer, scores)
    trainer.train()

    stops_at = 4  # the second score in a row that is not better than 0.75
    assert trainer.iter == (stops_at + LAG - 1) * 2 + 1
    assert "acc has not become better in 2 validations" in str(trainer.stop_reason)


def test_a_plateau_is_stepped_with_them(make_trainer: MakeTrainer) -> None:
    """`ReduceLROnPlateau` gives the rates that it gives for the list of scores by hand."""
    scores = [0.5, 0.4, 0.45, 0.3, 0.35]

    def plateau(model: torch.nn.Module) -> tuple[Any, ReduceLROnPlateau]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return optimizer, ReduceLROnPlateau(optimizer, patience=0)

    by_hand, scheduler = plateau(tiny_model())
    expected = []
    for score in scores:
        scheduler.step(score)
        expected.append(by_hand.param_groups[0]["lr"])
    model = tiny_model()
    optimizer, own = plateau(model)
    trainer = job(
        make_trainer,
        CheckpointHook(1),
        ParamSchedulerHook(monitor="loss"),
        model=model,
        optimizer=optimizer,
        schedulers=[own],
    )
    rates: list[float] = []
    trainer.bus.subscribe(
        lambda event: rates.append(optimizer.param_groups[0]["lr"]), "checkpoint_evaluated", priority="LOWEST"
    )
    reporting(trainer, scores, "loss")
    trainer.train()

    assert rates == expected


def answer(trainer: Trainer, name: str) -> Answer:
    """The answer to a command."""
    return msgspec.json.decode((trainer.work_dir / "outbox" / f"{name}.json").read_bytes(), type=Answer)


def test_a_checkpoint_counts_once(make_trainer: MakeTrainer) -> None:
    """A second report of a checkpoint is refused, whoever sends it."""
    trainer = job(make_trainer, saving(), val_step=val_step)
    seen, sent = collect(trainer, "checkpoint_evaluated"), []

    def handle(trainer: Trainer, event: Any) -> None:
        if event.iter in (2, 4):
            sent.append(report(trainer, "epoch_1", acc=0.5 + event.iter))
        for look in trainer.ownership.each_second:
            look()

    trainer.bus.subscribe(handle, "after_train_iter", priority="LOWEST", name="handle")
    trainer.train()

    assert [event.metrics for event in seen] == [{"acc": 2.5}]
    assert (
        "the checkpoint of iteration 2 has its metrics, since iteration 3" in answer(trainer, sent[-1]).reason
    )


def test_metrics_of_another_run_are_refused(make_trainer: MakeTrainer) -> None:
    """What an earlier run of the directory has left in the inbox does not reach a new run."""
    first = job(make_trainer, saving(), val_step=val_step)
    first.train()
    sent = report(first, "epoch_3", acc=0.5)
    first.close()
    second = job(make_trainer, saving(), val_step=val_step)
    seen = collect(second, "checkpoint_evaluated")
    second.train()

    assert seen == []
    reason = answer(second, sent).reason
    assert "expected a checkpoint of this run, which is at iteration 0, got one of iteration 6" in reason


def test_metrics_that_come_after_the_run_reach_the_next_one(make_trainer: MakeTrainer) -> None:
    """A report that comes when no run lives waits in the inbox, and the resumed run applies it."""
    first = job(make_trainer, saving(), val_step=val_step)
    first.train()
    report(first, "epoch_6", acc=0.5)
    first.close()
    second = job(make_trainer, hook := saving(), val_step=val_step, max_epochs=7)
    second.resume()
    seen = collect(second, "checkpoint_evaluated")
    second.train()

    assert [event.iter for event in seen] == [12]
    assert (hook.best.score, hook.best.name) == (0.5, "best_acc_epoch_6")


def test_metrics_that_come_too_late_stay_in_the_inbox(make_trainer: MakeTrainer) -> None:
    """A report that comes after the last iteration is not refused by the run that ends."""
    trainer = job(make_trainer, saving(), val_step=val_step)
    sent: list[str] = []
    trainer.bus.subscribe(
        lambda t, e: sent.append(report(t, "epoch_6", acc=0.5)), "after_run", priority="LOWEST"
    )
    trainer.train()

    assert (trainer.work_dir / "inbox" / f"{sent[0]}.json").exists()
    assert not (trainer.work_dir / "outbox" / f"{sent[0]}.json").exists()


def test_a_resumed_run_has_them_again(make_trainer: MakeTrainer) -> None:
    """Metrics that came after the checkpoint from which a run resumes are applied again, at the same iteration."""
    first = job(make_trainer, saving(save_last=False), val_step=val_step)
    reporting(first, [0.5])
    first.bus.subscribe(lambda t, e: t.stop("now") if e.iter == 2 else None, "after_train_iter", name="stop")
    first.train()
    first.close()
    assert first.iter == 3

    second = job(make_trainer, hook := saving(), val_step=val_step)
    assert second.resume().name == "epoch_1"
    seen = collect(second, "checkpoint_evaluated")
    second.train()

    assert [event.iter for event in seen] == [2]
    assert hook.best.name == "best_acc_epoch_1"
    assert "best_acc_epoch_1" in folders(second.work_dir)


def test_the_best_one_is_known_again_where_its_regular_checkpoint_is_gone(make_trainer: MakeTrainer) -> None:
    """A run that goes on from a marked checkpoint gets its metrics once more, and marks it by its own name."""
    first = job(make_trainer, saving(max_keep_ckpts=1), val_step=val_step)
    reporting(first, [0.25, 0.5])
    first.train()
    first.close()
    second = job(make_trainer, hook := saving(max_keep_ckpts=1), val_step=val_step)
    second.resume("best")

    def handle(trainer: Trainer, event: Any) -> None:
        if event.iter == 4:
            report(trainer, "best_acc_epoch_2", acc=0.5)

    second.bus.subscribe(handle, "after_train_iter", priority="LOWEST", name="handle")
    second.train()

    assert hook.best.name == "best_acc_epoch_2"
    assert folders(second.work_dir) == ["best_acc_epoch_2", "epoch_6"]
