"""A training process that is killed: what the event log and the JSON lines hold of it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from eventloop import read_events
from tests import forked
from tests.conftest import DEADLINE

KILLS = 4

# Forks a training process for each kill, so that torch is imported once; no thread runs here when it forks.
PROGRAM = """
import json, os, random, signal, struct, sys, time, warnings
from pathlib import Path

import torch

from eventloop import Trainer
from eventloop.eventlog.reader import read_events
from eventloop.writers import JSONLWriter, read_jsonl
from eventloop.writers.event_log_writer import EventLogWriter

kills, deadline = int(sys.argv[1]), float(sys.argv[2])
journal, chance = Path("journal"), random.Random(int(sys.argv[3]))
torch.optim.SGD(torch.nn.Linear(2, 1).parameters(), lr=0.1).step()  # what torch imports late, it imports here once


def train():
    torch.set_num_threads(1)
    model = torch.nn.Linear(2, 1)
    trainer = Trainer(
        model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), loss_fn=torch.nn.functional.mse_loss,
        train_loader=[(torch.randn(3, 2), torch.randn(3, 1))] * 10, max_iters=10**9, work_dir="run",
        writers=[EventLogWriter(), JSONLWriter(events=["before_run", "after_train_iter"])],
        default_hooks={"checkpoint": None},
    )
    emitted = os.open(journal, os.O_CREAT | os.O_TRUNC | os.O_WRONLY)
    trainer.bus.subscribe(lambda event: os.write(emitted, struct.pack("<Q", event.iter)), "before_train_iter")
    trainer.train()


def iterations(events):
    "Of the last run."
    found = []
    for event, iteration in events:
        if event == "before_run":
            found.clear()
        elif event == "after_train_iter":
            found.append(iteration)
    return found


def in_log():
    reader = read_events("run", on_torn="ignore")
    return iterations((r.tag, r.event.iter) for r in reader), reader


def in_lines():
    with warnings.catch_warnings(record=True) as torn:
        warnings.simplefilter("always")
        rows = [(row["event"], row["iter"]) for row in read_jsonl("run/metrics.jsonl")]
    return iterations(rows), len(torn)


def wait_for(condition):
    end = time.monotonic() + deadline
    while not condition():
        assert time.monotonic() < end, "the training process writes nothing"
        time.sleep(0.05)


def size(path):
    return os.path.getsize(path) if os.path.exists(path) else 0


for _ in range(kills):
    journal.unlink(missing_ok=True)
    before = size("run/events.evl")
    child = os.fork()
    if not child:
        train()
        os._exit(1)
    try:
        wait_for(lambda: size("run/events.evl") > before + chance.randrange(200_000))
        emitted = size(journal) // 8 - 1  # so many iterations were ended by now: the last one may be under way
        wait_for(lambda: len(in_log()[0]) >= emitted and len(in_lines()[0]) >= emitted)
        time.sleep(chance.random() * 0.3)
    finally:
        os.kill(child, signal.SIGKILL)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    (log, reader), (lines, torn_lines) = in_log(), in_lines()
    print(json.dumps({
        "status": status, "emitted": emitted, "begun": size(journal) // 8, "log": log, "lines": lines,
        "torn_lines": torn_lines, "torn": reader.torn, "damaged": reader.damaged,
    }))
"""


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """A run's directory, and what was found in it after each kill."""
    directory = tmp_path_factory.mktemp("killed")
    ran = forked.run(
        ["-c", PROGRAM, str(KILLS), str(DEADLINE), "7"],
        cwd=directory,
        timeout=KILLS * 3 * DEADLINE,
        env={**os.environ, "PYTHONPATH": forked.ROOT},
    )
    assert ran.returncode == 0, ran.stderr
    return directory / "run", [json.loads(line) for line in ran.stdout.splitlines()]


@pytest.mark.slow
def test_what_was_emitted_gets_to_the_files(killed: tuple[Path, list[dict[str, Any]]]) -> None:
    """Without a flush and an end: after a kill every iteration is there that was over a moment before, each once and
    in order, and none that never was."""
    _, rounds = killed

    assert [found["status"] for found in rounds] == [-9] * KILLS
    for found in rounds:
        for kept in (found["log"], found["lines"]):
            assert kept == list(range(len(kept)))
            assert found["emitted"] <= len(kept) <= found["begun"]


@pytest.mark.slow
def test_a_kill_leaves_one_torn_tail_at_most(killed: tuple[Path, list[dict[str, Any]]]) -> None:
    """Nothing before it is damaged, and the next run's opening removes it: over all kills no number of the sequence is
    missing, or there twice."""
    directory, rounds = killed

    assert [found["damaged"] for found in rounds] == [0] * KILLS
    assert all(found["torn_lines"] <= 1 for found in rounds)
    records = list(read_events(directory, on_torn="ignore"))
    assert [record.sequence for record in records] == list(range(len(records)))
    assert [record.tag for record in records].count("before_run") == KILLS
