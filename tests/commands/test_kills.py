"""A run that is killed at any point of a command, and resumed, has applied the command once, never twice."""

from __future__ import annotations

import signal
import threading
from pathlib import Path

import pytest

from eventloop.commands import Answer, NoAnswerError, send
from eventloop.commands.client import post
from eventloop.commands.messages import decode_answer
from eventloop.ownership import read_owner
from tests.commands.steered import steered
from tests.support.process_support import until

POINTS = [
    "publish before",
    "claim before",
    "claim after",
    "apply after",
    "record before",
    "record after",
    "answer before",
    "answer after",
    "publish after",
]


def killed_at(run: Path, point: str, *, saved: bool = False, interval: int = 20) -> str:
    """Send `double` to a training that is killed at a point of it; return the id of the command."""
    with steered(run, kill=point, saved=saved, interval=interval) as training:
        until(lambda: any(run.glob("iter_*")))  # what the resume begins with
        name = post(run, "double")
        assert training.die() == -signal.SIGKILL
    return name


@pytest.mark.representative(1)
@pytest.mark.parametrize("saved", [False, True])
@pytest.mark.parametrize("point", POINTS)
def test_a_kill_and_a_resume(tmp_path: Path, point: str, saved: bool) -> None:
    """The weight has doubled once, and the command is answered, also if a checkpoint had it before the kill."""
    run = tmp_path / "run"
    name = killed_at(run, point, saved=saved and not point.startswith(("claim", "apply")))

    with steered(run, resume=True, until_answered=name, interval=20) as training:
        state, _ = training.end()

    assert state["w"] == 2.0
    answer = decode_answer((run / "outbox" / f"{name}.json").read_bytes(), name)
    assert (answer.outcome, answer.reason) == ("applied", "")
    assert [*(run / "inbox").iterdir()] == []


@pytest.mark.slow
@pytest.mark.parametrize("point", POINTS)
def test_two_kills_and_two_resumes(tmp_path: Path, point: str) -> None:
    """A second kill at a point of the same command changes nothing of that."""
    run = tmp_path / "run"
    name = killed_at(run, "claim after")
    with steered(run, resume=True, kill=point, until_answered=name, interval=20) as training:
        training.die()

    with steered(run, resume=True, until_answered=name, interval=20) as training:
        state, _ = training.end()

    assert state["w"] == 2.0


@pytest.mark.slow
def test_a_sender_that_waits_withdraws_from_a_dead_run(tmp_path: Path) -> None:
    """Without an answer the command of a killed run is withdrawn, and a resume does not apply it."""
    run = tmp_path / "run"
    failures: list[NoAnswerError] = []
    sent: list[Answer] = []

    def sending() -> None:
        try:
            sent.append(send(run, "double", timeout=60.0))
        except NoAnswerError as error:
            failures.append(error)

    with steered(run, kill="claim after", interval=20) as training:
        until(lambda: any(run.glob("iter_*")))
        sender = threading.Thread(target=sending)
        sender.start()
        assert training.die() == -signal.SIGKILL
    sender.join(60.0)

    (error,) = failures
    assert sent == []
    assert (error.withdrawn, error.lives) == (True, False)
    owner = read_owner(run)
    assert owner is not None
    assert str(error) == (
        f"no answer: the run's process is dead ({owner.host}, process {owner.pid}, since {owner.since}); the command, "
        "which the run had begun to apply, was withdrawn"
    )
    assert [*(run / "inbox").iterdir()] == []
    with steered(run, resume=True, until_answered="1-00000000", interval=20) as training:
        state, _ = training.end()
    assert state["w"] == 1.0


def test_a_command_to_a_dead_run_is_not_sent(tmp_path: Path) -> None:
    """A sender that waits is refused at once, with machine, process and start of the run that died."""
    run = tmp_path / "run"
    with steered(run) as training:
        training.process.kill()
        until(lambda: (owner := read_owner(run)) is not None and owner.lives is False)
        with pytest.raises(
            NoAnswerError, match=r"the run's process is dead \(.+, process \d+, since .+\); the command"
        ):
            send(run, "stop")

    assert not (run / "inbox").exists()
