"""What a sender writes, waits for, and withdraws; the run's side is its own `Inbox`, called by the test."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from eventloop.commands import Answer, NoAnswerError, NoRunError, send
from eventloop.commands.client import post
from eventloop.commands.inbox import Inbox
from eventloop.commands.messages import Command
from eventloop.commands.private_directory import create_private
from eventloop.ownership.acquiring import owning
from tests.forked import ROOT
from tests.support.internals import clock_after
from tests.support.process_support import until


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Path]:
    """The directory of a training that this process owns."""
    directory = tmp_path / "run"
    directory.mkdir()
    with owning(directory, "training", ""):
        yield directory


def received(inbox: Inbox) -> Command:
    """Wait for a command, and return it."""
    found: list[Command] = []

    def is_there() -> bool:
        found.extend(each for each in inbox.receive() if isinstance(each, Command))
        return bool(found)

    until(is_there)
    return found[0]


def test_a_command_is_answered_and_the_answer_removed(run: Path) -> None:
    """`send` returns what the run answers, and leaves no file."""
    inbox, answers = Inbox(run), list[Answer]()
    sender = threading.Thread(
        target=lambda: answers.append(send(run, "set", arguments={"lr*": 0.5}, source="me"))
    )
    sender.start()
    command = received(inbox)
    assert (command.command, command.arguments, command.source) == ("set", {"lr*": 0.5}, "me")
    assert inbox.claim(command.id)
    given = Answer(id=command.id, command="set", outcome="applied", iteration=7, result={"lr": 0.5})
    inbox.answer(given)
    sender.join(60.0)

    assert answers == [given]
    assert [*(run / "inbox").iterdir(), *(run / "outbox").iterdir()] == []


def test_a_command_without_answer_is_withdrawn(run: Path) -> None:
    """After the timeout the file is gone, so that the run can no longer claim it."""
    with pytest.raises(
        NoAnswerError, match=r"no answer within 0.01 s: the run's process lives .+; the command was withdrawn"
    ) as error:
        send(run, "stop", timeout=0.01)

    assert (error.value.withdrawn, error.value.lives) == (True, True)
    assert [*(run / "inbox").iterdir()] == []


def test_a_command_that_is_being_applied_is_not_withdrawn(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is waited for further; then the error says that it will be answered, and where."""
    claimed = threading.Event()
    monkeypatch.setattr("eventloop.commands.client.PATIENCE_SECONDS", 0.02)
    monkeypatch.setattr("eventloop.commands.client.monotonic", clock_after(claimed.is_set))
    inbox, failures = Inbox(run), list[NoAnswerError]()

    def sending() -> None:
        with pytest.raises(NoAnswerError) as error:
            send(run, "stop", timeout=0.1)
        failures.append(error.value)

    sender = threading.Thread(target=sending)
    sender.start()
    command = received(inbox)
    assert inbox.claim(command.id)
    claimed.set()
    sender.join(60.0)

    (error,) = failures
    assert not error.withdrawn
    assert str(error).endswith(
        f"the run has begun to apply it, and will answer in {run}/outbox/{command.id}.json"
    )
    assert (run / "inbox" / f"{command.id}.claimed").exists()


def test_only_one_of_sender_and_run_gets_a_command(run: Path) -> None:
    """A command that the sender has removed cannot be claimed, and a claimed one cannot be removed."""
    inbox = Inbox(run)
    withdrawn, claimed = post(run, "stop"), post(run, "stop")
    (run / "inbox" / f"{withdrawn}.json").unlink()

    assert not inbox.claim(withdrawn)
    assert inbox.claim(claimed)
    assert not (run / "inbox" / f"{claimed}.json").exists()


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o777])
def test_folders_and_files_are_closed_whatever_the_umask(run: Path, umask: int) -> None:
    """Inbox and outbox are 0700, and a command is 0600."""
    program = f"import os, sys; os.umask({umask}); from eventloop.commands.client import post; post(sys.argv[1], 'stop')"
    subprocess.run([sys.executable, "-c", program, str(run)], cwd=ROOT, check=True)

    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in run.iterdir() if path.is_dir()}
    assert modes == {"inbox": 0o700, "outbox": 0o700}
    (file,) = (run / "inbox").iterdir()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give folders away")
def test_a_folder_of_another_user_is_refused(tmp_path: Path) -> None:
    """Only root changes a folder of its own; one of a third user is refused by both users' numbers."""
    folder = tmp_path / "inbox"
    create_private(folder)
    create_private(folder, 1234)
    assert folder.stat().st_uid == 1234

    with pytest.raises(
        PermissionError, match=r"expected .+/inbox to belong to user 4321, got user 1234: remove it"
    ):
        create_private(folder, 4321)


def test_a_directory_without_a_run(tmp_path: Path) -> None:
    """A directory in which no training is under way, and one that does not exist, are refused by name."""
    with pytest.raises(
        NoRunError, match=r"expected the directory of a training that runs, and .+ has no run under way"
    ):
        send(tmp_path, "stop")
    with pytest.raises(
        NoRunError, match=r"expected the directory of a training that runs, and .+/no is no directory"
    ):
        send(tmp_path / "no", "stop")


def test_a_process_that_does_not_train(tmp_path: Path) -> None:
    """A process that only prunes checkpoints takes no commands."""
    with (
        owning(tmp_path, "pruning", ""),
        pytest.raises(NoRunError, match=r"expected a training in .+ that is pruning"),
    ):
        send(tmp_path, "stop")


def test_a_command_that_is_too_large(run: Path) -> None:
    """More than 64 KiB are refused before anything is written."""
    with pytest.raises(ValueError, match=r"expected a command of at most 65,536 bytes, got 'note' of 70,\d+"):
        send(run, "note", "x" * 70_000)

    assert not (run / "inbox").exists()


def test_answers_that_nobody_fetches_are_removed(run: Path) -> None:
    """Answers and a dead sender's hidden files go after the given time, and younger ones and other files stay."""
    inbox, folder, outbox = Inbox(run), run / "inbox", run / "outbox"
    name = post(run, "stop")
    for path in (
        outbox / "1-00000000.json",
        outbox / "2-00000000.json",
        folder / ".3-00000000.tmp",
        outbox / "mine.json",
    ):
        path.write_text("{}")
    for path in (
        outbox / "1-00000000.json",
        folder / ".3-00000000.tmp",
        outbox / "mine.json",
        folder / f"{name}.json",
    ):
        os.utime(path, (path.stat().st_mtime - 100.0,) * 2)

    inbox.remove_old(60.0)

    assert sorted(path.name for path in outbox.iterdir()) == ["2-00000000.json", "mine.json"]
    assert [path.name for path in folder.iterdir()] == [f"{name}.json"]


def test_sending_imports_no_torch() -> None:
    """A sender starts without torch and numpy."""
    program = "import sys, eventloop.commands; print({'torch', 'numpy'} & {*sys.modules})"
    ran = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
    )

    assert ran.stdout == "set()\n"
