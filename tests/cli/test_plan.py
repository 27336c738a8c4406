"""`eventloop plan` of a script: it is run up to its run, and shows who would run when."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from eventloop import cli
from tests import forked
from tests.cli.conftest import ENVIRONMENT

EXAMPLES = Path(__file__).parents[2] / "examples"
TRAINER = """
import sys
import torch
import torch.nn.functional as F
from eventloop import Trainer
from eventloop.hooks import EMAHook
from eventloop.writers import ConsoleWriter, EventLogWriter, JSONLWriter

def build(**changes):
    model = torch.nn.Sequential(torch.nn.Linear(2, 8), torch.nn.ReLU(), torch.nn.Dropout(0.5), torch.nn.Linear(8, 3))
    loader = [(torch.zeros(4, 2), torch.zeros(4, dtype=torch.long))] * 3
    arguments = dict(optimizer=torch.optim.SGD(model.parameters(), lr=0.1), loss_fn=F.cross_entropy,
                     train_loader=loader, val_loader=loader, test_loader=loader, max_epochs=2, work_dir="out/run",
                     hooks=[EMAHook()], writers=[JSONLWriter(), EventLogWriter()])
    return Trainer(model, **{**arguments, **changes})
"""


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def write(text: str, name: str = "train.py") -> str:
    """A script in the working directory."""
    Path(name).write_text(text, encoding="utf-8")
    return name


def left() -> list[str]:
    """What is in the working directory besides the script."""
    return sorted(path.name for path in Path().iterdir() if path.name != "train.py")


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own."""
    return forked.run(["-m", "eventloop", *arguments], env=ENVIRONMENT)


def files(folder: str) -> dict[Path, bytes]:
    """What a folder holds."""
    return {path: path.read_bytes() if path.is_file() else b"" for path in Path(folder).rglob("*")}


def plan_of(*arguments: str, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """The plan as programs read it."""
    assert cli.main(["plan", "--json", *arguments]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


BEGINNINGS = {
    "train": "trainer.train()",
    "run": "trainer.run([('train', 1), ('val', 1)])",
    "val": "trainer.val()",
    "test": "trainer.test()",
    "epochs": "for epoch in trainer.epochs():\n    for batch in trainer.batches(trainer.train_loader): 1 / 0",
}


@pytest.mark.parametrize("beginning", BEGINNINGS)
def test_a_script_is_run_up_to_its_run(beginning: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Whichever way it begins, nothing is trained, nothing after it is done, and nothing is left behind."""
    script = write(
        f"{TRAINER}\ntrainer = build(train_step=lambda t, b: 1 / 0, loss_fn=None)\nprint('built')\n"
        f"{BEGINNINGS[beginning]}\nprint('trained')\n"
    )
    line = script and Path(script).read_text().splitlines().index(BEGINNINGS[beginning].splitlines()[0]) + 1
    before = {*threading.enumerate()}

    assert cli.main(["plan", script]) == 0

    output = capsys.readouterr().out.splitlines()
    assert output[0] == "built"
    assert output[1] == f"train.py:{line} would begin a run of 2 epochs, 6 iterations"
    assert "trained" not in output
    assert left() == []
    assert {*threading.enumerate()} <= before


def test_the_table_is_in_the_order_of_a_run(capsys: pytest.CaptureFixture[str]) -> None:
    """Events as they come; of each the sync handlers with their numbers, then who is in the background, and where."""
    script = write(
        f"{TRAINER}\ntrainer = build()\n"
        "@trainer.bus.on('after_train_iter', priority=55, every=20)\ndef show(trainer, event): pass\n"
        "@trainer.bus.on('after_val_epoch', queue=7, overflow='drop_oldest')\nasync def tell(event): pass\n"
        "trainer.train()\n"
    )

    found = plan_of(script, capsys=capsys)

    events = [plan["event"] for plan in found["buses"][0]]
    order = [
        "before_run",
        "before_train",
        "after_train_iter",
        "after_train_epoch",
        "after_val_epoch",
        "after_train",
    ]
    assert [event for event in events if event in order] == order
    assert events.index("after_train") < events.index("after_run") < events.index("scalars_logged")
    handlers = {plan["event"]: plan["handlers"] for plan in found["buses"][0]}
    numbers = [row["order"] for row in handlers["after_train_iter"] if row["order"]]
    assert numbers == [*range(1, len(numbers) + 1)]
    priorities = [row["priority"] for row in handlers["after_train_iter"] if row["order"]]
    assert priorities == sorted(priorities)
    assert {
        "order": 5, "priority": 55, "name": "show", "filter": "every=20", "runs_on": "sync", "queue": 0, "overflow": "",
        "budget_us": None,
    } in handlers["after_train_iter"]  # fmt: skip
    assert {
        "order": 0, "priority": 50, "name": "tell", "filter": "", "runs_on": "loop", "queue": 7,
        "overflow": "drop_oldest", "budget_us": None,
    } in handlers["after_val_epoch"]  # fmt: skip
    assert (found["max_epochs"], found["max_iters"], found["event"]) == (2, 6, "")


def test_the_plan_is_the_trainers_own(capsys: pytest.CaptureFixture[str]) -> None:
    """What is shown is what `print(trainer.bus)` shows where the run would begin."""
    script = write(f"{TRAINER}\ntrainer = build()\nprint(trainer.bus)\nprint('=====')\ntrainer.train()\n")

    assert cli.main(["plan", script]) == 0

    printed, _, planned = capsys.readouterr().out.partition("=====\n")
    assert planned.partition("\n\n")[2] == printed


def test_a_script_sees_what_python_shows_it(capsys: pytest.CaptureFixture[str]) -> None:
    """Its arguments, its name, its folder first in the path; and no bytecode is left."""
    Path("sub").mkdir()
    write("HERE = 1\n", "sub/beside_the_script.py")
    script = write(
        f"import sys\nimport beside_the_script\nprint(__name__, sys.argv)\n{TRAINER}\nbuild().train()\n",
        "sub/train.py",
    )
    path = list(sys.path)

    assert cli.main(["plan", script, "--", "--lr", "0.1", "--", "x"]) == 0

    assert capsys.readouterr().out.startswith("__main__ ['sub/train.py', '--lr', '0.1', '--', 'x']\n")
    assert sys.path == path
    assert sorted(p.name for p in Path("sub").iterdir()) == ["beside_the_script.py", "train.py"]


@pytest.mark.slow
def test_a_resume_changes_nothing_on_the_disk(capsys: pytest.CaptureFixture[str]) -> None:
    """The checkpoint is read, its handlers run; no writer cuts off what is to be written again."""
    first = write(f"{TRAINER}\nbuild(hooks=[]).train()\n")
    ran = forked.run([first], env=ENVIRONMENT)
    assert ran.returncode == 0, ran.stderr
    before = files("out")
    script = write(
        f"{TRAINER}\ntrainer = build(hooks=[], max_epochs=4)\n"
        "trainer.bus.on('after_load_checkpoint')(lambda event: print('loaded', event.path))\n"
        "trainer.resume('auto')\nprint(trainer.epoch, trainer.bus.flush().complete)\ntrainer.train()\n"
    )

    assert cli.main(["plan", script]) == 0

    output = capsys.readouterr().out
    assert output.startswith("loaded out/run/epoch_2\n2 True\n")
    assert "would begin a run of 4 epochs" in output
    assert files("out") == before


def test_what_the_script_itself_writes_stays_and_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    """A directory is removed only while it is empty."""
    script = write(
        f"{TRAINER}\ntrainer = build(work_dir=None)\n(trainer.work_dir / 'config.txt').write_text('lr')\ntrainer.train()\n"
    )

    assert cli.main(["plan", script]) == 0

    (run,) = Path("runs").iterdir()
    assert [path.name for path in run.iterdir()] == ["config.txt"]
    assert (
        f"{run.absolute()} was created and stays: the script has put config.txt there"
        in capsys.readouterr().err
    )


def test_an_empty_work_dir_that_was_there_stays() -> None:
    """Only what was made here is removed."""
    Path("out").mkdir()
    script = write(f"{TRAINER}\nbuild().train()\n")

    assert cli.main(["plan", script]) == 0

    assert [*Path("out").iterdir()] == []


@pytest.mark.slow
def test_a_run_in_another_thread_does_not_begin_either() -> None:
    """The thread ends without a word, and the plan is shown when the script ends."""
    script = write(
        f"{TRAINER}\nimport threading\ntrainer = build(train_step=lambda t, b: 1 / 0, loss_fn=None)\n"
        "thread = threading.Thread(target=trainer.train)\nthread.start()\nthread.join()\n"
    )
    ran = command("plan", script)

    assert (ran.returncode, ran.stderr) == (0, "")
    assert "would begin a run of 2 epochs" in ran.stdout


def test_what_the_script_does_on_its_way_out_is_no_failure(capsys: pytest.CaptureFixture[str]) -> None:
    """Its clean-up runs; one that needs what the training would have made fails without a word, and a subscription
    that it cancels is in the plan."""
    script = write(
        f"{TRAINER}\ntrainer = build()\n"
        "try:\n    with trainer.bus.subscribe(lambda event: None, 'before_train', name='mine'):\n"
        "        result = trainer.test()\nfinally:\n    print('closing')\n    print(result)\n"
    )

    assert cli.main(["plan", script]) == 0

    output, errors = capsys.readouterr()
    assert output.startswith("closing\n")
    assert " mine " in output
    assert errors == ""


BUSES = """
from eventloop.bus import Bus
with Bus() as first, Bus(), Bus() as third:
    first.subscribe(print, "before_run", name="one")
    third.subscribe(print, "after_run", name="two", offload="thread")
    {}
"""


def test_a_bus_without_a_trainer_begins_with_its_first_event(capsys: pytest.CaptureFixture[str]) -> None:
    """The first that somebody would hear: nobody hears it, and every bus that somebody listens to is shown."""
    script = write(
        "from eventloop.events import BeforeTrain, BeforeRun\n"
        + BUSES.format("first.emit(BeforeTrain()); first.emit(BeforeRun()); 1 / 0")
    )

    assert cli.main(["plan", script]) == 0

    assert capsys.readouterr().out == (
        "train.py:7 would emit before_run\n\n"
        "bus 1 of 2\n"
        "event       order  priority  handler  runs on  filter\n"
        "----------  -----  --------  -------  -------  ------\n"
        "before_run      1        50  one      sync\n\n"
        "bus 2 of 2\n"
        "event      order  priority  handler  runs on  filter  queue  overflow\n"
        "---------  -----  --------  -------  -------  ------  -----  --------\n"
        "after_run      -         -  two      thread           1,024  spill\n"
    )


def test_a_script_that_ends_without_a_run_shows_its_buses(capsys: pytest.CaptureFixture[str]) -> None:
    """As they are at its end."""
    script = write(BUSES.format("pass"))

    assert cli.main(["plan", script]) == 0

    output = capsys.readouterr().out
    assert output.startswith("train.py ends without a run\n\nbus 1 of 2\n")
    assert "  two " in output


def test_a_bus_nobody_listens_to(capsys: pytest.CaptureFixture[str]) -> None:
    """Is said to be one."""
    assert cli.main(["plan", write("from eventloop import Bus\nbus = Bus()\n")]) == 0

    assert capsys.readouterr().out == "train.py ends without a run\n\na bus nobody listens to\n"


def test_a_script_that_fails(capsys: pytest.CaptureFixture[str]) -> None:
    """Its traceback begins in the script; the exit code is 1, and the work dir is gone."""
    script = write(f"{TRAINER}\ntrainer = build()\nbuild(hooks=[dict(type='EMAHok')])\n")

    assert cli.main(["plan", script]) == 1

    output, errors = capsys.readouterr()
    assert output == ""
    assert errors.startswith('Traceback (most recent call last):\n  File "train.py", line 18, in <module>\n')
    assert "ValueError: unknown type 'EMAHok': did you mean 'EMAHook'?" in errors
    assert left() == []


def test_a_script_that_does_not_parse(capsys: pytest.CaptureFixture[str]) -> None:
    """Is shown as Python shows it."""
    assert cli.main(["plan", write("x = (\n")]) == 1

    errors = capsys.readouterr().err
    assert errors.lstrip().startswith('File "train.py", line 1\n')
    assert errors.endswith("SyntaxError: '(' was never closed\n")


@pytest.mark.parametrize(
    ("ending", "code", "says"), [("3", 3, ""), ("'usage: ...'", 1, "usage: ...\n"), ("[1]", 1, "[1]\n")]
)
def test_a_script_that_ends_itself(
    ending: str, code: int, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its exit code is ours."""
    assert cli.main(["plan", write(f"import sys\nsys.exit({ending})\n")]) == code

    assert capsys.readouterr() == ("", says)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("nowhere.py", None, "no file at nowhere.py: give a training script or a config"),
        ("train.py", "print", "train.py ended without a run, and has made neither a Trainer nor a Bus"),
        ("train.sh", "python", "train.sh is neither a Python file nor a config (.json, .toml, .yaml, .yml)"),
    ],
)
def test_bad_input_is_one_line(
    name: str, text: str | None, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """And exit code 2."""
    if text is not None:
        write(text, name)

    assert cli.main(["plan", name]) == 2

    output, errors = capsys.readouterr()
    assert output == ""
    assert errors.startswith(f"eventloop: {message}")
    assert errors.count("\n") == 1


def test_traceback_shows_where_it_was_found() -> None:
    """Asked for, the error itself is raised."""
    with pytest.raises(FileNotFoundError, match="no file at nowhere"):
        cli.main(["plan", "--traceback", "nowhere.py"])


def test_json_is_all_that_standard_output_has(capsys: pytest.CaptureFixture[str]) -> None:
    """What the script prints goes to standard error."""
    script = write(f"print('hello')\n{TRAINER}\nbuild().train()\n")

    assert cli.main(["plan", script, "--json"]) == 0

    output, errors = capsys.readouterr()
    assert json.loads(output)["file"] == "train.py"
    assert json.loads(output)["where"].startswith("train.py:")
    assert errors == "hello\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("example", "says"),
    [
        ("daily_schedule.py", r"would emit before_breakfirst"),
        ("lazy_person.py", r"bus 2 of 2"),
        ("hand_written_loop.py", r"would begin a run of 5 epochs"),
        ("mmengine_style.py", r"would begin a run of 40 epochs, 880 iterations"),
    ],
)
def test_every_example_has_a_plan(example: str, says: str, tmp_path: Path) -> None:
    """As a user would ask for it; it leaves nothing."""
    ran = command("plan", str(EXAMPLES / example))

    assert (ran.returncode, ran.stderr) == (0, "")
    assert says in ran.stdout
    assert [*tmp_path.iterdir()] == []


def test_every_example_is_planned_here() -> None:
    """A new one is to be added above."""
    marks: Any = test_every_example_has_a_plan
    (planned,) = (mark.args[1] for mark in marks.pytestmark if mark.name == "parametrize")

    assert sorted(path.name for path in EXAMPLES.glob("*.py")) == sorted(name for name, _ in planned)


def test_help_says_what_is_a_config(capsys: pytest.CaptureFixture[str]) -> None:
    """And when a script is held."""
    with pytest.raises(SystemExit, match="0"):
        cli.main(["plan", "--help"])

    words = " ".join(capsys.readouterr().out.split())
    assert "a Python file that assigns one of default_hooks, custom_hooks" in words
    assert "until its trainer would begin to train, validate or test" in words
