"""Test the saver: it writes copies of the moment of each call in order, and loses none."""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from eventloop.checkpoint import load_checkpoint, read_manifest, save_checkpoint
from eventloop.checkpoint.commit import Outcome, Removals, Save, commit
from eventloop.checkpoint.disk import Disk, SaveGivenUp
from eventloop.checkpoint.manifest import TensorEntry
from eventloop.checkpoint.saving.saver import QUEUE_BYTES, Saver, SaveReplacedError
from eventloop.checkpoint.saving.saver_client import Job
from eventloop.checkpoint.saving.snapshot import ChangedWhileCopiedError, Snapshot
from eventloop.temporary.leftovers import leftovers
from tests import no_threads
from tests.support.process_support import until
from tests.support.saving import (
    DEADLINE,
    Gate,
    Late,
    Writes,
    a_state,
    assert_same,
    nothing_is_small,
    pointers,
)

Make = Callable[..., Saver]


# --- what is written ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("small", [True, False])
def test_without_a_thread_the_caller_writes(
    make_saver: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small: bool
) -> None:
    """If no thread can be started, the caller copies everything and writes it at once."""
    no_threads.refuse(monkeypatch)
    if not small:
        nothing_is_small(monkeypatch)
    saver, state = make_saver(), a_state(1.0)

    for name in ("a", "b"):
        written = saver.save(state, Job(tmp_path / name), later=lambda: pointers(state))
        assert written.done()
        assert_same(load_checkpoint(tmp_path / name), 1.0)
    assert saver.abandon() == []


@pytest.mark.parametrize("small", [True, False])
def test_the_state_of_the_call_is_written(
    make_saver: Make, gate: Gate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small: bool
) -> None:
    """Changes of the state after the call are not in the checkpoint."""
    if not small:
        nothing_is_small(monkeypatch)
    state = a_state(1.0)
    written = make_saver(gate).save(state, Job(tmp_path / "a"))
    assert gate.entered.wait(DEADLINE)
    state["state_dict"]["w"].fill_(-1.0)
    gate.open.set()
    written.result(DEADLINE)

    assert_same(load_checkpoint(tmp_path / "a"), 1.0)


@pytest.mark.parametrize("process", [False, True])
@pytest.mark.parametrize("small", [True, False])
def test_a_sparse_tensor_is_saved(
    make_saver: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small: bool, process: bool
) -> None:
    """A sparse tensor is saved as it was at the call, and is in the manifest."""
    if not small:
        nothing_is_small(monkeypatch)
    state = {"meta": {}, "state_dict": {"s": torch.eye(4).to_sparse().coalesce(), "w": torch.ones(3)}}
    written = make_saver(process=process).save(state, Job(tmp_path / "a"))
    state["state_dict"]["s"].values().zero_()
    written.result(DEADLINE)

    loaded = load_checkpoint(tmp_path / "a")["state_dict"]
    assert loaded["s"].is_sparse
    assert torch.equal(loaded["s"].to_dense(), torch.eye(4))
    assert torch.equal(loaded["w"], torch.ones(3))
    assert TensorEntry("state_dict.s", "float32", (4, 4)) in read_manifest(tmp_path / "a").tensors


@pytest.mark.parametrize("fails", [False, True])
def test_the_copying_thread_frees_the_state(
    make_saver: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    """Tensors that nothing but the state holds are freed by the thread that copies, also if that fails."""
    late, saver, state, freed = Late(monkeypatch), make_saver(), a_state(1.0), list[str]()
    weakref.finalize(state["state_dict"]["n"], lambda: freed.append(threading.current_thread().name))
    watched = state["state_dict"]["w"]
    written = saver.save(state, Job(tmp_path / "a"), later=lambda: {watched.data_ptr()})
    assert late.entered.wait(DEADLINE)
    del state
    if fails:
        watched.zero_()
    before = [*freed]
    late.go.set()

    assert isinstance(written.exception(DEADLINE), ChangedWhileCopiedError) == fails
    assert (before, freed) == ([], ["eventloop checkpoint copy"])


# --- what is removed ---------------------------------------------------------------------------------------


def test_the_replaced_one_is_removed_when_the_new_one_is_durable(
    make_saver: Make, gate: Gate, tmp_path: Path
) -> None:
    """A replaced checkpoint stays until the new one is durable; a name that does not exist is ignored."""
    save_checkpoint(a_state(1.0), tmp_path / "old")
    job = Job(tmp_path / "new", replaces=(tmp_path / "old", tmp_path / "gone"))
    saver = make_saver(gate)
    written = saver.save(a_state(2.0), job)
    assert gate.entered.wait(DEADLINE)
    while_written = os.listdir(tmp_path)
    gate.open.set()
    written.result(DEADLINE)
    saver.close()

    assert (while_written, os.listdir(tmp_path)) == (["old"], ["new"])


@pytest.mark.parametrize("fails", [True, False])
def test_spares_are_counted_when_the_save_is_durable(make_saver: Make, tmp_path: Path, fails: bool) -> None:
    """`spares` counts the newest checkpoints that exist when the save is durable, not those of failed
    saves."""

    def before(path: Path) -> None:
        if fails and path.name == "a":
            raise OSError("input/output error")

    for name in ("older", "old"):
        save_checkpoint(a_state(0.0), tmp_path / name)
    saver = make_saver(Writes(before))
    older = tmp_path / "older", tmp_path / "old"
    saver.save(a_state(1.0), Job(tmp_path / "a", replaces=older, spares=2)).exception(DEADLINE)
    last = Job(tmp_path / "b", replaces=(*older, tmp_path / "a"), spares=1)
    saver.save(a_state(2.0), last).result(DEADLINE)
    saver.close()

    assert sorted(os.listdir(tmp_path)) == (["b", "old"] if fails else ["a", "b"])


def test_a_failed_removal_is_logged(
    make_saver: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """If a replaced checkpoint cannot be removed, the save succeeds, and the log has a warning."""

    def fail(disk: Disk, path: Path) -> None:
        raise OSError("input/output error")

    monkeypatch.setattr(Disk, "remove", fail)
    save_checkpoint(a_state(1.0), tmp_path / "old")
    saver = make_saver()
    saver.save(a_state(2.0), Job(tmp_path / "new", replaces=(tmp_path / "old",))).result(DEADLINE)
    saver.close()

    assert "a checkpoint that was replaced could not be removed: input/output error" in caplog.text
    assert_same(load_checkpoint(tmp_path / "new"), 2.0)


def test_a_save_that_fails_replaces_nothing(make_saver: Make, tmp_path: Path) -> None:
    """A failed save raises its error from the promise, and the checkpoint to be replaced stays."""

    def fail(path: Path) -> None:
        raise OSError("input/output error")

    save_checkpoint(a_state(1.0), tmp_path / "old")
    written = make_saver(Writes(fail)).save(a_state(2.0), Job(tmp_path / "new", replaces=(tmp_path / "old",)))

    with pytest.raises(OSError, match="input/output error"):
        written.result(DEADLINE)
    assert os.listdir(tmp_path) == ["old"]


# --- the queue ---------------------------------------------------------------------------------------------


def test_small_saves_wait_in_a_queue_and_are_written_together(make_saver: Make, tmp_path: Path) -> None:
    """Saves that arrive during a write are written together next, and become durable in order."""
    groups: list[int] = []
    gate = Gate()

    def write(saves: list[Save], given_up: threading.Event, removals: Removals) -> list[Outcome]:
        groups.append(len(saves))
        return gate(saves, given_up, removals)

    saver = make_saver(write)
    written = [saver.save(a_state(float(number)), Job(tmp_path / f"{number}")) for number in range(1)]
    assert gate.entered.wait(DEADLINE)
    written += [saver.save(a_state(float(number)), Job(tmp_path / f"{number}")) for number in range(1, 6)]
    until(lambda: len(saver.waiting) == 5)  # they are encoded on another thread
    gate.open.set()
    times = [each.result(DEADLINE).at for each in written]

    assert groups == [1, 5]
    assert times == sorted(times)
    for number in range(6):
        assert_same(load_checkpoint(tmp_path / f"{number}"), float(number))


def test_one_that_fails_in_a_group_leaves_the_others(make_saver: Make, tmp_path: Path) -> None:
    """If one save of a group fails, the others become durable."""
    gate = Gate()
    saver = make_saver(gate)
    (tmp_path / "file").touch()
    first = saver.save(a_state(0.0), Job(tmp_path / "0"))
    assert gate.entered.wait(DEADLINE)
    later = [saver.save(a_state(1.0), Job(tmp_path / name)) for name in ("1", "file/2", "3")]
    gate.open.set()

    errors = [each.exception(DEADLINE) for each in (first, *later)]
    assert [type(error) for error in errors] == [type(None), type(None), FileExistsError, type(None)]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1", "3", "file"]


def test_full(make_saver: Make, gate: Gate, tmp_path: Path) -> None:
    """A saver is full if the running saves and one more of the last size would exceed the limit of bytes."""
    saver = make_saver(gate)
    large = {"w": torch.zeros(QUEUE_BYTES // 8 + 1)}
    seen = [saver.full]
    saver.save(a_state(1.0), Job(tmp_path / "a"))
    seen.append(saver.full)
    saver.save(large, Job(tmp_path / "b"))
    seen.append(saver.full)
    gate.open.set()
    saver.close()

    assert seen == [False, False, True]


def test_waiting_saves_are_dropped(make_saver: Make, gate: Gate, tmp_path: Path) -> None:
    """`drop_waiting` drops saves that are not being written yet; later saves work."""
    saver = make_saver(gate)
    saver.drop_waiting()
    first = saver.save(a_state(1.0), Job(tmp_path / "a"))
    assert gate.entered.wait(DEADLINE)
    waiting = [saver.save(a_state(2.0), Job(tmp_path / name)) for name in ("b", "c")]
    saver.drop_waiting()
    last = saver.save(a_state(3.0), Job(tmp_path / "d"))
    gate.open.set()

    assert [type(each.exception(DEADLINE)) for each in waiting] == [SaveReplacedError] * 2
    first.result(DEADLINE)
    last.result(DEADLINE)
    assert sorted(os.listdir(tmp_path)) == ["a", "d"]
    assert_same(load_checkpoint(tmp_path / "d"), 3.0)


def test_a_closed_saver_has_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`close` waits for running copies and writes, and ends the threads."""
    nothing_is_small(monkeypatch)
    saver, state = Saver(), a_state(1.0)
    saver.save(state, Job(tmp_path / "a"), later=lambda: pointers(state))
    saver.close()

    assert_same(load_checkpoint(tmp_path / "a"), 1.0)
    names = {thread.name for thread in threading.enumerate()}
    assert names.isdisjoint({"eventloop checkpoint", "eventloop checkpoint copy"})


# --- copies that come later --------------------------------------------------------------------------------


def test_join_waits_for_the_copy(make_saver: Make, late: Late, tmp_path: Path) -> None:
    """Tensors that are copied late may be changed once `join` returns, all others at once."""
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


def test_a_change_without_join_is_an_error(make_saver: Make, late: Late, tmp_path: Path) -> None:
    """If a tensor is changed before `join`, the mixed copy is not written, and the next save works."""
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


def test_an_error_of_any_class_fails_its_save_alone(
    make_saver: Make, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Even an error that is no `Exception` leaves the thread that copies alive, and the next save works."""
    saver = make_saver()

    def exits(snapshot: Snapshot) -> None:
        raise SystemExit("the copy has ended")

    with monkeypatch.context() as patched:
        patched.setattr(Snapshot, "wait", exits)
        with pytest.raises(SystemExit, match="the copy has ended"):
            saver.save(a_state(0.0), Job(tmp_path / "a")).result(DEADLINE)

    saver.save(a_state(1.0), Job(tmp_path / "b")).result(DEADLINE)
    assert_same(load_checkpoint(tmp_path / "b"), 1.0)


def test_a_logging_filter_that_raises_loses_no_save(
    make_saver: Make, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """If a user's logging filter raises for a warning of a save, that save and the next one are written."""

    def commits(saves: Sequence[Save], given_up: threading.Event, removals: Removals) -> list[Outcome]:
        outcomes = commit(saves, given_up=given_up, removals=removals)
        return [outcome._replace(warnings=("a replaced checkpoint stays",)) for outcome in outcomes]

    def refuses(record: logging.LogRecord) -> bool:
        raise SystemExit("the filter has ended")

    saver, logger = make_saver(commits), logging.getLogger("eventloop")
    logger.addFilter(refuses)
    try:
        for name in ("a", "b"):
            saver.save(a_state(1.0), Job(tmp_path / name)).result(DEADLINE)
            assert_same(load_checkpoint(tmp_path / name), 1.0)
        saver.close()
    finally:
        logger.removeFilter(refuses)
    assert capsys.readouterr().err.count("SystemExit: the filter has ended") == 2


def test_abandoned_while_it_is_copied(late: Late, tmp_path: Path) -> None:
    """A save that is abandoned during its copy is given up and never written."""
    saver, state = Saver(process=False), a_state(1.0)
    written = saver.save(state, Job(tmp_path / "a"), later=lambda: pointers(state))
    assert late.entered.wait(DEADLINE)

    assert saver.abandon() == []
    late.go.set()
    assert isinstance(written.exception(DEADLINE), SaveGivenUp)
    assert os.listdir(tmp_path) == []


def test_abandoned_before_it_was_begun(make_saver: Make, gate: Gate, tmp_path: Path) -> None:
    """A save that waits in the queue of an abandoned saver is given up."""
    saver = Saver(gate, process=False)
    saver.save(a_state(1.0), Job(tmp_path / "a"))
    assert gate.entered.wait(DEADLINE)
    second = saver.save(a_state(2.0), Job(tmp_path / "b"))

    assert saver.abandon() == []
    gate.open.set()
    assert isinstance(second.exception(DEADLINE), SaveGivenUp)
    assert str(second.exception()) == f"{tmp_path / 'b'} was given up"
    assert not (tmp_path / "b").exists()
    assert leftovers(tmp_path) == []
