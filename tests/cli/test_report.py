"""`eventloop report`: what it tells of one run, of several, and of what is none."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import torch.nn.functional as F

from eventloop import Trainer
from eventloop.costs.records import write_costs
from eventloop.reporting.report import Report, load_report
from eventloop.reporting.text import as_text
from eventloop.writers import JSONLWriter
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
    handlers = [handler(seconds=5e-3), handler("mine", event="after_backward")]
    return make_run(tmp_path / "runs" / "second", phases=phases(100, hooks=3e-4), handlers=handlers)


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
        model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        loss_fn=F.cross_entropy,
        train_loader=batches(12),
        val_loader=batches(2),
        max_epochs=epochs,
        work_dir=run,
        writers=[JSONLWriter()],
    )


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
    recorded = loaded.costs
    assert (loaded.log.ended, recorded.phases.iterations, recorded.first_iter) == ("completed", 24, 24)
    assert report(run, "--all") == 0
    text = printed(capsys)
    assert "Iterations were run again from 24 on" in text
    assert "The costs are of the iterations from 24 on" in text
    assert rows_of(text, "OptimizerHook.after_train_iter")
    assert rows_of(text, "JSONLWriter")


def test_text_has_every_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Facts, phases with their trend and what was measured on the device, handlers, subscribers and curves, with
    units."""
    device = msgspec.structs.replace(phases(10), data=0.0, hooks=0.0, unaccounted=0.0)
    assert report(make_run(tmp_path / "first", device=device), "--all") == 0

    text = printed(capsys)
    assert text.startswith("Run first  (")
    assert "an iteration   p50 4.10 ms, mean 4.10 ms\n" in text
    assert rows_of(text, "data") == [["data", *["0.400", "9.8", "%", "0.400", "9.8", "%", "-"], "█" * 10]]
    assert rows_of(text, "forward")[0][:8] == ["forward", "1.00", "24.4", "%", "1.00", "24.4", "%", "1.00"]
    assert rows_of(text, "hooks")[0][:7] == ["hooks", "0.100", "2.4", "%", "0.100", "2.4", "%"]
    assert rows_of(text, "OptimizerHook.after_train_iter")
    assert rows_of(text, "EMAHook.after_train_iter")[0][1:] == (
        [
            "after_train_iter",
            "45",
            "100",
            "25.0",
            "0.60",
            "%",
            "25.0",
            "µs",
            "10.0",
            "µs",
            "100",
            "µs",
            "1.00",
            "ms",
        ]
    )
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


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_an_output_without_blocks(encoding: str, run: Path) -> None:
    """Plainer characters are used where the output has no others."""
    text = as_text([load_report(run)], encoding=encoding)

    assert text.encode(encoding)
    assert rows_of(text, "loss")[0][-1] == "#:-.______"
    assert "us/iteration" in text


def test_what_needs_a_look_is_marked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Handlers and subscribers over their budgets, subscribers that lost something, curves with NaN; with their errors
    in a line. JSON, which has no NaN, says it too."""
    run = make_run(
        tmp_path / "run",
        handlers=[handler(budget=5e-5, over_budget=True), handler("within", budget=5e-4)],
        subscribers=[
            subscriber(budget=5e-5, over_budget=True),
            subscriber("notify", failed=1, error="ValueError: a\nb"),
            subscriber("lossy", dropped=3),
            subscriber("fine", budget=5e-4),
        ],
    )
    write_lines(run, *TRAINED, scalars(110, loss="NaN", lr=0.1), scalars(120, loss="-Infinity", lr=0.1))

    assert report(run, "--all") == 0

    text = printed(capsys)
    marked = [line.split()[1] for line in text.splitlines() if line.startswith("!")]
    assert marked == [
        "EMAHook.after_train_iter",
        "its",
        "JSONLWriter",
        "notify",
        "lossy",
        "it",
        "loss",
        "not",
    ]
    assert rows_of(text, "!  JSONLWriter")[0][-2:] == ["50.0", "µs"]
    assert "\n!  its p99 went over its budget, as slow_handler said\n" in text
    assert "\n!  it did not get, or did not manage, all of its events; or its p99 went over" in text
    assert "\n!  not all of its values are finite\n" in text
    assert "notify: ValueError: a b\n" in text
    assert "train/loss: 2 of 12 values are NaN or infinite, the first at step 110" in text
    assert "not delivered  3 dropped, 1 failed\n" in text
    assert report(run, "--json") == 0
    told = json.loads(printed(capsys))
    (loss,) = (each for each in told["log"]["curves"] if (each["name"], each["mode"]) == ("loss", "train"))
    assert (loss["mean"][-3:], loss["last"]) == ([0.1, None, None], None)
    assert (loss["not_finite"], loss["first_not_finite"]) == (2, 110)
    assert [each["over_budget"] for each in told["costs"]["subscribers"]] == [True, False, False, False]


def test_several_runs_side_by_side(run: Path, slow: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A column a run, and the ratio of times to the first where it matters; what one has not is a dash."""
    assert report(run, slow, "--all") == 0

    text = printed(capsys)
    for begin, rows in {
        "phase": ["phase first second second / first"] * 2,
        "hooks": ["hooks 0.100 0.300 3.00×", "hooks 0.100 0.100 ≈"],
        "EMAHook": ["EMAHook.after_train_iter 25.0 50.0 ≈"],
        "mine": ["mine, after_backward - 25.0 -"],
        "JSONLWriter: delivered": ["JSONLWriter: delivered 30 30"],
        "train/loss": ["train/loss 0.1 0.1"],
    }.items():
        assert [" ".join(row) for row in rows_of(text, begin)] == rows


def test_runs_of_one_name_are_told_apart(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By as much of their paths as it takes; the same one twice by a number."""
    runs = [make_run(tmp_path / name / "run") for name in ("a", "b")]

    assert report(*runs, runs[0], "--all") == 0

    heads = [row.split("  ")[0] for row in printed(capsys).splitlines() if row.startswith("Run ")]
    assert heads == ["Run a/run", "Run b/run", "Run a/run (2)"]


def test_json_is_the_report(run: Path, slow: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One object of a run, which decodes to `Report`; a list of several."""
    assert report(run, "--json") == 0
    one = printed(capsys)
    assert report(run, slow, "--json") == 0
    several = json.loads(printed(capsys))

    assert msgspec.json.decode(one, type=Report) == load_report(run)
    assert [each["run"] for each in several] == [str(run), str(slow)]
    assert several[0] == json.loads(one)


NO_COSTS = (
    "There are no costs: no costs.json here. A run writes it while it goes on, unless it was killed early."
)
STATES: dict[str, tuple[dict[str, Any] | None, list[dict[str, Any]] | None, list[str]]] = {
    "costs alone": ({}, None, ["There are no curves: no metrics.jsonl here. JSONLWriter writes it.\n"]),
    "killed early": (
        None,
        TRAINED[:-1],
        ["under way or killed\n", "1 line is cut short or damaged in metrics.jsonl, and left out.\n"],
    ),
    "just begun": (
        {"phases": phases(0), "trend": [], "handlers": [], "subscribers": [], "complete": False},
        [begins(0)],
        [
            "The run is under way, or was killed: costs.json is as it was written last.\n",
            "There are no curves: metrics.jsonl has no scalars.\n",
            " under way or killed\n",
        ],
    ),
    "begun again": (
        {"outcome": "enough"},
        [*TRAINED[:-1], ends(100, "enough"), begins(100)],
        [
            "under way or killed\n",
            "The run was begun again, and is under way or was killed: costs.json is that of the call before.\n",
        ],
    ),
    "a log that lost its end": (
        {"outcome": "enough", "subscribers": [subscriber(dropped=1)]},
        [*TRAINED, begins(100)],
        [" enough\n"],
    ),
    "an error": (None, [*TRAINED[:-1], ends(3, "error", "ValueError: a\nb")], ["error: ValueError: a b\n"]),
}


@pytest.mark.parametrize("state", STATES)
def test_what_is_missing_is_said(state: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of runs that are under way, were killed, have other writers, or whose log and costs disagree on the end."""
    record, rows, told = STATES[state]
    if rows is not None:
        write_lines(
            tmp_path, *rows, torn=b'{"mode":"train","step":110,"it' if state == "killed early" else b""
        )
    if record is not None:
        write_costs(tmp_path, costs(**record))

    assert report(tmp_path, "--all") == (0 if record is not None else 2)

    text, said = capsys.readouterr()
    assert said == ("" if record is not None else f"eventloop: {tmp_path}: {NO_COSTS}\n")
    assert [line for line in told if line not in text] == []
    assert ("Handlers" in text, "Scalars" in text) == (
        record is not None and record.get("handlers") != [],
        rows is not None and len(rows) > 1,
    )
    assert ("begun again" in text) == (state == "begun again")
    if rows is None:
        (tmp_path / "events.evl").touch()
        assert report(tmp_path, "--all") == 0
        assert f"`eventloop replay {tmp_path} --to jsonl --out {tmp_path}` makes" in printed(capsys)


@pytest.mark.parametrize("options", [[], ["--all"], ["--json"]])
def test_a_terminal_obeys_no_name(
    tmp_path: Path, options: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Names, modes and errors of a run have escapes in place of control characters; of JSON they are the same texts."""
    nasty = "\x1b]0;title\x07\r\x9b2J\u202e\nend"
    values: dict[str, Any] = {nasty: 1.0}
    run = make_run(
        tmp_path / "run",
        handlers=[handler(nasty, event=nasty)],
        subscribers=[subscriber(nasty, error=nasty, failed=1)],
    )
    write_lines(run, scalars(1, nasty, **values))

    assert report(run, run, *options) == 0
    assert report(run, *options) == 0

    shown = capsys.readouterr().out
    assert {*"\x1b\x07\r\x9b\u202e"}.isdisjoint(shown)
    assert (
        r"title\x07 \u009b2J\u202e" in shown if "--json" not in options else r"title\u0007\r\u009b2J" in shown
    )
    assert "\nend" not in shown
