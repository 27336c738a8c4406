"""`eventloop replay` of logs that are damaged, empty, or hold events of the user's own, and what it is not told."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from eventloop import cli
from eventloop.bus import Bus
from eventloop.eventlog.format import HEADER, MARK, pack
from eventloop.events import BeforeTrain, Event, ScalarsLogged
from eventloop.events.run import Run
from eventloop.writers import EventLogWriter

EVENTS: list[Event] = [
    BeforeTrain(max_epochs=2),
    *(ScalarsLogged(step=n, scalars={"loss": 0.5}) for n in range(3)),
]
Says = Callable[[], str]


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The log of a run with four events, within the current directory."""
    monkeypatch.chdir(tmp_path)
    with Bus() as bus:
        EventLogWriter().attach(bus, lambda: Run(work_dir="run"))
        for event in EVENTS:
            bus.emit(event)
    return Path("run", "events.evl")


@pytest.fixture
def odd(log: Path) -> Path:
    """The same with two events that nobody here declares."""
    for sequence in (4, 5):
        payload = msgspec.msgpack.encode(("quaint", sequence, 0.0, 0, {"t": 7}))
        with log.open("ab") as file:
            file.write(pack(payload) + payload)
    return log


@pytest.fixture
def says(capsys: pytest.CaptureFixture[str]) -> Says:
    """What the command has said on standard error, which is all it says."""

    def read() -> str:
        said = capsys.readouterr()
        assert said.out == ""
        return said.err

    return read


def replay(*arguments: object) -> int:
    """The command, in this process."""
    return cli.main(["replay", *map(str, arguments)])


# --- damaged and empty logs -------------------------------------------------------------------------------


def test_damaged_bytes_in_the_middle_are_exit_code_1(log: Path, says: Says) -> None:
    """What is whole is replayed, and what is not is said."""
    data = log.read_bytes()
    starts = [match.start() for match in re.finditer(re.escape(MARK), data)]
    log.write_bytes(data[: starts[2] - 3] + b"\0" + data[starts[2] - 2 :])

    assert replay(log, "--to", "csv") == 1

    damaged = starts[2] - starts[1]
    assert says() == (
        "eventloop: 3 events replayed into run/replay/metrics.csv; "
        f"{damaged} bytes in the middle of the log are damaged, and their events are lost\n"
    )


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (HEADER, "holds no event: the run was killed before it wrote one, or is about to write it"),
        (HEADER[:3], "holds no whole event: 3 of its bytes are torn or damaged"),
        (HEADER + MARK, "holds no whole event: 4 of its bytes are torn or damaged"),
    ],
)
def test_a_log_without_an_event_is_exit_code_2(content: bytes, message: str, log: Path, says: Says) -> None:
    """There is nothing to tell of, as in the other commands; no file is made, and none is named."""
    log.write_bytes(content)

    assert replay(log, "--to", "csv") == 2

    assert says() == f"eventloop: run/events.evl {message} (--traceback shows where)\n"
    assert [path.name for path in Path("run").iterdir()] == ["events.evl"]
    with pytest.raises(ValueError, match=re.escape(message)):
        replay(log, "--to", "csv", "--traceback")


@pytest.mark.parametrize(
    ("only", "printed"),
    [
        (["stop_requested"], "0 events replayed; 4 of kinds that `only` does not name"),
        (
            ["before_train"],
            "1 event replayed into run/replay/metrics.jsonl; 3 of kinds that `only` does not name",
        ),
        (
            ["scalars_logged"],
            "3 events replayed into run/replay/metrics.jsonl; 1 of a kind that `only` does not name",
        ),
    ],
)
def test_the_closing_line_counts(only: list[str], printed: str, log: Path, says: Says) -> None:
    """In the right number; a file that was not made is not named. A torn end is reported, with exit code 0."""
    assert replay(log, "--to", "jsonl", "--only", *only) == 0

    assert says() == f"eventloop: {printed}\n"
    assert Path("run", "replay").exists() == (only != ["stop_requested"])
    log.write_bytes(log.read_bytes()[:-3])
    assert replay(log, "--to", "csv", "--out", "again") == 0
    assert re.search(
        r"3 events replayed into again/metrics.csv; the last \d+ bytes are a torn record\n",
        says(),
    )


def test_a_console_makes_no_file(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """However it is named."""
    Path("run", "replay").mkdir()
    Path("run", "replay", "earlier").touch()

    assert replay(log, "--to", "ConsoleWriter") == 0

    assert " into " not in capsys.readouterr().err


# --- the user's own events --------------------------------------------------------------------------------


def test_an_undeclared_event_is_told_with_the_option(odd: Path, says: Says) -> None:
    """The closing line counts it; asked for by name, it needs the module that declares it."""
    assert replay(odd, "--to", "csv") == 0
    unknown = "; 2 of an unknown type: quaint (2); --import MODULE imports the module that declares them\n"
    assert says().endswith(unknown)

    assert replay(odd, "--to", "jsonl", "--only", "quaint") == 2
    said = says()
    assert said.startswith("eventloop: unknown event 'quaint': known are after_backward, ")
    assert "; --import MODULE imports the module that declares an event of yours" in said


MODULES = {
    "own_events.py": "from eventloop import Event\nclass Quaint(Event):\n    t: int = 0\n",
    "own_writers.py": (
        "from eventloop import WRITERS\nfrom eventloop.writers import Writer\n@WRITERS.register\n"
        "class Shows(Writer):\n    events = '*'\n    def write(self, event):\n        print(event)\n"
    ),
}


def test_imported_modules_declare_events_and_register_writers(odd: Path) -> None:
    """Found in the current directory, where Python itself does not look: `-P`, and the installed command."""
    for name, source in MODULES.items():
        Path(name).write_text(source)

    ran = subprocess.run(
        [
            sys.executable,
            "-P",
            "-m",
            "eventloop",
            "replay",
            odd,
            "--to",
            "Shows",
            "--only",
            "quaint",
            "--import",
            "own_events",
            "--import",
            "own_writers",
        ],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )

    assert ran.returncode == 0, ran.stderr
    assert ran.stdout == "Quaint(t=7)\n" * 2
    assert ran.stderr == "eventloop: 2 events replayed; 4 of kinds that `only` does not name\n"


@pytest.mark.parametrize(
    ("module", "message"),
    [
        ("nowhere_at_all", "no such module is installed or in the current directory"),
        ("nowhere.at_all", "no such module is installed or in the current directory"),
        ("broken.py", "expected the name of a module, as in an import: broken"),
        ("broken", "ZeroDivisionError: division by zero"),
        ("lacks", "ModuleNotFoundError: No module named 'l'"),
        ("ends", "SystemExit: 3"),
        ("twoline", "ValueError: one two"),
    ],
)
def test_a_module_that_cannot_be_imported(module: str, message: str, log: Path, says: Says) -> None:
    """It is one line and exit code 2, however it fails, and `sys.path` is as it was."""
    sources = {
        "broken.py": "1 / 0",
        "lacks.py": "import l",
        "ends.py": "raise SystemExit(3)",
        "twoline.py": "raise ValueError('one\\ntwo')",
    }
    for name, source in sources.items():
        Path(name).write_text(source)
    path = [*sys.path]

    assert replay(log, "--to", "csv", "--import", module) == 2

    assert says() == f"eventloop: --import {module} failed: {message} (--traceback shows where)\n"
    assert sys.path == path
    with pytest.raises(ImportError, match=re.escape(f"--import {module} failed: ")):
        replay(log, "--to", "csv", "--import", module, "--traceback")


# --- RUN --------------------------------------------------------------------------------------------------


def test_a_missing_run_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    """--only takes all the words after it, as the usage shows."""
    with pytest.raises(SystemExit, match="2"):
        replay("--to", "csv", "--only", "scalars_logged", "run")

    assert "the following arguments are required: RUN" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [
        "--to jsonl {run} --only scalars_logged",
        "--only scalars_logged --to jsonl {run}",
        "--to jsonl --only scalars_logged -- {run}",
    ],
)
def test_the_run_may_stand_anywhere_else(arguments: str, log: Path, says: Says) -> None:
    """Between and behind options that take a word of their own."""
    assert replay(*arguments.format(run=log).split()) == 0

    assert (
        says()
        == "eventloop: 3 events replayed into run/replay/metrics.jsonl; 1 of a kind that `only` does not name\n"
    )
