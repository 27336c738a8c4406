"""Copies made beside the next forward and backward pass: bitwise those that would have been made at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
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
from tests.support.saving import Latest, same
from tests.support.trainers import DEADLINE, MakeTrainer, batches, tiny_model


@pytest.fixture
def latest(monkeypatch: pytest.MonkeyPatch) -> Iterator[Latest]:
    """Let go at the end of the test."""
    latest = Latest(monkeypatch)
    yield latest
    latest.let_go()


Build = Callable[..., Trainer]


@pytest.fixture
def late_equals_sync(tmp_path: Path, latest: Latest) -> Callable[..., None]:
    """Train one way with copies made at once and with copies made late, and compare all checkpoints and the end."""

    def check(build: Build, train: Callable[[Trainer], None] = Trainer.train) -> None:
        ends = []
        for overlap in (False, True):
            directory = tmp_path / str(overlap)
            torch.manual_seed(5)
            trainer = build(CheckpointHook(interval=1, by_epoch=False, overlap=overlap), work_dir=directory)
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
    """The next forward and backward pass do not wait; the optimizer's step does."""
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


def test_a_late_copy_is_that_of_its_moment(make_trainer: MakeTrainer, late_equals_sync: Check) -> None:
    """Weights, momentum, random state, counters, schedulers and hooks: all as they were when it was due."""

    def build(hook: Hook, **options: Any) -> Trainer:
        model = tiny_model()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        schedulers = [torch.optim.lr_scheduler.StepLR(optimizer, 2)]
        return make_trainer(
            model=model, optimizer=optimizer, schedulers=schedulers, hooks=[hook], max_iters=4, **options
        )

    late_equals_sync(build)


def test_buffers_are_copied_at_once(make_trainer: MakeTrainer, late_equals_sync: Check) -> None:
    """Running averages of batch norm change in the forward pass that comes before the copy."""

    def build(hook: Hook, **options: Any) -> Trainer:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(2, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        return make_trainer(model=model, optimizer=optimizer, hooks=[hook], max_iters=3, **options)

    late_equals_sync(build)


class Distilled(nn.Module):
    """A student, and a teacher that no optimizer has: it follows in each forward pass."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.student, self.teacher = nn.Linear(2, 3), nn.Linear(2, 3)
        self.teacher.requires_grad_(False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """The student's, with the teacher's as an offset."""
        for mine, theirs in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
            mine.mul_(0.5).add_(theirs.detach(), alpha=0.5)
        scores: torch.Tensor = self.student(inputs) + self.teacher(inputs)
        return scores


def test_parameters_without_an_optimizer_are_copied_at_once(
    make_trainer: MakeTrainer, late_equals_sync: Check
) -> None:
    """Anything may change them, as a teacher's average of the student changes in a forward pass."""

    def build(hook: Hook, **options: Any) -> Trainer:
        model = Distilled()
        optimizer = torch.optim.SGD(model.student.parameters(), lr=0.1)
        return make_trainer(model=model, optimizer=optimizer, hooks=[hook], max_iters=3, **options)

    late_equals_sync(build)


def test_states_of_hooks_are_copied_at_once(make_trainer: MakeTrainer, late_equals_sync: Check) -> None:
    """A hook may change its tensors whenever it is called."""

    class Counts(Hook):
        def __init__(self) -> None:
            self.seen = torch.zeros(1000)

        def before_train_iter(self, trainer: Trainer, event: Any) -> None:
            self.seen.add_(1)

        def state_dict(self) -> dict[str, Any]:
            return {"seen": self.seen}

    def build(hook: Hook, **options: Any) -> Trainer:
        return make_trainer(hooks=[hook, Counts()], max_iters=3, **options)

    late_equals_sync(build)


def test_a_hand_written_loop(make_trainer: MakeTrainer, late_equals_sync: Check) -> None:
    """One that calls `optimizer.step()` itself is as safe: PyTorch tells of every step."""

    def build(hook: Hook, **options: Any) -> Trainer:
        return make_trainer(hooks=[hook], max_iters=3, default_hooks={"optimizer": None}, **options)

    def train(trainer: Trainer) -> None:
        assert isinstance(trainer.optimizer, torch.optim.Optimizer)
        for _ in trainer.epochs():
            for inputs, target in trainer.batches(batches(3)):
                trainer.optimizer.zero_grad()
                F.cross_entropy(trainer.model(inputs), target).backward()
                trainer.optimizer.step()

    late_equals_sync(build, train)


def test_several_optimizers(make_trainer: MakeTrainer, late_equals_sync: Check) -> None:
    """The first step of any of them waits, and the hooks are off all of them at the end."""
    made: list[torch.optim.Optimizer] = []

    def build(hook: Hook, **options: Any) -> Trainer:
        model = tiny_model()
        one, other = model[0], model[3]  # type: ignore[index]
        optimizers = {
            "one": torch.optim.SGD(one.parameters(), lr=0.1, momentum=0.9),
            "other": torch.optim.Adam(other.parameters(), lr=0.01),
        }
        made.extend(optimizers.values())

        def step(trainer: Trainer, batch: Any) -> torch.Tensor:
            return F.cross_entropy(trainer.model(batch[0]), batch[1])

        defaults = {"optimizer": {"type": "OptimizerHook"}}
        return make_trainer(
            model=model, optimizer=optimizers, train_step=step, hooks=[hook], max_iters=3,
            default_hooks=defaults, **options,
        )  # fmt: skip

    late_equals_sync(build)
    assert [dict(optimizer._optimizer_step_pre_hooks) for optimizer in made] == [{}] * 4


@pytest.mark.slow
@pytest.mark.parametrize("several", [False, True])
def test_another_optimizer(make_trainer: MakeTrainer, late_equals_sync: Check, several: bool) -> None:
    """The steps of one that a handler before the checkpoint's puts in the place of the trainer's wait, too."""
    made: list[torch.optim.Optimizer] = []

    def optimizers(model: nn.Module) -> Any:
        made.append(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
        return {"one": made[-1]} if several else made[-1]

    class Exchange(Hook):
        priority = "HIGH"

        def after_train_iter(self, trainer: Trainer, event: Any) -> None:
            if event.iter == 2:
                trainer.optimizer = optimizers(trainer.model)

    def build(hook: Hook, **options: Any) -> Trainer:
        model = tiny_model()
        return make_trainer(
            model=model, optimizer=optimizers(model), hooks=[hook, Exchange()], max_iters=5, **options
        )

    late_equals_sync(build)
    assert [dict(optimizer._optimizer_step_pre_hooks) for optimizer in made] == [{}] * 4


def test_the_hooks_follow_the_trainers_optimizer(make_trainer: MakeTrainer) -> None:
    """From the next copy on the former one has none, and the present one has one, however many copies follow."""
    trainer = make_trainer()
    former = trainer.optimizer
    present = torch.optim.SGD(trainer.model.parameters(), lr=0.1)
    trainer.copying.begin(lambda: None)
    trainer.optimizer = present

    for _ in range(2):
        trainer.copying.begin(lambda: None)

    assert (len(former._optimizer_step_pre_hooks), len(present._optimizer_step_pre_hooks)) == (0, 1)
    trainer.copying.end()


class Sparse(nn.Module):
    """A classifier with a buffer that is sparse."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = tiny_model()
        self.register_buffer("mask", torch.eye(3).to_sparse())

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """The scores."""
        scores: torch.Tensor = self.inner(inputs)
        return scores


def test_a_model_with_a_sparse_buffer(make_trainer: MakeTrainer, late_equals_sync: Check) -> None:
    """It is saved like any other, and can be resumed from."""

    def build(hook: Hook, **options: Any) -> Trainer:
        model = Sparse()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        return make_trainer(model=model, optimizer=optimizer, hooks=[hook], max_iters=3, **options)

    late_equals_sync(build)
    trainer = build(CheckpointHook(interval=1))
    trainer.model.mask = torch.zeros(3, 3).to_sparse()
    late = max(find_checkpoints(trainer.work_dir.parent / "True"), key=lambda path: path.name)
    trainer.resume(late)
    assert torch.equal(trainer.model.state_dict()["mask"].to_dense(), torch.eye(3))


def test_what_only_looks_like_an_optimizer(make_trainer: MakeTrainer, late_equals_sync: Check) -> None:
    """It calls no hooks, so nothing of it is copied late; what is left over is, of one that does."""

    class Wrapped:
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

    def build(hook: Hook, **options: Any) -> Trainer:
        model = tiny_model()
        one, other = model[0], model[3]  # type: ignore[index]
        optimizers = {
            "wrapped": Wrapped(torch.optim.SGD(one.parameters(), lr=0.1)),
            "other": torch.optim.SGD(other.parameters(), lr=0.1),
        }
        return make_trainer(
            model=model, optimizer=optimizers, hooks=[hook], max_iters=3, default_hooks={"optimizer": None}, **options,
        )  # fmt: skip

    def train(trainer: Trainer) -> None:
        optimizers: Any = trainer.optimizer
        for _ in trainer.epochs():
            for inputs, target in trainer.batches(batches(3)):
                for optimizer in optimizers.values():
                    optimizer.zero_grad()
                F.cross_entropy(trainer.model(inputs), target).backward()
                for optimizer in optimizers.values():
                    optimizer.step()

    late_equals_sync(build, train)


@pytest.mark.slow
def test_an_average_is_swapped_in_after_the_copy(
    make_trainer: MakeTrainer, latest: Latest, late_equals_sync: Check
) -> None:
    """EMAHook's swap for a validation waits for the copy; the checkpoint has the weights of when it was due."""

    class CopiesNow(Hook):
        priority = "LOWEST"

        def __init__(self, hook: CheckpointHook) -> None:
            self.hook = hook

        def before_val_iter(self, trainer: Trainer, event: Any) -> None:
            latest.let_go()
            for saving in self.hook.saves.under_way:
                saving.written.result(DEADLINE)

    def build(hook: CheckpointHook, **options: Any) -> Trainer:
        return make_trainer(
            hooks=[hook, EMAHook(momentum=0.5), CopiesNow(hook)],
            max_iters=4,
            val_interval=1,
            val_loader=batches(1),
            **options,
        )

    late_equals_sync(build)


def test_weights_are_loaded_after_the_copy(make_trainer: MakeTrainer, late_equals_sync: Check) -> None:
    """So it is with weights that a handler loads in the middle."""

    other = make_trainer(max_iters=1, hooks=[CheckpointHook(interval=1, overlap=False)])
    other.train()

    class Back(Hook):
        def before_train_iter(self, trainer: Trainer, event: Any) -> None:
            if event.iter == 2:
                trainer.load_checkpoint(other.work_dir / "iter_1")

    def build(hook: Hook, **options: Any) -> Trainer:
        return make_trainer(hooks=[hook, Back()], max_iters=3, **options)

    late_equals_sync(build)


class Shrinks(Hook):
    """Changes the parameters in an iteration's beginning, with a join or without."""

    def __init__(self, latest: Latest, *, join: bool) -> None:
        self._latest, self._join = latest, join

    def before_train_iter(self, trainer: Trainer, event: Any) -> None:
        """Do that, and then let the copy begin."""
        if event.iter == 1:
            if self._join:
                trainer.copying.join()
            with torch.no_grad():
                for parameter in trainer.model.parameters():
                    parameter.mul_(0.5)
            self._latest.let_go()


@pytest.mark.parametrize(
    ("overlap", "join", "saved"), [(True, False, [2]), (True, True, [1, 2]), (False, False, [1, 2])]
)
def test_a_handler_that_changes_parameters(
    make_trainer: MakeTrainer, latest: Latest, overlap: bool, join: bool, saved: list[int]
) -> None:
    """Without `join` the save fails, and says so; with it, or with `overlap=False`, all is well."""
    trainer = make_trainer(
        max_iters=2, hooks=[CheckpointHook(interval=1, overlap=overlap), Shrinks(latest, join=join)]
    )
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
    """What an optimizer steps and its own state; not buffers, nor anything else."""
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


def test_a_sparse_parameter_comes_at_once(make_trainer: MakeTrainer) -> None:
    """It has no address by which a late copy would know it."""
    model = nn.Module()
    model.weight = nn.Parameter(torch.eye(3).to_sparse())
    optimizer = torch.optim.SGD([model.weight], lr=0.1)
    trainer = make_trainer(model=model, optimizer=optimizer)
    trainer.copying.before_step(optimizer)

    assert trainer.copying.may_come_later() == set()


def test_the_end_waits_for_the_copy(make_trainer: MakeTrainer) -> None:
    """Whoever steps the optimizer afterwards has no hook that would."""
    trainer = make_trainer()
    joined: list[int] = []
    trainer.copying.begin(lambda: joined.append(1))

    trainer.copying.end()

    assert joined == [1]


def test_the_hooks_are_taken_off(make_trainer: MakeTrainer, latest: Latest) -> None:
    """After a run the optimizer is as it was, also after one that failed; a run has them from its first step on."""
    trainer = make_trainer(max_iters=3, hooks=[CheckpointHook(interval=1)])
    optimizer = trainer.optimizer
    assert isinstance(optimizer, torch.optim.Optimizer)
    during: list[int] = []

    @trainer.bus.on("before_train_iter")
    def look(event: Any) -> None:
        during.append(len(optimizer._optimizer_step_pre_hooks))
        if event.iter == 2:
            raise RuntimeError("no luck")

    with pytest.raises(RuntimeError, match="no luck"):
        trainer.train()

    assert during == [1, 1, 1]
    assert dict(optimizer._optimizer_step_pre_hooks) == {}


def test_without_an_optimizer(make_trainer: MakeTrainer) -> None:
    """There is nothing that could come later, and nothing to wait for."""
    trainer = make_trainer(optimizer=None, default_hooks={"optimizer": None}, max_iters=1)

    assert trainer.copying.may_come_later() == set()
    trainer.copying.join()
    trainer.copying.end()
