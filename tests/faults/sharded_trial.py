"""Trainings of several ranks of which one, or its saver, is killed, and what must hold then.

    python -m tests.faults.sharded_trial '{"directory": ..., "kind": "FSDP2", "point": "voted", "rank": 1, ...}'

A process that has imported everything, and started no thread, forks the ranks.
"""

from __future__ import annotations

import faulthandler
import json
import os
import random
import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

import msgspec
import torch

from eventloop import Trainer
from eventloop.checkpoint.retention import pending
from eventloop.checkpoint.saving import group_writer, saver, snapshot, task
from eventloop.events import CheckpointFailed, CheckpointSaved, Event
from tests.faults.sharded_training import (
    ITERATIONS,
    KEPT,
    RANKS,
    check_whole,
    finish,
    join_ranks,
    record,
    wait_for_saves,
)
from tests.faults.shim import Kill, Slow, install

_PYTHON = sys.executable
DEADLINE = 90.0
"""Seconds against hangs."""
SLOW_SECONDS = 0.006
"""The longest wait of a write on a slow disk."""

IN_SAVER = {
    "write": ("write", "__*.distcp", "in"),
    "own": ("create", "rank_*.pth", "after"),
    "synced": ("sync_directory", ".*.tmp", "after"),
    "vote": ("rename", "vote_*", "before"),
    "voted": ("rename", "vote_*", "after"),
    "index": ("write", "index.json", "in"),
    "state": ("write", "state.pth", "in"),
    "manifest": ("write", "manifest.json", "in"),
    "rename": ("rename", "iter_*", "before"),
    "renamed": ("rename", "iter_*", "after"),
    "durable": ("sync_directory", "run", "after"),
    "replaced": ("rename", "*.old", "after"),
    "remove": ("remove", "*.old", "in"),
}
"""The points of a save by name: the method of `Disk`, the pattern of the file, and when."""
IN_TRAINING = {"step": "after_backward", "begun": "after_train_iter"}
"""The points of the training, and the events in which they are; at the second one a save has begun."""
OF_RANK_0 = ("index", "state", "manifest", "rename", "renamed", "durable", "replaced", "remove")
OF_OTHERS = ("vote", "voted")


class ShardedTrial(msgspec.Struct):
    """A training of several ranks that is disturbed once, and resumed.

    Attributes:
        kind: what divides the model.
        point, rank, hit: where, at the n-th time, and on which rank.
        whom: "trainer", "saver" or "both" processes of the rank.
        delay: the seconds after which the other ranks are killed once one has died.
        savers_too: the savers are killed with their trainers; else they finish what they can.
        slow: the disk is slow, so that saves overlap.
        thread: no process writes, but a thread of the training process.
        mapped: the copy is not sent to the process, which maps it.
    """

    directory: str
    kind: str
    point: str
    rank: int
    hit: int
    whom: str
    delay: float = 0.0
    savers_too: bool = False
    slow: bool = False
    thread: bool = False
    mapped: bool = False

    def place(self, name: str) -> Path:
        """Return the path of a file of the trial."""
        return Path(self.directory, name).absolute()


def main() -> None:
    """Make the trials of the arguments; print how many kills each of them had, or what was wrong."""
    torch.set_num_threads(1)
    assert threading.active_count() == 1
    for argument in sys.argv[1:]:
        killed, error = make(msgspec.json.decode(argument, type=ShardedTrial))
        sys.stdout.write(json.dumps({"killed": killed, "error": error}) + "\n")
        sys.stdout.flush()


def make(trial: ShardedTrial) -> tuple[int, str]:
    """Make a trial: the number of kills, and what was wrong."""
    Path(trial.directory).mkdir(parents=True)
    try:
        _make(trial)
    except AssertionError as error:
        logs = "".join(
            f"\n--- {log.name}: {log.read_text()[-3000:]}"
            for log in sorted(Path(trial.directory).glob("*.log"))
        )
        return int(trial.place("killed").exists()), f"{trial}: {error}{logs}"
    finally:
        _kill_savers(trial)
    return int(trial.place("killed").exists()), ""


def _make(trial: ShardedTrial) -> None:
    expected = _expected(trial)
    ranks = [
        _forked(trial, "first", rank, partial(_train, trial, expected)) for rank in range(RANKS[trial.kind])
    ]
    codes = _reaped(trial, ranks)
    killed = trial.place("killed").exists()
    if not killed or trial.whom == "saver":  # a thread has written instead
        assert codes == [0] * len(ranks), f"expected every rank to end well, got {codes}"
        assert not _lines(trial, "failed"), f"expected no save to fail, got {_lines(trial, 'failed')}"
        names = sorted(
            path.name for path in trial.place("run").iterdir() if re.search(r"iter_.*(?<!\.old)$", path.name)
        )
        kept = [f"iter_{iteration}" for iteration in range(ITERATIONS - KEPT + 1, ITERATIONS + 1)]
        assert names == kept, f"expected {kept} and no leftovers, got {names}"  # the next run removes .old
    else:
        assert codes[trial.rank] == -signal.SIGKILL, codes
    said = [int(line.rpartition("_")[2]) for line in _lines(trial, "saved")]
    _in_child(trial, "check", lambda: _check(trial, expected, max(said, default=0)))
    again = [
        _forked(trial, "again", rank, partial(_resume, trial, expected)) for rank in range(RANKS[trial.kind])
    ]
    codes = _reaped(trial, again)
    assert codes == [0] * len(ranks), f"expected every rank of the resumed run to end well, got {codes}"
    assert not _lines(trial, "failed again"), _lines(trial, "failed again")
    _in_child(trial, "end", lambda: _check(trial, expected, ITERATIONS))


def _expected(trial: ShardedTrial) -> Path:
    """Return the folder with what the undisturbed run had after each iteration; train it the first time."""
    folder = Path(trial.directory).absolute().parent / f"undisturbed {trial.kind} {os.getpid()}"
    if not folder.exists():
        folder.mkdir()
        ranks = [
            _forked(trial, "undisturbed", rank, lambda rank: record(trial.kind, rank, folder))
            for rank in range(RANKS[trial.kind])
        ]
        codes = _reaped(trial, ranks)
        assert codes == [0] * len(ranks), codes
    return folder


def _forked(trial: ShardedTrial, name: str, rank: int, run: Callable[[int], object]) -> int:
    """Fork a rank."""

    def joined() -> None:
        join_ranks(trial.kind, rank, trial.place(f"{name} rendezvous"))
        run(rank)

    return _fork(trial, f"{name} {rank}", joined)


def _in_child(trial: ShardedTrial, name: str, run: Callable[[], object]) -> None:
    """Run a function in a process of its own, because it may start threads."""
    code = os.waitstatus_to_exitcode(os.waitpid(_fork(trial, name, run), 0)[1])
    assert code == 0, f"{name} ended with {code}"


def _fork(trial: ShardedTrial, name: str, run: Callable[[], object]) -> int:
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        log = os.open(trial.place(f"{name}.log"), os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        os.dup2(log, 1)
        os.dup2(log, 2)
        faulthandler.dump_traceback_later(DEADLINE - 10)  # what a rank waits for that has no end
        run()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def _reaped(trial: ShardedTrial, processes: list[int]) -> list[int]:
    """Wait for the ranks, as torchrun does: once one has failed, kill the others; return the exit codes."""
    codes: dict[int, int] = {}
    end, failed = time.monotonic() + DEADLINE, False
    while len(codes) < len(processes):
        for process in [each for each in processes if each not in codes]:
            found, status = os.waitpid(process, os.WNOHANG)
            if found:
                codes[process] = os.waitstatus_to_exitcode(status)
        late = time.monotonic() > end
        if late or (not failed and any(codes.values())):
            failed = True
            time.sleep(trial.delay)
            for process in [each for each in processes if each not in codes]:
                os.kill(process, signal.SIGKILL)
            if trial.savers_too:
                _kill_savers(trial)
        assert not late, f"a rank has no end: {codes}"
        time.sleep(0.002)
    return [codes[process] for process in processes]


def _kill_savers(trial: ShardedTrial) -> None:
    for line in _lines(trial, "savers"):
        with suppress(OSError):
            if (
                b"in_saver" in Path(f"/proc/{line}/cmdline").read_bytes()
            ):  # else another process has the number
                os.kill(int(line), signal.SIGKILL)


def _lines(trial: ShardedTrial, name: str) -> list[str]:
    """Return the whole lines of a file of the trial; the last one may be torn."""
    path = trial.place(name)
    text = path.read_text() if path.exists() else ""
    return [line.removesuffix("\n") for line in text.splitlines(keepends=True) if line.endswith("\n")]


def _check(trial: ShardedTrial, expected: Path, least: int) -> None:
    found = check_whole(trial.kind, trial.place("run"), expected)
    assert max(found, default=0) >= least, f"expected a checkpoint of iteration {least} or later, got {found}"


# --- in a rank -------------------------------------------------------------------------------------------------


def _train(trial: ShardedTrial, expected: Path, rank: int) -> None:
    """Train the first time, with a kill."""
    _let_saves_be_slow(trial)
    if rank == trial.rank:
        _arm(trial)
    elif not trial.thread:
        _install(trial, Kill("", "", 0))

    def prepare(trainer: Trainer) -> None:
        _record_announced(trial, rank, trainer, "")
        wait_for_saves(trainer, under_way=2 if trial.slow else 0)
        if rank == trial.rank and trial.point in IN_TRAINING:
            _kill_in(trainer, trial)

    finish(trial.kind, rank, trial.place("run"), expected, prepare)


def _resume(trial: ShardedTrial, expected: Path, rank: int) -> None:
    """Train on, undisturbed, with a thread that writes."""
    pending.Saver = partial(saver.Saver, process=False)  # type: ignore[attr-defined,assignment]
    finish(
        trial.kind,
        rank,
        trial.place("run"),
        expected,
        lambda trainer: _record_announced(trial, rank, trainer, " again"),
    )


def _let_saves_be_slow(trial: ShardedTrial) -> None:
    saver.AT_ONCE = 0  # tensors are copied during the next iteration, although they are few
    group_writer.STARTING_BYTES = -1  # no thread writes while the process starts
    if trial.mapped:
        task.SMALL = 0
    if trial.slow:
        _copy_slowly()
    pending.Saver = partial(saver.Saver, process=not trial.thread)  # type: ignore[attr-defined,assignment]
    if not trial.thread:
        os.environ["EVENTLOOP_TESTS_SAVERS"] = str(trial.place("savers"))
        interpreter = trial.place(f"python{os.getpid()}")
        interpreter.write_text(f'#!/bin/sh\nexec {_PYTHON} {Path(__file__).with_name("in_saver.py")} "$@"\n')
        interpreter.chmod(0o755)
        sys.executable = str(interpreter)


def _copy_slowly() -> None:
    """Let the copy of what the optimizer changes run into the next iterations, also that of overlapping saves."""
    copy = snapshot.Snapshot.copy

    def copy_later(taken: snapshot.Snapshot) -> None:
        time.sleep(SLOW_SECONDS)
        copy(taken)

    snapshot.Snapshot.copy = copy_later  # type: ignore[method-assign,assignment]


def _arm(trial: ShardedTrial) -> None:
    """Let the saver kill itself, or its trainer, or both at the point."""
    kill = Kill("", "", 0)
    if trial.point in IN_SAVER:
        name, file, when = IN_SAVER[trial.point]
        parent = 0 if trial.whom == "saver" or trial.thread else os.getpid()
        mark = str(trial.place("killed"))
        kill = Kill(
            name, when, trial.hit, parent, mark, file, spared=trial.whom == "trainer" and not trial.thread
        )
    _install(trial, kill)


def _install(trial: ShardedTrial, kill: Kill) -> None:
    seconds = SLOW_SECONDS if trial.slow else 0.0
    if trial.thread:
        install(Slow(kill, seconds))
        return
    settings = [kill.name, kill.when, kill.hit, kill.parent, kill.mark, kill.file, kill.spared]
    os.environ["EVENTLOOP_TESTS_KILL"] = json.dumps(settings)
    os.environ["EVENTLOOP_TESTS_SLOW"] = str(seconds)


def _kill_in(trainer: Trainer, trial: ShardedTrial) -> None:
    """Kill this training process, its saver or both at the n-th event."""
    hits = []

    def kill(event: Event) -> None:
        hits.append(event)
        if len(hits) == trial.hit:
            trial.place("killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)

    trainer.bus.subscribe(kill, IN_TRAINING[trial.point], priority=100, name="kill")


def _record_announced(trial: ShardedTrial, rank: int, trainer: Trainer, run: str) -> None:
    """Write down durably what rank 0 announces."""
    if rank:
        return

    def write(name: str, line: str) -> None:
        journal = os.open(trial.place(name), os.O_CREAT | os.O_APPEND | os.O_WRONLY)
        os.write(journal, f"{line}\n".encode())
        os.fsync(journal)
        os.close(journal)

    def saved(event: CheckpointSaved) -> None:
        write(f"saved{run}", event.path)

    def failed(event: CheckpointFailed) -> None:
        write(f"failed{run}", f"{event.path}: {event.error}".replace("\n", " "))

    trainer.bus.subscribe(saved, "checkpoint_saved")
    trainer.bus.subscribe(failed, "checkpoint_failed")


def choose(directory: Path, kind: str, chance: random.Random, number: int) -> list[ShardedTrial]:
    """Return so many trials, in which every point has its turn."""
    points = [*IN_SAVER, *IN_TRAINING]
    chance.shuffle(points)
    trials = []
    for turn in range(number):
        point, ranks = points[turn % len(points)], RANKS[kind]
        rank = chance.randrange(ranks)
        rank = 0 if point in OF_RANK_0 else max(rank, 1) if point in OF_OTHERS else rank
        thread = point in IN_SAVER and chance.random() < 0.2
        whom = "trainer" if thread or point in IN_TRAINING else chance.choice(["trainer", "saver", "both"])
        most = {"write": 60, "state": 60, "replaced": ITERATIONS - KEPT, "remove": ITERATIONS - KEPT}
        trials.append(
            ShardedTrial(
                directory=str(directory / f"{kind}{turn}"),
                kind=kind,
                point=point,
                rank=rank,
                hit=chance.randint(1, most.get(point, ITERATIONS - 1)),
                whom=whom,
                delay=chance.choice([0.0, 0.02, 0.3]),
                savers_too=chance.random() < 0.5,
                slow=turn % 3 == 0,
                thread=thread,
                mapped=chance.random() < 0.5,
            )
        )
    return trials


if __name__ == "__main__":
    main()
