"""Build a trainer that only validates the checkpoints of another run, and does not change its files.

This trainer is an evaluator. `eventloop.sidecar` builds it with the function of the user that also builds the
training's trainer. It has a temporary `work_dir`, no writers, and none of the hooks that save or stop.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

from eventloop.bus import Bus
from eventloop.events import BeforeTrain
from eventloop.events.priority import Priority


class _Evaluator(NamedTuple):
    device: str | None


_building: ContextVar[_Evaluator | None] = ContextVar("building", default=None)


@contextmanager
def building_evaluator(device: str | None = None) -> Iterator[None]:
    """Make a context in which each trainer is built as an evaluator.

    Args:
        device: the device that the evaluator uses; None for the device that the program passes.
    """
    token = _building.set(_Evaluator(device))
    try:
        yield
    finally:
        _building.reset(token)


def builds_evaluator() -> bool:
    """Return whether the trainer that is being built is an evaluator."""
    return _building.get() is not None


def device_to_use(device: Any) -> Any:
    """Return the device of the trainer that is being built.

    Args:
        device: the device that the program passes, which an evaluator may replace.
    """
    evaluator = _building.get()
    return device if evaluator is None or evaluator.device is None else evaluator.device


def refuse_training(bus: Bus) -> None:
    """Subscribe a handler that raises RuntimeError when an evaluator begins a training."""
    bus.subscribe(_refuse, BeforeTrain, priority=Priority.HIGHEST, name="evaluator")


def _refuse(trainer: Any, event: BeforeTrain) -> None:
    """Raise an error when a training begins, because the evaluator only validates."""
    raise RuntimeError(
        "expected a function that builds the trainer and returns it, and got a training: move the call of "
        "train() out of the function that `eventloop evaluate` is given"
    )
