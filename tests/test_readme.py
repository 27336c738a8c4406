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


def test_it_is_short() -> None:
    """The README stays a first page, and its example has at most 20 lines of code."""
    assert len(README.encode()) <= 10_000
    assert len(README.splitlines()) <= 170
    assert len([line for line in PYTHON_BLOCKS[0].splitlines() if line]) <= 20


@pytest.mark.parametrize("number", range(len(PYTHON_BLOCKS)))
def test_example_runs(number: int, tmp_path: Path) -> None:
    """Each example runs as it is printed; those after the first go on from the first."""
    source = PYTHON_BLOCKS[0] if number == 0 else f"{PYTHON_BLOCKS[0]}\n{PYTHON_BLOCKS[number]}"
    ran = forked.run(["-c", source], cwd=tmp_path, env={**os.environ, "PYTHONPATH": forked.ROOT})

    assert ran.returncode == 0, ran.stderr


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
