"""`eventloop plan` of a script: it is run up to its run, and its subscribers are shown."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from eventloop import cli
from tests import forked
from tests.cli.conftest import ENVIRONMENT

EXAMPLES = Path(__file__).parents[2] / "examples"
TRAINER = """
import sys, threading
import torch
import torch.nn.functional as F
from eventloop import Trainer
from eventloop.writers import EventLogWriter, JSONLWriter

def build(**changes):
    model = torch.nn.Linear(2, 3)
    loader = [(torch.zeros(4, 2), torch.zeros(4, dtype=torch.long))] * 3
    arguments = dict(optimizer=torch.optim.SGD(model.parameters(), lr=0.1), loss_fn=F.cross_entropy,
                     train_loader=loader, val_loader=loader, max_epochs=2, work_dir="out/run",
                     writers=[JSONLWriter(), EventLogWriter()])
    return Trainer(model, **{**arguments, **changes})
"""
BUSES = """
from eventloop.bus import Bus
with Bus() as first, Bus(), Bus() as third:
    first.subscribe(print, "before_run", name="one")
    third.subscribe(print, "after_run", name="two", offload="thread")
"""


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", ENVIRONMENT["PYTHONPATH"])
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def write(text: str, name: str = "train.py") -> str:
    """A script in the working directory."""
    Path(name).write_text(text, encoding="utf-8")
    return name


def files() -> dict[str, bytes]:
    """The files in the working directory."""
    return {str(path): path.read_bytes() for path in Path().rglob("*") if path.is_file()}


@pytest.mark.slow
def test_a_script_is_run_up_to_its_run(capfd: pytest.CaptureFixture[str]) -> None:
    """As by Python, with its arguments; nothing is trained and nothing is left behind."""
    script = write(
        f"import neighbour\n{TRAINER}\nprint(__name__, sys.argv[1:])\ntrainer = build(train_step=lambda t, b: 1 / 0, loss_fn=None)\n"
        "trainer.train()\nprint('trained')\n",
        "sub_train.py",
    )
    write("", "neighbour.py")
    before = files()

    assert cli.main(["plan", script, "--", "--lr", "0.1", "--", "x"]) == 0

    output = capfd.readouterr().out.splitlines()
    line = before[script].decode().splitlines().index("trainer.train()") + 1
    assert output[0] == "__main__ ['--lr', '0.1', '--', 'x']"
    assert re.fullmatch(rf".*sub_train\.py:{line} would begin a run of 2 epochs, 6 iterations", output[1])
    assert "trained" not in output
    assert files() == before


@pytest.mark.slow
def test_the_table_is_in_the_order_of_a_run(capfd: pytest.CaptureFixture[str]) -> None:
    """Sync handlers with their order, then background subscribers; with --json the script prints to stderr."""
    script = write(
        f"{TRAINER}\ntrainer = build()\n"
        "@trainer.bus.on('after_train_iter', priority=55, every=20)\ndef show(trainer, event): pass\n"
        "@trainer.bus.on('after_val_epoch', queue=7, overflow='drop_oldest')\nasync def tell(event): pass\n"
        "print('hello')\ntrainer.train()\n"
    )

    assert cli.main(["plan", "--json", script]) == 0

    output, errors = capfd.readouterr()
    found: dict[str, Any] = json.loads(output)
    assert errors == "hello\n"
    handlers = {plan["event"]: plan["handlers"] for plan in found["buses"][0]}
    order = [
        "before_run",
        "before_train",
        "after_train_iter",
        "after_val_epoch",
        "after_train",
        "after_run",
        "scalars_logged",
    ]
    assert [event for event in handlers if event in order] == order
    rows = [row for row in handlers["after_train_iter"] if row["order"]]
    assert [row["order"] for row in rows] == [*range(1, len(rows) + 1)]
    assert [row["priority"] for row in rows] == sorted(row["priority"] for row in rows)
    shown, told = (
        {each["name"]: each for each in handlers[event]}[name]
        for event, name in (("after_train_iter", "show"), ("after_val_epoch", "tell"))
    )
    assert shown.items() >= {"order": 4, "priority": 55, "filter": "every=20", "runs_on": "sync"}.items()
    assert told.items() >= {"order": 0, "runs_on": "loop", "queue": 7, "overflow": "drop_oldest"}.items()
    assert (found["file"], found["max_epochs"], found["max_iters"]) == (script, 2, 6)


@pytest.mark.slow
def test_a_resume_changes_nothing_on_the_disk(capfd: pytest.CaptureFixture[str]) -> None:
    """The checkpoint is read and its handlers run; no writer truncates its file."""
    ran = forked.run([write(f"{TRAINER}\nbuild().train()\n")], env=ENVIRONMENT)
    assert ran.returncode == 0, ran.stderr
    script = write(
        f"{TRAINER}\ntrainer = build(max_epochs=4)\n"
        "trainer.bus.on('after_load_checkpoint')(lambda event: print('loaded', event.path))\n"
        "trainer.resume('auto')\nprint(trainer.epoch, trainer.bus.flush().complete)\ntrainer.train()\n"
    )
    before = files()

    assert cli.main(["plan", script]) == 0

    output = capfd.readouterr().out
    assert output.startswith("loaded out/run/epoch_2\n2 True\n")
    assert "would begin a run of 4 epochs" in output
    assert files() == before


@pytest.mark.slow
def test_code_on_the_way_out_is_no_failure(capfd: pytest.CaptureFixture[str]) -> None:
    """A run on another thread ends that thread silently, and an error in the clean-up does not hide the plan."""
    script = write(
        f"{TRAINER}\ntrainer = build()\nthread = threading.Thread(target=trainer.train)\n"
        "try:\n    thread.start(); thread.join()\nfinally:\n    print('closing'); result_of_training\n"
    )

    assert cli.main(["plan", script]) == 0

    output, errors = capfd.readouterr()
    assert output.startswith("closing\n")
    assert "would begin a run of 2 epochs" in output
    assert errors.startswith("Traceback")
    assert errors.count("Error") == 1


def test_a_bus_without_a_trainer_begins_with_its_first_event(capfd: pytest.CaptureFixture[str]) -> None:
    """No handler is called, and every bus with a subscriber is shown."""
    script = write(f"{BUSES}    from eventloop.events import BeforeRun; first.emit(BeforeRun()); 1 / 0")

    assert cli.main(["plan", script]) == 0

    head, _, tables = capfd.readouterr().out.partition("\n\n")
    assert head.endswith("train.py:6 would emit before_run")
    assert tables == (
        "bus 1 of 2\n"
        "event       order  priority  handler  runs on  filter\n"
        "----------  -----  --------  -------  -------  ------\n"
        "before_run      1        50  one      sync\n\n"
        "bus 2 of 2\n"
        "event      order  priority  handler  runs on  filter  queue  overflow\n"
        "---------  -----  --------  -------  -------  ------  -----  --------\n"
        "after_run      -         -  two      thread           1,024  spill\n"
    )


def test_a_script_that_ends_without_a_run_shows_its_buses(capfd: pytest.CaptureFixture[str]) -> None:
    """As they are at its end, also where nobody listens."""
    for script, begin in (
        (BUSES, "bus 1 of 2"),
        ("from eventloop import Bus\nbus = Bus()", "a bus nobody listens to"),
    ):
        assert cli.main(["plan", write(script)]) == 0

        assert capfd.readouterr().out.startswith(f"train.py ends without a run\n\n{begin}\n")


@pytest.mark.parametrize(
    ("script", "code", "errors"),
    [
        ("import sys; sys.exit(3)", 3, ""),
        pytest.param("import sys; sys.exit('usage: ...')", 1, "usage: ...\n", marks=pytest.mark.slow),
        ("x = (", 1, "SyntaxError: '(' was never closed\n"),
        pytest.param(BUSES + "    1 / 0", 1, "ZeroDivisionError: division by zero\n", marks=pytest.mark.slow),
    ],
)
def test_a_script_that_fails(script: str, code: int, errors: str, capfd: pytest.CaptureFixture[str]) -> None:
    """It fails as by Python."""
    assert cli.main(["plan", write(script)]) == code

    told = capfd.readouterr()
    assert told.out == ""
    assert told.err.endswith(errors)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("example", "text"),
    [
        ("daily_schedule.py", r"would emit before_breakfirst"),
        ("lazy_person.py", r"bus 2 of 2"),
        ("hand_written_loop.py", r"would begin a run of 5 epochs"),
        ("mmengine_style.py", r"would begin a run of 40 epochs, 880 iterations"),
    ],
)
def test_every_example_has_a_plan(
    example: str, text: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """It leaves nothing in the working directory."""
    assert cli.main(["plan", str(EXAMPLES / example)]) == 0

    output, errors = capfd.readouterr()
    assert text in output
    assert errors == ""
    assert [*tmp_path.iterdir()] == []
