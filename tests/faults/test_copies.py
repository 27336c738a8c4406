"""Copies that are made as late as they may be: whatever changes the parameters next waits for them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from eventloop.checkpoint import load_checkpoint
from eventloop.checkpoint.saving.saver import Saver, SaveReplacedError
from eventloop.checkpoint.saving.saver_client import Job
from eventloop.checkpoint.saving.snapshot import Snapshot
from eventloop.hooks import CheckpointHook
from tests.faults.training import ITERATIONS, check_whole, expected, make_trainer, same, weights
from tests.support.saving import DEADLINE, Latest, Writes


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> Iterator[Latest]:
    """Every copy of this test is made when it is waited for, also those of small states."""
    late = Latest(monkeypatch)
    yield late
    late.let_go()


@pytest.mark.parametrize("when_busy", ["wait", "replace"])
@pytest.mark.parametrize("two", [False, True])
def test_a_step_waits_for_the_copy(directory: Path, late: Latest, when_busy: str, two: bool) -> None:
    """However late a copy is, it holds what the parameters were; also where a second hook's handlers change them for a
    moment, before which the copy of the first hook's save is made."""
    others = [CheckpointHook(1, out_dir=directory.parent / "again", when_busy="replace")] if two else []
    trainer = make_trainer(directory, others, max_keep_ckpts=-1, when_busy=when_busy, save_best=None)
    failed: list[Any] = []
    trainer.bus.subscribe(failed.append, "checkpoint_failed")

    def change(event: Any) -> None:
        with torch.no_grad():
            for parameter in trainer.model.parameters():
                parameter.add_(1.0).sub_(1.0)

    if two:
        trainer.bus.subscribe(change, "before_save_checkpoint")
    trainer.train()
    trainer.close()

    assert late.copies
    assert all("replaced by a newer one" in event.error for event in failed)
    if not two:  # else the weights are rounded
        there = check_whole(directory)
        assert len(there) + len(failed) == ITERATIONS
        assert there[f"iter_{ITERATIONS}"] == ITERATIONS


@pytest.mark.parametrize("load", ["resume", "load_checkpoint"])
def test_loading_waits_for_the_copy(directory: Path, load: str) -> None:
    """What is loaded into the parameters does not get into the copy of what was before."""
    make_trainer(directory, max_iters=2, save_best=None).train()
    trainer = make_trainer(directory)
    before, seen = weights(trainer), []
    trainer.copying.begin(lambda: seen.append(weights(trainer)))

    loader: Callable[[Path], object] = getattr(trainer, load)
    loader(directory / "iter_2")

    assert len(seen) == 1
    assert same(seen[0], before)
    assert same(weights(trainer), expected()[2])
    trainer.copying.end()
    trainer.close()


def a_state(value: float) -> dict[str, Any]:
    """Two parameters."""
    return {"state_dict": {"w": torch.full((8,), value), "b": torch.full((2,), value)}}


def all_of_it(state: dict[str, Any]) -> set[int]:
    """Every tensor may be copied late."""
    return {tensor.data_ptr() for tensor in state["state_dict"].values()}


def weights_of(path: Path) -> float:
    """The value of all weights of a checkpoint."""
    (value,) = set(load_checkpoint(path)["state_dict"]["w"].tolist())
    return float(value)


def test_buffers_are_free_before_they_are_used_again(directory: Path, late: Latest) -> None:
    """A save that waits for its turn gives up its buffers to a newer one, once nothing is copied into them."""
    entered, gate = threading.Event(), threading.Event()

    def before(path: Path) -> None:
        entered.set()
        gate.wait(DEADLINE)

    saver = Saver(Writes(before), process=False)
    first, replaced, newest = (a_state(float(number)) for number in range(3))
    saver.save(first, Job(directory / "first"), later=lambda: all_of_it(first))
    saver.join()
    assert entered.wait(DEADLINE)
    given_way = saver.save(replaced, Job(directory / "replaced"), later=lambda: all_of_it(replaced))
    saver.drop_waiting()
    saver.save(newest, Job(directory / "newest"))
    saver.join()
    gate.set()
    saver.close()

    assert (weights_of(directory / "first"), weights_of(directory / "newest")) == (0.0, 2.0)
    assert not (directory / "replaced").exists()
    assert isinstance(given_way.exception(), SaveReplacedError)


def test_what_a_device_copies_is_waited_for(
    directory: Path, monkeypatch: pytest.MonkeyPatch, late: Latest
) -> None:
    """Nothing is written before the copy says that it is all there."""
    seen: list[str] = []
    wait = Snapshot.wait

    def record(snapshot: Snapshot) -> dict[str, Any]:
        copy = wait(snapshot)
        seen.append("there")
        return copy

    monkeypatch.setattr(Snapshot, "wait", record)
    saver = Saver(Writes(lambda path: seen.append("written")), process=False)
    state = a_state(1.0)
    saver.save(state, Job(directory / "one"), later=lambda: all_of_it(state))
    saver.join()
    saver.close()

    assert seen == ["there", "written"]
