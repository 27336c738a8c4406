"""Average metrics over a validation or test pass, with one read of the device at its end."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import reduce
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch

from eventloop.data.loader_state import (
    own_random_state,
    random_state,
    set_own_random_state,
    set_random_state,
)
from eventloop.data.rng import module_generators, set_module_generators
from eventloop.data.trainer_parts import TrainerParts
from eventloop.evaluation.batch_sizes import NUM_SAMPLES
from eventloop.metrics import EventStorage
from eventloop.metrics.scalar_value import is_number, is_single, unlogged, with_log_vars
from eventloop.state.exchange import decided_by_rank_0, gather
from eventloop.state.sharded import refuse_sharded
from eventloop.state.undo import Undo
from eventloop.util.functions import check_plain

logger = logging.getLogger("eventloop")

_SEVERAL = (torch.Tensor, np.ndarray, Mapping, list, tuple, set)
"""The types that a `val_step` may return for handlers of `after_val_iter`; they are not metrics."""
NESTED = (
    "val_step returned %r as a mapping of numbers, which become no metrics: return the numbers themselves, "
    "or in a mapping named log_vars"
)
UNUSABLE = (
    "val_step returned %s as %r, which is not a number and becomes no metric: return a number, or a tensor "
    "of one element"
)
SEVERAL_NUMBERS = (
    "val_step returned %r of shape %s, which is not one number and becomes no metric: take its mean(), or "
    "return it as 'preds' of an evaluator"
)
ONE_OF_TWO = (
    "val_step returned %r without %r, so nothing is scored: return both 'preds' and 'target' for "
    "an accuracy or an evaluator"
)


@runtime_checkable
class Metric(Protocol):
    """A metric object with the methods of torchmetrics."""

    def update(self, preds: Any, target: Any) -> None: ...
    def compute(self) -> Any: ...
    def reset(self) -> None: ...


Evaluator = Metric | Callable[[Any, Any], Any]
"""A metric object, or a function `(preds, target) -> number | mapping of numbers`.

The function is called for each batch, and its results are averaged over samples.
"""
Evaluators = Evaluator | Sequence[Evaluator] | Mapping[str, Evaluator]


def accuracy(preds: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return the share of samples whose highest score is the target's.

    Args:
        preds: scores, (N, C, ...).
        target: class indices, (N, ...).
    """
    return (preds.argmax(1) == target).float().mean()


class Mean(NamedTuple):
    """A mean, and the number of samples over which it was taken."""

    value: float
    samples: int


NOTHING = Mean(0.0, 0)


class Averages:
    """Average named values over samples.

    Tensors are summed on their device in double precision, as a loop adds up `value.item() * samples`: a sum
    in single precision is off by 1e-4 after 100,000 batches. MPS has no doubles. Numbers are averaged at once
    as Python floats, so that they are not rounded to the device's precision.
    """

    def __init__(self) -> None:
        self._sums: dict[str, torch.Tensor] = {}
        self._samples: dict[str, int] = {}
        self._means: dict[str, Mean] = {}

    def add(self, name: str, value: Any, samples: int) -> None:
        """Add the mean `value` of a batch of `samples`; of none the mean does not count, and may be NaN.

        Raises:
            TypeError: `value` is a tensor that is sharded over ranks.
        """
        if not samples:
            return
        if is_number(value):
            number = value.item() if isinstance(value, np.ndarray) else float(value)
            self._means[name] = _together(self._means.get(name, NOTHING), Mean(number, samples))
            return
        refuse_sharded(f"the metric {name!r}", value)
        tensor = torch.as_tensor(value).detach()
        tensor = (tensor.float() if tensor.device.type == "mps" else tensor.double()) * samples
        self._sums[name] = self._sums[name] + tensor if name in self._sums else tensor
        self._samples[name] = self._samples.get(name, 0) + samples

    def compute(self) -> dict[str, float]:
        """Return the means over the samples of all ranks. It waits for the device.

        A name that only some ranks have is averaged over those ranks.
        """
        own = dict(self._means)
        for name, total in self._read():
            own[name] = _together(
                own.get(name, NOTHING), Mean(total / self._samples[name], self._samples[name])
            )
        ranks = gather(own)  # an all-reduce would hang if ranks have different names
        means = {}
        for name in sorted({name for rank in ranks for name in rank}):
            means[name] = reduce(_together, (rank[name] for rank in ranks if name in rank)).value
        return means

    def _read(self) -> Iterator[tuple[str, float]]:
        """Yield each name with the sum of its values, reading each device once."""
        for device in {total.device: None for total in self._sums.values()}:
            names = sorted(name for name, total in self._sums.items() if total.device == device)
            values = torch.stack([self._sums[name].reshape(()) for name in names]).tolist()
            yield from zip(names, values, strict=True)


def _together(a: Mean, b: Mean) -> Mean:
    """Return the mean over the samples of both means.

    Equal means stay equal, while a sum that is divided again would be rounded twice.
    """
    samples = a.samples + b.samples
    if not samples:
        return a
    if math.isfinite(a.value) and math.isfinite(b.value):
        return Mean(a.value + (b.value - a.value) * (b.samples / samples), samples)
    return Mean(a.value + b.value, samples)


class Evaluation:
    """Collect the outputs of `val_step` over one pass, and compute the metrics at its end.

    `val_step` returns a mapping. Every number in it is averaged over samples: a Python or NumPy number, or
    a tensor of one element. `num_samples` is the number of samples of the batch. The evaluators get `preds`
    and `target`. Without an evaluator, targets that are class indices are scored by accuracy.

    Args:
        evaluator: one metric or several, or None.
        unusable: names of values, such as texts, that were already reported as unusable. New ones are logged
            and added to this set, so that a set shared by all evaluations logs each name once.
        device: where the predictions are; metrics that are modules, such as torchmetrics, are moved there.
    """

    def __init__(
        self,
        evaluator: Evaluators | None,
        unusable: set[str] | None = None,
        device: torch.device | None = None,
    ) -> None:
        self._unusable = set() if unusable is None else unusable
        self._evaluators = name_evaluators(evaluator)
        self._averages = Averages()
        self._sources: dict[str, str] = {}
        for metric in self._evaluators.values():
            if device is not None and isinstance(metric, torch.nn.Module):
                metric.to(device)
            if isinstance(metric, Metric):
                metric.reset()

    def add(self, outputs: Mapping[str, Any], samples: int) -> None:
        """Add the outputs of one batch."""
        outputs = with_log_vars(outputs)
        for name in unlogged(outputs):
            self._warn(name, NESTED, name)
        for name, value in outputs.items():
            if name in ("preds", "target", NUM_SAMPLES):  # not metrics, even with one element
                continue
            if is_single(value):
                self._claim(name, "val_step")
                self._averages.add(name, value, samples)
            elif not isinstance(value, _SEVERAL):
                self._warn(name, UNUSABLE, f"{value!r:.80}", name)
            elif isinstance(value, torch.Tensor | np.ndarray) and _one_a_sample(name, value):
                self._warn(name, SEVERAL_NUMBERS, name, tuple(value.shape))
        preds, target = outputs.get("preds"), outputs.get("target")
        evaluators = self._evaluators
        if not evaluators and is_classification(preds, target):
            evaluators = {"accuracy": accuracy}
        if evaluators and (preds is None or target is None):
            raise ValueError(
                "evaluators need 'preds' and 'target' from val_step, which returned "
                f"{sorted(map(str, outputs))}"
            )
        if (preds is None) != (target is None):
            given, absent = ("preds", "target") if target is None else ("target", "preds")
            self._warn(given, ONE_OF_TWO, given, absent)
        for name, evaluator in evaluators.items():
            with _naming(name):
                scores = (evaluator.update if isinstance(evaluator, Metric) else evaluator)(preds, target)
            if not isinstance(evaluator, Metric):
                for key, value in _named(name, scores).items():
                    self._claim(key, f"evaluator {name!r}")
                    self._averages.add(key, value, samples)

    def compute(self) -> dict[str, float]:
        """Return all metrics as floats, those of rank 0 on every rank. It waits for the device.

        A metric object that does not reduce over ranks has a different score on each rank. Ranks must not
        decide differently on the best checkpoint, a plateau or an early stop.

        Raises:
            ValueError: two sources report the same metric.
        """
        metrics = self._averages.compute()
        for name, metric in self._evaluators.items():
            if isinstance(metric, Metric):
                with _naming(name):
                    scores = metric.compute()
                for key, score in _named(name, scores).items():
                    self._claim(key, f"evaluator {name!r}")
                    refuse_sharded(f"the metric {key!r}", score)
                    metrics[key] = float(score)
        return decided_by_rank_0(lambda: metrics)

    def _warn(self, name: str, message: str, *values: object) -> None:
        """Log a warning about a value of `val_step`, once for each name."""
        if name not in self._unusable:
            self._unusable.add(name)
            logger.warning(message, *values)

    def _claim(self, name: str, source: str) -> None:
        if (owner := self._sources.setdefault(name, source)) != source:
            raise ValueError(
                f"the metric {name!r} comes from {owner} and from {source}: give the evaluator another name, "
                "evaluator={name: ...}"
            )


def before_drawing(
    model: torch.nn.Module, trained_on: Iterable[Any] | None, loaders: Iterable[Iterable[Any]]
) -> Callable[[], None]:
    """Return a function that restores the random states from which an evaluation on `loaders` draws.

    The states are those of this process now: the global generators, the model's modules, and all loaders.

    Args:
        model: the model.
        trained_on: the loader of the training, whose random state is restored too.
        loaders: the loaders of the evaluation.
    """
    training, modules = random_state(trained_on), module_generators(model)
    evaluations = [(each, own_random_state(each)) for each in loaders if each is not trained_on]

    def put_back() -> None:
        set_random_state(trained_on, training)
        for loader, state in evaluations:
            set_own_random_state(loader, state, opening=True)
        set_module_generators(model, modules)

    return put_back


def save_fields(undo: Undo, trainer: TrainerParts) -> None:
    """Let `undo` restore the trainer's model, batch, outputs and metrics.

    Until then, metrics that are put, also by `get_event_storage`, go to another storage and are discarded.
    """
    undo.attributes(trainer, "model", "batch", "outputs", "metrics")
    aside = EventStorage()
    undo.step(aside.__exit__)
    trainer.metrics = aside.__enter__()


def name_evaluators(evaluator: Evaluators | None) -> dict[str, Evaluator]:
    """Return evaluators by name: the keys of a mapping, or the names of the functions and classes."""
    if evaluator is None:
        return {}
    if isinstance(evaluator, Mapping):
        named = dict(evaluator)
    else:
        several: list[Any] = list(evaluator) if isinstance(evaluator, list | tuple) else [evaluator]
        names = [getattr(e, "__name__", type(e).__name__) for e in several]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"two evaluators are named {name!r}: name them, evaluator={{name: ...}}")
        named = dict(zip(names, several, strict=True))
    for name, one in named.items():
        if isinstance(one, type):
            raise TypeError(f"evaluator {name!r} is a class: give an object of it, {one.__name__}()")
        which = f"evaluator {name!r}" if isinstance(evaluator, Mapping) else "evaluator"
        check_plain(which, one, "preds", "target")
        if not isinstance(one, Metric) and not callable(one):
            hint = ": a config does not make one" if name == "type" else ""
            raise TypeError(f"{which} must be a function (preds, target) or a metric, got {one!r}{hint}")
    return named


def is_classification(preds: Any, target: Any) -> bool:
    """Return whether `preds` are scores of classes (N, C, ...) and `target` class indices (N, ...)."""
    if not isinstance(preds, torch.Tensor) or not isinstance(target, torch.Tensor):
        return False
    return not target.is_floating_point() and preds.ndim == target.ndim + 1


def _one_a_sample(name: object, value: torch.Tensor | np.ndarray[Any, Any]) -> bool:
    """Return whether a value seems to be a metric of each sample; other tensors are for handlers."""
    return (value.ndim == 1 and len(value) > 1) or name == "loss"


def _named(name: str, scores: Any) -> Mapping[str, Any]:
    """Return the scores of an evaluator by name.

    Raises:
        TypeError: a score is not one number.
    """
    named = scores if isinstance(scores, Mapping) else {name: scores}
    for key, value in named.items():
        if not is_single(value):
            shape = getattr(value, "shape", None)
            got = f"{value!r:.80}" if shape is None else f"a tensor of shape {tuple(shape)}: take its mean()"
            which = f" as {key!r}" if named is scores else ""
            raise TypeError(f"evaluator {name!r} must return a number{which}, got {got}")
    return named


@contextmanager
def _naming(evaluator: str) -> Iterator[None]:
    """Add a note with the evaluator's name to an error."""
    try:
        yield
    except Exception as error:
        error.add_note(f"raised by evaluator {evaluator!r} on 'preds' and 'target'")
        raise
