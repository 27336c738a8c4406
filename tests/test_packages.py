"""What is packed is what is there."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.skipif(not (ROOT / "eventloop").is_dir(), reason="needs the checkout")
def test_every_package_is_in_the_wheel() -> None:
    """A package that pyproject.toml does not list would be missing from the wheel, and no build would say so."""
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    folders = {path.parent.relative_to(ROOT) for path in (ROOT / "eventloop").rglob("__init__.py")}
    found = {".".join(folder.parts) for folder in folders} | {"eventloop.hooks", "eventloop.writers"}

    assert sorted(listed) == sorted(found)
