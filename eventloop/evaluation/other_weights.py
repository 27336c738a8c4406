"""Find other weights of the model that validations and tests evaluate too, such as `EMAHook`'s average.

The loop of an evaluation makes one more pass over the loaders for each of these hooks. `MonitoredMetrics`
uses the names of their metrics.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol, runtime_checkable

from eventloop.data.loader_info import named_loaders, of_loader
from eventloop.data.trainer_parts import TrainerParts


@runtime_checkable
class OtherWeights(Protocol):
    """A hook with other weights of the model, which validations and tests may evaluate in a second pass."""

    @property
    def evaluated_as(self) -> str:
        """The prefix of the metrics of the second pass, such as "ema"; "" if there is no second pass."""
        ...

    def in_model(self, trainer: Any, mode: str) -> AbstractContextManager[None]:
        """Return a context in whose block the model has these weights; `mode` is "val" or "test"."""
        ...


def other_weights(hooks: Iterable[Any]) -> dict[str, OtherWeights]:
    """Return the hooks whose weights are evaluated in a second pass, by the prefix of the metrics."""
    return {hook.evaluated_as: hook for hook in hooks if isinstance(hook, OtherWeights) and hook.evaluated_as}


def check_other_weights(trainer: TrainerParts, prefix: str, option: str) -> None:
    """Refuse a trainer whose evaluations cannot make a second pass, or whose metrics would have equal names.

    Args:
        prefix: the prefix of the metrics of the second pass.
        option: the option that requests the second pass, for the error message.

    Raises:
        ValueError: another engine's loop evaluates, a loader is an iterator, or a loader has the name
            `prefix`.
    """
    if trainer.host:
        raise ValueError(
            f"{option} needs the loop of eventloop's trainer, which makes a second pass over the loader, and "
            f"got the loop of {trainer.host}: leave the option out"
        )
    for argument, given in (("val_loader", trainer.val_loader), ("test_loader", trainer.test_loader)):
        loaders = named_loaders(given)
        iterators = [name or argument for name, each in loaders.items() if isinstance(each, Iterator)]
        if iterators:
            raise ValueError(
                f"{argument}: {option} reads it twice, expected an iterable that begins again, such as a "
                f"DataLoader or a list, got an iterator for {', '.join(iterators)}"
            )
        if prefix in loaders:
            raise ValueError(
                f"{argument}: expected loaders with other names than {prefix!r}, which {option} puts before "
                f"its metrics, got {', '.join(loaders)}"
            )


def name_of_pass(weights: str, loader: str) -> str:
    """Return the name of a pass over one loader, such as "ema/clean", the prefix of its metrics.

    Args:
        weights: the prefix of the weights; "" for the model's own weights.
        loader: the name of the loader; "" if there is only one.
    """
    return of_loader(weights, loader) if loader else weights


def merged(metrics: Mapping[str, float], others: Mapping[str, float]) -> dict[str, float]:
    """Return the metrics of two passes in one dict.

    Raises:
        ValueError: both passes report a metric of the same name.
    """
    if common := sorted(metrics.keys() & others.keys()):
        raise ValueError(
            f"expected metrics whose names are not those of other weights, got {', '.join(common)} from the "
            "model's own weights too: rename what val_step or the evaluator reports"
        )
    return {**metrics, **others}
