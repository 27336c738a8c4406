"""Average metrics over a validation or test, and read them from the device once, at the end."""

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

_FOR_HANDLERS = (torch.Tensor, np.ndarray, Mapping, list, tuple, set)
"""Types that `val_step` may return for handlers of `after_val_iter`: no warning says they are no metrics."""
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
    """Return the fraction of samples whose highest score belongs to the target class.

    Args:
        preds: scores, (N, C, ...).
        target: class indices, (N, ...).
    """
    return (preds.argmax(1) == target).float().mean()


class Mean(NamedTuple):
    """A mean, and the number of samples that it is the mean of."""

    value: float
    samples: int


NOTHING = Mean(0.0, 0)
"""The mean of no samples."""


class Averages:
    """Average named values over samples.

    Tensors are summed on their device, in double precision except on MPS, which has none: a sum in single
    precision is off by 1e-4 after 100,000 batches. Numbers are averaged on the host as Python floats.
    """

    def __init__(self) -> None:
        # by the name of the value: the sum of its tensors, each times the samples of its batch
        self._sums: dict[str, torch.Tensor] = {}
        self._samples: dict[str, int] = {}  # the number of samples in each sum
        self._means: dict[str, Mean] = {}  # the mean of the values that are numbers on the host

    def add(self, name: str, value: Any, samples: int) -> None:
        """Add the mean `value` over the samples of a batch; ignore it if the batch has no samples.

        Raises:
            TypeError: `value` is a tensor that is sharded over ranks.
        """
        if not samples:
            return
        if is_number(value):
            number = value.item() if isinstance(value, np.ndarray) else float(value)
            self._means[name] = _combined(self._means.get(name, NOTHING), Mean(number, samples))
            return
        refuse_sharded(f"the metric {name!r}", value)
        tensor = torch.as_tensor(value).detach()
        tensor = (tensor.float() if tensor.device.type == "mps" else tensor.double()) * samples
        self._sums[name] = self._sums[name] + tensor if name in self._sums else tensor
        self._samples[name] = self._samples.get(name, 0) + samples

    def compute(self) -> dict[str, float]:
        """Return the means over the samples of all ranks; a collective, which waits for the device.

        A name that only some ranks have is averaged over those ranks.
        """
        own_means = dict(self._means)
        for name, total in self._read_sums():  # a name may have tensors in some batches, numbers in others
            mean_of_tensors = Mean(total / self._samples[name], self._samples[name])
            own_means[name] = _combined(own_means.get(name, NOTHING), mean_of_tensors)
        ranks = gather(own_means)  # not an all-reduce, which would hang if ranks have different names
        means = {}
        for name in sorted({name for rank in ranks for name in rank}):
            means[name] = reduce(_combined, (rank[name] for rank in ranks if name in rank)).value
        return means

    def _read_sums(self) -> Iterator[tuple[str, float]]:
        """Yield each name with the sum of its tensors; read each device once."""
        for device in {total.device: None for total in self._sums.values()}:
            names = sorted(name for name, total in self._sums.items() if total.device == device)
            values = torch.stack([self._sums[name].reshape(()) for name in names]).tolist()
            yield from zip(names, values, strict=True)


def _combined(first: Mean, second: Mean) -> Mean:
    """Return the mean over the samples of two means.

    The result is their weighted sum, computed so that two equal means give exactly the same value.
    """
    samples = first.samples + second.samples
    if not samples:
        return first
    if math.isfinite(first.value) and math.isfinite(second.value):
        return Mean(first.value + (second.value - first.value) * (second.samples / samples), samples)
    return Mean(first.value + second.value, samples)  # NaN or infinite, as the weighted sum would be


class Evaluation:
    """Collect the outputs of `val_step` over one pass, and compute the metrics at its end.

    `val_step` returns a mapping. Every number in it is averaged over samples: a Python or NumPy number, or
    a tensor of one element. `num_samples` is the number of samples of the batch. The evaluators receive
    `preds` and `target`. Without an evaluator the accuracy is computed, if the targets are class indices.

    Args:
        evaluator: one metric or several, or None.
        unusable: the names of values that were reported as no metrics, such as texts. Names that are reported
            during this evaluation are added. All evaluations of a trainer share one set, so that each name is
            logged once.
        device: the device of the predictions, to which metrics that are modules (torchmetrics) are moved.
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
        self._sources: dict[str, str] = {}  # for each metric "val_step", or the evaluator that reports it
        for metric in self._evaluators.values():
            if device is not None and isinstance(metric, torch.nn.Module):
                metric.to(device)
            if isinstance(metric, Metric):
                metric.reset()

    def add(self, outputs: Mapping[str, Any], samples: int) -> None:
        """Add the outputs of one batch, which has `samples` samples.

        Raises:
            ValueError: an evaluator needs `preds` and `target`, or two sources report the same metric.
            TypeError: an evaluator returned something other than numbers.
        """
        outputs = with_log_vars(outputs)
        self._add_numbers(outputs, samples)
        self._evaluate(outputs, samples)

    def _add_numbers(self, outputs: Mapping[str, Any], samples: int) -> None:
        """Add the numbers among the outputs to the averages; warn of values that look like metrics."""
        for name in unlogged(outputs):
            self._warn(name, NESTED, name)
        for name, value in outputs.items():
            if name in ("preds", "target", NUM_SAMPLES):  # not metrics, even with one element
                continue
            if is_single(value):
                self._set_source(name, "val_step")
                self._averages.add(name, value, samples)
            elif not isinstance(value, _FOR_HANDLERS):
                self._warn(name, UNUSABLE, f"{value!r:.80}", name)
            elif isinstance(value, torch.Tensor | np.ndarray) and _is_metric_of_samples(name, value):
                self._warn(name, SEVERAL_NUMBERS, name, tuple(value.shape))

    def _evaluate(self, outputs: Mapping[str, Any], samples: int) -> None:
        """Pass the predictions and targets of a batch to the evaluators, or compute the accuracy."""
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
            if isinstance(evaluator, Metric):
                with _with_name_in_errors(name):
                    evaluator.update(preds, target)
                continue
            with _with_name_in_errors(name):
                scores = evaluator(preds, target)
            for key, value in _by_name(name, scores).items():
                self._set_source(key, f"evaluator {name!r}")
                self._averages.add(key, value, samples)

    def compute(self) -> dict[str, float]:
        """Return all metrics as floats; a collective, which waits for the device.

        Every rank gets the metrics of rank 0, because a metric object that does not reduce over ranks has a
        different score on each of them. Ranks must not decide differently on the best checkpoint, a plateau
        or an early stop.

        Raises:
            ValueError: two sources report the same metric.
        """
        metrics = self._averages.compute()
        for name, metric in self._evaluators.items():
            if isinstance(metric, Metric):
                with _with_name_in_errors(name):
                    scores = metric.compute()
                for key, score in _by_name(name, scores).items():
                    self._set_source(key, f"evaluator {name!r}")
                    refuse_sharded(f"the metric {key!r}", score)
                    metrics[key] = float(score)
        return decided_by_rank_0(lambda: metrics)

    def _warn(self, name: str, message: str, *values: object) -> None:
        """Log a warning about a value of `val_step`, once for each name."""
        if name not in self._unusable:
            self._unusable.add(name)
            logger.warning(message, *values)

    def _set_source(self, name: str, source: str) -> None:
        """Store that `source` reports a metric; refuse a second source of the same metric."""
        if (first := self._sources.setdefault(name, source)) != source:
            raise ValueError(
                f"the metric {name!r} comes from {first} and from {source}: give the evaluator another name, "
                "evaluator={name: ...}"
            )


def before_drawing(
    model: torch.nn.Module, trained_on: Iterable[Any] | None, loaders: Iterable[Iterable[Any]]
) -> Callable[[], None]:
    """Return a function that restores the current random states, from which an evaluation will draw.

    These are the states of the global generators, of the model's modules and of all loaders.

    Args:
        model: the model.
        trained_on: the loader of the training, whose random state is restored too.
        loaders: the loaders of the evaluation.
    """
    state_of_training, generators = random_state(trained_on), module_generators(model)
    states = [(loader, own_random_state(loader)) for loader in loaders if loader is not trained_on]

    def restore() -> None:
        """Restore the random states of the training, of the loaders, and of the model's own generators."""
        set_random_state(trained_on, state_of_training)
        for loader, state in states:
            set_own_random_state(loader, state, opening=True)  # the state before the pass was opened
        set_module_generators(model, generators)

    return restore


def save_fields(undo: Undo, trainer: TrainerParts) -> None:
    """Let `undo` restore the trainer's model, batch, outputs and metrics.

    Until then `trainer.metrics` and `get_event_storage()` are another storage, which is discarded.
    """
    undo.attributes(trainer, "model", "batch", "outputs", "metrics")
    discarded = EventStorage()
    undo.step(discarded.__exit__)
    trainer.metrics = discarded.__enter__()


def name_evaluators(evaluator: Evaluators | None) -> dict[str, Evaluator]:
    """Return evaluators by name: the keys of a mapping, or the names of the functions and classes.

    Raises:
        ValueError: two evaluators have one name.
        TypeError: an object is not an evaluator.
    """
    if evaluator is None:
        return {}
    has_names = isinstance(evaluator, Mapping)
    by_name = dict(evaluator) if isinstance(evaluator, Mapping) else _by_own_names(evaluator)
    for name, each in by_name.items():
        if isinstance(each, type):
            raise TypeError(f"evaluator {name!r} is a class: give an object of it, {each.__name__}()")
        subject = f"evaluator {name!r}" if has_names else "evaluator"
        check_plain(subject, each, "preds", "target")
        if not isinstance(each, Metric) and not callable(each):
            hint = ": a config does not make one" if name == "type" else ""
            raise TypeError(f"{subject} must be a function (preds, target) or a metric, got {each!r}{hint}")
    return by_name


def _by_own_names(evaluator: Evaluator | Sequence[Evaluator]) -> dict[str, Evaluator]:
    """Return evaluators by the names of the functions and classes; refuse equal names."""
    evaluators: list[Any] = list(evaluator) if isinstance(evaluator, list | tuple) else [evaluator]
    names = [getattr(each, "__name__", type(each).__name__) for each in evaluators]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"two evaluators are named {name!r}: name them, evaluator={{name: ...}}")
    return dict(zip(names, evaluators, strict=True))


def is_classification(preds: Any, target: Any) -> bool:
    """Return whether `preds` are scores of classes (N, C, ...) and `target` class indices (N, ...)."""
    if not isinstance(preds, torch.Tensor) or not isinstance(target, torch.Tensor):
        return False
    return not target.is_floating_point() and preds.ndim == target.ndim + 1


def _is_metric_of_samples(name: object, value: torch.Tensor | np.ndarray[Any, Any]) -> bool:
    """Return whether a tensor seems to have one value for each sample, of which the user forgot the mean."""
    return (value.ndim == 1 and len(value) > 1) or name == "loss"


def _by_name(evaluator: str, scores: Any) -> Mapping[str, Any]:
    """Return the scores of an evaluator by name: the mapping, or one score under the evaluator's name.

    Raises:
        TypeError: a score is not one number.
    """
    by_name = scores if isinstance(scores, Mapping) else {evaluator: scores}
    for key, value in by_name.items():
        if not is_single(value):
            shape = getattr(value, "shape", None)
            got = f"{value!r:.80}" if shape is None else f"a tensor of shape {tuple(shape)}: take its mean()"
            under_key = f" as {key!r}" if by_name is scores else ""
            raise TypeError(f"evaluator {evaluator!r} must return a number{under_key}, got {got}")
    return by_name


@contextmanager
def _with_name_in_errors(evaluator: str) -> Iterator[None]:
    """Add a note with the evaluator's name to an error that the block raises."""
    try:
        yield
    except Exception as error:
        error.add_note(f"raised by evaluator {evaluator!r} on 'preds' and 'target'")
        raise
