"""A run of MMEngine's form: config dicts, hooks of your own, validation, best checkpoint, average, early stop, resume.

    python examples/mmengine_style.py

Digits are learnt until their accuracy no longer rises. The run is stopped half-way through an epoch, and a new trainer
resumes it, as if the machine had been needed for something else; it ends as if that had not happened.

What is called otherwise here:

    custom_hooks = [...]                                hooks=[...]
    train_cfg = dict(max_epochs=40, val_interval=1)     max_epochs=40, val_interval=1
    param_scheduler = [...]                             schedulers=[...], configs of the same names
    optim_wrapper = dict(optimizer=..., clip_grad=...)  optimizer=..., an object of torch.optim; the rest is
                                                        default_hooks=dict(optimizer=...)
    val_evaluator = dict(type="Accuracy")               evaluator=..., a function or an object
    visualizer = dict(vis_backends=[...])               writers=[...]
    resume = True                                       trainer.resume("auto"), which raises where there is nothing yet
"""
# ruff: noqa: C408 (a config is written with dict(...), as MMEngine's users do)

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

from eventloop import HOOKS, Trainer
from eventloop.cli.demo import load_digits
from eventloop.events import COMPLETED, AfterTrainIter, AfterValEpoch
from eventloop.hooks import CheckpointHook, Hook

if TYPE_CHECKING:
    from torch import Tensor

STOPPED_AT = 100
"""Iterations after which the first trainer is stopped: in the middle of the fifth epoch of 22."""


@HOOKS.register
class ScoreTableHook(Hook):
    """Keeps a score of every validation; it has a state, so a resumed run's table begins where the run began."""

    priority = "LOW"

    def __init__(self, monitor: str) -> None:
        self.monitor = monitor
        self.rows: list[tuple[int, float]] = []

    def after_val_epoch(self, trainer: Trainer, event: AfterValEpoch) -> None:
        """Add a row: epochs completed, score."""
        if event.reason == COMPLETED:
            self.rows.append((event.epoch, event.metrics[self.monitor]))

    def state_dict(self) -> dict[str, Any]:
        """The rows so far."""
        return {"rows": list(self.rows)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with the rows of the run that is resumed."""
        self.rows = [(epoch, score) for epoch, score in state["rows"]]


class Accuracy:
    """Of all digits, and of the one that is recognised worst; an evaluator of torchmetrics' form."""

    def __init__(self, classes: int = 10) -> None:
        self._classes = classes
        self.reset()

    def reset(self) -> None:
        """Begin a pass."""
        self._hits = torch.zeros(self._classes)
        self._of = torch.zeros(self._classes)

    def update(self, preds: Tensor, target: Tensor) -> None:
        """Count a batch: `preds` (N, classes) are scores, `target` (N,) classes."""
        hits = target[preds.argmax(1) == target]
        self._hits += torch.bincount(hits, minlength=self._classes)
        self._of += torch.bincount(target, minlength=self._classes)

    def compute(self) -> dict[str, Tensor]:
        """Both accuracies, 0..1; `save_best` and `monitor` know them by these names."""
        return {"accuracy": self._hits.sum() / self._of.sum(), "worst_digit": (self._hits / self._of).min()}


CONFIG: dict[str, Any] = dict(
    max_epochs=40,
    val_interval=1,
    schedulers=[
        dict(type="LinearLR", start_factor=0.1, by_epoch=False, begin=0, end=22),
        dict(type="CosineAnnealingLR", by_epoch=True, begin=1, end=40, eta_min_ratio=0.05),
    ],
    default_hooks=dict(  # a default hook is configured by its arguments alone; None leaves it out
        optimizer=dict(grad_clip=dict(max_norm=5.0)),
        logger=dict(interval=11),
        checkpoint=dict(interval=1, max_keep_ckpts=2, save_best="accuracy"),
        sampler_seed=None,
    ),
    # MMEngine's custom_hooks=[...]: the Trainer's argument is hooks=[...]
    hooks=[
        dict(type="EMAHook", ema_type="ExponentialMovingAverage", momentum=0.05, priority=49),
        dict(type="EarlyStoppingHook", monitor="accuracy", patience=3, min_delta=0.002),
        dict(type="ScoreTableHook", monitor="accuracy"),
    ],
    writers=[dict(type="ConsoleWriter", interval=22), dict(type="JSONLWriter")],
)


def build(work_dir: str | None = None) -> Trainer:
    """A trainer of the config; each call gives a new one, of the same model."""
    torch.manual_seed(0)
    train, val = load_digits()
    model = nn.Sequential(
        nn.Flatten(), nn.Linear(64, 128), nn.BatchNorm1d(128), nn.ReLU(), nn.Dropout(0.2), nn.Linear(128, 10)
    )
    return Trainer(
        model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=1e-2),
        loss_fn=F.cross_entropy,
        train_loader=DataLoader(train, batch_size=64, shuffle=True, drop_last=True),
        val_loader=DataLoader(val, batch_size=180),
        evaluator=Accuracy(),
        work_dir=work_dir,
        **CONFIG,
    )


def stop_at(trainer: Trainer, iteration: int) -> None:
    """Have the trainer stopped after so many iterations, as a signal or a scheduler of jobs would."""

    @trainer.bus.on("after_train_iter", when=lambda event: event.iter + 1 == iteration)
    def somebody_needs_the_machine(trainer: Trainer, event: AfterTrainIter) -> None:
        trainer.stop("somebody needs the machine")


def hook_of(trainer: Trainer, cls: type[Any]) -> Any:
    """The trainer's hook of a class; a config's hook is built by the trainer."""
    return next(hook for hook in trainer.hooks if isinstance(hook, cls))


def main(work_dir: str | None = None) -> None:
    """Train, be stopped, resume, and test the best weights."""
    first = build(work_dir)
    for row in first.bus.plan("after_train_iter"):  # who runs when, before anything runs
        print(f"{row.priority:3}  {row.name}")
    stop_at(first, STOPPED_AT)
    first.train()
    first.close()
    print(f"\nstopped after {first.iter} iterations: {first.stop_reason}")

    second = build(str(first.work_dir))
    print(f"resuming from {second.resume('auto')}\n")
    second.train()

    print(
        f"\nended after {second.epoch} of {second.max_epochs} epochs: {second.stop_reason or 'all are done'}"
    )
    for epoch, score in hook_of(second, ScoreTableHook).rows:
        print(f"epoch {epoch:2}   accuracy {score:.2%}")
    best = hook_of(second, CheckpointHook).best
    second.load_checkpoint(second.work_dir / best.name)  # the averaged weights, as they were validated
    print(f"best: {best.name}, {best.score:.2%}; loaded and validated again: {second.val()['accuracy']:.2%}")
    second.close()


if __name__ == "__main__":
    main(*sys.argv[1:2])
