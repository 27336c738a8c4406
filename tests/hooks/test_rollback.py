"""Test that RollbackHook goes back from a divergence and from nothing else, as often as it may."""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from eventloop import Trainer
from eventloop.checkpoint import load_checkpoint
from eventloop.commands.record import NAME
from eventloop.hooks import CheckInvalidLossHook, CheckpointHook, RollbackHook
from tests.support.reading import Reads
from tests.support.rolled_back import skip_by_hand, weights
from tests.support.trainers import MakeTrainer, collect, record

Losses = Callable[[int], float]
INTERVAL = 5


class Numbers:
    """A train step whose loss is a function of the batch's number; batch k is the k-th of the pass."""

    def __init__(self, loss: Losses) -> None:
        self.loss, self.trained = loss, list[int]()

    def __call__(self, trainer: Trainer, batch: torch.Tensor) -> torch.Tensor:
        number = int(batch.item())
        self.trained.append(number)
        weight = next(trainer.model.parameters())
        loss: torch.Tensor = weight.sum() * 0 + weight.sum() * 1e-3 + self.loss(number)
        return loss


@pytest.fixture
def make(make_trainer: MakeTrainer) -> Callable[..., Trainer]:
    """Build trainers whose logged values are read in the background before the next iteration begins."""

    def make(loss: Losses, count: int = 60, hook: RollbackHook | None = None, **changes: Any) -> Trainer:
        model = nn.Linear(1, 1)
        nn.init.ones_(model.weight)
        nn.init.zeros_(model.bias)
        own, optimizer = [] if hook is None else [hook], torch.optim.SGD(model.parameters(), lr=0.1)
        schedulers = [torch.optim.lr_scheduler.ExponentialLR(optimizer, changes.pop("decay", 1.0))]
        trainer = make_trainer(
            model=model,
            optimizer=optimizer,
            schedulers=schedulers,
            train_step=Numbers(loss),
            train_loader=[torch.full((1, 1), float(number)) for number in range(count)],
            hooks=[CheckpointHook(10, by_epoch=False), *own, *changes.pop("hooks", [])],
            default_hooks={"logger": {"interval": INTERVAL}},
            **{"max_epochs": 1, **changes},
        )

        def read(trainer: Trainer, event: Any) -> None:
            if (event.batch_idx + 1) % INTERVAL == 0:
                trainer.bus.flush()

        trainer.bus.subscribe(read, "after_train_iter", priority="LOWEST", name="read")
        return trainer

    return make


def loss_of(number: int) -> float:
    """Return a healthy loss, between 0.9 and 1.1."""
    return 1 + 0.1 * math.sin(number)


def lost_at(*numbers: int, value: float = math.nan) -> Losses:
    """Return losses of which some have another value."""
    return lambda number: value if number in numbers else loss_of(number)


def trained(trainer: Trainer) -> list[int]:
    """Train, and return the batches that were trained on, in their order."""
    trainer.train()
    step: Any = trainer.custom_step
    return list(step.trained)


# --- when --------------------------------------------------------------------------------------------------


def test_nan_leads_back_behind_the_margin(make: Callable[..., Trainer]) -> None:
    """The run goes to the newest checkpoint that is the margin older than the first invalid loss, and skips all
    batches since."""
    trainer = make(lost_at(*range(33, 40)), hook=RollbackHook(margin=10, consecutive=3))
    rolled = collect(trainer, "rolled_back")
    batches = trained(trainer)

    assert batches == [*range(40), *range(40, 60)]
    assert [(event.iter, event.skipped) for event in rolled] == [(20, 20)]
    assert rolled[0].reason == "loss was NaN or infinite in iterations 33 to 39, at last nan"
    assert trainer.iter == 40


@pytest.mark.parametrize("unit", ["max_epochs", "max_iters"])
def test_divergence_in_the_last_iterations_leads_back(make: Callable[..., Trainer], unit: str) -> None:
    """A training does not end with lost weights because its last values were not read yet."""
    lengths = {"max_epochs": 1} if unit == "max_epochs" else {"max_epochs": None, "max_iters": 58}
    trainer = make(lost_at(55, 56, 57), count=58, hook=RollbackHook(consecutive=3), **lengths)
    rolled = collect(trainer, "rolled_back")
    trainer.train()

    assert [(event.iter, event.skipped) for event in rolled] == [(40, 18)]


def test_weights_are_those_of_a_new_process(make: Callable[..., Trainer], tmp_path: Path) -> None:
    """After the rollback the run equals a process that resumes from that checkpoint and skips these batches."""
    trainer = make(lost_at(*range(33, 40)), hook=RollbackHook(consecutive=3))
    trained(trainer)
    fresh = make(loss_of, work_dir=tmp_path / "fresh")
    fresh.resume(trainer.work_dir / "iter_20")
    skip_by_hand(fresh, 20)
    batches = trained(fresh)

    assert batches == [*range(40, 60)]
    assert weights(trainer) == weights(fresh)
    assert all(math.isfinite(value) for each in weights(trainer) for value in each)


def test_spike_leads_back(make: Callable[..., Trainer]) -> None:
    """Values above the multiple of the median, so many in a row, are a spike."""
    trainer = make(lost_at(*range(45, 50), value=3.5), hook=RollbackHook(window=20, margin=5), count=80)
    rolled = collect(trainer, "rolled_back")
    trained(trainer)

    assert [(event.iter, event.skipped) for event in rolled] == [(40, 10)]
    assert rolled[0].reason.startswith("loss was above 3 times its median 1.")
    assert "in iterations 45 to 49, at last 3.5" in rolled[0].reason


def test_another_metric_may_be_watched(make: Callable[..., Trainer]) -> None:
    """Any metric that is logged in each iteration can be monitored."""
    trainer = make(loss_of, hook=RollbackHook("strange", consecutive=2))
    trainer.bus.subscribe(
        lambda trainer, event: trainer.metrics.put_scalar(
            "strange", math.inf if 33 <= event.iter < 40 else 1.0
        ),
        "after_train_iter",
    )
    rolled = record(trainer, "rolled_back")
    trainer.train()

    assert rolled[0] == ("rolled_back", 20, 0)


@pytest.mark.parametrize("value", [math.nan, math.inf, 1000.0])
def test_single_bad_batches_are_no_spike(make: Callable[..., Trainer], value: float) -> None:
    """Values that are not in a row never lead back, however large they are."""
    bad = [number for number in range(150) if number % 6 < 2]
    trainer = make(lost_at(*bad, value=value), hook=RollbackHook(window=20, consecutive=3), count=150)
    rolled = record(trainer, "rolled_back")

    assert trained(trainer) == [*range(150)]
    assert rolled == []


@pytest.mark.representative(1)
@pytest.mark.parametrize("seed", range(3))
def test_noise_is_no_spike(make: Callable[..., Trainer], seed: int) -> None:
    """Independent values of a distribution with a long tail, of which many are three times the median, are none."""
    noise = torch.empty(1500).log_normal_(0, 1.5, generator=torch.Generator().manual_seed(seed)).tolist()
    median = sorted(noise)[len(noise) // 2]
    trainer = make(lambda number: float(noise[number]), hook=RollbackHook(), count=1500)
    rolled = record(trainer, "rolled_back")
    trainer.train()

    assert sum(value > 3 * median for value in noise) > 200
    assert rolled == []


def test_spike_before_the_window_is_full_is_none(make: Callable[..., Trainer]) -> None:
    """Finite values are judged only once the window is full."""
    trainer = make(lost_at(*range(20, 30), value=50.0), hook=RollbackHook(window=100))
    rolled = record(trainer, "rolled_back")
    trainer.train()

    assert rolled == []


def test_window_is_in_the_checkpoint(make: Callable[..., Trainer]) -> None:
    """A resumed run judges its first values by those before the checkpoint."""
    first = make(loss_of, hook=RollbackHook(window=20), max_epochs=2)
    first.bus.subscribe(
        lambda trainer, event: trainer.stop("enough") if event.iter == 39 else None, "after_train_iter"
    )
    first.train()
    hook = RollbackHook(window=20, margin=0)
    second = make(lost_at(*range(41, 60), value=9.0), hook=hook, max_epochs=2)
    rolled = collect(second, "rolled_back")
    second.resume()
    second.bus.subscribe(
        lambda trainer, event: trainer.stop("enough") if event.iter == 55 else None, "after_train_iter"
    )
    second.train()

    assert rolled[0].reason.startswith("loss was above 3 times its median 1.")


# --- how often, and what else ------------------------------------------------------------------------------


def test_batches_are_trained_on_again_without_skip(make: Callable[..., Trainer]) -> None:
    """With skip=False the run trains on the batches since the checkpoint again."""
    once = iter([math.nan] * 7)
    trainer = make(
        lambda number: next(once, 1.0) if number >= 33 else 1.0, hook=RollbackHook(skip=False, consecutive=3)
    )

    assert trained(trainer) == [*range(40), *range(20, 60)]


def test_rate_is_scaled_at_the_rollback(make: Callable[..., Trainer]) -> None:
    """With scale_lr the schedule goes on times the factor, and the checkpoint of the rollback has it."""
    trainer = make(lost_at(*range(33, 40)), hook=RollbackHook(consecutive=3, scale_lr=0.5), decay=0.99)
    rates: dict[int, float] = {}
    trainer.bus.subscribe(
        lambda trainer, event: rates.update({event.iter: trainer.optimizer.param_groups[0]["lr"]}),
        "before_train_iter",
    )
    trainer.train()
    saved = load_checkpoint(trainer.work_dir / "iter_20_rollback")["optimizer"]["param_groups"][0]["lr"]

    assert rates[39] == pytest.approx(0.05 * 0.99**39)
    assert saved == pytest.approx(0.05 * 0.99**20)


def test_run_stops_once_the_rollbacks_are_used_up(make: Callable[..., Trainer]) -> None:
    """The next spike leads back a last time, and the run stops there: its newest checkpoint is finite, and a resume
    goes on behind the batches."""
    hook = RollbackHook(max_rollbacks=1, consecutive=2)
    trainer = make(lost_at(33, 34, 53, 54), hook=hook, count=100)
    rolled = collect(trainer, "rolled_back")
    trainer.train()
    resumed = make(loss_of, count=100)
    path = resumed.resume()

    assert [event.iter for event in rolled] == [20, 20]
    assert trainer.stop_reason == (
        "loss was NaN or infinite in iterations 38 to 39, at last nan, and max_rollbacks=1 are used up"
    )
    assert path.name == "iter_20_rollback_2"
    state = load_checkpoint(path)["state_dict"]
    assert all(value.isfinite().all() for value in state.values())
    assert trained(resumed) == [*range(55, 100)]


def test_rollbacks_of_the_run_before_a_resume_count(make: Callable[..., Trainer]) -> None:
    """The number of rollbacks is in the checkpoints, and a rollback does not reset it."""
    first = make(lost_at(33, 34), hook=RollbackHook(max_rollbacks=1, consecutive=2), count=100)
    first.bus.subscribe(
        lambda trainer, event: trainer.stop("enough") if event.batch_idx == 49 else None, "after_train_iter"
    )
    first.train()
    second = make(lost_at(83, 84), hook=RollbackHook(max_rollbacks=1, consecutive=2), count=100)
    second.resume()
    second.train()

    assert first.stop_reason == "enough"
    assert str(second.stop_reason).endswith("max_rollbacks=1 are used up")


def test_nan_without_an_old_checkpoint_is_an_error(make: Callable[..., Trainer]) -> None:
    """Without a checkpoint that is old enough a lost metric ends the run, and lost weights are not saved."""
    trainer = make(lost_at(*range(12, 60)), hook=RollbackHook(margin=10))

    with pytest.raises(
        FloatingPointError,
        match=r"loss was NaN or infinite in iterations 12 to 19, at last nan, and the run cannot go back: no "
        r"checkpoint is older than iteration 3.*lower RollbackHook\(margin=",
    ):
        trainer.train()

    assert not (trainer.work_dir / "iter_60").exists()


def test_spike_without_an_old_checkpoint_is_logged_once(
    make: Callable[..., Trainer], caplog: pytest.LogCaptureFixture
) -> None:
    """Without a checkpoint that is old enough a finite spike is logged once, and the training goes on."""
    spikes = [*range(30, 40), *range(70, 80)]
    trainer = make(lost_at(*spikes, value=9.0), hook=RollbackHook(window=20, margin=100), count=90)
    with caplog.at_level(logging.WARNING):
        batches = trained(trainer)

    assert batches == [*range(90)]
    assert caplog.text.count("RollbackHook does not go back: no checkpoint is older than iteration 1") == 1


def test_repetition_goes_back_where_the_run_did(make: Callable[..., Trainer], tmp_path: Path) -> None:
    """A repetition of the run goes back by the record, and not by the hook as well."""
    losses = lost_at(*range(33, 40))
    trainer = make(losses, hook=RollbackHook(consecutive=3))
    trainer.train()
    again = make(
        losses,
        hook=RollbackHook(consecutive=3),
        work_dir=tmp_path / "again",
        commands=trainer.work_dir / NAME,
    )
    rolled = record(again, "rolled_back")
    again.train()

    assert rolled == [("rolled_back", 20, 0)]
    assert weights(again) == weights(trainer)


def test_no_value_is_read_on_the_training_thread(make: Callable[..., Trainer], reads: Reads) -> None:
    """The training thread asks no tensor for its value because of the hook, but those left in the last iteration."""

    def count(**options: Any) -> int:
        trainer = make(loss_of, **options)
        reads.clear()
        trainer.train()
        here = threading.current_thread().name
        return sum(number for (thread, _), number in reads.items() if thread == here)

    assert count(hook=RollbackHook()) - INTERVAL == count() > 0


# --- what is refused ---------------------------------------------------------------------------------------


def test_both_hooks_for_an_invalid_loss_are_refused(make: Callable[..., Trainer]) -> None:
    """CheckInvalidLossHook would end the run from which this hook goes back."""
    with pytest.raises(ValueError, match="expected RollbackHook or CheckInvalidLossHook, got both"):
        make(loss_of, hook=RollbackHook(), hooks=[CheckInvalidLossHook()])


def test_trainer_without_checkpoints_is_refused(make_trainer: MakeTrainer) -> None:
    """Without a CheckpointHook there is nothing to go back to."""
    with pytest.raises(ValueError, match=r"RollbackHook needs a CheckpointHook, .*: the trainer has none"):
        make_trainer(hooks=[RollbackHook()])


def test_trainer_without_logger_is_refused(make_trainer: MakeTrainer) -> None:
    """Without a LoggerHook nothing reads the values."""
    with pytest.raises(ValueError, match=r"RollbackHook needs a LoggerHook, .*: the trainer has none"):
        make_trainer(hooks=[RollbackHook(), CheckpointHook(1)], default_hooks={"logger": None})


@pytest.mark.parametrize(
    ("options", "kind", "match"),
    [
        ({"monitor": ""}, TypeError, "monitor must be the name of a metric, got ''"),
        ({"spike": 1}, ValueError, "spike must be above 1, got 1"),
        ({"window": 2}, ValueError, "window must be .* 3, got 2"),
        ({"margin": -1}, ValueError, "margin must be .* got -1"),
        ({"max_rollbacks": -1}, ValueError, "max_rollbacks must be .* got -1"),
        ({"skip": 3}, TypeError, "skip must be .* got 3"),
        ({"scale_lr": 0}, ValueError, "scale_lr must be above 0, got 0"),
        ({"consecutive": 0}, ValueError, "consecutive must be .* got 0"),
    ],
)
def test_invalid_options_are_refused(options: dict[str, Any], kind: type[Exception], match: str) -> None:
    """An option out of range is refused with its name, what was expected and what came."""
    with pytest.raises(kind, match=match):
        RollbackHook(**options)
