"""A rate that another process sets in a run, which is killed afterwards."""

from __future__ import annotations

import os
from pathlib import Path
from threading import Event
from time import monotonic

import msgspec
import pytest

from eventloop.commands.messages import Answer, Command
from tests.forked import Forked
from tests.steering.set_runs import ITERS, receive, set_run, setting, values

DEADLINE = 60.0
SCRIPT = Path(__file__).with_name("set_killed_script.py")


def send(run: Path, command: Command) -> None:
    """Put a command into the inbox of a run, as `eventloop tell` does."""
    inbox = run / "inbox"
    inbox.mkdir(mode=0o700, parents=True, exist_ok=True)
    (inbox / f"{command.id}.tmp").write_bytes(msgspec.json.encode(command))
    os.rename(inbox / f"{command.id}.tmp", inbox / f"{command.id}.json")


def await_file(path: Path, process: Forked) -> None:
    """Wait until a file is there."""
    until = monotonic() + DEADLINE
    while not path.exists():
        assert process.poll() is None, path
        assert monotonic() < until, path
        Event().wait(0.01)


@pytest.mark.slow
@pytest.mark.parametrize("killed_at", [8, 9, 14])
def test_a_run_that_was_told_and_killed_is_resumed_to_the_bit(tmp_path: Path, killed_at: int) -> None:
    """Killed right after the command, at the next save or much later, its successor ends as the run not killed."""
    run, command = tmp_path / "run", setting({"lr*": "0.37"})
    with Forked([SCRIPT, "7", str(killed_at)], cwd=tmp_path) as process:
        try:
            await_file(tmp_path / "waits", process)
            send(run, command)
            await_file(run / "outbox" / f"{command.id}.json", process)
            await_file(tmp_path / "reached", process)
        finally:
            process.kill()
    with Forked([SCRIPT, "0", "0"], cwd=tmp_path) as successor:
        assert successor.wait(DEADLINE) == 0

    whole = set_run(tmp_path / "whole", "SequentialLR")
    receive(whole, 7, command)
    rates = values(whole)
    whole.close()
    weights = b"".join(value.numpy().tobytes() for value in whole.model.state_dict().values())
    answer = msgspec.json.decode((run / "outbox" / f"{command.id}.json").read_bytes(), type=Answer)
    assert (answer.outcome, answer.iteration, len(rates)) == ("applied", 7, ITERS)
    assert answer.result["lr[0]"]["factor"] == 0.37
    assert (tmp_path / "found").read_text() == f"{rates[-1]} {weights.hex()}"
