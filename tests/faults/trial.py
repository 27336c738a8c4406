"""Trainings that are killed, one after another in one directory, and what must hold after each kill.

    python -m tests.faults.trial '{"directory": ..., "kills": [["sync", "before", 3]]}'

A process that has imported everything, and started no thread, forks one for each training.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import threading
import time
import traceback
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import msgspec
import torch

from eventloop import Trainer
from eventloop.checkpoint import commit as shelf
from eventloop.checkpoint import load_best, read_manifest
from eventloop.checkpoint.directory import scan
from eventloop.checkpoint.retention import pending
from eventloop.checkpoint.saving import group_writer
from eventloop.checkpoint.saving.saver import Saver
from eventloop.events import CheckpointSaved
from tests.faults.shim import Kill, install
from tests.faults.training import check_whole, expected, finish, make_trainer, wait_for_saves

_PYTHON = sys.executable
DEADLINE = 60.0
"""Seconds against hangs."""


class Point(msgspec.Struct, array_like=True):
    """Where a training is killed: the n-th call of a method of `Disk`; or "random": about when the n-th checkpoint
    was announced.

    Attributes:
        when: "before", "in" or "after"; with "random" which processes: "training", "saver" or "both".
        process: the process that writes makes the call.
        parent: the training is killed too.
    """

    name: str
    when: str
    hit: int
    process: bool = False
    parent: bool = False


class Trial(msgspec.Struct):
    """Trainings in one directory.

    Attributes:
        anew: the first one begins anew where another run has left its checkpoints.
        one_number: all of them have the same process number, as in a container.
        process: a process writes the checkpoints.
    """

    directory: str
    kills: list[Point]
    seed: int = 0
    anew: bool = False
    one_number: bool = False
    process: bool = False


class Said(msgspec.Struct):
    """What a training had announced as saved."""

    name: str
    sequence: int
    score: float | None


def main() -> None:
    """Make the trials of the arguments; print how many kills each of them had, or what was wrong."""
    torch.set_num_threads(1)
    expected()  # and what torch imports late, for all
    assert threading.active_count() == 1
    for argument in sys.argv[1:]:
        killed, error = make(msgspec.json.decode(argument, type=Trial))
        sys.stdout.write(json.dumps({"killed": killed, "error": error}) + "\n")
        sys.stdout.flush()


def make(trial: Trial) -> tuple[int, str]:
    """Make a trial: the number of kills, and what was wrong."""
    chance, killed = random.Random(trial.seed), 0
    Path(trial.directory).mkdir(parents=True)
    for turn, point in enumerate([*trial.kills, None]):
        child = os.fork()
        if not child:
            _train_in_child(trial, turn, point)
        if point is not None and point.name == "random":
            _kill_some_time(trial, child, point, chance)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        _wait_for_saver(trial)
        killed += code == -signal.SIGKILL or (point is not None and _saver_killed(trial))
        if code not in (0, -signal.SIGKILL):
            report = Path(trial.directory, "error")
            return killed, f"{trial}: {report.read_text() if report.exists() else code}"
    return killed, ""


def _train_in_child(trial: Trial, turn: int, point: Point | None) -> None:
    code = 1
    try:
        if trial.one_number:
            shelf.os = SimpleNamespace(**{**vars(os), "getpid": lambda: 1})  # type: ignore[assignment,attr-defined]
        _train(trial, turn, point)
        sys.stdout.flush()
        code = 0
    except BaseException:
        Path(trial.directory, "error").write_text(traceback.format_exc())
    os._exit(code)


def _train(trial: Trial, turn: int, point: Point | None) -> None:
    directory, by_process = Path(trial.directory, "run"), trial.process and point is not None
    if trial.anew and turn == 0:
        make_trainer(directory).train()
        _arm(trial, point)
        trainer = make_trainer(directory)
        _prepare(trial, trainer, by_process=by_process)
        trainer.train()
        return
    check_announced(trial)
    _arm(trial, point)
    finish(directory, lambda trainer: _prepare(trial, trainer, by_process=by_process))
    check_announced(trial)


def _arm(trial: Trial, point: Point | None) -> None:
    if point is not None and point.process:
        os.environ["EVENTLOOP_TESTS_KILL"] = json.dumps(
            [
                point.name,
                point.when,
                point.hit,
                os.getpid() if point.parent else 0,
                str(Path(trial.directory, "saver killed").absolute()),
            ]
        )
    elif point is not None and point.name != "random":
        install(Kill(point.name, point.when, point.hit))


def _prepare(trial: Trial, trainer: Trainer, *, by_process: bool) -> None:
    """Keep what it announces; let a process write."""
    journal = os.open(Path(trial.directory, "announced"), os.O_CREAT | os.O_APPEND | os.O_WRONLY)

    def record(event: CheckpointSaved) -> None:
        if not Path(event.path).exists():  # a later one, which is announced next, has replaced it already
            return
        manifest = read_manifest(Path(event.path))
        score = float(manifest.metrics["acc"]) if manifest.best else None
        os.write(journal, msgspec.json.encode(Said(Path(event.path).name, manifest.sequence, score)) + b"\n")

    trainer.bus.subscribe(record, "checkpoint_saved")
    group_writer.STARTING_BYTES = -1  # no thread writes while the process starts
    pending.Saver = partial(Saver, process=by_process)  # type: ignore[attr-defined,assignment]
    if by_process:
        wait_for_saves(trainer)
        os.environ["EVENTLOOP_TESTS_SAVERS"] = str(Path(trial.directory, "savers").absolute())
        interpreter = Path(trial.directory, "python").absolute()
        interpreter.write_text(f'#!/bin/sh\nexec {_PYTHON} {Path(__file__).with_name("in_saver.py")} "$@"\n')
        interpreter.chmod(0o755)
        sys.executable = str(interpreter)


def check_announced(trial: Trial) -> None:
    """What was announced as durable, or something newer, is there, whole; so is the best."""
    said = announced(trial)
    there = check_whole(Path(trial.directory, "run"))
    if not said:
        return
    found = scan(Path(trial.directory, "run"))
    last = max(said, key=lambda each: each.sequence)
    newest = max(found.manifests.values(), key=lambda manifest: manifest.sequence)
    assert newest.sequence >= last.sequence, f"{last} was announced, found {there}"
    assert found.manifests[found.paths[-1]].iter >= newest.iter, (
        f"{found.paths[-1]} would be resumed, found {there}"
    )
    scores = [each.score for each in said if each.score is not None]
    if scores:
        path, _ = load_best(Path(trial.directory, "run"), "acc")
        assert float(found.manifests[path].metrics["acc"]) >= max(scores)


def announced(trial: Trial) -> list[Said]:
    """What the trainings so far have announced; the last line may be torn."""
    path = Path(trial.directory, "announced")
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    return [msgspec.json.decode(line, type=Said) for line in lines if line.endswith(b"\n")]


# --- kills from outside ----------------------------------------------------------------------------------------


def _kill_some_time(trial: Trial, child: int, point: Point, chance: random.Random) -> None:
    before, end = len(announced(trial)), time.monotonic() + DEADLINE
    while len(announced(trial)) < before + point.hit and time.monotonic() < end and not _ended(child):
        time.sleep(0.0005)
    time.sleep(chance.random() * 0.01)
    targets = _savers(trial)[-1:] if point.when in ("saver", "both") else []
    targets += [child] if point.when in ("training", "both") else []
    for target in targets:
        if not _ended(target):
            os.kill(target, signal.SIGKILL)
            if target != child:
                Path(trial.directory, "saver killed").touch()


def _saver_killed(trial: Trial) -> bool:
    mark = Path(trial.directory, "saver killed")
    killed = mark.exists()
    mark.unlink(missing_ok=True)
    return killed


def _savers(trial: Trial) -> list[int]:
    path = Path(trial.directory, "savers")
    return [int(line) for line in path.read_text().split()] if path.exists() else []


def _ended(process: int) -> bool:
    """True when it is no more, or nobody's business but its parent's."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def _wait_for_saver(trial: Trial) -> None:
    """A process that was left alone finishes what it writes."""
    end = time.monotonic() + DEADLINE
    while not all(_ended(process) for process in _savers(trial)):
        assert time.monotonic() < end, "the process that writes does not end"
        time.sleep(0.005)


if __name__ == "__main__":
    main()
