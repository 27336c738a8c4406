"""`eventloop plan` of a Python file that only assigns: a config, or a training script that is written like one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from eventloop import cli
from eventloop.cli.plan_config import plan_config
from tests.cli.test_plan_config import refused, write

FLAT = """
import sys
import torch
import torch.nn.functional as F
from eventloop import Bus, Trainer
from eventloop.hooks import EMAHook

max_epochs = 2
loader = [(torch.zeros(4, 2), torch.zeros(4, dtype=torch.long))] * 3
model = torch.nn.Linear(2, 3)
trainer = Trainer(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), loss_fn=F.cross_entropy,
                  train_loader=loader, max_epochs=max_epochs, work_dir="out/run", hooks=[EMAHook()])
"""


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def left() -> list[str]:
    """What is in the working directory besides Python files."""
    return sorted(path.name for path in Path().iterdir() if path.suffix != ".py")


def test_a_flat_script_is_not_trained(capsys: pytest.CaptureFixture[str]) -> None:
    """It is held where its run would begin, as any script; no checkpoint and no directory is left."""
    script = write(f"{FLAT}result = trainer.train()\nafter = print('trained')\n")

    assert cli.main(["plan", script]) == 0

    output = capsys.readouterr().out
    line = len(FLAT.splitlines()) + 1
    assert output.startswith(f"config.py:{line} would begin a run of 2 epochs, 6 iterations\n\nevent ")
    assert "EMAHook.after_train_iter" in output
    assert "trained" not in output
    assert left() == []


def test_a_flat_script_is_run_once(capsys: pytest.CaptureFixture[str]) -> None:
    """What it does before its run is not done again to have its plan; with --json it prints to standard error."""
    script = write(f"{FLAT}once = print('made')\nresult = trainer.train()\n")

    assert cli.main(["plan", script, "--json"]) == 0

    output, errors = capsys.readouterr()
    assert (json.loads(output)["max_epochs"], errors) == (2, "made\n")


def test_a_flat_script_has_its_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    """As any script."""
    script = write(f"{FLAT}trainer.max_epochs = int(sys.argv[1])\nresult = trainer.train()\n")

    assert cli.main(["plan", script, "--", "7"]) == 0

    assert "would begin a run of 7 epochs" in capsys.readouterr().out


def test_a_flat_script_that_ends_itself(capsys: pytest.CaptureFixture[str]) -> None:
    """Its exit code is ours."""
    assert cli.main(["plan", write("import sys\nmax_epochs = 3\nended = sys.exit('usage: ...')\n")]) == 1

    assert capsys.readouterr() == ("", "usage: ...\n")


@pytest.mark.parametrize(
    "ending", ["", "bus = Bus()\nwatched = bus.subscribe(print, 'before_run', name='watch')"]
)
def test_a_file_with_a_trainer_or_a_bus_is_no_config(ending: str, capsys: pytest.CaptureFixture[str]) -> None:
    """It is a script that ends without a run, and its buses are shown."""
    head = FLAT if not ending else "from eventloop import Bus\nmax_epochs = 2\n"

    assert cli.main(["plan", write(head + ending)]) == 0

    output = capsys.readouterr().out
    assert output.startswith("config.py ends without a run\n\nevent ")
    assert ("EMAHook.before_run" in output, "watch" in output) == (not ending, bool(ending))
    assert left() == []


def test_what_a_swallowed_run_leads_to_does_not_count(capsys: pytest.CaptureFixture[str]) -> None:
    """A flat script that fails over a run that never began is one whose run was reached."""
    body = "def main():\n    try:\n        trainer.train()\n    finally:\n        1 / 0\n"

    assert cli.main(["plan", write(f"{FLAT}{body}result = main()\n")]) == 0

    assert "would begin a run of 2 epochs" in capsys.readouterr().out


def test_a_base_that_is_a_script_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """The config is not: the message names both, and nothing is trained."""
    write(f"{FLAT}result = trainer.train()\n", "base.py")

    message = refused(write("_base_ = 'base.py'\nhooks = []"), capsys)

    assert message == (
        "base.py, a base of config.py, begins a run when it is read: expected a config, got a script"
    )
    assert left() == []
    write("import sys\nended = sys.exit(3)", "base.py")
    assert "base.py, a base of config.py, ends the program when it is read" in refused("config.py", capsys)


def test_a_run_in_what_a_config_builds_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """A module that trains when it is imported is held, and the message says where."""
    write(f"{FLAT}result = trainer.train()\n", "trains_when_imported.py")

    message = refused(write("custom_imports = 'trains_when_imported'\nhooks = []"), capsys)

    assert message.startswith("config.py: building its hooks and writers would begin a run at ")
    assert message.endswith(f"trains_when_imported.py:{len(FLAT.splitlines()) + 1}, so there is no plan")
    assert left() == []


def test_a_hook_that_ends_the_program_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """As any other error of a hook."""
    hook = (
        "import sys\nfrom eventloop.hooks import Hook\nclass Ends(Hook):\n"
        "    def __init__(self) -> None:\n        sys.exit(3)\n"
    )

    message = refused(write(f"{hook}hooks = [dict(type=Ends)]"), capsys)

    assert message == "config.py: building its hooks and writers ends the program, so there is no plan"


def test_a_config_prints_to_standard_error(capsys: pytest.CaptureFixture[str]) -> None:
    """Where standard output is for programs."""
    assert cli.main(["plan", "--json", write("hooks = []\nprinted = print('hello')")]) == 0

    output, errors = capsys.readouterr()
    assert (json.loads(output)["file"], errors) == ("config.py", "hello\n")


def test_arguments_are_refused_with_the_config() -> None:
    """By the function too."""
    path = Path(write("hooks = []"))

    with pytest.raises(ValueError, match=r"config\.py is a config, which takes no arguments, got --lr 1"):
        plan_config(path, ["--lr", "1"])
