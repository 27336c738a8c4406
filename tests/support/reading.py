"""Counts how often a thread asks a tensor for its value, for which it would wait on a device."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from eventloop import Trainer
from eventloop.metrics.device import HostCopy

Reads = Counter[tuple[str, str]]
"""By thread, and by what was asked."""
READS = (
    "item",
    "tolist",
    "cpu",
    "numpy",
    "__float__",
    "__bool__",
    "__int__",
    "__index__",
    "__array__",
    "is_nonzero",
    "__contains__",
)
SCALAR = "aten::_local_scalar_dense"
"""What PyTorch itself, too, reads a number of a tensor with: `.item()`, `if tensor`, a comparison in an optimizer."""

arrived = threading.local()
"""Whether this thread reads a copy that has arrived in the host's memory, which is no waiting."""


def on_the_host() -> bool:
    """What is read now has arrived."""
    return bool(getattr(arrived, "reading", False))


def watch_reads(monkeypatch: pytest.MonkeyPatch) -> Reads:
    """Count from now on how often which thread asks a tensor for its value."""
    counted: Reads = Counter()
    take_values = HostCopy.values

    def counting(name: str) -> Any:
        original = getattr(torch.Tensor, name)

        def call(self: torch.Tensor, *arguments: Any, **options: Any) -> Any:
            if not on_the_host():
                counted[threading.current_thread().name, name] += 1
            return original(self, *arguments, **options)

        return call

    def values(copy: HostCopy) -> list[float]:
        if not copy.ready():
            counted[threading.current_thread().name, "HostCopy.values"] += 1
            return take_values(copy)
        arrived.reading = True
        try:
            return take_values(copy)
        finally:
            arrived.reading = False

    def waiting(*arguments: Any, **options: Any) -> None:
        counted[threading.current_thread().name, "synchronize"] += 1

    for name in READS:
        monkeypatch.setattr(torch.Tensor, name, counting(name))
    monkeypatch.setattr(HostCopy, "values", values)
    for module in (torch.cuda, torch.cpu, torch.accelerator):
        monkeypatch.setattr(module, "synchronize", waiting)
    return counted


class Operators(TorchDispatchMode):
    """Counts the operators that this thread runs, those inside PyTorch's own functions and backward included."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counted: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not on_the_host():
            self.counted[func.name().partition(".")[0]] += 1
        return func(*args, **(kwargs or {}))


@contextmanager
def waits_between(trainer: Trainer, reads: Reads, first: str, last: str) -> Iterator[list[str]]:
    """What the training thread waits for from one event to another, each time, in Python or inside PyTorch; a list that
    is filled as the trainer runs."""
    waits: list[str] = []
    mode = ExitStack()
    operators = Operators()

    def begin(event: Any) -> None:
        reads.clear()
        operators.counted.clear()
        mode.enter_context(operators)

    def end(event: Any) -> None:
        mode.close()
        own = threading.main_thread().name
        waits.extend(name for (thread, name), count in reads.items() for _ in range(count) if thread == own)
        waits.extend([SCALAR] * operators.counted[SCALAR])

    trainer.bus.subscribe(begin, first, priority="LOWEST")
    trainer.bus.subscribe(end, last, priority="HIGHEST")
    with mode:
        yield waits
