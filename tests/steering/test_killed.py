"""Test that a steered run which is killed and resumed ends as the uninterrupted one, by fresh processes."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from eventloop.commands.messages import INBOX, OUTBOX
from eventloop.commands.record import NAME
from tests import forked
from tests.steering.job import Plan, planned, recorded

pytestmark = pytest.mark.slow  # test_repetition.py has the resumes without a kill

SCRIPT = Path(__file__).with_name("killed_script.py")
PLAN: Plan = {
    3: [("shake", "0.1"), ("validate",)],
    4: [("shake", "0.2")],
    6: [("checkpoint",), ("shake", "0.3")],
    8: [("shake", "0.4")],
    11: [("shake", "0.5")],
}
Run = Callable[..., dict[str, Any] | None]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Run the script in a process of its own; return what it printed, or None if it was killed."""

    def start(name: str, plan: Plan, *, by_epoch: bool = True, **task: Any) -> dict[str, Any] | None:
        task |= {"folder": str(tmp_path / name), "plan": plan, "by_epoch": by_epoch}
        done = forked.run([SCRIPT, json.dumps(task)], cwd=tmp_path)
        if "kill" in task:
            assert done.returncode == -signal.SIGKILL, done.stderr
            return None
        assert done.returncode == 0, done.stderr
        said: dict[str, Any] = json.loads(done.stdout)
        return said

    return start


def between(first: int, last: int) -> Plan:
    """Return the commands of the plan from one iteration to another."""
    return {at: words for at, words in PLAN.items() if first <= at <= last}


def test_killed_between_two_commands(run: Run, tmp_path: Path) -> None:
    """A run killed after some commands and resumed ends with the weights of the uninterrupted steered run, and its
    record repeats it in a third process."""
    whole = run("whole", PLAN)
    run("run", PLAN, kill=["recorded", 9])

    then = run("run", between(10, 12), resume="auto")
    again = run("again", {}, record=str(tmp_path / "run" / NAME))

    assert then == again == whole
    assert recorded(tmp_path / "run") == planned(PLAN)


@pytest.mark.parametrize("by_epoch", [True, False])
@pytest.mark.parametrize("at", [[7], [9], [7, 10]])
def test_killed_several_times(run: Run, by_epoch: bool, at: list[int]) -> None:
    """Wherever the kills come, the end is that of the uninterrupted run."""
    whole = run("whole", PLAN, by_epoch=by_epoch)
    begin, resume = 0, dict[str, str]()
    for end in at:
        run("run", between(begin, end), by_epoch=by_epoch, kill=["recorded", end], **resume)
        begin, resume = end + 1, {"resume": "auto"}

    then = run("run", between(begin, 12), by_epoch=by_epoch, **resume)

    assert then == whole


def test_killed_before_the_record(run: Run, tmp_path: Path) -> None:
    """A command whose application was not recorded is applied once, at the first boundary after the resume, and
    answered."""
    plan: Plan = {8: [("shake", "0.4")]}
    run("run", {}, kill=["recorded", 7])  # with the checkpoint of iteration 5
    run("run", plan, resume="auto", kill=["applied", 8])
    assert not (tmp_path / "run" / NAME).exists()

    then = run("run", {}, resume="auto")

    assert then == run("whole", {6: [("shake", "0.4")]})
    assert [*(tmp_path / "run" / INBOX).iterdir()] == []
    (answer,) = [json.loads(file.read_text()) for file in (tmp_path / "run" / OUTBOX).iterdir()]
    assert (answer["outcome"], answer["iteration"]) == ("applied", 6)


def test_a_repetition_is_killed(run: Run, tmp_path: Path) -> None:
    """A repetition that is killed and resumed, with the same argument or without, ends as the steered run."""
    whole = run("whole", PLAN)
    record = str(tmp_path / "whole" / NAME)

    for name, then in (("with", {"record": record}), ("without", {})):
        run(name, {}, record=record, kill=["recorded", 9])
        assert run(name, {}, resume="auto", **then) == whole
