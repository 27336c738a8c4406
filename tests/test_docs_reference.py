"""The reference has every public name, and the list of events is what the classes say."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from docs._generate import events
from docs._generate.docstrings import to_rst
from docs._generate.public import PUBLIC_MODULES, public_names

ROOT = Path(__file__).resolve().parents[1]
PAGES = {path.stem: path.read_text(encoding="utf-8") for path in (ROOT / "docs" / "api").glob("*.md")}
DIRECTIVE = re.compile(r"^\.\. (?:currentmodule::|auto\w+::|py:data::) ([\w.]+)", re.MULTILINE)


def documented() -> set[str]:
    """Return the dotted names that the pages have a directive for, or a row that says where they are described."""
    names: set[str] = set()
    for text in PAGES.values():
        module = ""
        for match in DIRECTIVE.finditer(text):
            if "currentmodule" in match[0]:
                module = match[1]
            else:
                names.add(f"{module}.{match[1]}")
        names |= set(re.findall(r"`(eventloop\.\w+)`(?=[^|\n]*\| \[)", text))
    return names


@pytest.mark.parametrize("module", PUBLIC_MODULES)
def test_every_public_name_has_an_entry(module: str) -> None:
    """Each name that a public module exports is in the pages under `docs/api`."""
    assert [name for name in public_names(module) if f"{module}.{name}" not in documented()] == []


def test_every_entry_is_public() -> None:
    """The pages describe no name that its module does not have, or does not export."""
    exported = {f"{module}.{name}" for module in PUBLIC_MODULES for name in public_names(module)}
    registries = {"eventloop.optim.schedulers.SCHEDULERS"}

    assert documented() - exported - registries == set()


def test_the_list_of_events_is_up_to_date() -> None:
    """After a change of an event, run `python -m docs._generate.events`."""
    assert events.PAGE.read_text(encoding="utf-8") == events.page()


def test_the_list_has_every_event() -> None:
    """No event is left out where a family begins at the wrong class."""
    listed = [cls for _, members in events.families() for cls in members]

    assert listed == events.own_events()
    assert [family for family, _ in events.families()] == [*events.FAMILIES]


def test_a_docstring_becomes_rst() -> None:
    """Single backticks become literals, indented blocks become code, and sections are left to napoleon."""
    lines = ["Use `x`s, or *args.", "", "    x = 1", "", "    y = 2", "", "Args:", "    x: a `name`.", ""]
    to_rst(None, "function", "f", None, None, lines)

    assert lines[0] == r"Use ``x``\ s, or \*args."
    assert lines[2:7] == [".. code-block:: python", "", "    x = 1", "", "    y = 2"]
    assert lines[8:10] == ["Args:", "    x: a ``name``."]
