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
        ("module.py", '"""Wait."""\n\n\ndef f():\n    raise ValueError("it is none")\n', ["5: the rules of prose refuse 'is none'"]),
        ("module.py", '"""Wait."""\n\n\ndef _private():\n    """Tell somebody."""\n', []),
    ],
)  # fmt: skip
def test_refused_words_are_named(tmp_path: Path, name: str, text: str, found: list[str]) -> None:
    """A refused word in prose, a docstring or an error fails the check; code and private docstrings do not."""
    file = tmp_path / name
    file.write_text(text)

    ran = subprocess.run(
        [sys.executable, str(SCRIPT), str(file)], capture_output=True, text=True, check=False
    )

    assert ran.stdout.splitlines() == [f"{file}:{line}" for line in found]
    assert ran.returncode == bool(found)
