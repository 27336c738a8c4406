"""The examples run."""

from __future__ import annotations

import os
from pathlib import Path

from tests import forked

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"


def test_hand_written_loop_learns_the_line(tmp_path: Path) -> None:
    """The hand-written loop trains, prints from both kinds of handlers, and logs."""
    home = {**os.environ, "PYTHONPATH": forked.ROOT}
    ran = forked.run([EXAMPLES / "hand_written_loop.py", str(tmp_path)], env=home)

    assert ran.returncode == 0, ran.stderr
    assert "learnt y = 3.0 x + 0.5" in ran.stdout
    assert "iteration 8: loss" in ran.stdout
    assert "epoch 5: validation loss" in ran.stdout
    assert (tmp_path / "metrics.jsonl").read_text().count('"mode":"val"') == 5
