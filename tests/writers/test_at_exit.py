"""Programs that end without closing their bus: what they emitted is written, though from its main thread's end on Python
3.12 starts no thread."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from eventloop.eventlog.reader import read_events
from tests.no_threads import AT_EXIT

Run = Callable[..., subprocess.CompletedProcess[str]]

PROGRAM = """
import logging
from eventloop.bus import Bus
from eventloop.events import ScalarsLogged
from eventloop.events.run import Run
from eventloop.writers import *
logging.basicConfig(level=logging.WARNING)
bus = Bus(drain_timeout=60.0)
def emit(*steps):
    for step in steps:
        bus.emit(ScalarsLogged(step=step, iter=step - 1, scalars={"loss": 0.5}))
"""
FILES = {
    "JSONLWriter()": ("metrics.jsonl", b"step", 300),
    "CSVWriter()": ("metrics.csv", b"train", 300),
    "ConsoleWriter(stream=open('console.txt', 'w'), progress=False)": ("console.txt", b"loss", 30),
    "TensorBoardWriter()": ("tensorboard/events*", b"loss", 300),
}
"""Other writers, their files, and how often a word must be in them."""


def steps_in(path: Path) -> list[int]:
    reader = read_events(path)
    steps = [record.event.step for record in reader]  # type: ignore[attr-defined]
    assert (reader.torn, reader.damaged) == (None, 0)
    return steps


@pytest.mark.parametrize("first", [0, 500])
def test_an_event_log_is_whole(python: Run, tmp_path: Path, first: int) -> None:
    """Whether it is opened at the exit, by a program that is shorter than the bus's first look, or before."""
    program = (
        PROGRAM
        + AT_EXIT
        + f"""
EventLogWriter(fsync_interval=0.001).attach(bus, lambda: Run(work_dir="."))
emit(*range({first}))
if {first}:
    bus.flush()
emit(*range({first}, 1000))
"""
    )

    ran = python(program)

    assert (ran.returncode, ran.stderr) == (0, "")
    assert steps_in(tmp_path) == list(range(1000))


@pytest.mark.slow
@pytest.mark.parametrize("writer", FILES)
def test_a_file_of_lines_is_whole(python: Run, tmp_path: Path, writer: str) -> None:
    """Every record is there."""
    program = f'{PROGRAM}{AT_EXIT}\n{writer}.attach(bus, lambda: Run(work_dir="."))\nemit(*range(1, 301))\n'

    ran = python(program)

    assert (ran.returncode, ran.stderr) == (0, "")
    name, word, count = FILES[writer]
    (file,) = tmp_path.glob(name)
    assert file.read_bytes().count(word) == count
