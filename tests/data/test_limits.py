"""`Trainer(limit_batches=...)`: the most batches of a pass, in training, validation and test."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from eventloop.hooks import FixedLrUpdaterHook
from tests.support.interrupted import Augmented, EpochSampler
from tests.support.trainers import MakeTrainer, batches, collect, names, record


class Stream:
    """A loader that does not know its length."""

    def __init__(self, count: int) -> None:
        self._batches, self.fetched = batches(count), 0

    def __iter__(self) -> Iterator[Any]:
        for batch in self._batches:
            self.fetched += 1
            yield batch


def counts(rows: list[Any]) -> tuple[int, int, int]:
    """How many iterations of training, validation and test there were."""
    train, val, test = (names(rows).count(f"after_{mode}_iter") for mode in ("train", "val", "test"))
    return train, val, test


@pytest.mark.representative(1)
@pytest.mark.parametrize(
    ("limit", "expected"),
    [
        (None, (20, 8, 6)),
        (2, (4, 4, 2)),
        (7, (14, 8, 6)),  # a limit above the length has no effect
        (0.5, (10, 4, 3)),
        (1.0, (20, 8, 6)),
        ({"train": 3}, (6, 8, 6)),
        ({"train": 0.29, "val": 1, "test": 0.5}, (4, 2, 3)),
    ],
    ids=str,
)
def test_numbers_of_batches(make_trainer: MakeTrainer, limit: Any, expected: tuple[int, int, int]) -> None:
    """An int is a number and a float a share, rounded down, of the batches of each pass; a mapping has one for each
    mode."""
    trainer = make_trainer(
        train_loader=batches(10), val_loader=batches(4), test_loader=batches(6), limit_batches=limit
    )
    rows = record(trainer)

    trainer.train()
    trainer.test()

    assert counts(rows) == expected
    assert trainer.max_iters == trainer.iter == expected[0]
    assert trainer.epoch == 2


@pytest.mark.parametrize(
    ("limit", "error", "message"),
    [
        (0, ValueError, "limit_batches must be a number of batches .* or a share of them .*, got 0"),
        (1.5, ValueError, "limit_batches must be .* above 0, at most 1.0.*, got 1.5"),
        (float("nan"), ValueError, "limit_batches must be .*, got nan"),
        (True, TypeError, "limit_batches must be a number of batches .*, got True"),
        ("3", TypeError, "limit_batches must be a number of batches .*, got '3'"),
        ({"val": -1}, ValueError, r"limit_batches\['val'\] must be .*, got -1"),
        ({"vall": 1}, ValueError, "limit_batches has no argument 'vall': did you mean 'val'"),
        (
            0.1,
            ValueError,
            "limit_batches=0.1 of the 5 batches of the train loader is less than one batch: .* 0.2",
        ),
        (
            {"test": 0.5},
            ValueError,
            "limit_batches=0.5 for 'test' .* the test loader has no length: give a number",
        ),
    ],
    ids=str,
)
def test_bad_limits(make_trainer: MakeTrainer, limit: Any, error: type[Exception], message: str) -> None:
    """A limit that is none, or of less than a batch, is refused where the trainer is built."""
    with pytest.raises(error, match=message):
        make_trainer(train_loader=batches(5), test_loader=Stream(5), limit_batches=limit)


def test_a_limit_is_the_length_of_a_stream(make_trainer: MakeTrainer) -> None:
    """A loader without a length has passes of that many batches, so that the length of the run is known; no batch beyond
    is fetched."""
    stream = Stream(10)
    trainer = make_trainer(train_loader=stream, limit_batches={"train": 4})

    assert trainer.max_iters == 8
    trainer.train()

    assert (trainer.iter, trainer.epoch, stream.fetched) == (8, 2, 8)


def test_every_pass_begins_at_the_start(make_trainer: MakeTrainer) -> None:
    """Each epoch trains on the first batches of its pass, and so does each pass of a run of iterations."""
    data = batches(5)
    for options in ({"max_epochs": 3}, {"max_iters": 6}):
        trainer, seen = make_trainer(train_loader=data, limit_batches=2, **options), list[int]()
        trainer.bus.subscribe(
            lambda trainer, event, seen=seen: seen.append(
                next(i for i, batch in enumerate(data) if batch is trainer.batch)
            ),
            "before_train_iter",
        )
        trainer.train()

        assert seen == [0, 1] * 3


def test_a_hand_written_loop(make_trainer: MakeTrainer) -> None:
    """`trainer.batches(loader)` ends at the limit, and the epoch is complete."""
    trainer = make_trainer(train_loader=None, limit_batches={"train": 2})
    ends = collect(trainer, "after_train_epoch")

    for _ in trainer.epochs():
        for inputs, target in trainer.batches(batches(5)):
            trainer.outputs = {"loss": torch.nn.functional.cross_entropy(trainer.model(inputs), target)}

    assert (trainer.iter, trainer.epoch) == (4, 2)
    assert [event.reason for event in ends] == ["completed", "completed"]


def test_the_length_of_an_epoch_is_the_limit(make_trainer: MakeTrainer) -> None:
    """Schedules that count epochs in iterations, hooks with a warm-up in epochs, writers and the position get the
    number of batches that are trained on."""
    config = {"type": "StepLR", "step_size": 1, "gamma": 0.1, "by_epoch": True, "convert_to_iter_based": True}
    trainer = make_trainer(train_loader=batches(5), limit_batches={"train": 2}, schedulers=[config])
    rates: list[float] = []
    trainer.bus.subscribe(
        lambda trainer, event: rates.append(trainer.optimizer.param_groups[0]["lr"]), "before_train_iter"
    )

    trainer.train()

    assert rates == pytest.approx([0.1, 0.1, 0.01, 0.01])
    assert trainer.facts.run.iters_per_epoch == trainer.position.length == 2
    assert trainer.limits.length("train", trainer.train_loader) == 2


def test_a_warm_up_in_epochs(make_trainer: MakeTrainer) -> None:
    """A warm-up of one epoch ends with the limited epoch."""
    warm_up = FixedLrUpdaterHook(
        by_epoch=False, warmup="linear", warmup_iters=1, warmup_ratio=0.5, warmup_by_epoch=True
    )
    trainer = make_trainer(train_loader=batches(8), limit_batches=2, hooks=[warm_up])
    rates: list[float] = []
    trainer.bus.subscribe(
        lambda trainer, event: rates.append(trainer.optimizer.param_groups[0]["lr"]), "after_train_iter"
    )

    trainer.train()

    assert rates == pytest.approx([0.05, 0.075, 0.1, 0.1])


@pytest.mark.parametrize(("unit", "length"), [("max_epochs", 3), ("max_iters", 6)])
def test_set_epoch_counts_the_passes(make_trainer: MakeTrainer, unit: str, length: int) -> None:
    """A sampler gets the number of each limited pass."""
    told: list[int] = []

    class Told(EpochSampler):
        def set_epoch(self, epoch: int) -> None:
            told.append(epoch)

    model = torch.nn.Linear(4, 2)
    loader = DataLoader(Augmented(), 4, sampler=Told())
    make_trainer(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        train_loader=loader,
        limit_batches=2,
        **{unit: length},
    ).train()

    assert told == [0, 1, 2]


@pytest.mark.slow
@pytest.mark.parametrize("persistent", [False, True])
def test_workers_read_nothing_beyond_the_limit(make_trainer: MakeTrainer, persistent: bool) -> None:
    """Worker processes are given only the samples that are trained on."""
    data, model = Augmented(), torch.nn.Linear(4, 2)
    loader = DataLoader(data, 4, num_workers=2, persistent_workers=persistent)
    make_trainer(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        train_loader=loader,
        limit_batches=3,
    ).train()

    assert data.reads.tolist() == [2] * 12 + [0] * (len(data) - 12)


def test_a_stop_in_a_validation(make_trainer: MakeTrainer) -> None:
    """A stop after the last batch of a limited validation leaves it complete, as without a limit."""
    trainer = make_trainer(val_loader=batches(5), limit_batches={"val": 2}, max_epochs=1)
    ends = collect(trainer, "after_val_epoch")
    trainer.bus.subscribe(
        lambda trainer, event: trainer.stop("enough") if event.batch_idx == 1 else None, "after_val_iter"
    )

    trainer.train()

    assert [event.reason for event in ends] == ["completed"]
    assert set(ends[0].metrics) == {"loss", "accuracy"}


def test_each_of_several_loaders_is_limited_and_no_prediction(make_trainer: MakeTrainer) -> None:
    """A limit is one of a pass over one loader; predictions are of all samples."""
    loaders = {"clean": batches(4), "noisy": batches(6)}
    trainer = make_trainer(train_loader=batches(10), val_loader=loaders, limit_batches=0.5)
    rows = record(trainer)

    trainer.val()
    predicted = trainer.predict(batches(4))

    assert names(rows).count("after_val_iter") == 2 + 3
    assert len(predicted) == sum(len(inputs) for inputs, _ in batches(4))


def test_a_share_of_one_of_several_loaders_without_a_length_is_refused(make_trainer: MakeTrainer) -> None:
    """As that of a single loader is."""
    with pytest.raises(ValueError, match=r"limit_batches=0\.5 for 'val' is a share .* has no length"):
        make_trainer(val_loader={"clean": batches(4), "noisy": Stream(4)}, limit_batches=0.5)
