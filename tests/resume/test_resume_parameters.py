"""Test that the state of each parameter, param group and scheduler is loaded by its name, wherever it stands."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as torch_lr

from eventloop import Trainer
from eventloop.checkpoint import CheckpointError
from eventloop.hooks import GradientCumulativeOptimizerHook
from tests.checkpoints import rewrite
from tests.support.interrupted import assert_same, stop_after
from tests.support.trainers import MakeTrainer, batches

Groups = Callable[..., list[dict[str, Any]]]
Make = Callable[..., Trainer]


def model_of_three() -> nn.Sequential:
    """Return three layers whose weights have one shape."""
    torch.default_generator.manual_seed(0)
    return nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(3)))


@pytest.fixture
def build(make_trainer: MakeTrainer, tmp_path: Path) -> Make:
    """Return a function that builds a trainer of three layers with an optimizer of the weights a, b and c."""

    def make(
        groups: Groups, kind: Any = torch.optim.Adam, schedules: Any = lambda o: [], **changes: Any
    ) -> Trainer:
        model = model_of_three()
        optimizer = kind(groups(*model.parameters()))
        inputs = torch.randn(24, 4, generator=torch.Generator().manual_seed(1)).split(4)
        return make_trainer(
            **{
                "model": model,
                "optimizer": optimizer,
                "schedulers": schedules(optimizer),
                "work_dir": tmp_path,
                "train_loader": [(each, each.flip(1)) for each in inputs],
                "loss_fn": nn.functional.mse_loss,
                "max_epochs": 2,
                **changes,
            }
        )

    return make


def stopped(trainer: Trainer, after: int = 8) -> Trainer:
    """Train a part of the run."""
    stop_after(trainer, after)
    trainer.train()
    return trainer


def two(a: Any, b: Any, c: Any) -> list[dict[str, Any]]:
    """Return two param groups with rates of their own."""
    return [{"params": [a, b], "lr": 0.01}, {"params": [c], "lr": 0.03}]


def exchanged(a: Any, b: Any, c: Any) -> list[dict[str, Any]]:
    """Return the groups of `two` in another order."""
    return [*reversed(two(a, b, c))]


def turned(a: Any, b: Any, c: Any) -> list[dict[str, Any]]:
    """Return the groups of `two`, one of them with its parameters in another order."""
    return two(b, a, c)


def split(a: Any, b: Any, c: Any) -> list[dict[str, Any]]:
    """Return a group for each parameter, with the rates of `two`."""
    return [{"params": [p], "lr": rate} for p, rate in ((a, 0.01), (c, 0.03), (b, 0.01))]


def lambdas(optimizer: Any) -> Any:
    """Return a schedule that has a function for each group."""
    by_rate = {0.01: lambda step: 0.9**step, 0.03: lambda step: 0.5**step}
    return torch_lr.LambdaLR(optimizer, [by_rate[group["lr"]] for group in optimizer.param_groups])


SCHEDULES: dict[str, Any] = {
    "none": lambda o: [],
    "cosine": lambda o: [torch_lr.CosineAnnealingLR(o, 12)],
    "lambdas": lambda o: [lambdas(o)],
    "sequence": lambda o: [
        torch_lr.SequentialLR(o, [torch_lr.LinearLR(o, 0.1, total_iters=3), torch_lr.StepLR(o, 2)], [3])
    ],
    "window": lambda o: [{"type": "CosineAnnealingLR", "T_max": 9, "by_epoch": False, "eta_min_ratio": 0.1}],
    "one cycle": lambda o: [
        torch_lr.OneCycleLR(o, [10 * group["lr"] for group in o.param_groups], total_steps=20)
    ],
}


@pytest.mark.filterwarnings("ignore:The epoch parameter in:UserWarning")
@pytest.mark.representative(2)
@pytest.mark.parametrize("groups", [exchanged, turned])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_each_parameter_goes_on_with_its_own_state(build: Make, schedule: str, groups: Groups) -> None:
    """With the groups or parameters in another order the weights are bitwise the uninterrupted run's."""
    whole = build(two, schedules=SCHEDULES[schedule], default_hooks={"checkpoint": None})
    whole.train()
    stopped(build(two, schedules=SCHEDULES[schedule]))

    trainer = build(groups, schedules=SCHEDULES[schedule])
    trainer.resume()
    trainer.train()

    assert_same(trainer.model.state_dict(), whole.model.state_dict())


def test_names_of_named_parameters_stay_the_optimizers_own(build: Make) -> None:
    """An optimizer that was given names of parameters keeps them for its own order."""

    def named(a: Any, b: Any, c: Any) -> list[dict[str, Any]]:
        return [{"params": [("c", c)], "lr": 0.03}, {"params": [("b", b), ("a", a)], "lr": 0.01}]

    stopped(
        build(
            lambda a, b, c: [{"params": [("a", a), ("b", b)], "lr": 0.01}, {"params": [("c", c)], "lr": 0.03}]
        )
    )
    trainer = build(named)

    trainer.resume()

    assert [group["param_names"] for group in trainer.optimizer.param_groups] == [["c"], ["b", "a"]]


def test_schedulers_of_several_optimizers(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    """Schedulers of one class go with their optimizers, in whatever order the trainer has them."""

    def make(order: int, **changes: Any) -> Trainer:
        model = model_of_three()
        optimizer = {
            "body": torch.optim.Adam(model[:2].parameters(), 0.01),
            "head": torch.optim.Adam(model[2].parameters(), 0.03),
        }
        schedules = [torch_lr.CosineAnnealingLR(each, 12) for each in optimizer.values()]
        inputs = torch.randn(24, 4, generator=torch.Generator().manual_seed(1)).split(4)
        return make_trainer(
            model=model,
            optimizer=dict([*optimizer.items()][::order]),
            schedulers=schedules[::order],
            train_loader=[(each, each.flip(1)) for each in inputs],
            loss_fn=nn.functional.mse_loss,
            work_dir=tmp_path,
            **changes,
        )

    whole = make(1, default_hooks={"checkpoint": None})
    whole.train()
    stopped(make(1))
    trainer = make(-1)
    trainer.resume()
    trainer.train()

    assert_same(trainer.model.state_dict(), whole.model.state_dict())


def test_a_schedule_of_another_optimizer(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    """A scheduler that belongs to another optimizer than the saved one is refused with both names."""

    def make(name: str) -> Trainer:
        model = model_of_three()
        optimizer = {
            "body": torch.optim.SGD(model[:2].parameters()),
            "head": torch.optim.SGD(model[2].parameters()),
        }
        return make_trainer(
            model=model,
            optimizer=optimizer,
            schedulers=[torch_lr.StepLR(optimizer[name], 2)],
            work_dir=tmp_path,
            train_loader=[(torch.ones(1, 4), torch.ones(1, 4))],
            loss_fn=nn.functional.mse_loss,
        )

    make("body").train()

    with pytest.raises(
        CheckpointError, match=r"\[\"StepLR of 'body'\"\], the trainer has \[\"StepLR of 'head'\"\]"
    ):
        make("head").resume()


OTHERS: dict[str, tuple[Groups, Groups]] = {
    "in a group": (
        lambda a, b, c: [{"params": [a, b]}],
        lambda a, b, c: [{"params": [a, c]}],
    ),
    "a group": (
        lambda a, b, c: [{"params": [a]}, {"params": [b]}],
        lambda a, b, c: [{"params": [a]}, {"params": [c]}],
    ),
}


@pytest.mark.parametrize("case", OTHERS)
def test_other_parameters_are_refused(build: Make, case: str) -> None:
    """A parameter that is new, or gone, is refused by its name until `changed` permits it."""
    saved, own = OTHERS[case]
    stopped(build(saved))

    with pytest.raises(
        CheckpointError,
        match=r"parameters of the optimizer: \['1\.weight'\] in the checkpoint, \['2\.weight'\] in this trainer",
    ):
        build(own).resume()


@pytest.mark.parametrize("changed", ["keep", "apply"])
@pytest.mark.parametrize("case", OTHERS)
def test_other_parameters_begin_without_a_state(
    build: Make, caplog: pytest.LogCaptureFixture, case: str, changed: Any
) -> None:
    """With `changed` a new parameter trains as one that PyTorch's optimizer meets for the first time."""
    saved, own = OTHERS[case]
    first = stopped(build(saved))
    by_hand = model_of_three()
    by_hand.load_state_dict(first.model.state_dict())
    optimizer = torch.optim.Adam(own(*by_hand.parameters()))
    (own_a, *_), (a, *_) = by_hand.parameters(), first.model.parameters()
    optimizer.state[own_a] = first.optimizer.state[a]
    trainer = build(own)

    trainer.resume(changed=changed)
    trainer.train()

    for inputs, target in [*(trainer.train_loader or ())][2:]:
        optimizer.zero_grad()
        nn.functional.mse_loss(by_hand(inputs), target).backward()
        optimizer.step()
    assert_same(trainer.model.state_dict(), by_hand.state_dict())
    assert "the state of 1.weight in the optimizer is not loaded" in caplog.text
    assert "the optimizer begins without a state of 2.weight" in caplog.text
    assert "schedules" not in caplog.text, "the trainer has none"


def merged(a: Any, b: Any, c: Any) -> list[dict[str, Any]]:
    """Return one group of what were two."""
    return [{"params": [a, b, c], "lr": 0.01}]


class OwnSchedule(torch_lr.LRScheduler):
    """A user's schedule, which may keep a value for each group under any name."""

    def get_lr(self) -> list[Any]:
        """Return the rates."""
        return [group["lr"] for group in self.optimizer.param_groups]


@pytest.mark.parametrize(
    ("saved", "own", "options", "message"),
    [
        (
            two,
            merged,
            {},
            r"have \[2, 1\] .* trainer's \[3\], and 1\.weight and 2\.weight are in different groups there",
        ),
        (
            two,
            split,
            {},
            r"have \[2, 1\] .* trainer's \[1, 1, 1\], and 0\.weight and 1\.weight are in one group there",
        ),
        (
            merged,
            lambda a, b, c: [{"params": [c, b, a]}],
            {"kind": torch.optim.LBFGS},
            r"another order, .* LBFGS has no state for each parameter .* has '0\.weight', the trainer '2\.weight'",
        ),
        (
            two,
            exchanged,
            {"schedules": lambda o: [OwnSchedule(o)]},
            "param groups of the optimizer in another order, and the state of OwnSchedule",
        ),
    ],
    ids=["merged", "split", "lbfgs", "schedule"],
)
def test_what_cannot_be_arranged(
    build: Make, saved: Groups, own: Groups, options: dict[str, Any], message: str
) -> None:
    """A state that cannot be given to its parameters is refused, and the error says why."""
    steps = {"train_step": lambda trainer, batch: torch.zeros(()), "default_hooks": {"optimizer": None}}
    given = {**options, **(steps if "kind" in options else {})}
    stopped(build(saved, **given))

    with pytest.raises(CheckpointError, match=message):
        build(own, **given).resume(changed="keep")


@pytest.mark.parametrize("fits", [True, False])
def test_a_checkpoint_without_names(build: Make, tmp_path: Path, fits: bool) -> None:
    """A checkpoint of an earlier version is loaded by place; a state of another shape is refused at once."""
    first = stopped(build(two))

    def forget(checkpoint: dict[str, Any]) -> None:
        del checkpoint["meta"]["parameters"], checkpoint["meta"]["scheduler_optimizers"]
        if not fits:
            checkpoint["optimizer"]["state"][1]["exp_avg"] = torch.zeros(2, 4)

    rewrite(tmp_path / "iter_8", forget)
    trainer = build(two)

    if fits:
        trainer.resume()
        assert_same(trainer.optimizer.state_dict(), first.optimizer.state_dict())
        return
    with pytest.raises(
        CheckpointError,
        match=r"optimizer\.param_groups\[0\]: 'exp_avg' of its parameter 1 .* expected the shape \(4, 4\), got \(2, 4\)",
    ):
        trainer.resume()


def test_names_that_are_not_those_of_the_groups(build: Make, tmp_path: Path) -> None:
    """Names of more parameters than the saved groups have are refused, not paired with others."""
    stopped(build(two))
    rewrite(
        tmp_path / "iter_8", lambda checkpoint: checkpoint["meta"].update(parameters={"": ["a\nb\nc", "d"]})
    )

    with pytest.raises(
        CheckpointError, match=r"names of \[3, 1\] parameters in meta.parameters, expected .* \[2, 1\]"
    ):
        build(two).resume()


def test_parameters_outside_of_the_model(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    """Parameters without a name keep their order, beside those of the model in another order."""

    def make(turn: int) -> Trainer:
        model = model_of_three()
        scale = nn.Parameter(torch.ones(3))
        parameters = [*model.parameters()][::turn]
        return make_trainer(
            model=model,
            optimizer=torch.optim.Adam([*parameters, scale]),
            work_dir=tmp_path,
            train_step=lambda trainer, batch: (model(torch.ones(2, 4)).sum() * scale).sum(),
            train_loader=batches(3),
        )

    first = make(1)
    first.train()
    trainer = make(-1)
    trainer.resume()

    moments = {
        name: [each.optimizer.state[p]["exp_avg"] for p in each.optimizer.param_groups[0]["params"]]
        for name, each in (("first", first), ("second", trainer))
    }
    assert_same([moments["second"][i] for i in (2, 1, 0, 3)], moments["first"])


def test_accumulated_gradients_find_their_parameters(build: Make) -> None:
    """The gradients of an unfinished window are given to the parameters that had them."""
    hooks = {"default_hooks": {"optimizer": GradientCumulativeOptimizerHook(4)}}
    whole = build(two, **hooks)
    whole.train()
    stopped(build(two, default_hooks={"optimizer": GradientCumulativeOptimizerHook(4)}), 7)

    trainer = build(exchanged, default_hooks={"optimizer": GradientCumulativeOptimizerHook(4)})
    trainer.resume("iter_7")
    trainer.train()

    assert_same(trainer.model.state_dict(), whole.model.state_dict())
