"""What comes before a commit, failing: the memory that states are copied to, and the process that writes them."""

from __future__ import annotations

import errno
import os
import subprocess
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from eventloop.checkpoint import CheckpointError
from eventloop.checkpoint.saving.saver import Saver
from tests.faults.operations import logged_faults
from tests.faults.training import ITERATIONS, check_whole, finish, make_trainer

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="needs Linux's memfd_create")

CALLS: dict[str, tuple[Any, str]] = {
    "memfd_create": (os, "memfd_create"),
    "truncate": (os, "truncate"),
    "map": (torch, "from_file"),
    "allocate": (torch, "empty"),
    "pipe": (os, "pipe"),
    "start": (subprocess, "Popen"),
}
"""What the system is asked for, where that is asked."""


class Failing:
    """Fails when it is first called by who stages a state, or from then on."""

    def __init__(self, real: Callable[..., Any], *, lasting: bool) -> None:
        self.real, self._lasting, self.failed = real, lasting, 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.failed and not self._lasting:
            return self.real(*args, **kwargs)
        self.failed += 1
        if isinstance(self.real, type) or self.real.__module__ in ("os", "posix"):
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        raise RuntimeError("Cannot allocate memory")  # as torch says it


@pytest.mark.representative(2)
@pytest.mark.parametrize("lasting", [False, True], ids=["once", "from then on"])
@pytest.mark.parametrize("call", CALLS)
def test_any_call_of_the_staging_may_fail(
    directory: Path, monkeypatch: pytest.MonkeyPatch, call: str, lasting: bool
) -> None:
    """The training goes on to its end, it is told, whatever is taken for a checkpoint is whole, and it can be gone on
    with; a save that succeeds later is as good as any."""
    monkeypatch.setattr("eventloop.checkpoint.saving.task.SMALL", 0)
    made = partial(Saver, process=call != "allocate")
    monkeypatch.setattr("eventloop.checkpoint.retention.pending.Saver", made)
    trainer = make_trainer(directory, save_best=None)
    failing = Failing(getattr(*CALLS[call]), lasting=lasting)
    told: list[Any] = []
    trainer.bus.subscribe(told.append, "checkpoint_failed")
    fail_from_then_on = lambda event: monkeypatch.setattr(*CALLS[call], failing)
    trainer.bus.subscribe(fail_from_then_on, "before_save_checkpoint", once=True)

    all_fail = pytest.raises(CheckpointError, match="got none: all 7 saves failed")
    with logged_faults() as log, all_fail if call == "allocate" and lasting else nullcontext():
        trainer.train()
    monkeypatch.setattr(*CALLS[call], failing.real)
    trainer.close()

    assert failing.failed
    assert told or log, "nobody was told"
    assert trainer.iter == ITERATIONS
    there = check_whole(directory)
    assert (ITERATIONS in there.values()) or (call == "allocate" and lasting)
    finish(directory)
