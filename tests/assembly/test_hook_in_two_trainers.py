"""A hook that is given to a second trainer starts over there."""

from __future__ import annotations

import copy
import logging
import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from eventloop import Trainer
from eventloop.bridges import DrivenTrainer
from eventloop.checkpoint import load_checkpoint
from eventloop.hooks import (
    AmpOptimizerHook,
    CheckInvalidLossHook,
    CheckpointHook,
    EarlyStoppingHook,
    EMAHook,
    GradientCumulativeOptimizerHook,
    Hook,
    LoggerHook,
    PreciseBN,
    StepLrUpdaterHook,
)
from tests.support.interrupted import assert_same
from tests.support.trainers import MakeTrainer, batches, tiny_model

FOLDS = [[0.9, 0.8, 0.95, 0.94, 0.96, 0.9], [0.1, 0.2, 0.3, 0.4, 0.5, 0.45]]


def fold(make: MakeTrainer, scores: list[float], work_dir: Path, **changes: Any) -> Trainer:
    """Return a trainer whose validations have some scores."""
    left = iter(scores)
    return make(
        val_loader=batches(1),
        val_step=lambda trainer, batch: {"acc": next(left)},
        sanity_val=0,
        max_epochs=6,
        work_dir=work_dir,
        **changes,
    )


def test_early_stopping_over_folds(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    """Each fold trains as many epochs as with a hook of its own, and has its own best score."""
    hook = EarlyStoppingHook(monitor="acc", rule="greater", patience=2)
    epochs = []
    for number, scores in enumerate(FOLDS):
        trainer = fold(make_trainer, scores, tmp_path / str(number), hooks=[hook])
        trainer.train()
        epochs.append((trainer.epoch, hook.best))

    assert epochs == [(6, 0.96), (6, 0.5)]


class CountHook(Hook):
    """A user's hook: it counts in place, in an object of its own, and writes into a list of its user's."""

    def __init__(self, calls: list[int], scale: int = 1) -> None:
        self.calls, self.scale = calls, scale
        self.counts: list[int] = []

    def after_train_iter(self, trainer: Any, event: Any) -> None:
        """Count, and train by the count."""
        self.counts.append(self.scale)
        self.calls.append(sum(self.counts))
        with torch.no_grad():
            next(trainer.model.parameters()).add_(sum(self.counts))

    def state_dict(self) -> dict[str, Any]:
        """Return the counts."""
        return {"counts": self.counts}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the counts."""
        self.counts = state["counts"]


@dataclass(eq=False)
class DataHook(CountHook):
    """A dataclass, with its state in a field."""

    calls: list[int] = field(default_factory=list)
    scale: int = 1
    counts: list[int] = field(default_factory=list)


def net() -> nn.Module:
    """Return a model with BatchNorm."""
    torch.default_generator.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))


HOOKS: dict[str, Callable[[], Hook]] = {
    "checkpoint": lambda: CheckpointHook(2, save_best="auto", max_keep_ckpts=2, save_last=True),
    "ema": lambda: EMAHook(momentum=0.5, begin_iter=2),
    "accumulation": lambda: GradientCumulativeOptimizerHook(4),
    "amp": lambda: AmpOptimizerHook(dtype="bfloat16"),
    "logger": lambda: LoggerHook(interval=2, custom_cfg=[{"data_src": "loss", "method_name": "max"}]),
    "precise bn": lambda: PreciseBN(interval=1, num_iter=2),
    "policy": lambda: StepLrUpdaterHook(step=1),
    "invalid loss": lambda: CheckInvalidLossHook(1),
    "own": lambda: CountHook([], 2),
    "dataclass": lambda: DataHook([], 2),
}


@pytest.mark.filterwarnings("ignore:cumulative_iters=4")
@pytest.mark.representative(1)
@pytest.mark.parametrize("name", HOOKS)
def test_every_hook_starts_over(make_trainer: MakeTrainer, tmp_path: Path, name: str) -> None:
    """Weights and checkpoint of a second trainer are bitwise those of a trainer with a hook of its own."""

    def run(hook: Hook, scores: list[float], lr: float = 0.1) -> dict[str, Any]:
        model = net()
        trainer = fold(
            make_trainer,
            scores,
            tmp_path / str(len(list(tmp_path.iterdir()))) / "run",
            model=model,
            optimizer=torch.optim.SGD(model.parameters(), lr, 0.9),
            hooks=[hook],
        )
        trainer.train()
        saved = load_checkpoint(trainer.resume())
        return {
            "weights": saved["state_dict"],
            "optimizer": saved["optimizer"],
            "hooks": saved["hooks"],
            "all": sorted(path.name for path in trainer.work_dir.iterdir() if path.is_dir()),
        }

    shared = HOOKS[name]()
    run(shared, FOLDS[0], lr=0.05)
    second = run(shared, FOLDS[1])

    assert_same(second, run(HOOKS[name](), FOLDS[1]))


def test_what_the_user_gave_stays_the_users(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    """Arguments are the same objects again, and attributes that were set before the first trainer stay."""
    calls: list[int] = []
    hook = CountHook(calls, scale=3)
    hook.priority, hook.name, hook.scale = "LOW", "mine", 5
    for number in range(2):
        make_trainer(hooks=[hook], work_dir=tmp_path / str(number), max_epochs=1).train()

    assert calls == [5, 10, 15] * 2
    assert (hook.name, hook.priority) == ("mine", "LOW")


class SeenHook(CountHook):
    """A user's hook with its state in the list that it is given, and a metric of its own."""

    def __init__(self, seen: list[int] | None = None) -> None:
        super().__init__([])
        self.seen = [] if seen is None else seen
        self.metric = nn.Linear(1, 1)
        self.names: list[str] = ["first"]

    def after_train_iter(self, trainer: Any, event: Any) -> None:
        """Note the iteration."""
        self.seen.append(event.iter)

    def state_dict(self) -> dict[str, Any]:
        """Return the number of iterations."""
        return {"n": len(self.seen)}


def train_in(make_trainer: MakeTrainer, hook: Hook, work_dir: Path) -> None:
    """Train a trainer with the hook for three iterations."""
    make_trainer(hooks=[hook], work_dir=work_dir, max_epochs=1).train()


def test_what_the_constructor_made_is_made_anew(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    """A callable object of the constructor, such as a metric, is another one in each trainer."""
    hook, metrics = SeenHook(), []
    for name in "abc":
        train_in(make_trainer, hook, tmp_path / name)
        metrics.append(hook.metric)

    assert len({id(metric) for metric in metrics}) == 3


def test_a_state_in_an_argument_starts_over(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    """An argument that holds the state has its first values in each trainer."""
    hook = SeenHook([7])
    for name in "abc":
        train_in(make_trainer, hook, tmp_path / name)

        assert hook.seen == [7, 0, 1, 2]


def test_what_was_set_after_construction(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    """Objects that a user set, or changed in place, before the first trainer are there in each one."""
    metric, notes = nn.Linear(2, 2), {"a": [1]}
    hook = SeenHook()
    hook.metric, hook.notes = metric, notes  # type: ignore[attr-defined]
    hook.names.append("second")
    hook.seen = [5]
    for name in "abc":
        train_in(make_trainer, hook, tmp_path / name)

        assert hook.metric is metric
        assert (vars(hook)["notes"], hook.names, hook.seen) == ({"a": [1]}, ["first", "second"], [5, 0, 1, 2])


def test_a_dataclass_in_three_trainers(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    """It starts over in each one, with the fields as they were before the first."""
    hook = DataHook(scale=2)
    hook.scale = 3
    for name in "abc":
        train_in(make_trainer, hook, tmp_path / name)

        assert (hook.scale, hook.counts) == (3, [3, 3, 3])


def test_the_same_trainer_goes_on(make_trainer: MakeTrainer) -> None:
    """A second `train()` of one trainer, and a validation between, leave the hook's state as it is."""
    calls: list[int] = []
    hook = CountHook(calls)
    trainer = make_trainer(hooks=[hook], val_loader=batches(1), max_epochs=1)
    trainer.train()
    trainer.val()
    trainer.max_epochs, trainer.max_iters = 2, 6
    trainer.train()

    assert calls == [1, 2, 3, 4, 5, 6]


def test_the_first_trainer_has_lost_it(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    """Another run of a trainer whose hook a later one has got is refused by the hook's name."""
    hook = CountHook([])
    first, second = (make_trainer(hooks=[hook], work_dir=tmp_path / name) for name in ("a", "b"))
    second.train()

    with pytest.raises(
        RuntimeError,
        match=r"hook CountHook was given to another trainer .* each trainer a CountHook of its own",
    ):
        first.train()


def test_in_a_hosts_run_it_is_only_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A host's run goes on when a later trainer has got a hook of it."""
    hook = CountHook([])
    made = [
        DrivenTrainer(tiny_model(), hooks=[hook], work_dir=tmp_path / name, host="H") for name in ("a", "b")
    ]

    with caplog.at_level(logging.ERROR, "eventloop"):
        made[0].begin_run()
        made[0].end_run()

    assert "the hook CountHook was given to another trainer" in caplog.text
    for trainer in made:
        trainer.close()


def test_while_it_serves_a_run(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    """A hook of a run that goes on is not taken from it."""
    calls: list[int] = []
    hook = CountHook(calls)
    first = make_trainer(hooks=[hook], max_epochs=1)
    refused: list[str] = []

    @first.bus.on("before_train_iter", once=True)
    def build(trainer: Any, event: Any) -> None:
        with pytest.raises(ValueError, match="CountHook serves a run of another trainer just now") as error:
            make_trainer(hooks=[hook], work_dir=tmp_path / "other")
        refused.append(str(error.value))

    first.train()

    assert len(refused) == 1
    assert calls == [1, 2, 3]


class Refusing(Hook):
    """A hook whose check fails."""

    def check(self, trainer: Any) -> None:
        """Refuse."""
        raise ValueError("this hook refuses every trainer")


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"hooks": [Refusing()]}, "this hook refuses every trainer"),
        ({"hooks": [CountHook([])]}, "two hooks have the state name 'CountHook'"),
        ({"writers": [3]}, "expected a writer"),
    ],
    ids=["check", "names", "writers"],
)
def test_a_trainer_that_is_refused_takes_no_hook(
    make_trainer: MakeTrainer, tmp_path: Path, wrong: dict[str, Any], message: str
) -> None:
    """The hook keeps its state and its first trainer, which goes on."""
    calls: list[int] = []
    hook = CountHook(calls)
    first = make_trainer(hooks=[hook], max_epochs=1)
    first.train()

    with pytest.raises((ValueError, TypeError), match=message):
        make_trainer(**wrong | {"hooks": [hook, *wrong.get("hooks", [])]}, work_dir=tmp_path / "other")
    first.max_epochs, first.max_iters = 2, 6
    first.train()

    assert calls == [1, 2, 3, 4, 5, 6]


def test_a_trainer_that_is_refused_marks_no_new_hook(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    """A hook whose first trainer is refused is as new in the next one, with the attributes set until then."""
    hook = CountHook([])
    with pytest.raises(TypeError, match="expected a writer"):
        make_trainer(hooks=[hook], writers=[3], work_dir=tmp_path / "refused")
    hook.scale = 2
    for name in ("a", "b"):
        make_trainer(hooks=[hook], work_dir=tmp_path / name, max_epochs=1).train()

    assert hook.counts == [2, 2, 2]


class Kept(CountHook):
    """A hook whose constructor is replaced after its class was made, so that nobody knows the arguments."""


def _kept(self: Kept, calls: list[int]) -> None:
    CountHook.__init__(self, calls)
    del vars(self)["_made_with"]  # as a constructor that calls no other


Kept.__init__ = _kept  # type: ignore[method-assign, assignment]


class Once(CountHook):
    """A hook whose constructor works once."""

    def __init__(self, arguments: list[Any]) -> None:
        super().__init__(arguments.pop())


@pytest.mark.parametrize(
    ("hook", "error", "message"),
    [
        (Kept([]), ValueError, "Kept has the state of another trainer, and a Kept cannot start over"),
        (Once([[]]), IndexError, "pop from empty list"),
    ],
    ids=["unknown arguments", "constructor"],
)
def test_a_hook_that_cannot_start_over(
    make_trainer: MakeTrainer, tmp_path: Path, hook: Hook, error: type[Exception], message: str
) -> None:
    """It is refused by name when the second trainer is built, and keeps its state."""
    make_trainer(hooks=[hook]).train()

    with pytest.raises(error, match=message) as raised:
        make_trainer(hooks=[hook], work_dir=tmp_path / "other")

    notes = [str(raised.value), *getattr(raised.value, "__notes__", [])]
    assert any(f"give each trainer a {type(hook).__name__} of its own" in note for note in notes)
    assert hook.state_dict() == {"counts": [1] * 6}


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda hook: pickle.loads(pickle.dumps(hook))])
def test_a_copy_of_a_used_hook(make_trainer: MakeTrainer, tmp_path: Path, copied: Any) -> None:
    """A copy of a hook that a trainer has used starts over in another trainer, and the first one goes on."""
    hook = CountHook([])
    first = make_trainer(hooks=[hook])
    first.train()
    again = copied(hook)

    make_trainer(hooks=[again], work_dir=tmp_path / "other", max_epochs=1).train()
    first.max_epochs, first.max_iters = 3, 9
    first.train()

    assert (len(again.counts), len(hook.counts)) == (3, 9)


def test_a_hook_without_a_state_serves_several(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    """A user's hook that saves nothing goes on as it is, and the first trainer too."""

    class Notes(Hook):
        def __init__(self) -> None:
            self.seen: list[int] = []

        def after_train_epoch(self, trainer: Any, event: Any) -> None:
            self.seen.append(event.epoch)

    hook = Notes()
    first, second = (
        make_trainer(hooks=[hook], work_dir=tmp_path / name, max_epochs=1) for name in ("a", "b")
    )
    second.train()
    first.train()

    assert hook.seen == [0, 0]
