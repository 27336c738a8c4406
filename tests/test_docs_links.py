"""Relative links of README, CONTRIBUTING, examples and docs lead to files of the repository."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "examples/README.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]
LINK = re.compile(r"\]\((?!https?:|#|mailto:)([^)#\s]+)")


@pytest.mark.skipif(not (ROOT / "eventloop").is_dir(), reason="needs the checkout")
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_to_files(page: Path) -> None:
    """Each target exists; blocks of code are not looked at."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)

    assert [link for link in LINK.findall(text) if not (page.parent / link).exists()] == []


def test_no_menu_names_a_page_for_maintainers() -> None:
    """A user's menu has no page of docs/dev; the page on contributing links to each of them."""
    dev = ROOT / "docs" / "dev"
    users = [page for page in PAGES if dev not in page.parents]
    menus = re.findall(
        r"^```{toctree}.*?^```",
        "".join(page.read_text(encoding="utf-8") for page in users),
        flags=re.DOTALL | re.MULTILINE,
    )
    contributing = (ROOT / "docs" / "contributing.md").read_text(encoding="utf-8")

    assert len(menus) > 4
    assert [menu for menu in menus if "dev/" in menu] == []
    assert [page.name for page in dev.glob("*.md") if f"](dev/{page.name})" not in contributing] == []
