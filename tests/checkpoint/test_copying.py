"""Test that copies made during the next forward and backward pass are bitwise those of the moment of the
save."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from eventloop import Trainer
from eventloop.checkpoint import find_checkpoints, load_checkpoint
from eventloop.events import CheckpointFailed
from eventloop.hooks import CheckpointHook, EMAHook, Hook
from eventloop.state.tensors import tensors_of
from tests.support.inside_torch import step_hooks
from tests.support.saving import Latest, same
from tests.support.trainers import DEADLINE, MakeTrainer, batches, tiny_model


@pytest.fixture
def latest(monkeypatch: pytest.MonkeyPatch) -> Iterator[Latest]:
    """Return a `Latest`, which is released when the test ends."""
    latest = Latest(monkeypatch)
    yield latest
    latest.let_go()


Options = Callable[[], dict[str, Any]]


@pytest.fixture
def late_equals_sync(make_trainer: MakeTrainer, tmp_path: Path, latest: Latest) -> Callable[..., None]:
    """Return a function that trains with copies made at once and with late ones, and compares checkpoints and
    final weights."""

    def check(options: Options, train: Callable[[Trainer], None] = Trainer.train) -> None:
        ends = []
        for overlap in (False, True):
            torch.manual_seed(5)
            made = {"max_iters": 3, "hooks": [], **options()}
            hook = CheckpointHook(interval=1, by_epoch=False, overlap=overlap)
            trainer = make_trainer(
                work_dir=tmp_path / str(overlap), **{**made, "hooks": [hook, *made["hooks"]]}
            )
            with trainer.bus.capture("checkpoint_failed") as failed:
                train(trainer)
            assert [event for event in failed if isinstance(event, CheckpointFailed)] == []
            assert (latest.copies > 0) == overlap
            ends.append(trainer.model.state_dict())
        at_once, late = (find_checkpoints(tmp_path / str(overlap)) for overlap in (False, True))
        assert [path.name for path in late] == [path.name for path in at_once] != []
        for one, other in zip(at_once, late, strict=True):
            assert same(load_checkpoint(one), load_checkpoint(other)), one.name
        assert same(*ends)

    return check


Check = Callable[..., None]


def test_the_step_waits_for_the_copy(make_trainer: MakeTrainer, latest: Latest) -> None:
    """The optimizer's step waits for the copy; the forward and backward pass before it do not."""
    model = tiny_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    order = latest.order

    def step(trainer: Trainer, batch: Any) -> torch.Tensor:
        loss = F.cross_entropy(trainer.model(batch[0]), batch[1])
        loss.register_hook(lambda grad: order.append("backward"))
        order.append("forward")
        return loss

    trainer = make_trainer(
        model=model, optimizer=optimizer, train_step=step, max_iters=2, hooks=[CheckpointHook(interval=1)]
    )
    optimizer.register_step_post_hook(lambda *arguments: order.append("step"))
    trainer.train()

    assert order[:7] == ["forward", "backward", "step", "forward", "backward", "join", "step"]


def trained_by_sgd(model: nn.Module, trained: nn.Module | None = None, **options: Any) -> dict[str, Any]:
    """Return the options of a trainer whose optimizer trains a model or a part of it."""
    parameters = (trained or model).parameters()
    return {"model": model, "optimizer": torch.optim.SGD(parameters, lr=0.1, momentum=0.9), **options}


def with_schedule() -> dict[str, Any]:
    """Return the options of a trainer with Adam and a scheduler, whose states must be those of the moment of
    the save."""
    model = tiny_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    return {
        "model": model,
        "optimizer": optimizer,
        "schedulers": [torch.optim.lr_scheduler.StepLR(optimizer, 2)],
    }


def with_batch_norm() -> dict[str, Any]:
    """Return the options of a trainer with batch norm, whose running averages change in the forward pass
    before the copy."""
    torch.manual_seed(0)
    return trained_by_sgd(nn.Sequential(nn.Linear(2, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)))


class Distilled(nn.Module):
    """A student, and a teacher without an optimizer, whose weights change in each forward pass."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.student, self.teacher = nn.Linear(2, 3), nn.Linear(2, 3)
        self.teacher.requires_grad_(False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return the student's scores plus the teacher's."""
        for mine, theirs in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
            mine.mul_(0.5).add_(theirs.detach(), alpha=0.5)
        scores: torch.Tensor = self.student(inputs) + self.teacher(inputs)
        return scores


def with_teacher() -> dict[str, Any]:
    """Return the options of a trainer with parameters that no optimizer has, so that any code may change
    them."""
    model = Distilled()
    return trained_by_sgd(model, model.student)


class Counts(Hook):
    """A hook with a tensor that changes in every iteration."""

    def __init__(self) -> None:
        self.seen = torch.zeros(1000)

    def before_train_iter(self, trainer: Trainer, event: Any) -> None:
        self.seen.add_(1)

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen}

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


def with_mask() -> dict[str, Any]:
    """Return the options of a trainer whose model has a sparse buffer."""
    model = tiny_model()
    model.register_buffer("mask", torch.eye(3).to_sparse())
    return trained_by_sgd(model)


@pytest.mark.representative(2)
@pytest.mark.parametrize(
    "options",
    [with_schedule, with_batch_norm, with_teacher, with_mask, lambda: {"hooks": [Counts()]}],
    ids=["optimizer", "buffers", "no optimizer's", "sparse", "hooks"],
)
def test_a_late_copy_is_that_of_its_moment(late_equals_sync: Check, options: Options) -> None:
    """Only what the optimizer's step changes is copied late; everything else may change in the forward pass,
    and is copied at once."""
    late_equals_sync(options)


def loop(trainer: Trainer) -> None:
    """Train by hand, with all optimizers."""
    optimizers: Any = trainer.optimizer if isinstance(trainer.optimizer, dict) else {"": trainer.optimizer}
    for _ in trainer.epochs():
        for inputs, target in trainer.batches(batches(3)):
            for optimizer in optimizers.values():
                optimizer.zero_grad()
            F.cross_entropy(trainer.model(inputs), target).backward()
            for optimizer in optimizers.values():
                optimizer.step()


def test_a_hand_written_loop(late_equals_sync: Check) -> None:
    """In a hand-written loop `optimizer.step()` waits for the copy through a step pre-hook."""
    late_equals_sync(lambda: trained_by_sgd(tiny_model(), default_hooks={"optimizer": None}), loop)


class Wrapped:
    """An object that resembles an optimizer and calls no hooks."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self._inner = inner
        self.param_groups, self.state_dict = inner.param_groups, inner.state_dict

    def zero_grad(self) -> None:
        self._inner.zero_grad()

    def step(self) -> None:
        with torch.no_grad():
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.sub_(parameter.grad, alpha=0.1)


@pytest.mark.parametrize("wrap", [Wrapped, lambda optimizer: optimizer], ids=["wrapped", "both"])
def test_several_optimizers(late_equals_sync: Check, wrap: Any) -> None:
    """The first step of any optimizer waits; state of one that calls no hooks is copied at once; all hooks
    are removed at the end."""
    made: list[torch.optim.Optimizer] = []

    def options() -> dict[str, Any]:
        model: Any = tiny_model()
        one = torch.optim.SGD(model[0].parameters(), lr=0.1, momentum=0.9)
        made.extend([one, torch.optim.Adam(model[3].parameters(), lr=0.01)])
        optimizers = {"one": wrap(one), "other": made[-1]}
        return {"model": model, "optimizer": optimizers, "default_hooks": {"optimizer": None}}

    late_equals_sync(options, loop)
    assert [step_hooks(optimizer) for optimizer in made] == [0] * 4


@pytest.mark.slow
@pytest.mark.parametrize("several", [False, True])
def test_another_optimizer(late_equals_sync: Check, several: bool) -> None:
    """If a handler replaces the trainer's optimizer, the steps of the new one wait too."""
    made: list[torch.optim.Optimizer] = []

    def optimizers(model: nn.Module) -> Any:
        made.append(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
        return {"one": made[-1]} if several else made[-1]

    class Exchange(Hook):
        priority = "HIGH"

        def after_train_iter(self, trainer: Trainer, event: Any) -> None:
            if event.iter == 2:
                trainer.optimizer = optimizers(trainer.model)

    def options() -> dict[str, Any]:
        model = tiny_model()
        return {"model": model, "optimizer": optimizers(model), "hooks": [Exchange()], "max_iters": 5}

    late_equals_sync(options)
    assert [step_hooks(optimizer) for optimizer in made] == [0] * 4


def test_the_hooks_follow_the_trainers_optimizer(make_trainer: MakeTrainer) -> None:
    """From the next copy on only the trainer's present optimizer has a pre-hook, and only one."""
    trainer = make_trainer()
    former = trainer.optimizer
    present = torch.optim.SGD(trainer.model.parameters(), lr=0.1)
    trainer.copying.begin(lambda: None)
    trainer.optimizer = present

    for _ in range(2):
        trainer.copying.begin(lambda: None)

    assert (step_hooks(former), step_hooks(present)) == (0, 1)
    trainer.copying.end()


@pytest.mark.slow
def test_an_average_is_swapped_in_after_the_copy(latest: Latest, late_equals_sync: Check) -> None:
    """EMAHook waits for the copy before it swaps in the average, so the checkpoint has the weights of its
    iteration."""

    class CopiesNow(Hook):
        priority = "LOWEST"

        def before_val_iter(self, trainer: Trainer, event: Any) -> None:
            latest.let_go()
            (hook,) = (hook for hook in trainer.hooks if isinstance(hook, CheckpointHook))
            for saving in hook.saves.under_way:
                saving.written.result(DEADLINE)

    late_equals_sync(
        lambda: {
            "hooks": [EMAHook(momentum=0.5), CopiesNow()],
            "max_iters": 4,
            "val_interval": 1,
            "val_loader": batches(1),
        }
    )


def test_weights_are_loaded_after_the_copy(make_trainer: MakeTrainer, late_equals_sync: Check) -> None:
    """A handler that loads other weights waits for the copy first."""
    other = make_trainer(max_iters=1, hooks=[CheckpointHook(interval=1, overlap=False)])
    other.train()

    class Back(Hook):
        def before_train_iter(self, trainer: Trainer, event: Any) -> None:
            if event.iter == 2:
                trainer.load_checkpoint(other.work_dir / "iter_1")

    late_equals_sync(lambda: {"hooks": [Back()]})


@pytest.mark.parametrize(
    ("overlap", "join", "saved"), [(True, False, [2]), (True, True, [1, 2]), (False, False, [1, 2])]
)
def test_a_handler_that_changes_parameters(
    make_trainer: MakeTrainer, latest: Latest, overlap: bool, join: bool, saved: list[int]
) -> None:
    """A handler that changes parameters makes the save fail with advice, unless it calls `join` or overlap is
    off."""
    trainer = make_trainer(max_iters=2, hooks=[CheckpointHook(interval=1, overlap=overlap)])

    def shrink(trainer: Trainer, event: Any) -> None:
        if join:
            trainer.copying.join()
        with torch.no_grad():
            for parameter in trainer.model.parameters():
                parameter.mul_(0.5)
        latest.let_go()

    trainer.bus.subscribe(shrink, "before_train_iter", start=1)
    with trainer.bus.capture("checkpoint_failed") as seen:
        trainer.train()

    failed = [event for event in seen if isinstance(event, CheckpointFailed)]
    assert [path.name for path in find_checkpoints(trainer.work_dir)] == [
        f"iter_{number}" for number in saved
    ]
    assert [Path(event.path).name for event in failed] == ["iter_1"] * (2 - len(saved))
    for event in failed:
        assert event.error.startswith(
            "ChangedWhileCopiedError: 4 tensors of the parameters or of the optimizer's"
        )
        assert "use CheckpointHook(overlap=False)" in event.error


def test_what_may_come_later(make_trainer: MakeTrainer) -> None:
    """Dense parameters of an optimizer and its state may be copied late; buffers and sparse parameters may
    not."""
    model = nn.Sequential(nn.Linear(2, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    trainer = make_trainer(model=model, optimizer=optimizer, max_iters=1)
    late: list[set[int]] = []
    trainer.bus.on("after_train_iter", priority=99)(
        lambda event: late.append(trainer.copying.may_come_later())
    )
    trainer.train()

    expected = {p.data_ptr() for p in model.parameters()}
    expected |= {t.data_ptr() for state in optimizer.state.values() for t in tensors_of(state)}
    assert late == [expected]
    assert expected.isdisjoint(buffer.data_ptr() for buffer in model.buffers())
    sparse = nn.Module()
    sparse.weight = nn.Parameter(torch.eye(3).to_sparse())
    trainer = make_trainer(model=sparse, optimizer=torch.optim.SGD([sparse.weight], lr=0.1))
    trainer.copying.before_step(trainer.optimizer)
    assert trainer.copying.may_come_later() == set()


def test_the_hooks_are_taken_off(make_trainer: MakeTrainer, latest: Latest) -> None:
    """A run adds its pre-hook before the first step, and removes it at the end, also after an error."""
    trainer = make_trainer(max_iters=3, hooks=[CheckpointHook(interval=1)])
    optimizer = trainer.optimizer
    assert isinstance(optimizer, torch.optim.Optimizer)
    during: list[int] = []

    @trainer.bus.on("before_train_iter")
    def count_hooks(event: Any) -> None:
        during.append(step_hooks(optimizer))
        if event.iter == 2:
            raise RuntimeError("no luck")

    with pytest.raises(RuntimeError, match="no luck"):
        trainer.train()

    assert during == [1, 1, 1]
    assert step_hooks(optimizer) == 0


def test_without_an_optimizer(make_trainer: MakeTrainer) -> None:
    """Without an optimizer nothing is copied late, and the end of a run still waits for a copy."""
    trainer = make_trainer(optimizer=None, default_hooks={"optimizer": None}, max_iters=1)
    joined: list[int] = []

    assert trainer.copying.may_come_later() == set()
    trainer.copying.begin(lambda: joined.append(1))
    trainer.copying.end()
    assert joined == [1]
