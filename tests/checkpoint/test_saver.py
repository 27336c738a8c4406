"""The saver: a thread at first, a process in a longer run, and nothing lost between them."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from eventloop.checkpoint import load_checkpoint, save_checkpoint
from eventloop.checkpoint.disk import SaveGivenUp
from eventloop.checkpoint.manifest import Label, TensorEntry, read_manifest
from eventloop.checkpoint.saving.saver import FEW, ReplacedIfDurable, Saver, SaveReplacedError, State
from eventloop.checkpoint.saving.saver_client import Job
from eventloop.checkpoint.saving.snapshot import ChangedWhileCopiedError
from eventloop.checkpoint.store import Serialized, leftovers
from tests import no_threads
from tests.support.saving import DEADLINE, Gate, Late, a_state, assert_same, nothing_is_small, pointers, write

Make = Callable[..., Saver]


# --- a thread ----------------------------------------------------------------------------------------------


def test_young_saver_writes_on_a_thread(tmp_path: Path) -> None:
    """A run that has just begun starts no process; size and time are those of the bytes that are durable."""
    saver = Saver(write)
    written = saver.save(a_state(1.0), Job(tmp_path / "a", Label(sequence=4))).result(DEADLINE)
    saver.close()

    assert saver.process is None
    assert written.bytes == read_manifest(tmp_path / "a").files["state.pth"].bytes
    assert read_manifest(tmp_path / "a").sequence == 4
    assert_same(load_checkpoint(tmp_path / "a"), 1.0)


@pytest.mark.parametrize("small", [True, False])
def test_without_a_thread_the_caller_writes(
    make_saver: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small: bool
) -> None:
    """As once the main thread has ended in Python 3.12; also what a thread would have copied beside the next step."""
    no_threads.refuse(monkeypatch)
    if not small:
        nothing_is_small(monkeypatch)
    saver, state = make_saver(), a_state(1.0)

    for name in ("a", "b"):
        written = saver.save(state, Job(tmp_path / name), later=lambda: pointers(state))
        assert written.done()
        assert_same(load_checkpoint(tmp_path / name), 1.0)
    assert saver.abandon() == ""


@pytest.mark.parametrize("small", [True, False])
def test_a_thread_writes_what_the_state_was(
    make_saver: Make, gate: Gate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small: bool
) -> None:
    """The state at the call is written, whatever is done to it meanwhile: a small one as bytes, a large one copied."""
    if not small:
        monkeypatch.setattr("eventloop.checkpoint.saving.saver.SMALL", 0)
    state = a_state(1.0)
    written = make_saver(gate.write).save(state, Job(tmp_path / "a"))
    state["state_dict"]["w"].fill_(-1.0)
    gate.open.set()
    written.result(DEADLINE)

    assert isinstance(gate.states[0], Serialized) == small
    assert_same(load_checkpoint(tmp_path / "a"), 1.0)


@pytest.mark.parametrize("count", [FEW, FEW + 1])
def test_many_tensors_are_not_serialised_on_the_training_thread(
    make_saver: Make, gate: Gate, tmp_path: Path, count: int
) -> None:
    """However small they are: torch takes ten times as long to serialise one as it takes to copy it."""
    saver = make_saver(gate.write)
    gate.open.set()
    saver.save({"w": {str(i): torch.ones(2) for i in range(count)}}, Job(tmp_path / "a")).result(DEADLINE)

    assert isinstance(gate.states[0], Serialized) is (count <= FEW)
    assert len(read_manifest(tmp_path / "a").tensors) == count


@pytest.mark.parametrize("small", [True, False])
def test_a_sparse_tensor_is_saved(
    make_saver: Make, gate: Gate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small: bool
) -> None:
    """As it was at the call, whatever is done to it meanwhile; its manifest names it."""
    if not small:
        nothing_is_small(monkeypatch)
    state = {"meta": {}, "state_dict": {"s": torch.eye(4).to_sparse().coalesce(), "w": torch.ones(3)}}
    written = make_saver(gate.write).save(state, Job(tmp_path / "a"))
    state["state_dict"]["s"].values().zero_()
    gate.open.set()
    written.result(DEADLINE)

    loaded = load_checkpoint(tmp_path / "a")["state_dict"]
    assert loaded["s"].is_sparse
    assert torch.equal(loaded["s"].to_dense(), torch.eye(4))
    assert torch.equal(loaded["w"], torch.ones(3))
    assert TensorEntry("state_dict.s", "float32", (4, 4)) in read_manifest(tmp_path / "a").tensors


def test_what_is_replaced_goes_when_the_new_one_is_durable(
    make_saver: Make, gate: Gate, tmp_path: Path
) -> None:
    """Not before; what is not there any more is nothing to speak of."""
    save_checkpoint(a_state(1.0), tmp_path / "old")
    job = Job(tmp_path / "new", replaces=(tmp_path / "old", tmp_path / "gone"))
    written = make_saver(gate.write).save(a_state(2.0), job)
    assert gate.entered.wait(DEADLINE)
    while_written = os.listdir(tmp_path)
    gate.open.set()
    written.result(DEADLINE)

    assert (while_written, os.listdir(tmp_path)) == (["old"], ["new"])


def test_what_cannot_be_removed(
    make_saver: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The new one is durable, so that is no failed save: it is said in the log."""

    def fail(path: Path) -> None:
        raise OSError("input/output error")

    monkeypatch.setattr("eventloop.checkpoint.cleanup.remove_checkpoint", fail)
    save_checkpoint(a_state(1.0), tmp_path / "old")
    make_saver().save(a_state(2.0), Job(tmp_path / "new", replaces=(tmp_path / "old",))).result(DEADLINE)

    assert "a checkpoint that was replaced could not be removed: input/output error" in caplog.text
    assert_same(load_checkpoint(tmp_path / "new"), 2.0)


def test_what_somebody_else_removes_meanwhile(
    make_saver: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """That is what was to be done, and no failure: of that nothing is said, and the others go."""

    def gone(path: Path) -> None:
        shutil.rmtree(path)
        if path.name == "pruned":
            raise FileNotFoundError(path)

    monkeypatch.setattr("eventloop.checkpoint.cleanup.remove_checkpoint", gone)
    former = (tmp_path / "pruned", tmp_path / "old")
    for path in former:
        save_checkpoint(a_state(1.0), path)
    make_saver().save(a_state(2.0), Job(tmp_path / "new", replaces=former)).result(DEADLINE)

    assert not caplog.records
    assert os.listdir(tmp_path) == ["new"]


def test_a_save_that_fails_replaces_nothing(make_saver: Make, tmp_path: Path) -> None:
    """Its error is the future's, and what was to be replaced is there."""

    def fail(state: State, job: Job, given_up: threading.Event) -> int:
        raise OSError("input/output error")

    save_checkpoint(a_state(1.0), tmp_path / "old")
    written = make_saver(fail).save(a_state(2.0), Job(tmp_path / "new", replaces=(tmp_path / "old",)))

    with pytest.raises(OSError, match="input/output error"):
        written.result(DEADLINE)
    assert os.listdir(tmp_path) == ["old"]


def test_busy(make_saver: Make, gate: Gate, tmp_path: Path) -> None:
    """While one is under way another one is refused: there is nowhere to copy it to."""
    saver = make_saver(gate.write)
    before = saver.busy
    written = saver.save(a_state(1.0), Job(tmp_path / "a"))

    assert (before, saver.busy) == (False, True)
    with pytest.raises(
        RuntimeError, match="a save is running: wait for its promise, or make the Saver with spare=True"
    ):
        saver.save(a_state(2.0), Job(tmp_path / "b"))
    gate.open.set()
    written.result(DEADLINE)
    assert not saver.busy
    saver.save(a_state(2.0), Job(tmp_path / "b")).result(DEADLINE)


def test_a_saver_that_is_closed_has_written(
    gate: Gate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`close` lets a save end that is being written, also one that is still being copied."""
    nothing_is_small(monkeypatch)
    saver, state = Saver(write, start_after=None), a_state(1.0)
    saver.save(state, Job(tmp_path / "a"), later=lambda: {state["state_dict"]["w"].data_ptr()})
    saver.close()

    assert_same(load_checkpoint(tmp_path / "a"), 1.0)
    names = {thread.name for thread in threading.enumerate()}
    assert names.isdisjoint({"eventloop checkpoint", "eventloop checkpoint copy"})


# --- spare buffers -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("small", [True, False])
def test_a_newer_state_takes_the_place_of_one_that_waits(
    make_saver: Make, gate: Gate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small: bool
) -> None:
    """The first is being written, the second waits, the third replaces it."""
    if not small:
        monkeypatch.setattr("eventloop.checkpoint.saving.saver.SMALL", 0)
    saver = make_saver(gate.write, spare=True)
    first = saver.save(a_state(1.0), Job(tmp_path / "a"))
    assert gate.entered.wait(DEADLINE)
    second = saver.save(a_state(2.0), Job(tmp_path / "b"))
    third = saver.save(a_state(3.0), Job(tmp_path / "c"))

    with pytest.raises(SaveReplacedError, match="a newer state was to be saved"):
        second.result(DEADLINE)
    gate.open.set()
    first.result(DEADLINE)
    third.result(DEADLINE)
    assert sorted(os.listdir(tmp_path)) == ["a", "c"]
    assert_same(load_checkpoint(tmp_path / "a"), 1.0)
    assert_same(load_checkpoint(tmp_path / "c"), 3.0)


def test_one_that_waits_is_dropped(make_saver: Make, gate: Gate, tmp_path: Path) -> None:
    """`drop_waiting` does that without a newer one, and leaves the one that is being written."""
    saver = make_saver(gate.write, spare=True)
    saver.drop_waiting()
    first = saver.save(a_state(1.0), Job(tmp_path / "a"))
    assert gate.entered.wait(DEADLINE)
    second = saver.save(a_state(2.0), Job(tmp_path / "b"))
    saver.drop_waiting()
    gate.open.set()

    assert isinstance(second.exception(DEADLINE), SaveReplacedError)
    first.result(DEADLINE)
    saver.close()
    assert os.listdir(tmp_path) == ["a"]


def test_one_that_is_begun_meanwhile_is_waited_for(
    make_saver: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waited for its turn when `drop_waiting` looked, and is being written when its turn to go comes."""
    gates = {"a": Gate(), "b": Gate()}
    saver = make_saver(
        lambda state, job, given_up: gates[job.path.name].write(state, job, given_up), spare=True
    )
    first = saver.save(a_state(1.0), Job(tmp_path / "a"))
    assert gates["a"].entered.wait(DEADLINE)
    second = saver.save(a_state(2.0), Job(tmp_path / "b"))
    join, wait = saver.join, second.wait

    def meanwhile() -> None:
        gates["a"].open.set()
        assert gates["b"].entered.wait(DEADLINE)
        join()

    def waited_for(timeout: float | None = None) -> bool:
        gates["b"].open.set()
        return wait(timeout)

    monkeypatch.setattr(saver, "join", meanwhile)
    monkeypatch.setattr(second, "wait", waited_for)
    saver.drop_waiting()

    assert (first.done(), second.done()) == (True, True)
    assert_same(load_checkpoint(tmp_path / "b"), 2.0)


@pytest.mark.parametrize("fails", [True, False])
def test_what_goes_if_the_save_before_is_durable(make_saver: Make, tmp_path: Path, fails: bool) -> None:
    """Stays if that failed: what a save replaces besides is settled when it is written."""
    go = threading.Event()

    def first_waits(state: State, job: Job, given_up: threading.Event) -> int:
        if job.path.name == "a":
            assert go.wait(DEADLINE)
            if fails:
                raise OSError("input/output error")
        return write(state, job, given_up)

    for name in ("old", "older"):
        save_checkpoint(a_state(0.0), tmp_path / name)
    saver = make_saver(first_waits, spare=True)
    first = saver.save(a_state(1.0), Job(tmp_path / "a"))
    job = Job(tmp_path / "b", replaces=(tmp_path / "older",))
    second = saver.save(a_state(2.0), job, also=ReplacedIfDurable(first, (tmp_path / "old",)))
    go.set()
    second.result(DEADLINE)

    assert sorted(os.listdir(tmp_path)) == (["b", "old"] if fails else ["a", "b"])


# --- copies that come later --------------------------------------------------------------------------------


def test_join_waits_for_the_copy(make_saver: Make, late: Late, tmp_path: Path) -> None:
    """What comes later may be changed once `join` returns; the rest may be at once."""
    saver, state = make_saver(), a_state(1.0)
    written = saver.save(state, Job(tmp_path / "a"), later=lambda: pointers(state))
    state["state_dict"]["n"].fill_(-1)
    state["optimizer"]["state"][0]["momentum"].fill_(7.0)
    assert late.entered.wait(DEADLINE)
    threading.Thread(target=late.let_go_when_waited_for).start()
    saver.join()
    state["state_dict"]["w"].fill_(-1.0)
    written.result(DEADLINE)

    assert_same(load_checkpoint(tmp_path / "a"), 1.0)


def test_what_comes_later_is_asked_for_a_large_state_alone(make_saver: Make, tmp_path: Path) -> None:
    """A small one is copied in less time than the question takes."""
    asked: list[bool] = []

    def later() -> set[int]:
        asked.append(True)
        return set()

    saver = make_saver()
    saver.save(a_state(1.0), Job(tmp_path / "a"), later=later).result(DEADLINE)
    assert asked == []
    saver.save({"state_dict": {"w": torch.zeros(3 << 20)}}, Job(tmp_path / "b"), later=later).result(DEADLINE)
    assert asked == [True]


def test_a_change_without_join_is_an_error(make_saver: Make, late: Late, tmp_path: Path) -> None:
    """The copy is of neither state, so it is not written; the next save works."""
    saver, state = make_saver(), a_state(1.0)
    written = saver.save(state, Job(tmp_path / "a"), later=lambda: pointers(state))
    assert late.entered.wait(DEADLINE)
    state["state_dict"]["w"].fill_(-1.0)
    late.go.set()

    with pytest.raises(
        ChangedWhileCopiedError, match="1 tensors of the parameters or of the optimizer's state"
    ):
        written.result(DEADLINE)
    assert os.listdir(tmp_path) == []
    saver.save(a_state(2.0), Job(tmp_path / "b")).result(DEADLINE)
    assert_same(load_checkpoint(tmp_path / "b"), 2.0)


def test_abandoned_while_it_is_copied(late: Late, tmp_path: Path) -> None:
    """A save that has nothing to write yet is given up, and is not written when its copy is there."""
    saver, state = Saver(write, start_after=None), a_state(1.0)
    saver.save(state, Job(tmp_path / "a"), later=lambda: pointers(state))
    assert late.entered.wait(DEADLINE)

    assert saver.abandon() == "given up"
    copier = saver._copier
    assert copier is not None
    late.go.set()
    copier.end(DEADLINE)
    assert os.listdir(tmp_path) == []


def test_abandoned_before_it_was_begun(make_saver: Make, gate: Gate, tmp_path: Path) -> None:
    """A save that waits for its turn is given up too."""
    saver = Saver(gate.write, start_after=None, spare=True)
    saver.save(a_state(1.0), Job(tmp_path / "a"))
    assert gate.entered.wait(DEADLINE)
    second = saver.save(a_state(2.0), Job(tmp_path / "b"))

    assert saver.abandon() == "given up"
    gate.open.set()
    assert isinstance(second.exception(DEADLINE), SaveGivenUp)
    assert str(second.exception()) == f"{tmp_path / 'b'} was given up"
    assert not (tmp_path / "b").exists()
    assert leftovers(tmp_path) == []
