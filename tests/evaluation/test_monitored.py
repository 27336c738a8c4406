"""Metrics that hooks monitor are known to be reported before the first iteration."""

from __future__ import annotations

import logging
import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import SGD
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader, Dataset
from torchmetrics.classification import MulticlassAccuracy

from eventloop import Trainer
from eventloop.data.loader_state import random_state
from eventloop.events import AfterValEpoch
from eventloop.hooks import CheckpointHook, EarlyStoppingHook
from tests.ranks import run_ranks
from tests.support.interrupted import assert_same
from tests.support.trainers import MakeTrainer, batches, build_trainer, shuffled, tiny_model

WITHOUT_CHECKPOINTS = {"checkpoint": None}


def plateau(make_trainer: MakeTrainer, monitor: str, **options: Any) -> Trainer:
    """A trainer whose scheduler is stepped with a metric."""
    model = tiny_model()
    optimizer = SGD(model.parameters(), lr=0.1)
    return make_trainer(
        model=model,
        optimizer=optimizer,
        schedulers=[ReduceLROnPlateau(optimizer)],
        default_hooks={"param_scheduler": {"monitor": monitor}, **WITHOUT_CHECKPOINTS},
        **options,
    )


def best(make_trainer: MakeTrainer, monitor: str, **options: Any) -> Trainer:
    """A trainer that saves what is best in a metric."""
    return make_trainer(hooks=[CheckpointHook(save_best=monitor, rule="greater")], **options)


def early(make_trainer: MakeTrainer, monitor: str, **options: Any) -> Trainer:
    """A trainer that stops when a metric becomes no better."""
    hooks = [EarlyStoppingHook(monitor, rule="greater")]
    return make_trainer(hooks=hooks, default_hooks=WITHOUT_CHECKPOINTS, **options)


BEST = r"CheckpointHook\(save_best='X'\)"
MONITORS: dict[str, Callable[..., Trainer]] = {
    BEST: best,
    r"EarlyStoppingHook\(monitor='X'\)": early,
    r"ReduceLROnPlateau with monitor='X'": plateau,
}


@pytest.mark.parametrize(
    ("option", "monitor", "options", "names"),
    [
        *(
            (option, "acc", {}, r"did you mean 'accuracy'\? It reports accuracy, loss\.")
            for option in MONITORS
        ),
        (BEST, "val_loss", {}, r"did you mean 'loss'\? It reports accuracy, loss\."),
        (
            BEST,
            "f1",
            {},
            r"does not report\. It reports accuracy, loss\. .*evaluator=\{'f1': \.\.\.\} or val_step",
        ),
        (BEST, "accuracy", {"evaluator": MulticlassAccuracy(3)}, r"It reports MulticlassAccuracy, loss\."),
        (BEST, "loss", {"train_step": lambda trainer, batch: 0}, r"It reports accuracy\."),
    ],
)
def test_name_that_cannot_come_is_refused_at_construction(
    make_trainer: MakeTrainer, option: str, monitor: str, options: dict[str, Any], names: str
) -> None:
    """The error has the option, the metric, the nearest name and all names that an evaluation reports."""
    needs = option.replace("X", monitor)
    with pytest.raises(ValueError, match=rf"{needs} needs the metric '{monitor}', .*{names}"):
        MONITORS[option](make_trainer, monitor, val_loader=batches(1), **options)


def right(preds: torch.Tensor, target: torch.Tensor) -> Any:
    """An evaluator whose names are known once it was called."""
    return {"top1": (preds.argmax(1) == target).float().mean()}


UNKNOWN: list[dict[str, Any]] = [
    {"evaluator": {"acc": right}},
    {"val_step": lambda trainer, batch: {"top1": 1.0}},
]


@pytest.mark.parametrize(("option", "options"), [*zip(MONITORS, [*UNKNOWN, UNKNOWN[1]], strict=True)])
@pytest.mark.parametrize("by_hand", [False, True], ids=["train()", "hand-written"])
def test_unknown_name_is_looked_for_in_one_batch(
    make_trainer: MakeTrainer, option: str, options: dict[str, Any], by_hand: bool
) -> None:
    """Names that only the user's code knows are checked before the first iteration; the error says how to skip that."""
    trainer = MONITORS[option](make_trainer, "top5", val_loader=batches(2), **options)
    message = rf"{option.replace('X', 'top5')} .*did you mean 'top1'\? .* sanity_val=0 skips it"

    with pytest.raises(ValueError, match=message):
        next(iter(trainer.epochs())) if by_hand else trainer.train()

    assert trainer.iter == 0


def test_accuracy_of_a_regression_is_found_before_the_first_iteration(make_trainer: MakeTrainer) -> None:
    """By default accuracy comes with class indices alone, which only a batch shows."""
    loader = [(torch.ones(4, 2), torch.ones(4, 3))]
    trainer = best(make_trainer, "accuracy", train_loader=loader, val_loader=loader, loss_fn=F.mse_loss)

    with pytest.raises(ValueError, match=r"needs the metric 'accuracy'.*It reports loss\."):
        trainer.train()

    assert trainer.iter == 0


ONE_HOT = [(torch.ones(3, 2), torch.eye(3))]


@pytest.mark.parametrize(
    ("sanity_val", "after"), [(1, 0), (None, 1)], ids=["sanity validation", "validation"]
)
def test_accuracy_of_one_hot_targets(make_trainer: MakeTrainer, sanity_val: int | None, after: int) -> None:
    """F.cross_entropy takes them and they have no accuracy: the error names the remedy, as early as a batch is tried."""
    options = {"train_loader": ONE_HOT, "val_loader": ONE_HOT, "sanity_val": sanity_val}
    trainer = best(make_trainer, "accuracy", **options)

    with pytest.raises(ValueError, match=r"'accuracy'.* targets must be class indices; else give evaluator="):
        trainer.train()

    assert trainer.iter == after


class Counted:
    """A `val_step` that counts its batches."""

    def __init__(self, name: str = "top1") -> None:
        self.name, self.calls = name, 0

    def __call__(self, trainer: Trainer, batch: Any) -> dict[str, float]:
        self.calls += 1
        return {self.name: float(self.calls)}


@pytest.mark.representative(2)
@pytest.mark.parametrize(
    ("sanity_val", "monitor", "expected"),
    [(None, "top1", 1), (None, "auto", 0), (0, "top1", 0), (2, "auto", 2), (9, "top1", 3)],
)
def test_how_many_batches_are_run(
    make_trainer: MakeTrainer, sanity_val: int | None, monitor: str, expected: int
) -> None:
    """One by default where a name is unknown, else as many as are asked for and there are."""
    step = Counted()
    trainer = best(make_trainer, monitor, val_loader=batches(3), val_step=step, sanity_val=sanity_val)
    seen: list[int] = []
    trainer.bus.subscribe(lambda event: seen.append(step.calls), "before_train_epoch")

    trainer.train()

    assert seen[0] == expected


@pytest.mark.parametrize("monitor", ["loss", "accuracy"])
def test_known_names_need_no_batch(make_trainer: MakeTrainer, monitor: str) -> None:
    """A classification's loss and accuracy come for certain: nothing is read of the loader before the first epoch."""
    loader = Untouched(batches(3))
    trainer = best(make_trainer, monitor, val_loader=loader, max_epochs=1)
    seen: list[int] = []
    trainer.bus.subscribe(lambda event: seen.append(loader.given), "before_train_epoch")

    trainer.train()

    assert (seen, loader.given) == ([0], 3)


def test_batch_is_run_once_for_a_trainer(make_trainer: MakeTrainer) -> None:
    """A second call of `train`, and a run that is resumed, do without."""
    first, second = Counted(), Counted()
    options: dict[str, Any] = {"val_loader": batches(1), "sanity_val": 1}
    trainer = best(make_trainer, "top1", val_step=first, max_epochs=1, **options)
    trainer.train()
    trainer.max_epochs = 2
    trainer.train()
    resumed = best(make_trainer, "top1", val_step=second, max_epochs=3, **options)
    resumed.resume()
    resumed.train()

    assert (first.calls, second.calls) == (1 + 2, 1)


def test_no_event_is_emitted(make_trainer: MakeTrainer) -> None:
    """What is no validation of the run is not announced as one, nor are numbers that it puts."""

    def val_step(trainer: Trainer, batch: Any) -> dict[str, float]:
        trainer.metrics.put_scalar("put", 1.0)
        assert trainer.mode == "val"
        assert not trainer.model.training
        return {"top1": 1.0}

    trainer = best(make_trainer, "auto", val_loader=batches(1), val_step=val_step, sanity_val=1, val_begin=9)
    with trainer.bus.capture(
        "before_val", "before_val_epoch", "before_val_iter", "after_val_iter", "after_val"
    ) as seen:
        trainer.train()

    assert seen == []
    assert "put" not in trainer.metrics.latest()


class Noisy(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Draws from every generator there is, and from one of its own."""

    def __init__(self) -> None:
        self.own = np.random.default_rng(3)

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        noise = torch.rand(2) + random.random() + np.random.rand() + self.own.random()
        return noise.float(), torch.tensor(index % 3)


class Noise(nn.Module):
    """Add noise of an own generator."""

    def __init__(self) -> None:
        super().__init__()
        self.own = torch.Generator().manual_seed(7)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs + torch.rand((), generator=self.own)


def noisy_trainer(
    work_dir: Path, sanity_val: int | None, workers: int, shared: torch.Generator | None
) -> Trainer:
    """A training whose validation draws at random, and leaves buffers and modes changed."""

    def val_step(trainer: Trainer, batch: Any) -> dict[str, Any]:
        trainer.model.train()  # as for Monte Carlo dropout
        preds = F.dropout(trainer.model(batch[0]), 0.5) + torch.rand(()) + random.random() + np.random.rand()
        trainer.metrics.put_scalar("inside", preds.mean())
        return {"spread": preds.std(), "preds": preds, "target": batch[1]}

    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    model = nn.Sequential(nn.Linear(2, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), Noise(), nn.Linear(8, 3))
    model[1].eval()  # frozen until the first epoch
    options: dict[str, Any] = {"num_workers": workers, "persistent_workers": workers > 0, "generator": shared}
    return build_trainer(
        work_dir,
        model=model,
        train_loader=shuffled(3, generator=shared),
        val_step=val_step,
        sanity_val=sanity_val,
        val_loader=DataLoader(Noisy(), batch_size=4, shuffle=True, **options),
        evaluator={"accuracy": MulticlassAccuracy(3)},
        hooks=[CheckpointHook(save_best="spread", rule="less")],
    )


@pytest.mark.slow
@pytest.mark.parametrize(("workers", "own_generator"), [(0, True), (1, False), (1, True)])
def test_run_is_bitwise_that_without_it(tmp_path: Path, workers: int, own_generator: bool) -> None:
    """Random states, those of workers too, buffers, modes, metrics and the evaluator are what they were."""
    ended = []
    for sanity_val in (0, None, 2):
        shared = torch.Generator().manual_seed(5) if own_generator else None
        trainer = noisy_trainer(tmp_path / f"{sanity_val}", sanity_val, workers, shared)
        modes: list[list[bool]] = []
        trainer.bus.subscribe(
            lambda trainer, event, to=modes: to.append([m.training for m in trainer.model.modules()]),
            "before_train_epoch",
            "after_train",
        )
        with trainer.bus.capture("scalars_logged", "after_val_epoch") as seen:
            trainer.train()
        trainer.close()
        states = trainer.model.state_dict(), trainer.optimizer.state_dict(), random_state(trainer.val_loader)
        trainer.val_loader = None  # its workers end now; with the trainer's cycles they would be waited for
        events = sorted(seen, key=lambda event: type(event).__name__)  # the background has its own pace
        ended.append((states, modes, [logged(event) for event in events]))

    assert_same(ended[0], ended[1])
    assert_same(ended[0], ended[2])


def logged(event: Any) -> Any:
    """What an event says but for times."""
    if isinstance(event, AfterValEpoch):
        return event
    return event.mode, event.step, {k: v for k, v in event.scalars.items() if "time" not in k and k != "eta"}


class Untouched:
    """A loader of a class of its own, which may not begin again."""

    def __init__(self, loader: list[Any]) -> None:
        self._left = iter(loader)
        self.given = 0

    def __iter__(self) -> Iterator[Any]:
        for batch in self._left:
            self.given += 1
            yield batch


def test_loader_that_may_not_begin_again_is_left_alone(
    make_trainer: MakeTrainer, caplog: pytest.LogCaptureFixture
) -> None:
    """By default no batch is taken from it, and the log says so; a missing metric is found by the first validation."""
    caplog.set_level(logging.INFO, "eventloop")
    loader = Untouched(batches(2))
    trainer = best(make_trainer, "top5", val_loader=loader, val_step=Counted())
    seen: list[int] = []
    trainer.bus.subscribe(lambda event: seen.append(loader.given), "before_val_epoch")

    with pytest.raises(ValueError, match="'top5' needs a metric which the validation does not report"):
        trainer.train()

    assert seen == [0]
    assert "not checked before training: whether the validation reports 'top5'" in caplog.text


def test_lazy_model_is_left_alone(make_trainer: MakeTrainer) -> None:
    """The first batch of training makes its weights, as without a check."""
    model = nn.Sequential(nn.LazyLinear(3))
    lazy: list[bool] = []

    def val_step(trainer: Trainer, batch: Any) -> dict[str, Any]:
        lazy.append(isinstance(trainer.model[0], nn.LazyLinear))  # type: ignore[index]
        return {"top1": trainer.model(batch[0]).mean()}

    options = {"val_loader": batches(1), "val_step": val_step, "max_epochs": 1}
    best(make_trainer, "top1", model=model, optimizer=SGD(model.parameters(), lr=0.1), **options).train()

    assert lazy == [False]


class NeedsMore:
    """A metric object that cannot be computed of one batch."""

    seen = 0

    def update(self, preds: torch.Tensor, target: torch.Tensor) -> None:
        self.seen += 1

    def compute(self) -> dict[str, float]:
        if self.seen < 2:
            raise ValueError("needs at least two batches")
        return {"top1": 1.0}

    def reset(self) -> None:
        self.seen = 0


def test_error_of_the_default_check_is_logged(
    make_trainer: MakeTrainer, caplog: pytest.LogCaptureFixture
) -> None:
    """An evaluator that needs more than a batch trains as it did, and begins with no batch seen; the log says what was
    not checked."""
    evaluator, seen = NeedsMore(), list[int]()
    trainer = best(make_trainer, "top1", val_loader=batches(2), evaluator=evaluator)
    trainer.bus.subscribe(lambda event: seen.append(evaluator.seen), "before_train_epoch", once=True)

    trainer.train()

    assert (trainer.epoch, seen) == (2, [0])
    (line,) = [line for line in caplog.messages if "sanity" in line]
    assert re.search(r"reports 'top1': .*needs at least two batches; sanity_val=0", line)


def test_error_of_a_check_that_was_asked_for_is_raised(make_trainer: MakeTrainer) -> None:
    """With `sanity_val` a validation that fails ends the run before it has trained."""
    trainer = best(make_trainer, "top1", val_loader=batches(2), evaluator=NeedsMore(), sanity_val=1)

    with pytest.raises(ValueError, match="needs at least two batches") as raised:
        trainer.train()

    assert trainer.iter == 0
    assert any("sanity_val=1" in note for note in raised.value.__notes__)


def test_trainer_with_a_val_step_of_its_own(tmp_path: Path) -> None:
    """A subclass that overrides `val_step` reports what it likes."""

    class Own(Trainer):
        def val_step(self, batch: Any) -> dict[str, float]:
            return {"top1": 1.0}

    model = tiny_model()
    trainer = Own(
        model,
        optimizer=SGD(model.parameters(), lr=0.1),
        loss_fn=F.cross_entropy,
        train_loader=batches(1),
        val_loader=batches(1),
        max_epochs=1,
        work_dir=tmp_path,
        hooks=[CheckpointHook(save_best="top1")],
    )
    trainer.train()
    trainer.close()

    assert trainer.epoch == 1


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"sanity_val": -1}, ValueError, "sanity_val must be at least 0, got -1"),
        ({"sanity_val": True}, TypeError, "sanity_val must be an int, got True"),
        ({"sanity_val": 1.0}, TypeError, r"sanity_val must be an int, got 1\.0"),
        (
            {"sanity_val": 1, "val_loader": None},
            ValueError,
            "sanity_val=1 needs .* give the Trainer a val_loader",
        ),
    ],
)
def test_bad_sanity_val_is_refused(
    make_trainer: MakeTrainer, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    """It is a number of batches, of a loader that there is."""
    with pytest.raises(error, match=message):
        make_trainer(**{"val_loader": batches(1), **options})


RANKS = """
import json, logging, sys
import torch, torch.distributed as dist
from eventloop import Trainer
from eventloop.hooks import CheckpointHook

logging.getLogger("eventloop").setLevel(logging.ERROR)
rank, meeting = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=2)

def run(metric, val_step):
    model, batch = torch.nn.Linear(1, 1), (torch.ones(1, 1), torch.ones(1, 1))
    trainer = Trainer(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), train_loader=[batch] * 2,
                      loss_fn=torch.nn.functional.mse_loss, val_loader=[batch], val_step=val_step, max_epochs=1,
                      hooks=[CheckpointHook(save_best=metric, rule="less")], work_dir=f"run_{metric}",
                      default_hooks=dict(preemption=None))
    try:
        trainer.train()
    except ValueError as error:
        return str(error)
    finally:
        trainer.close()
    return trainer.iter

calls = []

def fails_once_on_rank_1(trainer, batch):
    calls.append(batch)
    if rank == 1 and len(calls) == 1:
        raise OSError("a file of this rank")
    return {"score": 1.0}

print(json.dumps({"fails": run("score", fails_once_on_rank_1), "missing": run("other", lambda *_: {"score": 1.0})}))
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_ranks_check_together(tmp_path: Path) -> None:
    """A rank whose batch fails leaves no other waiting, and a missing metric ends all of them."""
    said = run_ranks(RANKS, tmp_path)

    assert [rank["fails"] for rank in said] == [2, 2]
    assert all("needs the metric 'other'" in rank["missing"] for rank in said)
