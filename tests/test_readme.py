"""The README does what it says."""

from __future__ import annotations

import os
import re
import tomllib
from pathlib import Path

import pytest

from tests import forked

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
PYTHON_BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def test_first_example_is_short() -> None:
    """The example on the first screen fits there: at most 25 lines."""
    assert len(PYTHON_BLOCKS[0].strip().splitlines()) <= 25


@pytest.mark.parametrize("number", range(len(PYTHON_BLOCKS)))
def test_example_runs(number: int, tmp_path: Path) -> None:
    """Each example runs as it is printed; those after the first go on from the first."""
    source = PYTHON_BLOCKS[0] if number == 0 else f"{PYTHON_BLOCKS[0]}\n{PYTHON_BLOCKS[number]}"
    ran = forked.run(["-c", source], cwd=tmp_path, env={**os.environ, "PYTHONPATH": forked.ROOT})

    assert ran.returncode == 0, ran.stderr


def test_the_printed_plan_is_the_first_example_s(tmp_path: Path) -> None:
    """Of the iterations it has every handler, as `print(trainer.bus)` shows them."""
    (block,) = re.findall(r"```text\n(event .*?)```", README, re.DOTALL)
    source = PYTHON_BLOCKS[0].replace("trainer.train()", "print(trainer.bus)")
    ran = forked.run(["-c", source], cwd=tmp_path, env={**os.environ, "PYTHONPATH": forked.ROOT})
    printed = re.search(r"^after_train_iter .*?(?=^\w)", ran.stdout, re.DOTALL | re.MULTILINE)

    assert printed is not None, ran.stderr
    assert [line.split() for line in block.splitlines()[1:]] == [
        line.split() for line in printed[0].splitlines()
    ]


def test_commands_are_the_two_promised() -> None:
    """The README has the demo's and the tests' command, each complete on one line."""
    prefix = "python -m venv .venv && . .venv/bin/activate && pip install -c constraints.txt -e"

    assert f"{prefix} '.[demo]' && eventloop demo\n" in README
    assert f"{prefix} '.[demo,test]' && pytest\n" in README


def test_the_first_command_brings_what_the_others_need() -> None:
    """`eventloop report --html` works after the demo's installation, which brings all that the extra `report` does."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"][
        "optional-dependencies"
    ]

    assert "torch-eventloop[report]" in extras["demo"]
    assert any(requirement.startswith("plotly") for requirement in extras["report"])
