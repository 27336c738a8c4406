"""Texts as names of files."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from eventloop.util.file_names import is_plain_name, safe_name

PIECES = ["", "/", "..", ".", "%", "%2F", " ", "\\", ":", "\0", "\n", "\x85", "\u202e", "\udcff", "ä", "%%"]


def test_any_text_is_one_name_and_another_text_another(tmp_path: Path) -> None:
    """Each can be made in a folder, none leads out of it, and none is hidden."""
    texts = {"".join(parts) for parts in itertools.product(PIECES, repeat=2)}

    names = {safe_name(text) for text in texts}

    assert len(names) == len(texts)
    for name in names:
        assert (tmp_path / name).resolve().parent == tmp_path.resolve()
        (tmp_path / name).touch()
    assert {path.name for path in tmp_path.iterdir()} == names
    assert not [name for name in names if name.startswith(".")]


def test_a_long_text_is_a_short_name() -> None:
    """Of 128 bytes at most, and another one for another text."""
    texts = ["x" * 128, "x" * 129, "x" * 130, "é" * 128, "é" * 129, "\n" * 50, "\n" * 51, "\udcff" * 200]

    names = [safe_name(text) for text in texts]

    assert len({*names}) == len(texts)
    assert max(len(name.encode()) for name in names) == 128
    assert names[0] == texts[0]


@pytest.mark.parametrize(
    ("name", "plain"),
    [
        ("epoch_1", True),
        ("a b.pth", True),
        ("", False),
        (".", False),
        ("..", False),
        (".a", False),
        ("a/b", False),
        ("/a", False),
        ("../a", False),
        ("a/", False),
        ("a\0", False),
        (3, False),
        (None, False),
    ],
)
def test_what_a_plain_name_is(name: object, plain: bool) -> None:
    """The name of something in a folder, and no path."""
    assert is_plain_name(name) is plain
