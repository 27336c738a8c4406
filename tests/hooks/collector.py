"""What the tests of the garbage collection share: cycles that are counted, and who collected when."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import ClassVar
from weakref import WeakSet

import pytest

from tests.conftest import count_frozen

YOUNG, MIDDLE, ALL = range(3)


class Now:
    """What is going on."""

    name = ""


class Node:
    """Half of a reference cycle."""

    alive: ClassVar[WeakSet[Node]] = WeakSet()

    def __init__(self) -> None:
        Node.alive.add(self)
        self.other: Node | None = None


def cycle() -> Node:
    """Two objects that only a collection frees."""
    a, b = Node(), Node()
    a.other, b.other = b, a
    return a


@pytest.fixture(autouse=True)
def collector_as_it_was(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every test begins with the collector on and nothing frozen, and has to end so."""
    monkeypatch.setattr(gc, "get_freeze_count", count_frozen)
    gc.unfreeze()
    gc.enable()
    yield
    frozen = gc.get_freeze_count()
    gc.freeze()  # what other tests count on
    assert gc.isenabled()
    assert frozen == 0


@pytest.fixture
def collect_calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, str]]:
    """The same, without Python's own collections."""
    collect_calls: list[tuple[int, str]] = []
    collect = gc.collect

    def collect_and_record(generation: int = ALL) -> int:
        collect_calls.append((generation, Now.name))
        return collect(generation)

    monkeypatch.setattr(gc, "collect", collect_and_record)
    return collect_calls


@pytest.fixture
def no_nodes() -> Iterator[None]:
    """None of another test."""
    gc.collect()
    assert not Node.alive
    yield
    gc.collect()
