"""docs/checkpoints.md does what it says."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from eventloop.checkpoint.listing import Stock
from tests import forked

ROOT = Path(__file__).resolve().parent.parent
TEXT = (ROOT / "docs" / "checkpoints.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The blocks, run one after the other: where, and what they printed."""
    where = tmp_path_factory.mktemp("docs")
    program = "\n".join(BLOCKS)
    ended = forked.run(["-c", program], cwd=where, env={**os.environ, "PYTHONPATH": forked.ROOT})
    assert ended.returncode == 0, ended.stderr
    return where / "runs" / "kept", ended.stdout


def test_what_is_printed(ran: tuple[Path, str]) -> None:
    """The change of the rate with both values, and the epochs of the longer run."""
    assert re.search(r"^  lr: 0\.1 in the checkpoint, 0\.05 in this trainer$", ran[1], re.MULTILINE)
    assert ran[1].splitlines()[-1] == "6"


def test_what_is_kept(ran: tuple[Path, str]) -> None:
    """The newest three and the best, of the longer run."""
    names = [saved.name for saved in Stock(ran[0]).inventory().checkpoints if not saved.abandoned]

    assert {"epoch_4", "epoch_5", "epoch_6"} <= set(names)
    assert [name for name in names if name.startswith("best_accuracy_epoch_")]


def test_the_keys_are_those_of_the_file(ran: tuple[Path, str]) -> None:
    """The table has each of a checkpoint; the one beside them is of an average."""
    import torch

    named = set(re.findall(r"`(\w+)`", "".join(re.findall(r"^\| (`.*?) \|", TEXT, re.MULTILINE)[:4])))
    state = torch.load(ran[0] / "epoch_6" / "state.pth", weights_only=True)

    assert named == {*state, "ema_state_dict"}
