"""A commit in which one operation fails, whichever it is, and what must hold afterwards."""

from __future__ import annotations

import errno
import logging
import os
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from io import FileIO
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch

from eventloop.checkpoint import load_checkpoint, load_newest, save_checkpoint, verify_checkpoint
from eventloop.checkpoint.commit import Removals
from eventloop.checkpoint.directory import scan
from eventloop.checkpoint.manifest import Label
from eventloop.checkpoint.retention import pending
from eventloop.checkpoint.saving.saver import Saver
from eventloop.events import CheckpointFailed
from tests.faults.shim import Operation, Record, clear_durable_directories, shimmed
from tests.faults.training import ITERATIONS, KEPT, check_whole, finish, make_trainer, wait_for_saves

SYSTEM = ("ENOSPC", "EIO", "EINTR")


def state(value: int) -> dict[str, Any]:
    """A state that is told from others by its value."""
    return {"meta": {"iter": value}, "state_dict": {"w": torch.full((50,), float(value))}}


def save(path: Path, value: int) -> None:
    """Save that state; the later one has the greater value."""
    save_checkpoint(state(value), path, Label(sequence=value))


def value_of(path: Path) -> int:
    """Which one it is."""
    found = load_checkpoint(path)
    value: int = found["meta"]["iter"]
    assert torch.equal(found["state_dict"]["w"], torch.full((50,), float(value)))
    return value


# --- what may be wrong with an operation -----------------------------------------------------------------------


def _error(code: str) -> Callable[[Operation], Any]:
    def fail(operation: Operation) -> Any:
        number = getattr(errno, code)
        raise OSError(number, os.strerror(number), str(operation.path))

    return fail


def _half_then_error(operation: Operation) -> Any:
    operation.halve()
    return _error("ENOSPC")(operation)


def _done_then_error(operation: Operation) -> Any:
    made = operation.do()
    if isinstance(made, FileIO):
        made.close()
    return _error("EIO")(operation)


def _short(operation: Operation) -> Any:
    return operation.do((len(operation.data) + 1) // 2)


def _nothing(operation: Operation) -> Any:
    return 0


FAULTS: dict[str, Callable[[Operation], Any]] = {
    **{code: _error(code) for code in SYSTEM},
    "half": _half_then_error,
    "late": _done_then_error,  # it was done, and the system says it was not
    "nothing": _nothing,
    "short": _short,
}


def faults_of(operation: Operation) -> list[str]:
    """Those that make sense for it."""
    more = {"write": ["half", "short", "nothing"], "remove": ["half"]}
    return [*SYSTEM, "late", *more.get(operation.name, [])]


# --- single saves ----------------------------------------------------------------------------------------------


class Case(NamedTuple):
    """A save: what is there before, under which name what is saved is new, and what is removed then."""

    before: dict[str, int]
    name: str
    removed: tuple[str, ...] = ()
    within: str = ""
    """A directory that is not there yet."""


CASES = {
    "first": Case({}, "iter_1", within="new/deep"),
    "second": Case({"iter_1": 1}, "iter_2"),
    "same name": Case({"iter_1": 1, "iter_2": 2}, "iter_2"),
    "pruning": Case({"iter_1": 1, "iter_2": 2}, "iter_3", removed=("iter_1",)),
}


class Try(NamedTuple):
    """One operation of a case, and what becomes of it."""

    case: str
    number: int
    fault: str
    lasting: bool = False


def all_tries(directory: Path, case: str) -> list[Try]:
    """Every operation of a case with every fault; and with all that follow failing too."""
    tries, record = [], Record()
    _commit(directory, case, record)
    for number, operation in enumerate(record.made):
        tries += [Try(case, number, fault) for fault in faults_of(operation)]
        tries += [Try(case, number, fault, lasting=True) for fault in ("ENOSPC", "EIO")]
    return tries


def _commit(directory: Path, name: str, record: Record) -> bool:
    """Make a case; True when the save raised nothing."""
    case = CASES[name]
    where = directory / case.within
    where.parent.mkdir(parents=True, exist_ok=True)
    for former, value in case.before.items():
        save(where / former, value)
    clear_durable_directories()
    with shimmed(record):
        try:
            save(where / case.name, 9)
        except OSError:
            return False
        removals = Removals()
        warnings = removals.rename([where / each for each in case.removed])
        for warning in [*warnings, *removals.finish()]:
            logging.getLogger("eventloop").warning("%s", warning)
    return True


def check_try(directory: Path, attempt: Try) -> None:
    """Make a case with one operation failing, and check everything."""
    case = CASES[attempt.case]
    where = directory / case.within
    record = Record(attempt.number, FAULTS[attempt.fault], attempt.lasting)
    with logged_faults() as log:
        saved = _commit(directory, attempt.case, record)
    there = values(where)
    if saved:
        assert log or attempt.fault == "short", "the error was told to nobody"
        assert attempt.fault != "short" or not log
        assert there[case.name] == 9
        assert load_newest(where)[0] == where / case.name
    else:
        _check_former(case, there, lasting=attempt.lasting)
    _check_not_synced_again(record)
    save(where / case.name, 10)  # the disk is well again
    assert values(where)[case.name] == 10
    assert load_newest(where)[1]["meta"]["iter"] == 10


def _check_former(case: Case, there: dict[str, int], *, lasting: bool) -> None:
    """After an error all is as before. On a disk that does nothing more, nothing can be undone; then what is new and
    durable may be there beside the former holder of its name, or without it."""
    beside = [name for name in there if name not in case.before]
    if lasting and beside:
        assert [there[name] for name in beside] == [9]
        there = {case.name: case.before.get(case.name, 9), **there}
    assert {name: there.get(name) for name in case.before} == case.before, "a former one is gone"
    assert lasting or not beside, f"it was not saved, and is there: {there}"


def values(directory: Path) -> dict[str, int]:
    """What the checkpoints of a directory hold; all that is taken for one is whole."""
    found = scan(directory)
    assert not found.damaged, found.damaged
    for path in found.paths:
        verify_checkpoint(path)
    return {path.name: value_of(path) for path in found.paths}


def _check_not_synced_again(record: Record) -> None:
    if record.failed.name != "sync":
        return
    lost = record.failed.path
    after = record.made[(record.fail_at or 0) + 1 :]
    touching = [each for each in after if each.path in (lost, lost.parent)]
    again = [each for each in after if each.name == "sync" and each.path == lost]
    changes = [
        each.name for each in touching if not each.name.startswith("sync")
    ]  # the others come at the same time
    assert (again, changes) == ([], ["remove"]), "what could not be synced was not given up"


@contextmanager
def logged_faults() -> Iterator[list[str]]:
    """What the log says of faults in a block."""
    lines: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    handler, logger = Keep(logging.WARNING), logging.getLogger("eventloop")
    logger.addHandler(handler)
    propagate, logger.propagate = logger.propagate, False
    try:
        yield lines
    finally:
        logger.removeHandler(handler)
        logger.propagate = propagate


# --- a training ------------------------------------------------------------------------------------------------


class TrainingTry(NamedTuple):
    """One operation of a training, by number and name, and what becomes of it."""

    number: int
    name: str
    fault: str


def training_tries(directory: Path) -> list[TrainingTry]:
    """Every operation with every fault, of a training that saves, prunes, and replaces its best."""
    record = Record()
    _train(directory, record)
    return [
        TrainingTry(number, operation.name, fault)
        for number, operation in enumerate(record.made)
        for fault in faults_of(operation)
    ]


def one_of_each(tries: list[TrainingTry], chance: random.Random) -> list[TrainingTry]:
    """By chance one for each kind of operation and each fault of it."""
    return [*{(each.name, each.fault): each for each in chance.sample(tries, len(tries))}.values()]


def _train(directory: Path, record: Record) -> list[CheckpointFailed]:
    clear_durable_directories()
    trainer = make_trainer(directory)
    failed: list[CheckpointFailed] = []
    trainer.bus.subscribe(failed.append, "checkpoint_failed")
    wait_for_saves(trainer)
    # a thread writes them all, because operations of a process are not counted
    with shimmed(record), patch.object(pending, "Saver", partial(Saver, process=False)):
        trainer.train()
    trainer.close()
    return failed


def check_training(directory: Path, number: int, fault: str) -> None:
    """Train with one operation failing: told at once, nothing lost, the next save works, and it can be gone on with."""
    record = Record(number, FAULTS[fault])
    with logged_faults() as log:
        failed = _train(directory, record)
    there = check_whole(directory)
    assert max(there.values()) == ITERATIONS, "the save after the failed one did not work"
    assert len(there) >= KEPT
    if fault == "short":
        assert not failed
        assert not log
    for event in failed:
        saved_at = int(event.path.rpartition("_")[2])
        assert event.iter <= saved_at, f"told in iteration {event.iter}, not in the one after {saved_at}"
        if saved_at < ITERATIONS:  # the last one is tried once more
            assert Path(event.path).name not in there
    assert failed or log or fault == "short", f"nobody was told that {record.failed} failed"
    _check_not_synced_again(record)
    finish(directory)
