"""Run the Python blocks of every page under docs/, and check what docs/checkpoints.md says of its files."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from eventloop.checkpoint.listing import Stock
from tests import forked

DOCS = Path(__file__).resolve().parent.parent / "docs"
MADE_FROM_CODE = {"events.md", "api", "dev"}
BLOCK = re.compile(r"^(<!-- not run: .+? -->\n)?```python\n(.*?)^```", re.DOTALL | re.MULTILINE)


def program_of(page: Path) -> str:
    """Return a page's Python blocks as one program, without those that are marked `<!-- not run: why -->`."""
    return "\n".join(code for not_run, code in BLOCK.findall(page.read_text(encoding="utf-8")) if not not_run)


def run(program: str, where: Path) -> subprocess.CompletedProcess[str]:
    """Run a program in a process of its own, and require that it succeeds."""
    ran = forked.run(["-c", program], cwd=where, env={**os.environ, "PYTHONPATH": forked.ROOT})
    assert ran.returncode == 0, ran.stderr
    return ran


CHECKPOINTS, ORDER = DOCS / "checkpoints.md", DOCS / "concepts" / "bus.md"
PAGES = [
    page
    for page in sorted(DOCS.rglob("*.md"))
    if page.relative_to(DOCS).parts[0] not in MADE_FROM_CODE
    and page not in (CHECKPOINTS, ORDER)
    and program_of(page)
]
FOLDERS = sorted({page.parent for page in PAGES})
IN_TURN = """
import os, pathlib
for name, program in {programs!r}:
    where = pathlib.Path(name).absolute()
    where.mkdir(parents=True)
    os.chdir(where)
    exec(compile(program, name, "exec"), {{"__name__": "__main__"}})
    os.chdir(where.parent)
"""


@pytest.mark.slow
@pytest.mark.parametrize("folder", FOLDERS, ids=[str(folder.relative_to(DOCS)) for folder in FOLDERS])
def test_blocks_run(folder: Path, tmp_path: Path) -> None:
    """The blocks of a page run one after the other, as one program, in a directory of its own. One process runs the
    pages of a folder, which saves the imports."""
    programs = [(page.name, program_of(page)) for page in PAGES if page.parent == folder]
    run(IN_TURN.format(programs=programs), tmp_path)


@pytest.mark.slow
def test_the_printed_order_is_the_program_s(tmp_path: Path) -> None:
    """docs/concepts/bus.md shows the rows that its own program prints for an iteration."""
    (block,) = re.findall(r"```text\n(event .*?)```", ORDER.read_text(encoding="utf-8"), re.DOTALL)
    ran = run(program_of(ORDER), tmp_path)
    printed = re.search(r"^after_train_iter .*?(?=^\w)", ran.stdout, re.DOTALL | re.MULTILINE)

    assert printed is not None, ran.stdout
    assert [line.split() for line in block.splitlines()[1:]] == [
        line.split() for line in printed[0].splitlines()
    ]


@pytest.mark.slow
def test_what_the_page_of_checkpoints_says(tmp_path: Path) -> None:
    """It prints the change of the rate with both values, and the epochs of the longer run; the newest three and the best
    are kept; its table has each key of a file, and that of an average."""
    import torch

    lines = run(program_of(CHECKPOINTS), tmp_path).stdout.splitlines()
    assert "  lr: 0.1 in the checkpoint, 0.05 in this trainer" in lines
    assert "6" in lines
    assert lines[-1] == "None"  # nobody owns the directory any more

    directory = tmp_path / "runs" / "kept"
    names = [saved.name for saved in Stock(directory).inventory().checkpoints if not saved.abandoned]
    assert {"epoch_4", "epoch_5", "epoch_6"} <= set(names)
    assert [name for name in names if name.startswith("best_accuracy_epoch_")]

    text = CHECKPOINTS.read_text(encoding="utf-8")
    named = set(re.findall(r"`(\w+)`", "".join(re.findall(r"^\| (`.*?) \|", text, re.MULTILINE)[:4])))
    state = torch.load(directory / "epoch_6" / "state.pth", weights_only=True)
    assert named == {*state, "ema_state_dict"}
