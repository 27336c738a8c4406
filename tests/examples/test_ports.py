"""The ports of plain PyTorch programs end with the weights of their originals, and are as long as their page says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests import forked
from tests.test_examples import ENVIRONMENT, EXAMPLES, count

PORTS = EXAMPLES / "ports"
ROW = re.compile(r"^\| [^|]+ \| \[(\w+)\.py\]\(\1\.py\) \| (\d+), (\d+) \| (\d+), (\d+) \|", re.MULTILINE)
ROWS = {name: counts for name, *counts in ROW.findall((PORTS / "README.md").read_text(encoding="utf-8"))}


@pytest.mark.slow
@pytest.mark.parametrize("name", ROWS)
def test_port_ends_with_the_bits_of_the_original(name: str, tmp_path: Path) -> None:
    """Original and port, each in a process of its own, save equal tensors."""
    import torch

    for script in (f"{name}_original", name):
        ran = forked.run([PORTS / f"{script}.py", f"{script}.pt"], cwd=tmp_path, env=ENVIRONMENT)
        assert ran.returncode == 0, ran.stderr
    original, port = (torch.load(tmp_path / f"{script}.pt") for script in (f"{name}_original", name))

    torch.testing.assert_close(port, original, rtol=0, atol=0)


def test_the_page_has_each_pair_and_its_counts() -> None:
    """The table lists all scripts with their lines and statements, and no port is above 60 lines."""
    scripts = {path.stem: count(path.read_text(encoding="utf-8")) for path in PORTS.glob("*.py")}

    assert {*scripts} == {*ROWS} | {f"{name}_original" for name in ROWS}
    for name, counts in ROWS.items():
        assert [*scripts[f"{name}_original"], *scripts[name]] == [int(each) for each in counts]
        assert scripts[name][0] <= 60
