"""Whatever lies in the inbox is answered or ignored in one line, and the training goes on."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from eventloop.commands import Answer, send
from eventloop.commands.client import post
from eventloop.commands.messages import LARGEST, decode_answer, new_id
from tests.commands.steered import Steered, steered
from tests.support.process_support import until


@pytest.fixture(scope="module")
def training(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Steered]:
    """A training that ends with the module."""
    with steered(tmp_path_factory.mktemp("faulty") / "run") as training:
        send(training.run, "push", "0")  # creates the folders
        yield training


def pushed(training: Steered) -> list[int]:
    """Return the numbers that the training was sent."""
    numbers: list[int] = send(training.run, "pushed").result["result"]
    return numbers


def raw(name: str, command: str = "push", **fields: object) -> bytes:
    return msgspec.json.encode({"id": name, "command": command, "source": "a@b", **fields})


def answered(training: Steered, name: str) -> Answer:
    """Wait for the answer to a command, and return it."""
    path = training.run / "outbox" / f"{name}.json"
    until(path.exists)
    answer = decode_answer(path.read_bytes(), name)
    path.unlink()
    return answer


UNREADABLE = {
    "no JSON": b"stop please",
    "nothing": b"",
    "deep JSON": b"[" * 30_000,
    "deep arguments": b'{"id": "X", "command": "push", "arguments": {"a": ' + b"[" * 30_000,
    "invalid UTF-8": b'{"id": "X", "command": "pu\xffsh"}',
    "a wrong field": b'{"id": "X", "command": "push", "eval": "1"}',
    "a wrong type": b'{"id": "X", "command": 3}',
    "NaN": b'{"id": "X", "command": "push", "arguments": {"number": NaN}}',
    "another id": b'{"id": "1-00000000", "command": "push", "words": ["1"]}',
    "a path as id": b'{"id": "../../1-00000000", "command": "push", "words": ["1"]}',
}


@pytest.mark.parametrize("what", UNREADABLE)
def test_a_file_that_is_no_command(training: Steered, what: str) -> None:
    """It is refused once nobody can be writing it any more, with what was expected."""
    name = new_id()
    (training.run / "inbox" / f"{name}.json").write_bytes(UNREADABLE[what].replace(b"X", name.encode()))

    answer = answered(training, name)

    assert answer.outcome == "refused"
    assert answer.reason.startswith("expected a command")
    assert send(training.run, "push", "1").outcome == "applied"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"command": "pusch"}, "unknown command 'pusch': did you mean 'push'?"),
        ({"command": "../push"}, "unknown command '../push': did you mean 'push'?"),
        ({"words": ["three"]}, "push expects 'push NUMBER', got number='three': Expected `int`, got `str`"),
        ({"words": []}, "push expects 'push NUMBER', got no NUMBER"),
        ({"words": ["1", "2"]}, "push expects 'push NUMBER', got 2 arguments"),
        ({"arguments": {"nummer": 1}}, "push has no argument 'nummer': did you mean 'number'?"),
        ({"arguments": {"number": 1e999}}, "expected a command as JSON"),
        ({"command": "scale", "words": ["nan"]}, "scale expects finite numbers, got amount=nan"),
        ({"command": "scale", "words": ["-inf"]}, "scale expects finite numbers, got amount=-inf"),
    ],
)
def test_arguments_that_do_not_fit(training: Steered, changes: dict[str, object], reason: str) -> None:
    """A command that is unknown, or whose arguments are of the wrong number or type, is refused by what was expected."""
    name = new_id()
    contents = raw(name, **changes).replace(b"null", b"1e999")  # type: ignore[arg-type]
    (training.run / "inbox" / f"{name}.json").write_bytes(contents)

    assert answered(training, name).reason.startswith(reason)


def test_a_file_that_is_written_slowly(tmp_path: Path) -> None:
    """Half a command is left alone, here for a minute, and is applied once it is whole."""
    with steered(tmp_path / "run", writing=60.0) as training:
        send(training.run, "push", "1")
        name = new_id()
        whole = raw(name, "scale", words=["0.5"])
        path = training.run / "inbox" / f"{name}.json"
        path.write_bytes(whole[:20])
        send(training.run, "push", "1")  # so a look has seen the half

        with path.open("ab") as file:
            file.write(whole[20:])

        assert answered(training, name).result["amount"] == 0.5


def link_inside(path: Path) -> None:
    path.with_suffix(".txt").write_bytes(raw(path.stem, words=["1"]))
    path.symlink_to(path.with_suffix(".txt"))


def link_hard(path: Path) -> None:
    path.with_suffix(".txt").write_bytes(raw(path.stem, words=["1"]))
    os.link(path.with_suffix(".txt"), path)


def of_another_user(path: Path) -> None:
    path.write_bytes(raw(path.stem, words=["1"]))
    os.chown(path, 12345, -1)


IGNORED: dict[str, tuple[Callable[[Path], object], str]] = {
    "a FIFO": (os.mkfifo, "it is no regular file with one name"),
    "a folder": (Path.mkdir, "it is no regular file with one name"),
    "a link": (link_inside, "Too many levels of symbolic links"),
    "a second name": (link_hard, "it is no regular file with one name"),
    "a huge file": (
        lambda path: path.write_bytes(b" " * (LARGEST + 1)),
        "it has 65,537 bytes, and a command at most 65,536",
    ),
    "another user's": (of_another_user, "it belongs to user 12345"),
}
ROOT_ONLY = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")


@pytest.mark.parametrize(
    "what", [pytest.param(what, marks=ROOT_ONLY if "user" in what else []) for what in IGNORED]
)
def test_what_is_no_file_of_the_user_is_ignored(training: Steered, what: str) -> None:
    """Links are not followed, a FIFO is not waited for, and no file of another user is read: one line in the log."""
    name, before = new_id(), len(training.log())
    make, why = IGNORED[what]
    path = training.run / "inbox" / f"{name}.json"
    make(path)

    for number in range(3):  # looks
        assert send(training.run, "push", str(number)).outcome == "applied"

    (line,) = training.log()[before:]
    assert line.startswith(f"{path} is ignored: ")
    assert why in line
    assert pushed(training)[-3:] == [0, 1, 2]
    assert os.path.lexists(path)


@pytest.mark.slow
def test_many_files_of_no_use_do_not_fill_the_log(tmp_path: Path) -> None:
    """A thousand files are ignored with some twenty lines, and hide no command that comes after them."""
    with steered(tmp_path / "run") as training:
        send(training.run, "push", "1")
        for number in range(500):
            (training.run / "inbox" / f"{number}.json").write_text("{}")
            (training.run / "inbox" / f"{number}\udcff.json").mkdir()

        assert send(training.run, "push", "2").outcome == "applied"
        send(training.run, "stop")
        _, log = training.end()

    assert len(log) == 21
    assert "expected a name TIME-NUMBER.json, which is the id of a command" in log[0]
    assert log[-1].endswith("further files are ignored without a line")


def test_a_thousand_at_once(training: Steered) -> None:
    """All are answered and applied, in the order in which they were sent."""
    names = [post(training.run, "push", str(number)) for number in range(1000)]
    outbox = training.run / "outbox"
    until(lambda: {*os.listdir(outbox)} >= {f"{name}.json" for name in names})

    assert pushed(training)[-1000:] == [*range(1000)]


def test_an_inbox_that_is_a_link(training: Steered, tmp_path: Path) -> None:
    """The run does not follow it, and a sender is refused by name; commands work again when it is gone."""
    inbox, name, before = training.run / "inbox", new_id(), pushed(training)
    inbox.rename(training.run / "aside")
    inbox.symlink_to(tmp_path)
    (tmp_path / f"{name}.json").write_bytes(raw(name, words=["7"]))

    with pytest.raises(NotADirectoryError, match=r"expected a directory at .+/inbox, got a link: remove it"):
        send(training.run, "push", "1")
    until(lambda: any("/inbox is ignored: expected a directory" in line for line in training.log()))
    inbox.unlink()

    assert pushed(training) == before
    assert [path.name for path in tmp_path.iterdir()] == [f"{name}.json"]


def test_an_inbox_that_is_removed(training: Steered) -> None:
    """The training goes on, and receives the commands in a new one."""
    before = len(training.log())
    for number in range(3):
        send(training.run, "push", str(number))
        for folder in ("inbox", "outbox"):
            shutil.rmtree(training.run / folder)

    assert pushed(training)[-3:] == [0, 1, 2]
    assert training.log()[before:] == []


def test_an_outbox_that_is_a_file(training: Steered) -> None:
    """The command is applied, the log has one line, and the answer comes once the file is gone."""
    outbox, inbox, name, before = (
        training.run / "outbox",
        training.run / "inbox",
        new_id(),
        len(training.log()),
    )
    send(training.run, "push", "1")
    shutil.rmtree(outbox)
    outbox.write_text("")
    (inbox / f"{name}.json").write_bytes(raw(name, words=["2"]))
    until(lambda: len(training.log()) > before)
    with pytest.raises(NotADirectoryError, match=r"expected a directory at .+/outbox, got no directory"):
        send(training.run, "push", "3")
    outbox.unlink()

    assert answered(training, name).outcome == "applied"
    assert pushed(training)[-2:] == [1, 2]
    (line,) = training.log()[before:]
    assert line.startswith(
        f"the answer to push is not written: NotADirectoryError: expected a directory at {outbox}"
    )


def test_folders_that_are_open_to_others_are_closed(training: Steered) -> None:
    """The run closes an inbox and an outbox that somebody has opened."""
    for folder in ("inbox", "outbox"):
        (training.run / folder).chmod(0o777)

    send(training.run, "push", "1")

    assert [(training.run / folder).stat().st_mode & 0o777 for folder in ("inbox", "outbox")] == [0o700] * 2


def test_a_disk_that_takes_no_more(tmp_path: Path) -> None:
    """The training goes on, and the answers say that the record or the rest of the answer could not be written."""
    with steered(tmp_path / "run", largest_file=4096) as training:
        send(training.run, "note", "x" * 3000)
        noted = send(training.run, "note", "x" * 3000)
        talked = send(training.run, "talk", "5000")
        pushed = send(training.run, "push", "1")
        send(training.run, "stop")
        state, log = training.end()

    record = f"{training.run}/commands.jsonl"
    assert noted.outcome == talked.outcome == pushed.outcome == "applied"
    assert noted.warning == f"{record} does not have this command yet: OSError: [Errno 27] File too large"
    assert talked.warning == "the disk is full, so this answer is not whole"
    assert pushed.result == {"number": 1}
    assert state["pushed"] == [1]
    assert [line for line in log if "commands.jsonl" in line] == [
        f"{record} is not written: OSError: [Errno 27] File too large; the training goes on, and writes it later if it can"
    ]


def test_a_record_that_cannot_be_replaced(training: Steered) -> None:
    """However long its file cannot be written, the log has one line, and the record is written afterwards."""
    record, before = training.run / "commands.jsonl", len(training.log())
    send(training.run, "push", "1")
    record.unlink()
    record.mkdir()
    warnings = [send(training.run, "push", str(number)).warning for number in range(3)]
    record.rmdir()

    assert send(training.run, "push", "9").warning == ""
    assert [json.loads(line)["arguments"] for line in record.read_text().splitlines()[-4:]] == [
        {"number": number} for number in (0, 1, 2, 9)
    ]
    assert all(f"{record} does not have this command yet: IsADirectoryError" in each for each in warnings)
    (line,) = training.log()[before:]
    assert line.startswith(f"{record} is not written: IsADirectoryError: [Errno 21]")
