"""Share a small state, writes that are held, and late copies among the tests of the saver."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from eventloop import Trainer
from eventloop.checkpoint.commit import Outcome, Removals, Save, commit
from eventloop.checkpoint.retention.pending import Saves
from eventloop.checkpoint.saving.buffers import Buffers
from eventloop.checkpoint.saving.saver import Saver
from eventloop.checkpoint.saving.snapshot import Snapshot
from eventloop.hooks import CheckpointHook, Hook

DEADLINE = 60.0
"""Seconds against hangs; no test waits as long while all is well."""


def nothing_is_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every state be saved like a large one."""
    monkeypatch.setattr("eventloop.checkpoint.saving.task.SMALL", 0)
    monkeypatch.setattr("eventloop.checkpoint.saving.saver.AT_ONCE", 0)


def a_state(value: float) -> dict[str, Any]:
    return {
        "meta": {"iter": int(value), "names": ["a", "b"], "pair": (1, 2.5), "nothing": None},
        "state_dict": {
            "w": torch.full((3, 4), value),
            "n": torch.tensor(int(value)),
            "empty": torch.empty(0),
        },
        "optimizer": {"state": {0: {"momentum": torch.full((12,), -value)}}},
    }


def begun(state: Mapping[str, Any], later: Collection[int] = (), buffers: Buffers | None = None) -> Snapshot:
    """Return a snapshot that has begun, in fresh buffers unless some are given."""
    snapshot = Snapshot(state)
    snapshot.begin(buffers or Buffers(), later)
    return snapshot


def no_thread_while_it_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every save wait for the start of the process, as one of more than 64 MB does."""
    monkeypatch.setattr("eventloop.checkpoint.saving.group_writer.STARTING_BYTES", -1)


class Writes:
    """A replacement of `commit` that calls `before` with each path first, so that a test can hold or fail
    it."""

    def __init__(self, before: Callable[[Path], object]) -> None:
        self._before = before

    def __call__(
        self,
        saves: Sequence[Save],
        given_up: threading.Event | None = None,
        removals: Removals | None = None,
    ) -> list[Outcome]:
        return [self._one(save, given_up, removals) for save in saves]

    def _one(self, save: Save, given_up: threading.Event | None, removals: Removals | None) -> Outcome:
        try:
            self._before(save.path)
        except Exception as error:
            return Outcome(error=error)
        return commit([save], given_up=given_up, removals=removals)[0]

    @classmethod
    def of_hooks(cls, monkeypatch: pytest.MonkeyPatch, before: Callable[[Path], object]) -> None:
        """Let the savers of all hooks of a test write with this replacement, on a thread."""
        monkeypatch.setattr(
            "eventloop.checkpoint.retention.pending.Saver", partial(Saver, cls(before), process=False)
        )


class Gate(Writes):
    """Writes that are held until they are released, and the names that were written."""

    def __init__(self) -> None:
        self.entered, self.open = threading.Event(), threading.Event()
        self.names: list[str] = []
        super().__init__(self.hold)

    def hold(self, path: Path) -> None:
        """Wait until the gate is opened."""
        self.names.append(path.name)
        self.entered.set()
        assert self.open.wait(DEADLINE)


class Ended(Hook):
    """A hook that waits in each iteration until the saves of another hook have ended."""

    def __init__(self, hook: CheckpointHook) -> None:
        self.hook = hook

    def after_train_iter(self, trainer: Trainer, event: Any) -> None:
        """Wait before the other hook's turn."""
        for saving in self.hook.saves.under_way:
            saving.written.exception(DEADLINE)


def assert_same(loaded: dict[str, Any], value: float) -> None:
    expected = a_state(value)
    assert loaded["meta"] == expected["meta"]
    for name, tensor in expected["state_dict"].items():
        assert torch.equal(loaded["state_dict"][name], tensor), name
    assert torch.equal(
        loaded["optimizer"]["state"][0]["momentum"], expected["optimizer"]["state"][0]["momentum"]
    )


def pointers(state: dict[str, Any]) -> set[int]:
    """Return the addresses of the tensors that an optimizer's step changes."""
    return {state["state_dict"]["w"].data_ptr()}


class Late:
    """Copies that begin when they are released."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.entered, self.go, self.waited_for = (threading.Event() for _ in range(3))
        copy = Snapshot.copy

        def held(snapshot: Snapshot) -> None:
            self.entered.set()
            assert self.go.wait(DEADLINE)
            copy(snapshot)

        join = Snapshot.join

        def joined(snapshot: Snapshot) -> None:
            self.waited_for.set()
            join(snapshot)

        monkeypatch.setattr(Snapshot, "copy", held)
        monkeypatch.setattr(Snapshot, "join", joined)
        nothing_is_small(monkeypatch)

    def let_go_when_waited_for(self) -> None:
        """Wait until a thread waits for a copy, and release it then."""
        assert self.waited_for.wait(DEADLINE)
        self.go.set()


class Latest:
    """Copies that begin only when a thread waits for them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.copies = 0
        self.order: list[str] = []
        self._requested: dict[Snapshot, threading.Event] = {}
        begin, copy, join = Snapshot.__init__, Snapshot.copy, Snapshot.join
        finish = Saves.finish

        def begun(snapshot: Snapshot, *arguments: Any) -> None:
            self._requested[snapshot] = threading.Event()
            begin(snapshot, *arguments)

        def late(snapshot: Snapshot) -> None:
            self._requested[snapshot].wait(DEADLINE)
            self.copies += 1
            copy(snapshot)

        def joined(snapshot: Snapshot) -> None:
            if not self._requested[snapshot].is_set():
                self.order.append("join")
            self._requested[snapshot].set()
            join(snapshot)

        def finished(saves: Saves, trainer: Trainer, *, failed: bool = False) -> None:
            self.let_go()
            finish(saves, trainer, failed=failed)

        nothing_is_small(monkeypatch)
        monkeypatch.setattr(Snapshot, "__init__", begun)
        monkeypatch.setattr(Snapshot, "copy", late)
        monkeypatch.setattr(Snapshot, "join", joined)
        monkeypatch.setattr(Saves, "finish", finished)

    def let_go(self) -> None:
        """Release the copies that are due."""
        for asked in list(self._requested.values()):
            asked.set()


def same(one: Any, other: Any) -> bool:
    """Return whether two nested states are equal to the bit."""
    if isinstance(one, torch.Tensor):
        alike = (one.dtype, one.layout) == (other.dtype, other.layout)
        return alike and torch.equal(one.to_dense(), other.to_dense())
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one if key != "time")
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)
