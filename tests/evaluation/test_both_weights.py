"""EMAHook(validate="both"): the model's own weights and their average, evaluated one after the other."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.optim import SGD
from torch.optim.lr_scheduler import ReduceLROnPlateau

from eventloop import Trainer
from eventloop.assembly.attach import DEFAULT_HOOKS
from eventloop.checkpoint import CheckpointError
from eventloop.hooks import CheckpointHook, EarlyStoppingHook, EMAHook
from eventloop.writers import ConsoleWriter, JSONLWriter
from eventloop.writers.jsonl import read_jsonl
from tests.ranks import run_ranks
from tests.support.interrupted import assert_same
from tests.support.trainers import MakeTrainer, batches, collect, shuffled, tiny_model

MOMENTUM, EPOCHS = 0.25, 3


def both(**options: Any) -> EMAHook:
    """A hook that evaluates both, whose average moves fast."""
    return EMAHook(momentum=MOMENTUM, validate="both", **options)


def noisy(trainer: Trainer, batch: Any) -> dict[str, Any]:
    """A validation that draws random numbers."""
    return score(trainer.model, batch)


def score(model: Callable[[Any], Any], batch: Any) -> dict[str, Any]:
    """The loss and the accuracy on a batch with noise."""
    inputs, target = batch
    outputs = model(inputs + torch.randn(inputs.shape))
    hits = (outputs.argmax(1) == target).float().mean()
    return {"loss": F.cross_entropy(outputs, target), "accuracy": hits}


def validated(run: Path) -> list[dict[str, float]]:
    """The metrics of each validation that a writer got."""
    rows = [row for row in read_jsonl(run / "metrics.jsonl") if row.get("mode") == "val"]
    names = [f"{prefix}{name}" for prefix in ("", "ema/") for name in ("loss", "accuracy")]
    return [{name: row[name] for name in names} for row in rows]


def plain_validation(model: torch.nn.Module) -> dict[str, float]:
    """The means over the batches in plain PyTorch."""
    model.eval()
    with torch.no_grad():
        found = [score(model, batch) for batch in batches(2)]
    model.train()
    return {name: float(sum(each[name] for each in found) / len(found)) for name in found[0]}


def plain_training() -> tuple[torch.nn.Module, list[dict[str, float]]]:
    """A training in plain PyTorch that averages its weights, and validates both with the same random numbers."""
    model, average = tiny_model(), tiny_model()
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    rows, began = [], False
    torch.manual_seed(5)
    for _ in range(EPOCHS):
        for inputs, target in batches(3):
            loss = F.cross_entropy(model(inputs), target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            with torch.no_grad():
                for own, other in zip(model.parameters(), average.parameters(), strict=True):
                    other.lerp_(own, MOMENTUM if began else 1.0)
            began = True
        random_state = torch.get_rng_state()
        row = plain_validation(model)
        torch.set_rng_state(random_state)
        rows.append(row | {f"ema/{name}": value for name, value in plain_validation(average).items()})
    return model, rows


def test_metrics_are_those_of_plain_pytorch(make_trainer: MakeTrainer) -> None:
    """Each validation reports those of the weights under their names, those of the average under "ema/", on the same
    data with the same noise, and the training goes on as if only the weights had been validated."""
    trainer = make_trainer(
        hooks=[both()], val_loader=batches(2), val_step=noisy, max_epochs=EPOCHS, writers=[JSONLWriter()]
    )
    torch.manual_seed(5)
    trainer.train()
    trainer.close()

    model, rows = plain_training()
    got = validated(trainer.work_dir)
    assert got == [pytest.approx(row, abs=1e-6) for row in rows]
    assert got[-1]["loss"] != got[-1]["ema/loss"]
    for own, other in zip(trainer.model.parameters(), model.parameters(), strict=True):
        assert torch.equal(own, other)


@pytest.mark.parametrize("mode", ["val", "test"])
def test_it_is_one_evaluation_with_more_passes(make_trainer: MakeTrainer, mode: str) -> None:
    """There is one pair of epoch events with all metrics; iterations with the average name it before their loader."""
    loaders: dict[str, Any] = {f"{mode}_loader": {"clean": batches(2), "noisy": batches(1)}}
    trainer = make_trainer(hooks=[both()], max_epochs=1, default_hooks={"checkpoint": None}, **loaders)
    trainer.train()
    seen = collect(trainer, f"before_{mode}_epoch", f"after_{mode}_iter", f"after_{mode}_epoch")

    metrics = getattr(trainer, mode)()

    assert [event.loader for event in seen[1:-1]] == [
        "clean",
        "clean",
        "noisy",
        "ema/clean",
        "ema/clean",
        "ema/noisy",
    ]
    assert list(metrics) == [
        f"{of}{name}/{metric}"
        for of in ("", "ema/")
        for name in ("clean", "noisy")
        for metric in ("accuracy", "loss")
    ]
    assert seen[-1].metrics == metrics


def test_without_an_update_both_are_the_model(make_trainer: MakeTrainer) -> None:
    """Until the average begins, its metrics are those of the model, so that whoever follows them finds them."""
    trainer = make_trainer(hooks=[both(begin_epoch=2)], val_loader=batches(2), val_step=noisy)
    rows = collect(trainer, "after_val_epoch")

    trainer.train()

    first, second = (event.metrics for event in rows)
    assert first["ema/loss"] == first["loss"]
    assert second["ema/loss"] != second["loss"]


def test_others_follow_the_average(make_trainer: MakeTrainer) -> None:
    """The best checkpoint, an early stop, a plateau and the console follow "ema/top1", which the weights' top1 does
    not change."""
    scores, now = iter([0.5, 0.9, 0.2, 0.2, 0.2]), {"": 0.0, "ema": 0.0}
    place = [""]
    model, stream = tiny_model(), io.StringIO()
    optimizer = SGD(model.parameters(), lr=0.1)
    trainer = make_trainer(
        model=model,
        optimizer=optimizer,
        val_loader=batches(1),
        max_epochs=5,
        sanity_val=1,
        val_step=lambda trainer, batch: {"top1": now[place[0]]},
        schedulers=[ReduceLROnPlateau(optimizer, mode="max", patience=0)],
        default_hooks={
            "param_scheduler": {"monitor": "ema/top1"},
            "checkpoint": {"save_best": "ema/top1", "interval": 1},
        },
        hooks=[EarlyStoppingHook("ema/top1", patience=2), both()],
        writers=[ConsoleWriter(stream=stream)],
    )
    trainer.bus.subscribe(lambda event: place.__setitem__(0, event.loader), "before_val_iter", name="place")
    trainer.bus.subscribe(
        lambda event: now.update({"": now[""] + 1, "ema": next(scores)}), "before_val_epoch"
    )

    trainer.train()
    trainer.close()

    assert trainer.epoch == 4  # two validations without an improvement
    assert [path.name for path in trainer.work_dir.glob("best_*")] == ["best_ema_top1_epoch_2"]
    assert optimizer.param_groups[0]["lr"] < 0.1
    assert "ema/top1: 0.9000" in stream.getvalue()


@pytest.mark.parametrize(
    ("hook", "metric", "message"),
    [
        (both(), "ema/acuracy", "'ema/acuracy', which .*did you mean 'ema/accuracy'"),
        (EMAHook(), "ema/accuracy", r"'ema/accuracy', which .* It reports accuracy, loss\. Other"),
    ],
)
def test_a_metric_that_no_pass_reports_is_refused(
    make_trainer: MakeTrainer, hook: EMAHook, metric: str, message: str
) -> None:
    """The names of the average's metrics are known when the trainer is built, with "both" only."""
    with pytest.raises(ValueError, match=message):
        make_trainer(val_loader=batches(1), hooks=[CheckpointHook(save_best=metric, rule="greater"), hook])


# --- stops, resumes and loads ------------------------------------------------------------------------------


def job(make_trainer: MakeTrainer, run: Path) -> Trainer:
    """A training with shuffled batches in which a validation draws random numbers."""
    torch.manual_seed(3)
    return make_trainer(
        work_dir=run,
        train_loader=shuffled(3),
        val_loader=shuffled(2),
        val_step=noisy,
        max_epochs=EPOCHS,
        hooks=[both()],
        writers=[JSONLWriter()],
    )


@pytest.mark.parametrize("stop_in", ["", "ema"])
def test_a_resumed_run_is_the_uninterrupted_one(
    tmp_path: Path, make_trainer: MakeTrainer, stop_in: str
) -> None:
    """A validation that was cut short in either pass begins again, and all metrics and weights are the same bits."""
    whole = job(make_trainer, tmp_path / "whole")
    whole.train()
    whole.close()
    cut = job(make_trainer, tmp_path / "cut")
    cut.bus.subscribe(
        lambda trainer, event: trainer.stop("enough"),
        "after_val_iter",
        when=lambda event: (event.epoch, event.loader, event.batch_idx) == (2, stop_in, 0),
    )
    cut.train()
    cut.close()
    assert len(validated(cut.work_dir)) == 1

    resumed = job(make_trainer, tmp_path / "cut")
    resumed.resume()
    resumed.train()
    resumed.close()

    assert validated(resumed.work_dir) == validated(whole.work_dir)
    assert_same(whole.model.state_dict(), resumed.model.state_dict())


def test_loading_a_checkpoint_loads_both(tmp_path: Path, make_trainer: MakeTrainer) -> None:
    """`load_checkpoint` gives the model its own weights and the hook the average, so `val` reports what the training
    reported after that epoch; with validate="average" the model still gets the average alone."""
    trained = job(make_trainer, tmp_path / "run")
    trained.train()
    path = trained.work_dir / "epoch_2"

    def validate(hook: EMAHook) -> dict[str, float]:
        trainer = make_trainer(work_dir=tmp_path / "other", val_loader=batches(2), hooks=[hook])
        trainer.load_checkpoint(path)
        return trainer.val()

    again = job(make_trainer, tmp_path / "again")
    again.resume(path)
    again.val_loader = batches(2)
    again.__dict__["_val_step"] = None
    expected = again.val()
    assert validate(both()) == expected
    assert expected["loss"] != expected["ema/loss"]
    assert validate(EMAHook()) == {name: expected[f"ema/{name}"] for name in ("accuracy", "loss")}


def test_a_resume_with_the_other_choice_is_refused(tmp_path: Path, make_trainer: MakeTrainer) -> None:
    """Best scores of "accuracy" were those of the average, so the choice is the user's."""
    make_trainer(hooks=[EMAHook()], max_epochs=1).train()
    trainer = make_trainer(hooks=[EMAHook(validate="both")], max_epochs=2, val_loader=batches(1))

    with pytest.raises(CheckpointError, match=r"EMAHook\.validate: 'average' in the checkpoint, 'both' in"):
        trainer.resume()
    trainer.resume(changed={"EMAHook.validate": "apply"})

    assert trainer.epoch == 1


RANKS = """
import json, sys
import torch
import torch.distributed as dist
from eventloop import Trainer
from eventloop.hooks import EMAHook

rank, place = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method=f"file://{place}", rank=rank, world_size=2)
model = torch.nn.Linear(1, 1, bias=False)
torch.nn.init.ones_(model.weight)
trainer = Trainer(
    model, optimizer=torch.optim.SGD(model.parameters(), lr=0.25), max_epochs=2, work_dir=f"run{rank}",
    train_loader=[torch.ones(1, 1)], train_step=lambda trainer, batch: trainer.model(batch).sum(),
    val_loader=[torch.full((1, 1), rank + 1.0)] * (rank + 1),
    val_step=lambda trainer, batch: {"x": trainer.model(batch).mean()},
    hooks=[EMAHook(momentum=0.5, validate="both")], writers=[],
)
rows = []
trainer.bus.subscribe(lambda event: rows.append(event.metrics), "after_val_epoch")
trainer.train()
print(json.dumps(rows))
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_ranks_report_the_same_of_both(tmp_path: Path) -> None:
    """Both passes average over the samples of all ranks: 1 and twice 2 here, times weights 0.75 and 0.5 and their average."""
    said: list[Any] = run_ranks(RANKS, tmp_path)

    mean = (1 + 2 + 2) / 3
    expected = [{"x": 0.75 * mean, "ema/x": 0.75 * mean}, {"x": 0.5 * mean, "ema/x": 0.625 * mean}]
    assert said[0] == said[1]
    assert said[0] == [pytest.approx(row) for row in expected]


# --- bad input ---------------------------------------------------------------------------------------------


def test_an_unknown_choice_is_refused() -> None:
    """The error names the option, the choice and what came."""
    with pytest.raises(ValueError, match="validate must be 'average' or 'both', got 'raw'"):
        EMAHook(validate="raw")  # type: ignore[arg-type]


@pytest.mark.parametrize("argument", ["val_loader", "test_loader"])
def test_a_loader_with_the_name_of_the_average_is_refused(make_trainer: MakeTrainer, argument: str) -> None:
    """Its metrics would have the names of the average's."""
    message = (
        rf"{argument}: expected loaders with other names than 'ema', which EMAHook\(validate=.* got ema, a"
    )
    with pytest.raises(ValueError, match=message):
        make_trainer(hooks=[both()], **{argument: {"ema": batches(1), "a": batches(1)}})


def test_a_loader_that_begins_only_once_is_refused(make_trainer: MakeTrainer) -> None:
    """The second pass would have no batches."""
    message = (
        r"val_loader: EMAHook\(validate=\"both\"\) reads it twice, expected an iterable .* got an iterator"
    )
    with pytest.raises(ValueError, match=message):
        make_trainer(hooks=[both()], val_loader=iter(batches(1)))


def test_another_engines_loop_is_refused(make_trainer: MakeTrainer) -> None:
    """It makes one pass over the loader, so nobody would evaluate the average."""

    class Driven(Trainer):
        host = "Lightning"

    with pytest.raises(ValueError, match=r"EMAHook\(validate=\"both\"\) needs .* got the loop of Lightning"):
        Driven(
            tiny_model(),
            max_epochs=1,
            hooks=[both()],
            default_hooks=dict.fromkeys(DEFAULT_HOOKS),
            work_dir=make_trainer().work_dir,
        )


def test_a_metric_with_the_name_of_the_average_is_refused(make_trainer: MakeTrainer) -> None:
    """A val_step that evaluates an average itself would report it twice."""
    trainer = make_trainer(
        hooks=[both()], val_loader=batches(1), val_step=lambda trainer, batch: {"a": 1.0, "ema/a": 2.0}
    )
    with pytest.raises(ValueError, match=r"expected metrics whose names .* got ema/a from the model's own"):
        trainer.val()
