"""Run the Python blocks of every page under docs/, and check what docs/checkpoints.md says of its files."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from eventloop.checkpoint.listing import Stock
from tests import forked

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
MADE_FROM_CODE = {"events.md", "api", "dev"}
PAGES = sorted(path for path in DOCS.rglob("*.md") if path.relative_to(DOCS).parts[0] not in MADE_FROM_CODE)
CHECKPOINTS = (DOCS / "checkpoints.md").read_text(encoding="utf-8")


BLOCK = re.compile(r"^(<!-- not run: .+? -->\n)?```python\n(.*?)^```", re.DOTALL | re.MULTILINE)


def blocks(text: str) -> list[str]:
    """Return the Python blocks of a page, without those that are marked `<!-- not run: why -->`."""
    return [code for not_run, code in BLOCK.findall(text) if not not_run]


def name_of(page: Path) -> str:
    """Return the name of a page as pytest shows it."""
    return page.relative_to(DOCS).as_posix()


def run(page: Path, where: Path) -> str:
    """Run the blocks of a page one after the other, as one program, and return what they print."""
    program = "\n".join(blocks(page.read_text(encoding="utf-8")))
    ended = forked.run(["-c", program], cwd=where, env={**os.environ, "PYTHONPATH": forked.ROOT})
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


WITH_BLOCKS = [page for page in PAGES if blocks(page.read_text(encoding="utf-8"))]


@pytest.mark.parametrize("page", [p for p in WITH_BLOCKS if p.name != "checkpoints.md"], ids=name_of)
def test_blocks_run(page: Path, tmp_path: Path) -> None:
    """Every Python block of a page runs as it is printed, after those before it."""
    run(page, tmp_path)


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Run the blocks of checkpoints.md: where, and what they printed."""
    where = tmp_path_factory.mktemp("docs")
    return where / "runs" / "kept", run(DOCS / "checkpoints.md", where)


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

    named = set(re.findall(r"`(\w+)`", "".join(re.findall(r"^\| (`.*?) \|", CHECKPOINTS, re.MULTILINE)[:4])))
    state = torch.load(ran[0] / "epoch_6" / "state.pth", weights_only=True)

    assert named == {*state, "ema_state_dict"}
