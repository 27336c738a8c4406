"""The learning rate range test: train on rising learning rates, and record the losses.

Leslie N. Smith, "Cyclical Learning Rates for Training Neural Networks", https://arxiv.org/abs/1506.01186.
The curve and the suggestion are those of ignite's `FastaiLRFinder`, bit by bit.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch.nn.parameter import is_lazy

from eventloop.assembly.argument_checks import check_step
from eventloop.data.limits import first
from eventloop.data.loader_info import to_device
from eventloop.data.position import batches_of_update
from eventloop.data.side_pass import position_of
from eventloop.data.trainer_parts import TrainerParts
from eventloop.evaluation.compiled_outputs import begin_compiled_step
from eventloop.events import AfterTrainEpoch, AfterTrainIter, BeforeRun, BeforeTrain, BeforeTrainIter
from eventloop.model.training_modes import TrainingModes
from eventloop.optim.param_groups import write_value
from eventloop.state.exchange import gather
from eventloop.state.undo import Undo
from eventloop.tuning.curve import LRCurve
from eventloop.tuning.trial import begin_trial
from eventloop.util.checks import number, positive

logger = logging.getLogger("eventloop")

ENDED = "range test"
"""The `reason` of the event `after_train_epoch`: not "completed", so OptimizerHook makes no further step."""


class Range(NamedTuple):
    """The checked arguments of a range test; `Trainer.find_lr` documents them."""

    start: float
    end: float
    iterations: int
    smoothing: float
    divergence: float

    def rate(self, iteration: int) -> float:
        """Return the learning rate of an iteration, counted from 0; it is `end` in the last one."""
        return float(self.start * (self.end / self.start) ** ((iteration + 1) / self.iterations))


def find_lr(
    trainer: TrainerParts,
    start_lr: float,
    end_lr: float,
    iterations: int,
    smoothing: float,
    divergence: float,
) -> LRCurve:
    """Run the range test of `Trainer.find_lr`, which documents the arguments and errors."""
    tested = _checked(start_lr, end_lr, iterations, smoothing, divergence)
    check_step(trainer.custom_step, trainer.loss_fn, trainer.optimizer, steps_itself=trainer.steps_itself)
    if not isinstance(trainer.optimizer, torch.optim.Optimizer):
        raise TypeError(
            "find_lr tests the learning rate of one optimizer, and the trainer's optimizer is "
            f"{trainer.optimizer!r:.100}: test each model with a trainer of its own"
        )
    _refuse_lazy(trainer.model)
    loader = _checked_loader(trainer.train_loader)
    undo = Undo()
    # a compiled optimizer step would be compiled again for each rate, until PyTorch's limit of eight
    eager = torch.compiler.set_stance("force_eager") if trainer.compiled else nullcontext()
    with undo, undo, eager:  # undo twice: an interrupt may skip one of the two exits
        separate_pass = begin_trial(undo, trainer, loader)
        batches = _endless(separate_pass, trainer.limits.cut("train", loader))
        curve = _run(trainer, tested, batches)
    if not curve.diverged:
        logger.info(
            "the loss has not diverged up to the learning rate %g: a larger end_lr shows more", end_lr
        )
    return curve


def _checked(start: float, end: float, iterations: int, smoothing: float, divergence: float) -> Range:
    """Return the arguments of the test; raise TypeError or ValueError for a wrong one."""
    start, end = number("start_lr", start, above=0), number("end_lr", end, above=0)
    if end <= start:
        raise ValueError(f"end_lr must be above start_lr={start}, got {end}")
    positive("iterations", iterations)
    smoothing = number("smoothing", smoothing, above=0, most=1)
    return Range(start, end, iterations, smoothing, number("divergence", divergence, above=1))


def _refuse_lazy(model: torch.nn.Module) -> None:
    """Refuse a model with parameters that its first forward pass creates: they cannot be restored."""
    if lazy := [name for name, parameter in model.named_parameters() if is_lazy(parameter)]:
        raise ValueError(
            f"find_lr needs a model whose parameters have values, and {lazy[0]!r} is lazy: call the model "
            "with a batch before"
        )


def _checked_loader(loader: Iterable[Any] | None) -> Iterable[Any]:
    """Return the train loader; refuse one whose batches the training could not read again."""
    if loader is None:
        raise ValueError("find_lr trains on batches of the train loader: give the Trainer a train_loader")
    with_position = loader if hasattr(loader, "__next__") else position_of(loader)
    if with_position is not None:
        raise TypeError(
            f"find_lr reads batches that the training must read again, and the position of the "
            f"{type(with_position).__name__} in the train loader would stay moved: give a trainer for the "
            "test a DataLoader over a map-style data set, or a list of batches"
        )
    return loader


def _endless(loader: Iterable[Any], limit: int | None) -> Iterator[Any]:
    """Repeat passes over a loader without end, and yield their batches, at most `limit` of each pass."""
    while True:
        is_empty = True
        for batch in first(iter(loader), limit):
            is_empty = False
            yield batch
        if is_empty:
            raise ValueError("the train loader is empty: a pass over it gave no batch")


def _run(trainer: TrainerParts, tested: Range, batches: Iterator[Any]) -> LRCurve:
    """Train with rising rates until the last one, or until the loss diverges, and return the curve."""
    modes = TrainingModes()
    modes.record_modes(trainer.model)
    modes.set(trainer.model)
    trainer.announce(BeforeRun)
    trainer.announce(BeforeTrain)
    curve = LRCurve([], [], False)
    try:
        for iteration in range(tested.iterations):
            # as in ignite, an iteration trains with the rate that the curve shows for the iteration before
            _set_rate(trainer, tested.rate(max(0, iteration - 1)))
            loss = _step(trainer, batches, iteration)
            if curve.losses:
                loss = tested.smoothing * loss + (1 - tested.smoothing) * curve.losses[-1]
            if not math.isfinite(loss):
                return LRCurve(curve.lrs, curve.losses, True)
            curve.lrs.append(tested.rate(iteration))
            curve.losses.append(loss)
            lowest = min(curve.losses)
            if lowest > 0 and loss > tested.divergence * lowest:
                return LRCurve(curve.lrs, curve.losses, True)
        return curve
    finally:
        trainer.announce(AfterTrainEpoch, reason=ENDED)


def _set_rate(trainer: TrainerParts, rate: float) -> None:
    """Set the learning rate of all param groups."""
    for group in trainer.optimizer.param_groups:
        write_value(group, "lr", rate)


def _step(trainer: TrainerParts, batches: Iterator[Any], iteration: int) -> float:
    """Train for one iteration, and return the mean of its loss over ranks; this waits for the device."""
    if trainer.compiled:
        begin_compiled_step()
    trainer.batch, trainer.outputs = to_device(next(batches), trainer.device), None
    accumulator = trainer.counting.accumulator
    if accumulator is not None:
        trainer.counting.begin(accumulator)
    trainer.announce(BeforeTrainIter, batch_idx=iteration)
    trainer.outputs = trainer.train_step(trainer.batch)
    if accumulator is not None:
        for batch in batches_of_update(trainer, accumulator, batches):
            trainer.outputs = trainer.train_step(batch)
    trainer.announce(AfterTrainIter, batch_idx=iteration)
    losses = gather(float(trainer.outputs["loss"]))
    return sum(losses) / len(losses)
