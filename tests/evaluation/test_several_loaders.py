"""Several validation or test loaders by name: their metrics, their events, and the hooks that follow them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torchmetrics.classification import MulticlassAccuracy

from eventloop import Trainer
from eventloop.data.loader_state import random_state
from eventloop.hooks import CheckpointHook, EarlyStoppingHook, EMAHook, VisualizationHook
from eventloop.writers import JSONLWriter
from tests.ranks import run_ranks
from tests.support.interrupted import assert_same
from tests.support.trainers import MakeTrainer, batches, collect, record, shuffled, tiny_model

CLEAN = batches(3)
NOISY = [(inputs + 1.0, target) for inputs, target in batches(2, size=5)]
BOTH = {"clean": CLEAN, "noisy": NOISY}


@pytest.mark.parametrize("mode", ["val", "test"])
def test_each_loader_has_its_own_metrics(make_trainer: MakeTrainer, mode: str) -> None:
    """They are those of a trainer with that loader alone, under the loader's name: metric objects are not shared."""
    evaluator = {"top1": MulticlassAccuracy(3)}

    both = getattr(make_trainer(**{f"{mode}_loader": BOTH}, evaluator=evaluator), mode)()

    expected: dict[str, float] = {}
    for name, loader in BOTH.items():
        alone = getattr(make_trainer(**{f"{mode}_loader": loader}, evaluator=evaluator), mode)()
        expected |= {f"{name}/{metric}": value for metric, value in alone.items()}
    assert list(both) == ["clean/loss", "clean/top1", "noisy/loss", "noisy/top1"]
    assert both == expected
    assert both["clean/top1"] != both["noisy/top1"]


@pytest.mark.parametrize("mode", ["val", "test"])
def test_one_validation_goes_through_the_loaders_in_order(make_trainer: MakeTrainer, mode: str) -> None:
    """There is one pair of epoch events, and each iteration names its loader and counts that loader's batches."""
    trainer = make_trainer(**{f"{mode}_loader": BOTH})
    rows = record(trainer)
    iterations = collect(trainer, f"before_{mode}_iter", f"after_{mode}_iter")

    getattr(trainer, mode)()

    ends = [name for name, _, _ in rows if not name.endswith("_iter")]
    assert ends == [
        "before_run",
        f"before_{mode}",
        f"before_{mode}_epoch",
        f"after_{mode}_epoch",
        f"after_{mode}",
        "after_run",
    ]
    places = [("clean", 0), ("clean", 1), ("clean", 2), ("noisy", 0), ("noisy", 1)]
    assert [(event.loader, event.batch_idx) for event in iterations[::2]] == places
    assert [(event.loader, event.batch_idx) for event in iterations[1::2]] == places


def test_a_single_loader_has_no_name(make_trainer: MakeTrainer) -> None:
    """Its iterations have loader="", and its metrics no prefix."""
    trainer = make_trainer(val_loader=CLEAN)
    seen = collect(trainer, "after_val_iter")

    assert set(trainer.val()) == {"loss", "accuracy"}
    assert {event.loader for event in seen} == {""}


def test_loop_of_steps_names_its_loaders(make_trainer: MakeTrainer) -> None:
    """A loop of one's own gives the name with each iteration."""
    trainer = make_trainer()
    seen = collect(trainer, "before_val_iter", "after_val_iter")

    trainer.begin_run(training=False)
    trainer.begin_val()
    trainer.begin_val_iter(CLEAN[0], 0, loader="clean")
    trainer.end_val_iter(None, 0, loader="clean")
    trainer.end_val({"clean/loss": 1.0})
    trainer.end_run()

    assert [event.loader for event in seen] == ["clean", "clean"]


def test_metrics_arrive_at_writers(make_trainer: MakeTrainer) -> None:
    """A line of `metrics.jsonl` has the metrics of all loaders."""
    trainer = make_trainer(val_loader=BOTH, max_epochs=1, writers=[JSONLWriter()])

    trainer.train()
    trainer.close()

    lines = [json.loads(line) for line in (trainer.work_dir / "metrics.jsonl").read_text().splitlines()]
    (line,) = [line for line in lines if line.get("mode") == "val"]
    assert {"clean/loss", "clean/accuracy", "noisy/loss", "noisy/accuracy"} <= line.keys()


# --- hooks -------------------------------------------------------------------------------------------------


def test_hooks_monitor_a_metric_of_one_loader(make_trainer: MakeTrainer) -> None:
    """The best checkpoint, an early stop and a plateau follow `clean/top1`, whatever the other loader reports."""
    scores = iter([0.5, 0.9, 0.2, 0.2, 0.2])
    now = {"clean": 0.0, "noisy": 0.0}

    def val_step(trainer: Trainer, batch: Any) -> dict[str, float]:
        return {"top1": now["clean" if batch[0].shape[0] == 4 else "noisy"]}

    model = tiny_model()
    optimizer = SGD(model.parameters(), lr=0.1)
    trainer = make_trainer(
        model=model,
        optimizer=optimizer,
        val_loader=BOTH,
        val_step=val_step,
        max_epochs=5,
        sanity_val=1,
        schedulers=[ReduceLROnPlateau(optimizer, mode="max", patience=0)],
        default_hooks={"param_scheduler": {"monitor": "clean/top1"}},
        hooks=[
            CheckpointHook(interval=1, save_best="clean/top1", rule="greater"),
            EarlyStoppingHook("clean/top1", rule="greater", patience=2),
        ],
    )
    trainer.bus.subscribe(
        lambda event: now.update(clean=next(scores), noisy=now["noisy"] + 1), "before_val_epoch"
    )

    trainer.train()

    assert trainer.epoch == 4  # two validations without an improvement
    assert [path.name for path in trainer.work_dir.glob("best_*")] == ["best_clean_top1_epoch_2"]
    assert optimizer.param_groups[0]["lr"] < 0.1


def test_an_average_is_swapped_in_once(make_trainer: MakeTrainer) -> None:
    """All loaders are evaluated with the average, and the training has its own weights again afterwards."""
    trainer = make_trainer(val_loader=BOTH, hooks=[EMAHook(momentum=0.5)], max_epochs=1)
    seen: list[torch.Tensor] = []
    own: list[torch.Tensor] = []
    weight = trainer.model[0].weight  # type: ignore[index]
    trainer.bus.subscribe(lambda event: seen.append(weight.detach().clone()), "after_val_iter")
    trainer.bus.subscribe(lambda event: own.append(weight.detach().clone()), "before_val", "after_val")

    trainer.train()

    assert len(seen) == 5
    assert all(torch.equal(each, seen[0]) for each in seen)
    assert torch.equal(own[0], own[1])
    assert not torch.equal(seen[0], own[0])


def test_images_are_named_by_their_loader(make_trainer: MakeTrainer) -> None:
    """The first batches of two loaders do not take one name."""
    images = [(torch.rand(2, 1, 4, 4), torch.zeros(2).long())]
    trainer = make_trainer(
        model=nn.Sequential(nn.Flatten(), nn.Linear(16, 3)),
        optimizer=None,
        val_loader={"clean": images, "noisy": images},
        hooks=[VisualizationHook()],
    )

    with trainer.bus.capture("image_logged") as seen:
        trainer.val()

    assert [event.name for event in seen] == ["clean/inputs/0", "noisy/inputs/0"]  # type: ignore[attr-defined]


# --- known before the training ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("monitor", "message"),
    [
        (
            "accuracy",
            r"'accuracy', which .*did you mean '(clean|noisy)/accuracy'\? It reports clean/accuracy, clean/loss,",
        ),
        ("clean/f1", r"'clean/f1', which .*Other names come from evaluator=\{'f1': \.\.\.\}"),
    ],
)
def test_a_metric_without_its_loader_is_refused(
    make_trainer: MakeTrainer, monitor: str, message: str
) -> None:
    """The error has the names with their loaders, before anything is trained."""
    with pytest.raises(ValueError, match=message):
        make_trainer(val_loader=BOTH, hooks=[CheckpointHook(save_best=monitor, rule="greater")])


def test_sanity_validation_reads_every_loader(make_trainer: MakeTrainer) -> None:
    """A name that only a batch shows is looked for in a batch of each loader."""
    seen: list[int] = []

    def val_step(trainer: Trainer, batch: Any) -> dict[str, float]:
        seen.append(len(batch[0]))
        return {"top1": 1.0}

    options: dict[str, Any] = {"val_loader": BOTH, "val_step": val_step}
    trainer = make_trainer(**options, hooks=[CheckpointHook(save_best="noisy/top5", rule="greater")])

    with pytest.raises(
        ValueError, match=r"needs the metric 'noisy/top5', .* It reports clean/top1, noisy/top1"
    ):
        trainer.train()

    assert seen == [4, 5]


def two_shuffled(seed: int) -> dict[str, Any]:
    """Two loaders that draw from generators of their own."""
    return {
        name: shuffled(3, generator=torch.Generator().manual_seed(seed + i))
        for i, name in enumerate(("clean", "noisy"))
    }


def test_sanity_validation_restores_the_states_of_all_loaders(make_trainer: MakeTrainer) -> None:
    """The first validation draws what it draws without one."""
    drawn = []
    for sanity_val in (0, 2):
        loaders = two_shuffled(7)
        trainer = make_trainer(val_loader=loaders, sanity_val=sanity_val, max_epochs=1)
        states: list[Any] = []
        trainer.bus.subscribe(
            lambda event, to=states, of=loaders: to.extend(map(random_state, of.values())), "before_val"
        )
        torch.manual_seed(0)
        trainer.train()
        drawn.append(states)

    assert_same(drawn[0], drawn[1])


# --- stops and resumes -------------------------------------------------------------------------------------


def test_a_stop_in_the_last_batch_of_a_loader_is_before_the_end(make_trainer: MakeTrainer) -> None:
    """The loaders that are left are not read, and there are no metrics."""
    trainer = make_trainer(val_loader=BOTH)
    seen = collect(trainer, "after_val_iter", "after_val_epoch")
    trainer.bus.subscribe(
        lambda trainer, event: trainer.stop("enough"),
        "after_val_iter",
        when=lambda event: event.batch_idx == 2,
    )

    assert trainer.val() == {}
    assert [event.loader for event in seen[:-1]] == ["clean"] * 3
    assert (seen[-1].reason, seen[-1].metrics) == ("enough", {})


@pytest.mark.parametrize("stop_in", ["clean", "noisy"])
def test_resumed_validation_draws_the_same_batches(
    tmp_path: Path, make_trainer: MakeTrainer, stop_in: str
) -> None:
    """A validation that was cut short begins again with the first loader, with the random states of all loaders."""

    def train(work_dir: Path, stop: bool) -> tuple[Trainer, list[Any]]:
        torch.manual_seed(3)
        trainer = make_trainer(
            work_dir=work_dir, train_loader=shuffled(3), val_loader=two_shuffled(11), max_epochs=3
        )
        seen: list[Any] = []
        trainer.bus.subscribe(
            lambda trainer, event: seen.append(trainer.batch[0]), "after_val_iter", name="see"
        )
        if stop:
            trainer.bus.subscribe(
                lambda trainer, event: trainer.stop("interrupted"),
                "after_val_iter",
                when=lambda event: event.epoch == 2 and (event.loader, event.batch_idx) == (stop_in, 1),
            )
        return trainer, seen

    whole, expected = train(tmp_path / "whole", stop=False)
    whole.train()
    cut, before = train(tmp_path / "cut", stop=True)
    cut.train()
    resumed, after = train(tmp_path / "cut", stop=False)
    resumed.resume()
    resumed.train()

    assert len(before) == 6 + (2 if stop_in == "clean" else 5)
    assert_same(expected, before[:6] + after)
    assert_same(whole.model.state_dict(), resumed.model.state_dict())


# --- bad input ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("argument", ["val_loader", "test_loader"])
@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({}, ValueError, r"must be a loader, or a mapping \{name: loader\} of one or more, got \{\}"),
        ({1: CLEAN}, TypeError, "the name of a loader must be a str .* got 1"),
        ({"": CLEAN}, ValueError, "the name of a loader must be a str that is not empty .* got ''"),
        ({"a/b": CLEAN}, ValueError, "the name of a loader must .* has no '/', .* got 'a/b'"),
        ({"clean": CLEAN, "noisy": 3}, TypeError, r"\['noisy'\] must be an iterable of batches, got 3"),
        ({"clean": []}, ValueError, r"\['clean'\] is empty: it has 0 batches"),
    ],
)
def test_bad_mappings_are_refused(
    make_trainer: MakeTrainer, argument: str, given: Any, error: type[Exception], message: str
) -> None:
    """The error names the argument, what was expected and what came."""
    with pytest.raises(error, match=rf"^{argument}.*{message}"):
        make_trainer(**{argument: given})


def test_several_train_loaders_are_refused(make_trainer: MakeTrainer) -> None:
    """Iterating over a mapping would train on its names."""
    with pytest.raises(
        TypeError, match=r"train_loader must be one iterable of batches, got a mapping with \['a'\]"
    ):
        make_trainer(train_loader={"a": CLEAN})


class Once:
    """A loader without a length that gives nothing."""

    def __iter__(self) -> Iterator[Any]:
        return iter(())


def test_empty_loader_of_several_is_named(make_trainer: MakeTrainer) -> None:
    """A loader that turns out to be empty is an error with its name."""
    with pytest.raises(ValueError, match="the val loader 'noisy' is empty: a pass over it gave no batch"):
        make_trainer(val_loader={"clean": CLEAN, "noisy": Once()}).val()


RANKS = """
import json, logging, sys
import torch, torch.distributed as dist
from eventloop import Trainer

logging.getLogger("eventloop").setLevel(logging.ERROR)
rank, meeting = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=2)
loaders = {"clean": [torch.full((2,), 1.0 + rank)], "noisy": [torch.full((1,), 10.0 + rank)] * (1 + 2 * rank)}
trainer = Trainer(torch.nn.Linear(1, 1), max_epochs=1, val_loader=loaders, work_dir="run",
                  val_step=lambda trainer, batch: {"x": batch.mean()})
print(json.dumps(trainer.val()))
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_two_ranks_average_each_loader(tmp_path: Path) -> None:
    """Each metric is that of all ranks' samples, also where one rank has more batches of a loader."""
    first, second = run_ranks(RANKS, tmp_path)

    assert first == second == {"clean/x": 1.5, "noisy/x": (10 + 3 * 11) / 4}
