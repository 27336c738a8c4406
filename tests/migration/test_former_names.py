"""Former names of our own arguments and methods: the error names the new one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from eventloop import EventStorage, hooks, writers
from eventloop.registry import HOOKS, build

CostsHook: Any = hooks.CostsHook
EventLogWriter: Any = writers.EventLogWriter
VisdomWriter: Any = writers.VisdomWriter


@pytest.mark.parametrize(
    ("call", "former", "new"),
    [
        (lambda: CostsHook(interval=300), "interval", "interval_seconds"),
        (lambda: build({"type": "CostsHook", "interval": 300}, HOOKS), "interval", "interval_seconds"),
        (lambda: CostsHook(log_every=30.0), "log_every", "log_seconds"),
        (lambda: EventLogWriter(fsync_interval=5.0), "fsync_interval", "fsync_seconds"),
        (lambda: VisdomWriter(retry_interval=5.0), "retry_interval", "retry_seconds"),
    ],
)
def test_a_time_is_named_by_its_unit(call: Callable[[], object], former: str, new: str) -> None:
    """An interval counts iterations or epochs; the former name of a time is refused with the one in seconds."""
    with pytest.raises((TypeError, ValueError), match=f"'{former}': use {new}="):
        call()


@pytest.mark.parametrize(
    ("former", "new"), [("settle", "read_collected"), ("look_for_lost_loss", "check_losses")]
)
def test_a_former_method_of_the_storage_is_explained(former: str, new: str) -> None:
    """Reading it names the method that replaces it."""
    with pytest.raises(AttributeError, match=rf"EventStorage has no attribute '{former}': use {new}\(\)"):
        getattr(EventStorage(), former)
