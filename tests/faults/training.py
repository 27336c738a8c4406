"""The training that is disturbed: tiny, the same every time, and what every checkpoint of it must hold is known."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

from eventloop import Bus, Trainer
from eventloop.checkpoint import load_checkpoint
from eventloop.checkpoint.directory import scan
from eventloop.events import Event
from eventloop.hooks import CheckpointHook, Hook

ITERATIONS = 6
KEPT = 2
SCORES = (0.1, 0.5, 0.3, 0.7, 0.6, 0.9)
"""Of the validation after each iteration."""
Weights = dict[str, torch.Tensor]


def make_trainer(
    directory: Path, others: Sequence[Hook] = (), *, max_iters: int = ITERATIONS, **hook: Any
) -> Trainer:
    """A trainer that saves after each iteration, and the best."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Dropout(0.5), torch.nn.Linear(4, 1))
    generator = torch.Generator().manual_seed(1)
    data = [
        (torch.randn(2, 3, generator=generator), torch.randn(2, 1, generator=generator)) for _ in range(4)
    ]
    options = {"interval": 1, "max_keep_ckpts": KEPT, "save_best": "acc", **hook}
    return Trainer(
        model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        loss_fn=F.mse_loss,
        train_loader=data,
        max_iters=max_iters,
        work_dir=directory,
        bus=Bus(drain_timeout=20),
        val_loader=[torch.zeros(1)],
        val_interval=1,
        val_step=_score,
        hooks=[CheckpointHook(**options), *others],
        default_hooks={"garbage_collection": None, "preemption": None, "logger": None},
    )


def _score(trainer: Trainer, batch: Any) -> dict[str, float]:
    return {"acc": SCORES[(trainer.iter - 1) % len(SCORES)]}


def weights(trainer: Trainer) -> Weights:
    """A copy."""
    return {name: value.clone() for name, value in trainer.model.state_dict().items()}


@cache
def expected() -> dict[int, Weights]:
    """The weights after each iteration of a run that nothing disturbs, by the number of completed ones."""
    after: dict[int, Weights] = {}
    with tempfile.TemporaryDirectory() as directory:
        trainer = make_trainer(Path(directory), interval=-1, save_last=False, save_best=None)
        trainer.bus.subscribe(
            lambda event: after.__setitem__(event.iter + 1, weights(trainer)), "after_train_iter"
        )
        trainer.train()
        trainer.close()
    return after


def wait_for_saves(trainer: Trainer) -> None:
    """Let each iteration of a training wait until its saves have ended, so that they are not written together."""
    hooks = [hook for hook in trainer.hooks if isinstance(hook, CheckpointHook)]

    def wait(event: Event) -> None:
        for hook in hooks:
            for saving in hook.saves.under_way:
                saving.written.wait(60.0)

    for priority in (0, 100):  # before the hook reports them, and after it has begun others
        trainer.bus.subscribe(wait, "after_train_iter", priority=priority, name=f"wait at {priority}")


def same(one: Weights, other: Weights) -> bool:
    """Bit by bit."""
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def check_whole(directory: Path) -> dict[str, int]:
    """Every directory that is taken for a checkpoint is one, and holds what the run was at its iteration; returns the
    iterations by name."""
    found = scan(directory)
    assert not found.damaged, found.damaged
    for path, manifest in found.manifests.items():
        state = load_checkpoint(path)
        assert state["meta"]["iter"] == manifest.iter
        assert path.name.split("-")[0].endswith(f"iter_{manifest.iter}"), path
        assert same(state["state_dict"], expected()[manifest.iter]), f"{path} holds other weights"
    return {path.name: found.manifests[path].iter for path in found.paths}


def finish(directory: Path, prepare: Callable[[Trainer], object] = lambda trainer: None) -> Trainer:
    """Resume, go on to the end, and compare with the run that nothing disturbed."""
    trainer = make_trainer(directory)
    if check_whole(directory):
        trainer.resume("auto")
        assert same(weights(trainer), expected()[trainer.iter])
    prepare(trainer)
    trainer.train()
    trainer.close()
    assert same(weights(trainer), expected()[ITERATIONS])
    assert ITERATIONS in check_whole(directory).values()
    return trainer
