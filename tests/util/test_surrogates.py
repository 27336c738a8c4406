"""Texts that UTF-8 has no bytes for, and what a file of text has in their place."""

from __future__ import annotations

import os

from eventloop.util.surrogates import escaped, without_surrogates


def test_a_lone_surrogate_is_an_escape() -> None:
    """Each stands as Python writes it; any other letter is what it was."""
    assert escaped(os.fsdecode(b"/data/caf\xe9/gr\xc3\xb6\xc3\x9fe")) == "/data/caf\\udce9/größe"
    assert escaped("\ud83d😀") == "\\ud83d😀"


def test_texts_are_found_wherever_they_are() -> None:
    """Keys and what is in mappings, lists, tuples and sets; all else is the object that it was."""
    data = b"\xff"

    changed = without_surrogates({"a\udcff": [("\udcff", 1)], ("x", "\udcff"): {"\udcff"}, "b": {1: data}})

    assert changed == {"a\\udcff": [("\\udcff", 1)], ("x", "\\udcff"): {"\\udcff"}, "b": {1: data}}
    assert changed["b"][1] is data
