"""`eventloop report`: what it tells of one run, of several, and of what is none."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import torch.nn.functional as F

from eventloop import Trainer
from eventloop.costs.records import write_costs
from eventloop.reporting.report import Report, load_report
from eventloop.writers import JSONLWriter
from tests.cli.conftest import ENVIRONMENT
from tests.cli.reported_runs import (
    TRAINED,
    begins,
    costs,
    ends,
    handler,
    make_run,
    phases,
    report,
    scalars,
    subscriber,
    write_lines,
)
from tests.support.trainers import batches, tiny_model


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A whole run."""
    return make_run(tmp_path / "runs" / "first")


@pytest.fixture
def slow(tmp_path: Path) -> Path:
    """Another one, with dearer hooks."""
    return make_run(
        tmp_path / "runs" / "second",
        phases=phases(100, hooks=3e-4), handlers=[handler(seconds=5e-3), handler("mine", event="after_backward")],
    )  # fmt: skip


def printed(capsys: pytest.CaptureFixture[str]) -> str:
    """What came on standard output; nothing on the other one."""
    said = capsys.readouterr()
    assert said.err == ""
    return said.out


def rows_of(text: str, begin: str) -> list[list[str]]:
    """The cells of the rows that begin so."""
    return [line.split() for line in text.splitlines() if line.startswith(begin)]


def trainer_of(run: Path, epochs: int) -> Trainer:
    model = tiny_model()
    return Trainer(
        model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), loss_fn=F.cross_entropy,
        train_loader=batches(12), val_loader=batches(2), max_epochs=epochs, work_dir=run, writers=[JSONLWriter()],
    )  # fmt: skip


@pytest.mark.slow
def test_a_real_run_that_was_resumed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What the hooks and writers of a training left is read whole; iterations that were run again count once."""
    run = tmp_path / "run"
    first = trainer_of(run, 3)
    first.train()
    first.close()
    shutil.rmtree(run / "epoch_3")
    again = trainer_of(run, 4)
    assert again.resume("auto")
    again.train()
    again.close()

    loaded = load_report(run)

    assert loaded.log is not None
    assert loaded.costs is not None
    assert loaded.log.resumed_at == [24]
    (loss,) = [curve for curve in loaded.log.curves if (curve.name, curve.mode) == ("loss", "val")]
    assert loss.steps == [12, 24, 36, 48]
    assert (loaded.log.ended, loaded.costs.phases.iterations, loaded.costs.first_iter) == (
        "completed",
        24,
        24,
    )
    assert report(run) == 0
    text = printed(capsys)
    assert "Iterations were run again from 24 on" in text
    assert "The costs are of the iterations from 24 on" in text
    assert rows_of(text, "OptimizerHook.after_train_iter")
    assert rows_of(text, "JSONLWriter")


def test_text_has_every_table(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Facts, phases with their trend, handlers, subscribers and curves, with units."""
    assert report(run) == 0

    text = printed(capsys)
    assert text.startswith("Run first  (")
    assert "an iteration, median            4.10 ms (mean 4.10 ms)\n" in text
    assert rows_of(text, "data")[0] == ["data", "0.400", "9.8", "%", "0.400", "9.8", "%", "█" * 10]
    assert rows_of(text, "hooks")[0][:7] == ["hooks", "0.100", "2.4", "%", "0.100", "2.4", "%"]
    assert [row[0] for row in rows_of(text, "OptimizerHook") + rows_of(text, "EMAHook")] == [
        "OptimizerHook.after_train_iter",
        "EMAHook.after_train_iter",
    ]
    ema = rows_of(text, "EMAHook")[0]
    assert ema[1:] == [
        "after_train_iter", "45", "100", "25.0", "0.60", "%", "25.0", "µs", "10.0", "µs", "100", "µs", "1.00", "ms",
    ]  # fmt: skip
    assert rows_of(text, "JSONLWriter")[0][:6] == [
        "JSONLWriter",
        "scalars_logged",
        "and",
        "1",
        "more",
        "thread",
    ]
    assert rows_of(text, "loss")[0][-1] == "█▄▃▂▁▁▁▁▁▁"
    assert rows_of(text, "accuracy")[0][:5] == ["accuracy", "val", "1", "0.9", "0.9"]


def test_what_needs_a_look_is_marked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Handlers over their budgets, subscribers that lost something, curves with NaN; with their errors in a line."""
    run = make_run(
        tmp_path / "run",
        handlers=[handler(budget=5e-5, over_budget=True), handler("within", budget=5e-4)],
        subscribers=[subscriber(dropped=3), subscriber("notify", failed=1, error="ValueError: a\nb"), subscriber("fine")],
    )  # fmt: skip
    write_lines(run, *TRAINED, scalars(110, loss="NaN", lr=0.1))

    assert report(run) == 0

    text = printed(capsys)
    marked = [line.split()[1] for line in text.splitlines() if line.startswith("!")]
    assert marked == ["EMAHook.after_train_iter", "its", "JSONLWriter", "notify", "it", "loss", "not"]
    assert "\n!  its p99 went over its budget, as slow_handler said\n" in text
    assert "\n!  it did not get, or did not manage, all of its events\n" in text
    assert "\n!  not all of its values are finite\n" in text
    assert "notify: ValueError: a b\n" in text
    assert "train/loss: 1 of 11 values are NaN or infinite, the first at step 110" in text
    assert "events not delivered            3 dropped, 1 failed\n" in text


def test_a_writer_over_its_budget_is_marked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In the text, and in JSON, whose record says it."""
    slow = subscriber(budget=5e-5, over_budget=True)
    run = make_run(tmp_path / "run", subscribers=[slow, subscriber("within", budget=5e-4)])

    assert report(run) == 0

    text = printed(capsys)
    assert [line.split()[1] for line in text.splitlines() if line.startswith("!")] == ["JSONLWriter", "its"]
    assert "\n!  its p99 went over its budget, as slow_handler said\n" in text
    assert rows_of(text, "!  JSONLWriter")[0][-2:] == ["50.0", "µs"]
    assert report(run, "--json") == 0
    subscribers = json.loads(printed(capsys))["costs"]["subscribers"]
    assert [(s["budget"], s["over_budget"]) for s in subscribers] == [(5e-5, True), (5e-4, False)]


def test_several_runs_side_by_side(run: Path, slow: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A column a run, and the ratio to the first; what one has not is a dash."""
    assert report(run, slow) == 0

    text = printed(capsys)
    assert rows_of(text, "phase") == [["phase", "first", "second", "second", "/", "first"]] * 2
    assert rows_of(text, "hooks") == [
        ["hooks", "0.100", "0.300", "3.00×"],
        ["hooks", "0.100", "0.100", "1.00×"],
    ]
    assert rows_of(text, "EMAHook") == [["EMAHook.after_train_iter", "25.0", "50.0", "2.00×"]]
    assert rows_of(text, "mine") == [["mine,", "after_backward", "-", "25.0", "-"]]
    assert rows_of(text, "JSONLWriter: delivered") == [["JSONLWriter:", "delivered", "30", "30", "1.00×"]]
    assert rows_of(text, "train/loss") == [["train/loss", "0.1", "0.1", "1.00×"]]


def test_runs_of_one_name_are_told_apart(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By as much of their paths as it takes; the same one twice by a number."""
    runs = [make_run(tmp_path / name / "run") for name in ("a", "b")]

    assert report(*runs, runs[0]) == 0

    heads = [row for row in printed(capsys).splitlines() if row.startswith("Run ")]
    assert [head.split("  ")[0] for head in heads] == ["Run a/run", "Run b/run", "Run a/run (2)"]


def test_json_is_the_report(run: Path, slow: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One object of a run, which decodes to `Report`; a list of several."""
    assert report(run, "--json") == 0
    one = printed(capsys)
    assert report(run, slow, "--json") == 0
    several = json.loads(printed(capsys))

    assert msgspec.json.decode(one, type=Report) == load_report(run)
    assert [each["run"] for each in several] == [str(run), str(slow)]
    assert several[0] == json.loads(one)


def test_nan_is_null_in_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """JSON has no word for it."""
    write_lines(tmp_path, scalars(1, loss=0.5), scalars(2, loss="NaN"), scalars(3, loss="-Infinity"))

    assert report(tmp_path, "--json") == 0

    (loss,) = json.loads(printed(capsys))["log"]["curves"]
    assert (loss["mean"], loss["last"]) == ([0.5, None, None], None)
    assert (loss["not_finite"], loss["first_not_finite"]) == (2, 2)


def test_costs_without_curves(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A run with other writers has a report of costs, which says what would make curves."""
    write_costs(tmp_path, costs())

    assert report(tmp_path) == 0

    text = printed(capsys)
    assert "There are no curves: no metrics.jsonl here. JSONLWriter writes it.\n" in text
    assert "EMAHook" in text
    assert "Scalars" not in text
    (tmp_path / "events.evl").touch()
    assert report(tmp_path) == 0
    assert f"`eventloop replay {tmp_path} --to jsonl --out {tmp_path}` makes" in printed(capsys)


def test_curves_without_costs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A run that was killed early has a report of curves, and is not called complete."""
    write_lines(tmp_path, *TRAINED[:-1], torn=b'{"mode":"train","step":110,"it')

    assert report(tmp_path) == 0

    text = printed(capsys)
    assert "There are no costs: no costs.json here." in text
    assert "1 line is cut short or damaged in metrics.jsonl, and left out.\n" in text
    assert "state                   under way or killed\n" in text
    assert rows_of(text, "loss")
    assert "Handlers" not in text


def test_a_run_under_way(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its record says that it is not the last one; no iteration need be over."""
    write_costs(tmp_path, costs(phases=phases(0), trend=[], handlers=[], subscribers=[], complete=False))
    write_lines(tmp_path, begins(0))

    assert report(tmp_path) == 0

    text = printed(capsys)
    assert "The run is under way, or was killed: costs.json is as it was written last.\n" in text
    assert "There are no curves: metrics.jsonl has no scalars.\n" in text
    assert "state       under way or killed\n" in text


def test_a_run_that_was_begun_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Until it has a record of its own it is not what the call before has ended as."""
    run = make_run(tmp_path / "run", outcome="enough")
    write_lines(run, *TRAINED[:-1], ends(100, "enough"), begins(100))

    assert report(run) == 0

    text = printed(capsys)
    assert "state                           under way or killed\n" in text
    assert (
        "The run was begun again, and is under way or was killed: costs.json is that of the call before.\n"
        in text
    )


def test_the_end_of_a_log_that_lost_something(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It may have been lost too, as on a full disk: the record says how the run ended."""
    run = make_run(tmp_path / "run", outcome="enough", subscribers=[subscriber(dropped=1)])
    write_lines(run, *TRAINED, begins(100))

    assert report(run) == 0

    text = printed(capsys)
    assert "state                           enough\n" in text
    assert "begun again" not in text


def test_how_a_run_ended(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With its error, in one line."""
    row = {"event": "after_run", "iter": 3, "epoch": 0, "reason": "error", "error": "ValueError: a\nb"}
    write_lines(tmp_path, *TRAINED[:-1], row)

    assert report(tmp_path) == 0

    assert "error: ValueError: a b\n" in printed(capsys)


@pytest.mark.slow
@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_a_terminal_without_blocks(encoding: str, run: Path) -> None:
    """Plainer characters are used where the output has no others."""
    ran = subprocess.run(
        [sys.executable, "-m", "eventloop", "report", str(run)],
        env={**ENVIRONMENT, "PYTHONIOENCODING": encoding}, capture_output=True, check=True, timeout=60,
    )  # fmt: skip

    text = ran.stdout.decode(encoding)
    assert rows_of(text, "loss")[0][-1] == "#:-.______"
    assert "us/iteration" in text


def test_nobody_reads_on(run: Path) -> None:
    """As in `eventloop report ... | head -1`: no traceback."""
    command = f"{sys.executable} -m eventloop report {run} --json | head -1"
    ran = subprocess.run(
        ["bash", "-c", command], env=ENVIRONMENT, capture_output=True, text=True, check=True, timeout=60
    )

    assert (ran.stdout, ran.stderr) == ("{\n", "")


def test_torch_is_not_imported(run: Path) -> None:
    """It takes longer to import than a report to make."""
    program = "import sys; from eventloop import cli; cli.main(['report', sys.argv[1]]); print('torch' in sys.modules)"
    ran = subprocess.run(
        [sys.executable, "-c", program, str(run)], env=ENVIRONMENT, capture_output=True, text=True, check=True, timeout=60
    )  # fmt: skip

    assert ran.stdout.splitlines()[-1] == "False"


def test_times_on_the_device(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Where they were measured, in a column of their own; phases that have none there have a dash."""
    run = make_run(
        tmp_path / "run", device=msgspec.structs.replace(phases(10), data=0.0, hooks=0.0, unaccounted=0.0)
    )

    assert report(run) == 0

    text = printed(capsys)
    assert rows_of(text, "forward")[0][:8] == ["forward", "1.00", "24.4", "%", "1.00", "24.4", "%", "1.00"]
    assert rows_of(text, "data")[0][:8] == ["data", "0.400", "9.8", "%", "0.400", "9.8", "%", "-"]


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_a_terminal_obeys_no_name(
    tmp_path: Path, options: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Names, modes and errors of a run have escapes in place of control characters; of JSON they are the same texts."""
    nasty = "\x1b]0;title\x07\r\x9b2J\u202e\nend"
    values: dict[str, Any] = {nasty: 1.0}
    run = make_run(
        tmp_path / "run", handlers=[handler(nasty, event=nasty)], subscribers=[subscriber(nasty, error=nasty, failed=1)]
    )  # fmt: skip
    write_lines(run, scalars(1, nasty, **values))

    assert report(run, run, *options) == 0
    assert report(run, *options) == 0

    shown = capsys.readouterr().out
    assert {*"\x1b\x07\r\x9b\u202e"}.isdisjoint(shown)
    assert r"title\x07 \u009b2J\u202e" in shown if not options else r"title\u0007\r\u009b2J" in shown
    assert "\nend" not in shown
