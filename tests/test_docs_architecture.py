"""docs/architecture.md names code that exists, and draws the layers that import-linter checks."""

from __future__ import annotations

import importlib
import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
NAMED = sorted(set(re.findall(r"`(eventloop(?:\.\w+)+)`", PAGE)))


def find(dotted: str) -> object:
    """Return the module, class, function or method of a dotted name."""
    parts = dotted.split(".")
    for length in range(len(parts), 0, -1):
        try:
            found: object = importlib.import_module(".".join(parts[:length]))
        except ModuleNotFoundError:
            continue
        for part in parts[length:]:
            if isinstance(found, type) and part not in vars(found):  # an inherited one may be another method
                raise AttributeError(f"{found.__name__} does not define {part}")
            found = getattr(found, part)
        return found
    raise ModuleNotFoundError(dotted)


@pytest.mark.parametrize("dotted", NAMED)
def test_every_name_exists(dotted: str) -> None:
    """Each `eventloop.package.module.name` of the page can be imported, attribute by attribute."""
    if ".tensorboard" in dotted:
        pytest.importorskip("google_crc32c")
        pytest.importorskip("tensorboard")
    find(dotted)


def test_the_walks_name_code() -> None:
    """Each numbered step of the four walks names at least one object."""
    steps = re.findall(r"^\d\. .*?(?=^\d\. |^$)", PAGE, re.DOTALL | re.MULTILINE)

    assert len(steps) == 24
    assert [step for step in steps if not re.search(r"`eventloop\.\w+\.", step)] == []


def test_the_layers_are_those_that_are_checked() -> None:
    """The list of packages has every layer of the import contract, from top to bottom."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"][
        "contracts"
    ]
    layers = next(contract["layers"] for contract in contracts if contract["type"] == "layers")
    block = next(
        block for block in re.findall(r"```text\n(.*?)```", PAGE, re.DOTALL) if block.startswith("cli ")
    )

    assert [re.split(r"  +", line)[0] for line in block.splitlines() if not line.startswith(" ")] == layers
