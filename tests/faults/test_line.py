"""A run goes back to an earlier checkpoint: whatever fails, and whenever the power is cut, the note is whole or as before."""

from __future__ import annotations

from itertools import count
from pathlib import Path
from typing import Any

import pytest

from eventloop.checkpoint import load_newest
from eventloop.checkpoint.directory import go_back, read_steps_back, scan
from eventloop.temporary.leftovers import leftovers, remove_dead
from tests.checkpoints import orphan
from tests.faults.crash_states import Model, write_tree
from tests.faults.operations import FAULTS, faults_of, save, value_of, values
from tests.faults.shim import Operation, Record, shimmed


def prepare(base: Path, *, again: bool) -> Path:
    """Three checkpoints; a run may have gone back to the second before."""
    run = base / "run"
    for value in (1, 2, 3):
        save(run / f"iter_{value}", value)
    if again:
        go_back(scan(run), run / "iter_2")
    return run


def newest(run: Path) -> int:
    """What `resume("auto")` would take."""
    return value_of(load_newest(run)[0])


@pytest.mark.parametrize("again", [False, True])
def test_power_cuts(tmp_path: Path, again: bool) -> None:
    """At every moment the newest is what it was or where the run went back to, and afterwards that; no checkpoint is
    touched, nothing is damaged, and what was left over is removed."""
    base = tmp_path / "base"
    run = prepare(base, again=again)
    before = newest(run)
    model, made = Model(base), list[Operation]()

    def recorded(operation: Operation) -> Any:
        made.append(operation)
        return operation.do()

    with shimmed(recorded):
        assert go_back(scan(run), run / "iter_1")
    assert {operation.name for operation in made} == {"create", "write", "sync", "rename", "sync_directory"}
    places = (tmp_path / f"crash{number}" for number in count(1))
    found, last = set[int](), set[int]()
    for step in (step for operation in made for step in model.steps(operation)):
        step()
        last.clear()
        for tree, place in zip(model.root.states(), places, strict=False):
            write_tree(tree, place)
            assert values(place / "run") == {"iter_1": 1, "iter_2": 2, "iter_3": 3}
            last.add(newest(place / "run"))
            orphan(place / "run")
            remove_dead(place / "run")
            assert not leftovers(place / "run")
        found |= last
    assert (found, last) == ({before, 1}, {1})


@pytest.mark.slow
def test_failing_operations(tmp_path: Path) -> None:
    """After an error the turns are those before, or the new ones where the system did what it said it had not; then the
    disk is well again, and it works."""
    record = Record()
    run = prepare(tmp_path / "whole", again=True)
    with shimmed(record):
        go_back(scan(run), run / "iter_1")
    tries = [(n, fault) for n, operation in enumerate(record.made) for fault in faults_of(operation)]
    for number, (at, fault) in enumerate(tries):
        run = prepare(tmp_path / str(number), again=True)
        former = read_steps_back(run)
        failing = Record(at, FAULTS[fault])
        with shimmed(failing):
            try:
                go_back(scan(run), run / "iter_1")
            except OSError:
                renamed = any(operation.name == "rename" for operation in failing.made[:at])
                unchanged = read_steps_back(run) == former
                assert renamed or fault == "late" or unchanged, f"{failing.failed}, {fault}"
            else:
                assert fault == "short", "the error was told to nobody"
        assert values(run) == {"iter_2": 2, "iter_3": 3, "iter_1": 1}
        assert not leftovers(run)
        go_back(scan(run), run / "iter_1")
        assert newest(run) == 1
