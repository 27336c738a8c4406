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


@pytest.mark.skipif(not (ROOT / "eventloop").is_dir(), reason="needs the checkout")
def test_every_file_of_a_package_is_in_the_wheel() -> None:
    """Files that are not Python, such as those of the live page, are missing from the wheel unless they are listed."""
    data = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    folders = {package: ROOT / package.replace(".", "/") for package in data}
    listed = {
        path for package, folder in folders.items() for glob in data[package] for path in folder.glob(glob)
    }
    found = {
        path
        for path in (ROOT / "eventloop").rglob("*")
        if path.is_file() and path.suffix not in (".py", ".pyc")
    }

    assert {path.name for path in listed} >= {"py.typed", "page.html", "page.css", "page.js"}
    assert sorted(found - listed) == []
