"""What all commands have in common: an output that takes nothing, a reader that leaves, tracebacks, and no torch."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path

import pytest

from eventloop import cli
from eventloop.bus import Bus
from eventloop.checkpoint import save_checkpoint
from eventloop.costs.spans import SpanRecorder
from eventloop.events import ScalarsLogged
from eventloop.events.run import Run
from eventloop.tracing.chrome import WindowFacts
from eventloop.tracing.files import write_trace
from eventloop.util.terminal import OutputError
from eventloop.writers import EventLogWriter
from tests.cli.conftest import ENVIRONMENT
from tests.cli.reported_runs import make_run

FULL = Path("/dev/full")
CLOSED = "standard output is closed: there is nowhere to write to"
DISK_FULL = "standard output cannot be written: [Errno 28] No space left on device"
CONFIG = 'default_hooks = dict(logger=dict(interval=5))\nhooks = [dict(type="EMAHook")]\n'
COMMANDS = [
    "report run",
    "report run --json",
    "report run --html -",
    "checkpoints run",
    "checkpoints run --json",
    "trace run",
    "trace run -o -",
    "plan config.py",
    "plan config.py --json",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A config, and a run with something for every command."""
    folder = tmp_path_factory.mktemp("commands")
    run = make_run(folder / "run")
    save_checkpoint({"state_dict": {}}, run / "epoch_1")
    facts = WindowFacts("run", 0, 1, True, 1.0, 100.0, thread=7, pid=9)
    write_trace(run, facts, SpanRecorder())
    with Bus() as bus:
        EventLogWriter().attach(bus, lambda: Run(work_dir=str(run)))
        bus.emit(ScalarsLogged(step=1, scalars={"loss": 0.5}))
    (folder / "config.py").write_text(CONFIG)
    return folder


@pytest.fixture(autouse=True)
def _in_it(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)


@pytest.mark.skipif(not FULL.exists(), reason="needs Linux's /dev/full")
@pytest.mark.parametrize("command", COMMANDS)
def test_an_output_that_takes_nothing(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A closed output and a full disk are one line; the exit code is 2, or 1 where a file could not be written."""
    for reason in (CLOSED, DISK_FULL):
        with FULL.open("w") as full, redirect_stdout(None if reason is CLOSED else full):
            code = cli.main(command.split())
        assert capsys.readouterr().err == f"eventloop: {reason} (--traceback shows where)\n"
        assert code == (1 if command == "trace run -o -" else 2)


@pytest.mark.parametrize("command", [*COMMANDS, "replay run --to console"])
def test_a_reader_that_leaves(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    """It ends the command quietly, with exit code 0."""
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as pipe, redirect_stdout(pipe):
        code = cli.main(command.split())

    said = capsys.readouterr().err
    assert (code, said) == (0, "eventloop: 1 event replayed\n" if "replay" in command else "")


def test_a_process_whose_reader_leaves() -> None:
    """As in `eventloop report ... | head -1`: the interpreter's exit adds no traceback."""
    command = f"{sys.executable} -m eventloop report run --json | head -1"
    ran = subprocess.run(
        ["bash", "-c", command], env=ENVIRONMENT, capture_output=True, text=True, check=True, timeout=60
    )

    assert (ran.stdout, ran.stderr) == ("{\n", "")


@pytest.mark.parametrize(
    ("command", "error", "message"),
    [
        ("demo --device cdua", ValueError, "device 'cdua' cannot be used here"),
        ("checkpoints nowhere", ValueError, "no directory at nowhere"),
        ("plan nowhere", FileNotFoundError, "no file at nowhere"),
        ("replay nowhere --to csv", FileNotFoundError, "no run at nowhere"),
        ("report nowhere", ValueError, "expected a run's directory .*, got no directory"),
        ("trace nowhere", FileNotFoundError, "no run at nowhere"),
        ("report run", OutputError, CLOSED),
    ],
)
def test_traceback_shows_where(command: str, error: type[Exception], message: str) -> None:
    """Asked for, the error itself is raised."""
    output = None if error is OutputError else sys.stdout

    with redirect_stdout(output), pytest.raises(error, match=message):
        cli.main([*command.split(), "--traceback"])


@pytest.mark.parametrize("command", ["demo", "init", "checkpoints", "plan", "replay", "report", "trace"])
def test_help_says_what_the_exit_codes_mean(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    """All of them, and how a run is resumed."""
    with pytest.raises(SystemExit, match="0"):
        cli.main([command, "--help"])

    words = " ".join(capsys.readouterr().out.split())
    assert "exit codes: 0 done" in words
    if command == "demo":
        for told in (
            "2 bad input",
            "130 stopped by Ctrl-C",
            "143 stopped by SIGTERM",
            "[auto|best|PATH|NAME]",
        ):
            assert told in words


WITHOUT_TORCH = """
import sys
from eventloop import cli
for command in sys.argv[1:]:
    assert cli.main(command.split()) == 0, command
print([name for name in ("torch", "numpy", "sklearn", "tensorboard", "rich") if name in sys.modules])
"""


def test_no_torch_is_imported(python: Callable[..., subprocess.CompletedProcess[str]], folder: Path) -> None:
    """To list, verify, prune, replay, report and merge: it would take longer to import than all of it."""
    run = folder / "run"
    commands = [f"checkpoints {run} --verify --prune 1 --yes", f"trace {run}", f"replay {run} --to jsonl"]

    ran = python(WITHOUT_TORCH, *commands)

    assert ran.stdout.endswith("\n[]\n"), ran.stderr
    assert "'torch'" not in python(WITHOUT_TORCH, f"report {run}").stdout.splitlines()[-1]


@pytest.mark.slow
@pytest.mark.parametrize("arguments", ["--help", "demo --help", "--version"])
def test_help_imports_no_torch(arguments: str) -> None:
    """Help is there at once: neither torch nor anything that imports it is loaded."""
    ran = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "eventloop", *arguments.split()],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        env=ENVIRONMENT,
    )

    packages = {line.split("|")[-1].strip().split(".")[0] for line in ran.stderr.splitlines()}
    assert ran.stdout
    assert "eventloop" in packages
    assert packages.isdisjoint({"torch", "numpy", "sklearn", "tensorboard", "rich"})
