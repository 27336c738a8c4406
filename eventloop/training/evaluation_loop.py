"""Run one pass over a validation or test loader, with its events."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch

from eventloop.data.limits import first
from eventloop.data.loader_info import persists, to_device
from eventloop.data.loader_state import random_state, set_random_state
from eventloop.evaluation.evaluation import Evaluation, batch_size, before_drawing
from eventloop.evaluation.schedule import Evaluate
from eventloop.stops.stopping import Pass
from eventloop.training.loop_steps import EVAL_ITERATIONS
from eventloop.training.protocols import LoopTrainer
from eventloop.training.scopes import EpochScope, EvalScope, keep_until_end


def check_loader(trainer: LoopTrainer, mode: str) -> Iterable[Any]:
    """Return the loader of a mode."""
    loaders = {"train": trainer.train_loader, "val": trainer.val_loader, "test": trainer.test_loader}
    if (loader := loaders[mode]) is None:
        does = "train" if mode == "train" else "evaluate"
        raise ValueError(f"the trainer has no {mode}_loader to {does} on: pass {mode}_loader=...")
    return loader


def evaluate(trainer: LoopTrainer, mode: Evaluate, *, scheduled: bool = False) -> dict[str, float]:
    """Validate or test once, with all events, and return the metrics: {} if a stop cut the pass short.

    Args:
        scheduled: whether the training loop calls this, and not the user. Such an evaluation is recorded
            in the checkpoints once it is complete, and a resumed run does not repeat it.

    Raises:
        ValueError: the trainer has no loader for `mode`, or it is empty.
    """
    loader = check_loader(trainer, mode)
    with trainer.clock.excluding():
        put_back = before_drawing(trainer.model, trainer.loader, loader) if scheduled else None
        with EvalScope(trainer, mode) as scope:
            _evaluate(trainer, mode, loader, scope, counts=scheduled)
        if put_back is not None and not scope.complete:  # it runs again, and must draw the same numbers
            put_back()
    return scope.metrics


def _evaluate(
    trainer: LoopTrainer, mode: Evaluate, loader: Iterable[Any], scope: EvalScope, *, counts: bool
) -> None:
    batch, outputs, was_training = trainer.batch, trainer.outputs, trainer.model.training
    trainer.model.eval()
    try:
        with EpochScope(trainer, mode) as epoch:
            evaluation = Evaluation(trainer.evaluator, trainer.ignored_outputs)
            if _run_pass(trainer, mode, loader, evaluation):
                epoch.metrics = scope.metrics = evaluation.compute()
                epoch.complete = scope.complete = True
                trainer.position.evaluated += counts
    finally:
        trainer.model.train(was_training)
        trainer.batch, trainer.outputs = batch, outputs


def _run_pass(trainer: LoopTrainer, mode: Evaluate, loader: Iterable[Any], evaluation: Evaluation) -> bool:
    before, after = EVAL_ITERATIONS[mode]
    bus = trainer.bus
    passing, batches = Pass(trainer.stops, trainer.limits.length(mode, loader)), 0
    reading = first(_opened(trainer, loader), trainer.limits.cut(mode, loader))
    for batch_idx, batch in enumerate(reading):
        trainer.batch = to_device(batch, trainer.device)
        if bus.wants(before):
            trainer.announce(before, batch_idx=batch_idx)
        with torch.no_grad():
            trainer.outputs = trainer.val_step(trainer.batch)
        evaluation.add(trainer.outputs, batch_size(trainer.batch))
        if bus.wants(after):
            trainer.announce(after, batch_idx=batch_idx)
        batches += 1
        bus.poll(trainer)
        if passing.stops(batches):
            keep_until_end(trainer, reading)
            return False
    passing.end(batches)
    if not batches:
        raise ValueError(f"the {mode} loader is empty: a pass over it gave no batch")
    return True


def _opened(trainer: LoopTrainer, loader: Iterable[Any]) -> Iterator[Any]:
    """Begin a pass over a loader, and restore the random state of the training.

    Persistent workers draw their seed in the first pass of a process. In a resumed run that is another pass
    than in an uninterrupted one, and the training must get the same random numbers.
    """
    if not persists(loader):
        return iter(loader)
    trains_with = random_state(trainer.loader)
    iterator = iter(loader)
    set_random_state(trainer.loader, trains_with)
    return iterator
