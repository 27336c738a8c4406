"""What the report says of the begin of a run, its scores, checkpoints and notes: as text, as JSON and on the page."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from eventloop.description.record import Begin, RunRecord, write_record
from eventloop.events import TextLogged
from eventloop.hooks import CheckpointHook
from eventloop.writers import JSONLWriter
from tests.cli.reported_runs import begins, make_run, report, scalars, subscriber, write_lines
from tests.support.trainers import MakeTrainer, batches

RECORD = RunRecord(
    begins=[
        Begin(time=1e9, iter=0, host="node1"),
        Begin(time=1e9 + 60, iter=40, host="node2", commit="a" * 40),
    ],
    model="Net",
    parameters=1200,
    trainable=1000,
    device="cuda:0",
    ranks=4,
    python="3.11",
    torch="2.13",
    eventloop="0.1.0",
    config={"lr": 0.1, "model": {"width": 8}, "seed": 0},
    options={
        "optimizer": {"type": "SGD", "nesterov": False},
        "schedulers": [{"type": "StepLR", "gamma": 0.5}],
    },
)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run that was begun twice, with scores and a note."""
    directory = make_run(tmp_path / "run", subscribers=[subscriber(peak_queued=2, capacity=1000)])
    write_record(directory, RECORD)
    lines = [
        scalars(step, "val", accuracy=value, other=value)
        for step, value in ((10, 0.5), (20, 0.75), (30, 0.25))
    ]
    note = {"event": "text_logged", "mode": "train", "step": 12, "name": "note", "text": "half the rate"}
    write_lines(directory, begins(0), *lines, note)
    return directory


def test_the_text_in_full_has_every_fact(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A metric whose name does not say which score is better has only the last one."""
    assert report(run, "--all") == 0

    said = capsys.readouterr().out
    for fact in (
        r"begun +\d{4}-\S+ \S+ on node1; begun again, last at \d{4}-\S+ \S+ on node2, after iteration 40\n",
        r"model +Net, 1,200 parameters, 200 of them frozen\n",
        r"device +cuda:0, 4 ranks\n",
        r"versions +python 3.11, torch 2.13, eventloop 0.1.0\n",
        rf"commit +{'a' * 40}\n",
        r"options +lr=0.1, model.width=8, seed=0\n",
        r"scores +val/accuracy best 0.75 at step 20, last 0.25 at step 30, val/other last 0.25 at step 30\n",
        r"note at 12 +half the rate\n",
        r"\noptimizer.nesterov +False *\n",
        r"\nschedulers\[0\].gamma +0.5 *\n",
    ):
        assert re.search(fact, said), fact


def test_the_short_text_has_the_begin_the_options_and_the_scores(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """When and where the run began, its model, options and scores are on a line each; versions are not there."""
    assert report(run) == 0

    said = capsys.readouterr().out
    assert re.search(r"\nbegun +\d{4}-\S+ \S+ on node1; begun again, last at .*\n", said)
    assert re.search(r"\nmodel +Net, 1,200 parameters, 200 of them frozen\n", said)
    assert re.search(r"\noptions +lr=0.1, model.width=8, seed=0\n", said)
    assert re.search(r"\nscores +val/accuracy best 0.75 at step 20, last 0.25 at step 30.*\n", said)
    assert "versions" not in said


def test_the_page_begins_with_the_facts_and_the_curves(run: Path, tmp_path: Path) -> None:
    """The options are in a table. The bar of a backlog is its share of the queue's capacity, none where that is unknown."""
    assert report(run, "--html", tmp_path / "page.html") == 0

    page = (tmp_path / "page.html").read_text("utf-8").rpartition("</script></head>")[2]
    places = [page.index(text) for text in ("cuda:0, 4 ranks", "<h2>Scalars", "<h2>Step time", "<h2>Options")]
    assert places == sorted(places)
    assert "2 of 1,000</span><div class=track><div class='fill' style='width:0.2%" in page
    old = make_run(tmp_path / "old", subscribers=[subscriber(peak_queued=2)])
    assert report(old, "--html", tmp_path / "page.html") == 0
    assert "<span>2</span><div class=track></div>" in (tmp_path / "page.html").read_text("utf-8")


def test_a_run_of_a_trainer_has_all_of_it(
    make_trainer: MakeTrainer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """JSON has the record, the scores, the durable checkpoints, also those outside of the run, and the texts."""
    elsewhere = tmp_path / "elsewhere"
    trainer = make_trainer(
        max_epochs=2,
        val_loader=batches(1),
        val_step=lambda trainer, batch: {"accuracy": trainer.epoch / 2},
        hooks=[CheckpointHook(interval=1, out_dir=elsewhere)],
        writers=[JSONLWriter()],
        config={"lr": 0.1},
    )

    @trainer.bus.on("after_train_epoch")
    def note(trainer: object, event: object) -> None:
        made.announce(TextLogged, mode="train", step=made.iter, name="note", text=f"at {made.iter}")

    made = trainer
    trainer.train()

    assert report(trainer.work_dir, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["begun"]["config"] == {"lr": 0.1}
    (score,) = [each for each in found["scores"] if each["name"] == "val/accuracy"]
    assert (score["best"], score["last"], score["last_step"]) == (1.0, 1.0, trainer.iter)
    assert [Path(each["name"]).name for each in found["checkpoints"] if each["newest"]] == ["epoch_2"]
    assert [line["text"] for line in found["log"]["texts"]] == [
        f"at {trainer.iter // 2}",
        f"at {trainer.iter}",
    ]
