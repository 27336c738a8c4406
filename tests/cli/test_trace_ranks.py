"""`eventloop trace RUN --ranks`: the windows of all ranks on one timeline, with the slow rank named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from eventloop import cli
from eventloop.costs.records import WAITING
from eventloop.costs.spans import Span, SpanRecorder
from eventloop.tracing.chrome import WindowFacts
from eventloop.tracing.files import write_trace
from eventloop.tracing.ranks import clock_shifts

Json = dict[str, Any]
STEP = 0.05
"""Seconds of an iteration."""


def write_window(
    run: Path,
    rank: int,
    *,
    world_size: int = 2,
    clock: float = 0.0,
    longer: float = 0.0,
    phase: str = "data",
    iterations: range = range(20, 40),
    backward: bool = True,
) -> None:
    """Write the window of a rank whose clock is ahead by `clock` seconds.

    Each iteration takes `STEP`. `longer` is what the phase takes more than 1 ms; backward takes the rest.
    """
    recorder = SpanRecorder()
    for iteration in iterations:
        at = began = clock + iteration * STEP
        seconds = {"data": 1e-3, "before_train_iter": 1e-3, "forward": 1e-3}
        seconds |= {phase: 1e-3 + longer} if phase != "hooks" else {"before_train_iter": 1e-3 + longer}
        if phase in WAITING:
            seconds["before_train_iter"] += longer
            del seconds[phase]
            recorder.add(Span(1, "wait", WAITING[phase], at + 1.5e-3, longer, iteration, "disk"))
        step = STEP - sum(seconds.values())
        for name, each in seconds.items():
            kind: Any = "event" if name == "before_train_iter" else "phase"
            recorder.add(Span(1, kind, name, at, each, iteration))
            at += each
        recorder.add(Span(1, "event", "after_train_iter", at, step, iteration))
        if backward:
            recorder.add(Span(1, "phase", "backward", at, step - 2e-3, iteration))
            recorder.add(Span(1, "phase", "optimizer", at + step - 2e-3, 1e-3, iteration))
        recorder.add(Span(1, "iteration", f"iteration {iteration}", began, STEP, iteration))
    write_trace(
        run,
        WindowFacts(
            run.name,
            iterations[0],
            len(iterations),
            True,
            clock + iterations[0] * STEP,
            100.0 + rank,
            1,
            pid=99,
            rank=rank,
            world_size=world_size,
        ),
        recorder,
    )


def merged(run: Path, *options: str) -> Json:
    """The file that the command writes next to the windows."""
    assert cli.main(["trace", str(run), "--ranks", *options]) == 0
    (path,) = (run / "traces").glob("ranks_*.json")
    made: Json = json.loads(path.read_bytes())
    return made


def ends(made: Json, rank: int) -> dict[int, float]:
    """Map the iterations of a rank to their ends."""
    return {
        e["args"]["iter"]: e["ts"] + e["dur"]
        for e in made["traceEvents"]
        if e["ph"] == "X" and e["cat"] == "iteration" and e["pid"] == rank
    }


def processes(made: Json) -> dict[int, str]:
    """Map the ranks to the names of their processes."""
    return {e["pid"]: e["args"]["name"] for e in made["traceEvents"] if e["name"] == "process_name"}


@pytest.mark.parametrize("backward", [True, False])
def test_ranks_are_processes_on_one_clock(tmp_path: Path, backward: bool) -> None:
    """Clocks that differ by 1,000 s, as of other machines, are aligned by the ends that the ranks have in common."""
    write_window(tmp_path, 0, backward=backward)
    write_window(tmp_path, 1, backward=backward, clock=1000.0)

    made = merged(tmp_path)

    assert processes(made) == {0: "rank 0", 1: "rank 1"}
    first, second = ends(made, 0), ends(made, 1)
    assert list(second) == list(range(20, 40))
    assert [*second.values()] == pytest.approx([*first.values()], abs=0.01)
    assert min(e["ts"] for e in made["traceEvents"]) == 0
    assert made["otherData"]["slow rank"] == "none"


def test_clocks_are_shifted_by_the_median() -> None:
    """An iteration in which one rank left late, and iterations of one rank alone, change nothing."""
    first = {i: float(i) for i in range(10)}
    other = {i: i + 5.0 + (100.0 if i == 3 else 0.0) for i in range(2, 12)}

    assert clock_shifts([first, other]) == [0.0, -5.0]


@pytest.mark.parametrize("phase", ["data", "forward", "hooks", "checkpoint"])
def test_the_slow_rank_is_named(tmp_path: Path, phase: str, capsys: pytest.CaptureFixture[str]) -> None:
    """In the name of its process, in the facts of the file, and by the command; what waits within a handler is not slow in
    the hooks."""
    write_window(tmp_path, 0)
    write_window(tmp_path, 1, clock=7.0, longer=0.02, phase=phase)

    made = merged(tmp_path)

    name = WAITING.get(phase, phase)
    assert processes(made) == {0: "rank 0", 1: f"rank 1, slow in {name}: 20.0 ms longer an iteration"}
    sentence = f"rank 1 is slow in {name}: "
    assert made["otherData"]["slow rank"].startswith(sentence)
    said = capsys.readouterr().err
    assert said.startswith(
        f"eventloop: iterations 20..39 of 2 ranks into {tmp_path}/traces/ranks_20-39.json; open"
    )
    assert sentence in said


def test_a_window_is_chosen_and_the_list_has_each_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The list shows rank 0's windows; `--ranks` takes the last one, or that of `--window`, also into `-o`."""
    for window in (range(10), range(20, 30)):
        for rank in range(2):
            write_window(tmp_path, rank, iterations=window)

    assert list(ends(merged(tmp_path), 1)) == list(range(20, 30))
    assert cli.main(["trace", str(tmp_path), "--ranks", "--window", "1", "-o", str(tmp_path / "x.json")]) == 0
    assert list(ends(json.loads((tmp_path / "x.json").read_bytes()), 1)) == list(range(10))
    capsys.readouterr()
    assert cli.main(["trace", str(tmp_path)]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 2 + 2 + 1


def rank_missing(run: Path) -> None:
    """Leave out rank 1 of 3, and rank 2."""
    write_window(run, 0, world_size=3)


def one_rank(run: Path) -> None:
    """A run of one process."""
    write_window(run, 0, world_size=1)


def no_common_iteration(run: Path) -> None:
    """A file of rank 1 whose iterations are not those of its name."""
    write_window(run, 0)
    write_window(run, 1, iterations=range(50, 70))
    (run / "traces" / "iterations_50-69.rank1.json").rename(run / "traces" / "iterations_20-39.rank1.json")


def damaged(run: Path) -> None:
    """A file of rank 1 that is cut short."""
    write_window(run, 0)
    write_window(run, 1)
    path = run / "traces" / "iterations_20-39.rank1.json"
    path.write_bytes(path.read_bytes()[:900])


FILE = "run/traces/iterations_20-39"


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (
            rank_missing,
            [],
            f"rank 1 of 3 has no window of iterations 20..39, and 1 more: expected {FILE}.rank1.json; the rank was killed",
        ),
        (one_rank, [], f"{FILE}.json is of a run with one rank: leave out --ranks"),
        (
            no_common_iteration,
            [],
            f"{FILE}.json and the windows of the other ranks have no iteration in common",
        ),
        (damaged, [], f"{FILE}.rank1.json is damaged, or not a trace of eventloop: "),
        (rank_missing, ["--merge"], "--ranks takes one window: leave out --merge or --ranks"),
        (rank_missing, ["--window", "2"], "run/traces has no window 2: it has 1: iterations 20..39"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    make: Any,
    options: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Nothing is written."""
    monkeypatch.chdir(tmp_path)
    make(Path("run"))

    assert cli.main(["trace", "run", "--ranks", *options]) == 2

    errors = capsys.readouterr().err
    assert errors.startswith(f"eventloop: {message}")
    assert errors.count("\n") == 1
    assert not list(Path("run/traces").glob("ranks_*"))
