"""Test resumes that are refused late: the trainer is as before, and trains on as if nobody had tried."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import eventloop.hooks
from eventloop import Trainer
from eventloop.checkpoint import load_checkpoint
from eventloop.hooks import (
    AmpOptimizerHook,
    CheckpointHook,
    EarlyStoppingHook,
    EMAHook,
    GradientCumulativeOptimizerHook,
    Hook,
    LoggerHook,
    PreciseBN,
    RollbackHook,
)
from eventloop.resume.gathering import gather
from tests.support.interrupted import assert_same, seed, state_of, stopped
from tests.support.trainers import build_trainer, samples

pytestmark = pytest.mark.filterwarnings("ignore:cumulative_iters=3 makes:UserWarning")


class Refusal:
    """A function that raises its `error` once."""

    def __init__(self) -> None:
        self.error: BaseException | None = None

    def __call__(self) -> None:
        """Raise the error, if one is set, and forget it."""
        error, self.error = self.error, None
        if error is not None:
            raise error


class PickyHook(Hook):
    """A hook that refuses a state after it has loaded a part of it."""

    def __init__(self, refuse: Refusal) -> None:
        self._refuse = refuse
        self.seen = [0]
        self.total = 0

    def after_train_iter(self, trainer: Trainer, event: Any) -> None:
        self.seen.append(event.iter)
        self.total += 1

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen, "total": self.total}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.seen[:] = state["seen"]
        torch.rand(1)
        self._refuse()
        self.total = state["total"]


class PickyAdam(torch.optim.AdamW):
    """An optimizer that copies into its tensors, and then refuses the state."""

    refuse: Callable[[], None]

    def load_state_dict(self, state_dict: Any) -> None:
        for own, saved in zip(self.state.values(), state_dict["state"].values(), strict=True):
            own["exp_avg"].copy_(saved["exp_avg"])
        self.refuse()
        super().load_state_dict(state_dict)


class PickyLR(torch.optim.lr_scheduler.ExponentialLR):
    """A scheduler that loads its state, and then refuses it."""

    refuse: Callable[[], None]

    def load_state_dict(self, state_dict: Any) -> None:
        super().load_state_dict(state_dict)
        self.refuse()


class PickyModule(nn.Module):
    """A module that loads its extra state, and then refuses it."""

    def __init__(self, refuse: Refusal) -> None:
        super().__init__()
        self._refuse, self._seen = refuse, 0

    def get_extra_state(self) -> Any:
        return self._seen

    def set_extra_state(self, state: Any) -> None:
        self._seen = state
        self._refuse()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self._seen += self.training
        return inputs


def overriding(kind: type[Hook]) -> Any:
    """Return a subclass with a `load_state_dict` that calls that of the class."""

    def load_state_dict(self: Any, state: Mapping[str, Any]) -> None:
        kind.load_state_dict(self, state)

    return type(kind.__name__, (kind,), {"load_state_dict": load_state_dict, "__module__": "mine"})


KINDS = (
    EMAHook,
    EarlyStoppingHook,
    PreciseBN,
    CheckpointHook,
    LoggerHook,
    AmpOptimizerHook,
    GradientCumulativeOptimizerHook,
    RollbackHook,
)
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "amp": {"dtype": "bfloat16", "loss_scale": "dynamic", "cumulative_iters": 3},
    "gradients": {"cumulative_iters": 3},
}
CASES: list[tuple[str, str, bool, BaseException]] = [
    ("amp", "last hook", False, ValueError("refused late")),
    ("gradients", "module", True, KeyboardInterrupt("refused late")),
    ("gradients", "first hook", False, ValueError("refused late")),
    ("amp", "optimizer", False, ValueError("refused late")),
    ("amp", "scheduler", False, ValueError("refused late")),
    ("amp", "module", False, ValueError("refused late")),
    ("amp", "last hook", True, KeyboardInterrupt("refused late")),
]
"""One of `OPTIMIZERS`, the part that refuses, whether hooks have a `load_state_dict` of their own, and the error."""


def build(
    directory: Path,
    optimizer_hook: str,
    *,
    refusing: str = "",
    refuse: Refusal | None = None,
    own: bool = False,
) -> Trainer:
    """Return a trainer with every stateful hook, and one part that refuses its state on request."""
    refuse = refuse or Refusal()
    kinds: list[Any] = [overriding(each) if own else each for each in KINDS]
    ema, early, precise, checkpoint, logger, amp, gradients, rollback = kinds
    seed()
    layers = [nn.Linear(2, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 3)]
    model = nn.Sequential(*layers, *([PickyModule(refuse)] if refusing == "module" else []))
    adam: Any = torch.optim.AdamW
    decay: Any = torch.optim.lr_scheduler.ExponentialLR
    if refusing == "optimizer":
        adam = type("AdamW", (PickyAdam,), {"refuse": staticmethod(refuse)})
    if refusing == "scheduler":
        decay = type("ExponentialLR", (PickyLR,), {"refuse": staticmethod(refuse)})
    optimizer = adam(model.parameters(), lr=0.05)
    schedulers = [
        torch.optim.lr_scheduler.SequentialLR(
            optimizer, [torch.optim.lr_scheduler.ConstantLR(optimizer), decay(optimizer, 0.9)], [2]
        ),
        decay(optimizer, 0.99),
    ]
    kind: Any = {"amp": amp, "gradients": gradients}[optimizer_hook]
    hooks: list[Any] = [
        ema(momentum=0.25),
        kind(**OPTIMIZERS[optimizer_hook]),
        early("loss", patience=9),
        precise(num_iter=2),
        checkpoint(interval=2, by_epoch=False, save_best="loss", max_keep_ckpts=2),
        rollback(),
    ]
    statistics: list[dict[str, Any]] = [
        {"data_src": "loss", "window_size": 3, "log_name": "last"},
        {"data_src": "loss", "log_name": "all"},
    ]
    data = samples(20)
    return build_trainer(
        directory,
        model=model,
        optimizer=optimizer,
        schedulers=schedulers,
        max_epochs=2,
        hooks=[PickyHook(refuse), *hooks] if refusing == "first hook" else [*hooks, PickyHook(refuse)],
        train_loader=DataLoader(data, 4, shuffle=True, generator=torch.Generator().manual_seed(5)),
        val_loader=DataLoader(samples(4), 2, shuffle=True, generator=torch.Generator().manual_seed(4)),
        default_hooks={"logger": logger(interval=2, custom_cfg=statistics)},
    )


def everything(trainer: Trainer) -> dict[str, Any]:
    """Return everything that a refused resume must leave unchanged."""
    state = gather(trainer.state, "")
    del state["meta"]["time"]
    own = trainer.state
    return state | {
        "gradients": [p.grad if p.grad is None else p.grad.clone() for p in trainer.model.parameters()],
        "counters": [
            trainer.iter,
            trainer.epoch,
            trainer.batch_idx,
            trainer.metrics.iter,
            trainer.metrics.epoch,
        ],
        "loaders": [x.generator.get_state() for x in (trainer.train_loader, trainer.val_loader)],  # type: ignore[union-attr]
        "from": [own.resumed_from, own.went_back_to, own.loads],
    }


OTHER = 8
"""Iterations of the run that is refused: in mid-epoch, and within a window of accumulated gradients."""


@pytest.fixture(scope="module")
def others(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Return a function that makes a checkpoint of another run, once for each kind."""
    made: dict[tuple[str, bool], Path] = {}

    def of(optimizer_hook: str, *, module: bool) -> Path:
        key = optimizer_hook, module
        if key not in made:
            directory = tmp_path_factory.mktemp("other")
            with closing(build(directory, optimizer_hook, refusing="module" if module else "")) as trainer:
                torch.manual_seed(99)
                stopped(trainer, OTHER)
            made[key] = directory / f"iter_{OTHER}"
        return made[key]

    return of


@pytest.fixture(scope="module")
def ends(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., dict[str, Any]]:
    """Return a function that returns the final state of a run without a resume, once for each kind."""
    made: dict[tuple[str, str], dict[str, Any]] = {}

    def of(optimizer_hook: str, refusing: str) -> dict[str, Any]:
        key = optimizer_hook, refusing
        if key not in made:
            with closing(
                build(tmp_path_factory.mktemp("whole"), optimizer_hook, refusing=refusing)
            ) as trainer:
                stopped(trainer, 4).train()
                made[key] = state_of(trainer)
        return made[key]

    return of


@pytest.mark.representative(1)
@pytest.mark.parametrize(("optimizer_hook", "refusing", "own", "error"), CASES)
def test_a_refused_resume_leaves_no_trace(
    tmp_path: Path,
    others: Any,
    ends: Any,
    optimizer_hook: str,
    refusing: str,
    own: bool,
    error: BaseException,
) -> None:
    """Whichever part refuses its state, and after Ctrl-C, the trainer is bitwise as before, also at the end
    of the run."""
    refuse, other = Refusal(), others(optimizer_hook, module=refusing == "module")
    with closing(build(tmp_path, optimizer_hook, refusing=refusing, refuse=refuse, own=own)) as trainer:
        stopped(trainer, 4)
        before = everything(trainer)
        refuse.error = error

        with pytest.raises(BaseException, match="refused late") as raised:
            trainer.resume(other)

        assert raised.value.__notes__[-1].endswith("is loaded: everything is restored as it was before")
        assert_same(everything(trainer), before)
        trainer.train()
        assert_same(state_of(trainer), ends(optimizer_hook, refusing))


def test_every_stateful_hook_is_among_them() -> None:
    """These tests cover all stateful hooks."""
    stateful = {
        kind
        for kind in (getattr(eventloop.hooks, name) for name in eventloop.hooks.__all__)
        if isinstance(kind, type) and issubclass(kind, Hook) and kind.state_dict is not Hook.state_dict
    }

    assert {kind.load_state_dict for kind in stateful} == {kind.load_state_dict for kind in KINDS}


class Stuck(Hook):
    """A hook that refuses every state after it changed an object that an attribute refers to."""

    def __init__(self, *errors: BaseException) -> None:
        self.own = SimpleNamespace(seen=0, errors=[*errors])

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.own.seen}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.own.seen += 1
        raise self.own.errors.pop(0)


@pytest.mark.parametrize(
    "second", [ValueError("it takes none"), KeyboardInterrupt()], ids=["error", "Ctrl-C"]
)
def test_a_hook_that_cannot_be_put_back_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, second: BaseException
) -> None:
    """A note of the error names a hook that cannot be restored; Ctrl-C meanwhile is raised, and has the note too."""
    stuck = Stuck(ValueError("it takes none"), second)
    with closing(build_trainer(tmp_path, hooks=[stuck], max_epochs=1)) as trainer:
        trainer.train()

        with pytest.raises(type(second)) as raised:
            trainer.resume("epoch_1")

    error = raised.value if isinstance(second, ValueError) else raised.value.__context__
    assert isinstance(error, ValueError)
    given, put_back = error.__notes__
    assert raised.value.__notes__[-1] == put_back
    assert given.startswith(
        f"raised by the hook Stuck, which was given its state of {tmp_path / 'epoch_1'}. "
    )
    assert put_back.startswith(f"nothing of {tmp_path / 'epoch_1'} is loaded: ")
    assert "except the hook Stuck, which could not be restored: build a new trainer" in put_back
    assert "the hook Stuck could not be restored to its state before" in caplog.text


@pytest.mark.parametrize(
    ("errors", "note"),
    [
        ([KeyboardInterrupt()], ""),
        ([KeyboardInterrupt(), KeyboardInterrupt()], "has loaded only a part of"),
        ([torch.OutOfMemoryError("out of memory")], "has loaded only a part of"),
    ],
    ids=["Ctrl-C", "Ctrl-C twice", "error"],
)
def test_an_error_once_the_checkpoint_is_being_taken(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, errors: list[BaseException], note: str
) -> None:
    """A single Ctrl-C during the commit is raised after it; after any other error a note has advice."""
    left = [*errors]

    with closing(build_trainer(tmp_path, max_epochs=1)) as first:
        first.train()
    with closing(build_trainer(tmp_path, max_epochs=1)) as trainer:
        note_resumed = trainer.state.record_resumed

        def fail(*args: Any, **options: Any) -> None:
            if left:
                raise left.pop(0)
            note_resumed(*args, **options)

        monkeypatch.setattr(trainer.state, "record_resumed", fail)
        with pytest.raises(type(errors[0])) as raised:
            trainer.resume("epoch_1")
        assert note in "".join(getattr(raised.value, "__notes__", "x"))
        assert bool(note) == hasattr(raised.value, "__notes__")

        if note:
            trainer.resume("epoch_1")
        saved = load_checkpoint(tmp_path / "epoch_1")
        now = gather(trainer.state, "")
        assert (trainer.iter, trainer.epoch) == (3, 1)
        assert_same(
            [now[key] for key in ("state_dict", "optimizer", "rng")],
            [saved[key] for key in ("state_dict", "optimizer", "rng")],
        )
