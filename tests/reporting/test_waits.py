"""Waits are rows of their own wherever a run's times are shown, and above 2 % of it they have an advice line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from msgspec.structs import replace

from eventloop.costs.records import FILE, Cause, Phases, Place, TrendPoint, WaitCost, read_costs, write_costs
from eventloop.hooks import TraceHook
from eventloop.reporting.advice import advice
from eventloop.reporting.page.html import as_page
from eventloop.reporting.report import load_report
from eventloop.reporting.run_tables import run_tables
from tests.cli.reported_runs import costs, make_run, phases, report
from tests.support.traces import inside, read_windows
from tests.support.trainers import MakeTrainer, batches
from tests.support.waited_for import WaitedFor

Capture = pytest.CaptureFixture[str]
ROWS: dict[Cause, str] = {
    "checkpoint": "waiting for a checkpoint",
    "background": "waiting for the background",
    "ranks": "waiting for other ranks",
}


@pytest.fixture
def waited_for(monkeypatch: pytest.MonkeyPatch) -> WaitedFor:
    """Work that takes its time while the training thread waits for it."""
    return WaitedFor(monkeypatch)


def waiting_run(run: Path, cause: Cause = "checkpoint", **places: float) -> Path:
    """Write a run of 10 s, 0.41 s of it in iterations, with waits; those in iterations are a phase of them as well."""
    own = costs()
    inside = places.get("iterations", 0.0)

    def longer(usual: Phases) -> Phases:
        return replace(usual, **{cause: inside * usual.iterations / 100})

    trend = [TrendPoint(first_iter=i, phases=longer(phases(5))) for i in range(0, 100, 5)]
    found: list[WaitCost] = []
    for place, seconds in places.items():
        at: Place = place  # type: ignore[assignment]
        found.append(WaitCost(cause, at, "slow part", 4, seconds, seconds / 2))
    return make_run(run, seconds=10.0, evaluation=1.0, phases=longer(own.phases), trend=trend, waits=found)


def lines(text: str) -> dict[str, str]:
    """Return the rest of each line of a text by its begin, for the rows of waits."""
    found = {}
    for line in text.splitlines():
        for name in ROWS.values():
            if line.strip().startswith(name):
                found[name] = " ".join(line.strip().removeprefix(name).split())
    return found


@pytest.mark.parametrize("cause", ROWS)
@pytest.mark.parametrize("options", [(), ("--all",)])
def test_the_report_has_the_waits_apart(
    tmp_path: Path, capsys: Capture, cause: Cause, options: tuple[str, ...]
) -> None:
    """The parts of the run add up to it, and a line says in which of them the waits were."""
    run = waiting_run(tmp_path / "run", cause, iterations=2.0, evaluations=3.0, end=1.0)

    assert report(run, *options) == 0

    shown = " ".join(capsys.readouterr().out.split())
    took = f"took 10.0 s: iterations 410 ms, evaluation 1.00 s, {ROWS[cause]} 6.00 s, the rest 2.59 s"
    assert took in shown
    assert (
        f"{ROWS[cause]} 6.00 s, 60.0 % of the run: 2.00 s in iterations, 3.00 s in evaluations, 1.00 s at the end"
        in shown
    )


def test_the_iterations_have_a_row_of_the_wait(tmp_path: Path, capsys: Capture) -> None:
    """Among the phases, if there is any in them: its time of an iteration and its share."""
    assert report(waiting_run(tmp_path / "run", iterations=2.0)) == 0
    assert lines(capsys.readouterr().out)["waiting for a checkpoint"].startswith("20.0 83.0 % 20.0 83.0 %")

    assert report(waiting_run(tmp_path / "other", end=2.0)) == 0
    assert "waiting for a checkpoint  20.0" not in capsys.readouterr().out


def test_a_table_has_each_cause_and_part_of_the_run(tmp_path: Path) -> None:
    """With what was waited for, how often, and how long at most."""
    run = waiting_run(tmp_path / "run", "background", evaluations=3.0, between=1.0)

    (table,) = (table for table in run_tables(load_report(run)) if table.title == "Waits")

    assert table.header == ["cause", "where", "for", "in all", "of the run", "waits", "longest"]
    assert table.rows == [
        ["waiting for the background", "in evaluations", "slow part", "3.00 s", "30.0 %", "4", "1.50 s"],
        ["waiting for the background", "between epochs", "slow part", "1.00 s", "10.0 %", "4", "500 ms"],
    ]


def test_a_run_without_waits_has_no_row(tmp_path: Path, capsys: Capture) -> None:
    """In no output."""
    run = waiting_run(tmp_path / "run")

    assert report(run, "--all") == 0
    assert report(run, run, "--diff") == 0

    assert (
        "waiting for" not in capsys.readouterr().out + as_page([load_report(run)]).rpartition("</script>")[2]
    )


def test_programs_have_the_waits(tmp_path: Path, capsys: Capture) -> None:
    """In the report as JSON, and in the record itself."""
    run = waiting_run(tmp_path / "run", iterations=2.0)

    assert report(run, "--json") == 0

    expected = {
        "cause": "checkpoint",
        "place": "iterations",
        "name": "slow part",
        "calls": 4,
        "seconds": 2.0,
        "longest": 1.0,
    }
    for found in (json.loads(capsys.readouterr().out)["costs"], json.loads((run / FILE).read_bytes())):
        assert found["waits"] == [expected]
        assert found["phases"]["checkpoint"] == 2.0


def test_the_page_has_the_waits(tmp_path: Path) -> None:
    """As a section with a table, as a fact, and as a part of the bars of an iteration's phases."""
    page = as_page([load_report(waiting_run(tmp_path / "run", iterations=2.0))])

    body = page.partition("<body>")[2]
    assert "<h2>Waits</h2>" in body
    assert "<td>waiting for a checkpoint</td><td>in iterations</td><td>slow part</td>" in body
    assert "<dt>waiting for a checkpoint</dt><dd>2.00 s, 20.0 % of the run: 2.00 s in iterations</dd>" in body
    assert '"name":"waiting for a checkpoint"' in body


def test_several_runs_are_compared_by_their_waits(tmp_path: Path, capsys: Capture) -> None:
    """A run without any has none of it, and is not a run that lacks the row."""
    runs = waiting_run(tmp_path / "a", end=2.0), make_run(tmp_path / "b", seconds=10.0)

    assert report(*runs) == 0
    assert lines(capsys.readouterr().out) == {"waiting for a checkpoint": "2.00 s 0 s 0.00×"}

    assert report(*runs, "--all") == 0
    assert "waiting for a checkpoint  2.00 s" in capsys.readouterr().out


def test_the_differences_have_the_waits(tmp_path: Path, capsys: Capture) -> None:
    """Those in iterations with their interval, as a phase; the others as sums."""
    a = waiting_run(tmp_path / "a", end=1.0)
    b = waiting_run(tmp_path / "b", iterations=2.0, end=3.0)

    assert report(a, b, "--diff", "--json") == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)["rows"]}
    assert report(a, b, "--diff") == 0
    shown = capsys.readouterr().out

    within, apart = (
        rows[name] for name in ("waiting for a checkpoint", "waiting for a checkpoint, outside of iterations")
    )
    assert (within["kind"], within["a"], within["b"]) == ("phase", 0.0, pytest.approx(0.02))
    assert (apart["kind"], apart["a"], apart["b"]) == ("wait", pytest.approx(0.01), pytest.approx(0.03))
    assert rows["hooks"]["difference"] == 0.0
    assert "1.00 s in all" in shown
    assert "3.00 s in all" in shown
    assert "waiting for other ranks" not in rows


@pytest.mark.parametrize(
    ("cause", "place", "words"),
    [
        (
            "checkpoint",
            "iterations",
            ["interval=", 'when_busy="skip"', "save_optimizer=False", "a faster disk"],
        ),
        ("checkpoint", "between", ["interval=", 'when_busy="skip"', "save_optimizer=False", "a faster disk"]),
        ("checkpoint", "evaluations", ["val_interval=", "save_best=", "save_optimizer=False"]),
        ("checkpoint", "end", ["the run ends when its last saves are on the disk", "save_last=False"]),
        ("background", "iterations", ['overflow="spill"', "bus.flush()", "batch=True", 'offload="process"']),
        ("background", "end", ["every=", "batch=True", 'offload="process"']),
        ("ranks", "between", ["equal shares of the data"]),
    ],
)
def test_a_wait_of_2_percent_has_a_line_with_its_cause_and_its_cure(
    tmp_path: Path, cause: Cause, place: Place, words: list[str]
) -> None:
    """The figure, its share, what was waited for, and what to do; below 2 % there is none."""
    (line,) = advice(read_costs(waiting_run(tmp_path / "run", cause, **{place: 0.21})))

    for each in [f"{ROWS[cause]} took 210 ms, 2.1 % of the run", "slow part (210 ms)", *words]:
        assert each in line
    assert advice(read_costs(waiting_run(tmp_path / "short", cause, **{place: 0.19}))) == []


def test_a_slow_iteration_that_waited_is_not_called_unexplained(tmp_path: Path) -> None:
    """The line on the wait says why 1 of 100 iterations is long."""
    own = read_costs(waiting_run(tmp_path / "run", iterations=2.0))
    slow = replace(own, iteration=replace(own.iteration, samples=1000, p50=4e-3, p99=0.3, max=1.0))

    (line,) = advice(slow)
    assert line.startswith("waiting for a checkpoint took")
    assert len(advice(replace(slow, waits=[]))) == 1


def test_a_record_of_before_is_read_as_it_was(tmp_path: Path) -> None:
    """Without the new fields: it has no waits, and its phases add up as they did."""
    write_costs(tmp_path, costs())
    document = json.loads((tmp_path / FILE).read_bytes())
    del document["waits"]
    for part in (document["phases"], *(point["phases"] for point in document["trend"])):
        for cause in ROWS:
            del part[cause]
    (tmp_path / FILE).write_text(json.dumps(document))

    found = read_costs(tmp_path)

    assert found == costs()
    assert found.phases.wall == pytest.approx(0.41)


# --- a run of its own ----------------------------------------------------------------------------------------------


def test_the_summary_has_the_waits(make_trainer: MakeTrainer, waited_for: WaitedFor) -> None:
    """Under the line of the phases, in which those of the iterations have a share; and the advice begins with them."""
    trainer = make_trainer(max_epochs=1, train_loader=batches(4))
    trainer.bus.subscribe(
        lambda event: waited_for.work(0.1),
        "after_train_iter",
        offload="thread",
        overflow="block",
        queue=1,
        name="upload",
    )
    trainer.train()

    shown = trainer.summary()

    assert "what to do:\n  waiting for the background took " in shown
    assert "most of it for upload (" in " ".join(shown.split())
    (iterations,) = (line for line in shown.splitlines() if line.startswith("4 iterations of "))
    assert ", waiting for the background " in iterations
    assert "% of the run: " in lines(shown)["waiting for the background"]


def test_the_trace_has_the_waits(make_trainer: MakeTrainer, waited_for: WaitedFor) -> None:
    """As spans of a kind of their own, within the handler and the event in which they were spent."""
    trainer = make_trainer(max_epochs=1, train_loader=batches(4), hooks=[TraceHook(windows=[(0, 4)])])
    trainer.bus.subscribe(
        lambda event: waited_for.work(0.05), "after_train_iter", offload="thread", name="upload"
    )
    trainer.bus.subscribe(lambda trainer, event: trainer.bus.flush(), "after_train_iter", name="flush")
    trainer.train()

    (window,) = read_windows(trainer.work_dir)

    waits = [span for span in window.spans if span.kind == "wait" and span.name == ROWS["background"]]
    handlers = [span for span in window.spans if span.kind == "handler" and span.name == "flush"]
    assert len(handlers) == 4
    for handler in handlers:
        within = [span for span in waits if inside(span, handler) and span.iter == handler.iter]
        assert within
        assert sum(span.ended - span.began for span in within) > 0.9 * 0.05
    assert {span.track for span in waits} == {"training thread"}
