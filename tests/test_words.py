"""`scripts/words` names the words that the rules of prose refuse."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "scripts" / "words"

pytestmark = pytest.mark.skipif(not SCRIPT.exists(), reason="needs the checkout")


@pytest.mark.parametrize(
    ("name", "text", "found"),
    [
        ("page.md", "Nobody waits.\n", ["1: the rules of prose refuse 'Nobody'"]),
        ("page.md", "```python\nnobody = 1\n```\n\nThe bus waits.\n", []),
        ("module.py", '"""Wait for somebody."""\n', ["1: the rules of prose refuse 'somebody'"]),
        (
            "module.py",
            '"""Wait."""\n\n\ndef f():\n    raise ValueError("it is none")\n',
            ["5: the rules of prose refuse 'is none'"],
        ),
        ("module.py", '"""Wait."""\n\n\ndef _private():\n    """Tell somebody."""\n', []),
    ],
)
def test_refused_words_are_named(tmp_path: Path, name: str, text: str, found: list[str]) -> None:
    """A refused word in prose, a docstring or an error fails the check; code and private docstrings do not."""
    file = tmp_path / name
    file.write_text(text)

    ran = subprocess.run(
        [sys.executable, str(SCRIPT), str(file)], capture_output=True, text=True, check=False
    )

    assert ran.stdout.splitlines() == [f"{file}:{line}" for line in found]
    assert ran.returncode == bool(found)


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("def tell_losses():\n    pass\n", ["1: the name 'tell_losses'"]),
        ("class Queue:\n    async def _take(self):\n        pass\n", ["2: the name '_take'"]),
        ("class Queue:\n    asked: int = 0\n", ["2: the name 'asked'"]),
        ("def start(self):\n    self._asking = True\n", ["2: the name '_asking'"]),
        (
            "def start(noted=0, *, seconds_told=0):\n    pass\n",
            ["1: the name 'noted'", "1: the name 'seconds_told'"],
        ),
        ("class Scope:\n    def __enter__(self):\n        self.retained = 0\n", []),
        ("def test_it_is_told():\n    told = 0\n", []),
        ("def add(note, taken):\n    trainer.asked_to_stop = True\n", []),
    ],
)
def test_refused_names_are_named(tmp_path: Path, text: str, names: list[str]) -> None:
    """A function that begins with a refused verb fails the check, and so does an attribute or parameter with one."""
    file = tmp_path / "module.py"
    file.write_text(text)

    ran = subprocess.run(
        [sys.executable, str(SCRIPT), str(file)], capture_output=True, text=True, check=False
    )

    found = [line.removeprefix(f"{file}:").partition(" has ")[0] for line in ran.stdout.splitlines()]
    assert found == names
    assert ran.returncode == bool(names)
