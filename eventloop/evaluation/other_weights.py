"""Find the weights that validations and tests evaluate after the model's own, such as an average of these.

The loop of an evaluation runs one more pass over the loaders for each, and `MonitoredMetrics` knows the names
of their metrics.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol, runtime_checkable

from eventloop.data.loader_info import named_loaders, of_loader
from eventloop.data.trainer_parts import TrainerParts


@runtime_checkable
class OtherWeights(Protocol):
    """A hook with other weights of the model, which each validation and test may evaluate as well."""

    @property
    def evaluated_as(self) -> str:
        """The prefix of their metrics, such as "ema"; "" if no evaluation adds them to the model's own."""
        ...

    def in_model(self, trainer: Any, mode: str) -> AbstractContextManager[None]:
        """Return a context in whose block the model has these weights; `mode` is "val" or "test"."""
        ...


def other_weights(hooks: Iterable[Any]) -> dict[str, OtherWeights]:
    """Return the hooks whose weights are evaluated after the model's own, by the prefix of their metrics."""
    return {hook.evaluated_as: hook for hook in hooks if isinstance(hook, OtherWeights) and hook.evaluated_as}


def check_other_weights(trainer: TrainerParts, prefix: str, option: str) -> None:
    """Refuse a trainer whose evaluations cannot make one more pass, or whose metrics have the same names.

    Args:
        prefix: the prefix of the metrics of the other weights.
        option: the option that asks for the pass, for the error.

    Raises:
        ValueError: another engine's loop evaluates, or a loader has the name `prefix`.
    """
    if trainer.host:
        raise ValueError(
            f"{option} needs the loop of eventloop's trainer, which makes a second pass over the loader, and "
            f"got the loop of {trainer.host}: leave the option out"
        )
    for argument, given in (("val_loader", trainer.val_loader), ("test_loader", trainer.test_loader)):
        once = [name or argument for name, each in named_loaders(given).items() if isinstance(each, Iterator)]
        if once:
            raise ValueError(
                f"{argument}: {option} reads it twice, expected an iterable that begins again, such as a "
                f"DataLoader or a list, got an iterator for {', '.join(once)}"
            )
        if prefix in (names := [*named_loaders(given)]):
            raise ValueError(
                f"{argument}: expected loaders with other names than {prefix!r}, which {option} puts before "
                f"its metrics, got {', '.join(names)}"
            )


def name_of_pass(weights: str, loader: str) -> str:
    """Return the name of a pass over one loader, which `of_loader` puts before the names of its metrics.

    Args:
        weights: the prefix of the weights; "" for the model's own.
        loader: the name of the loader; "" for a single one.
    """
    return of_loader(weights, loader) if loader else weights


def merged(metrics: Mapping[str, float], others: Mapping[str, float]) -> dict[str, float]:
    """Return the metrics of two passes.

    Raises:
        ValueError: both passes report a metric.
    """
    if twice := sorted(metrics.keys() & others.keys()):
        raise ValueError(
            f"expected metrics whose names are not those of other weights, got {', '.join(twice)} from the "
            "model's own weights too: rename what val_step or the evaluator reports"
        )
    return {**metrics, **others}
