"""Adding up metrics over a validation or test pass, with one read of the device at its end."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
import torch.distributed as dist


@runtime_checkable
class Metric(Protocol):
    """What torchmetrics' metrics look like."""

    def update(self, preds: Any, target: Any) -> None: ...
    def compute(self) -> Any: ...
    def reset(self) -> None: ...


Evaluator = Metric | Callable[[Any, Any], Any]
"""A metric object, or a function `(preds, target) -> number | mapping of numbers` per batch, averaged over
samples."""
Evaluators = Evaluator | Sequence[Evaluator] | Mapping[str, Evaluator]


def accuracy(preds: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Share of samples whose highest score is the target's: `preds` (N, C, ...), `target` (N, ...) of classes."""
    return (preds.argmax(1) == target).float().mean()


class Averages:
    """Means over samples of named values, added up on the device they are on."""

    def __init__(self) -> None:
        self._sums: dict[str, torch.Tensor] = {}
        self._samples: dict[str, int] = {}

    def add(self, name: str, value: Any, samples: int) -> None:
        """Add the mean `value` of a batch of `samples`."""
        tensor = torch.as_tensor(value).detach().float() * samples
        self._sums[name] = self._sums[name] + tensor if name in self._sums else tensor
        self._samples[name] = self._samples.get(name, 0) + samples

    def compute(self) -> dict[str, float]:
        """The means, over all ranks; waits for the device."""
        names = sorted(self._sums)
        if not names:
            return {}
        sums = torch.stack([self._sums[name].reshape(()) for name in names])
        counts = torch.tensor([float(self._samples[name]) for name in names], device=sums.device)
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            both = torch.cat([sums, counts])
            dist.all_reduce(both)
            sums, counts = both.chunk(2)
        return dict(zip(names, (sums / counts).tolist(), strict=True))


class Evaluation:
    """One pass over a loader: fed with what `val_step` returns, asked for the metrics at the end.

    Every 0-dim value of the mapping is averaged over samples; `preds` and `target` feed the evaluators. Without
    an evaluator, class indices as targets are scored by accuracy.
    """

    def __init__(self, evaluator: Evaluators | None) -> None:
        self._evaluators = name_evaluators(evaluator)
        self._averages = Averages()
        for metric in self._evaluators.values():
            if isinstance(metric, Metric):
                metric.reset()

    def add(self, outputs: Mapping[str, Any], samples: int) -> None:
        """Take in the outputs of one batch."""
        for name, value in outputs.items():
            if isinstance(value, int | float) or (isinstance(value, torch.Tensor) and value.numel() == 1):
                self._averages.add(name, value, samples)
        preds, target = outputs.get("preds"), outputs.get("target")
        evaluators = self._evaluators
        if not evaluators and is_classification(preds, target):
            evaluators = {"accuracy": accuracy}
        for name, evaluator in evaluators.items():
            if isinstance(evaluator, Metric):
                evaluator.update(preds, target)
            else:
                self._add_scores(name, evaluator(preds, target), samples)

    def _add_scores(self, name: str, scores: Any, samples: int) -> None:
        for key, value in scores.items() if isinstance(scores, Mapping) else [(name, scores)]:
            self._averages.add(key, value, samples)

    def compute(self) -> dict[str, float]:
        """All metrics as floats; waits for the device."""
        metrics = self._averages.compute()
        for name, metric in self._evaluators.items():
            if isinstance(metric, Metric):
                value = metric.compute()
                scores = value if isinstance(value, Mapping) else {name: value}
                metrics |= {key: float(score) for key, score in scores.items()}
        return metrics


def name_evaluators(evaluator: Evaluators | None) -> dict[str, Evaluator]:
    """Evaluators by name: a mapping's keys, else the function's or class's own name.

    Raises:
        TypeError: something in it is neither a metric nor a function.
    """
    if evaluator is None:
        return {}
    if isinstance(evaluator, Mapping):
        named = dict(evaluator)
    else:
        several: list[Any] = list(evaluator) if isinstance(evaluator, list | tuple) else [evaluator]
        named = {getattr(e, "__name__", type(e).__name__): e for e in several}
    for name, one in named.items():
        if not isinstance(one, Metric) and not callable(one):
            raise TypeError(f"evaluator {name!r} must be a function (preds, target) or a metric, got {one!r}")
    return named


def is_classification(preds: Any, target: Any) -> bool:
    """True for scores of classes (N, C, ...) against class indices (N, ...)."""
    if not isinstance(preds, torch.Tensor) or not isinstance(target, torch.Tensor):
        return False
    return not target.is_floating_point() and preds.ndim == target.ndim + 1


def batch_size(batch: Any) -> int:
    """How many samples a batch has: the first dimension of its first tensor, else its length, else 1."""
    if isinstance(batch, torch.Tensor):
        return int(batch.shape[0]) if batch.ndim else 1
    if isinstance(batch, Mapping):
        batch = list(batch.values())
    if isinstance(batch, list | tuple) and batch:
        return batch_size(batch[0])
    return 1
