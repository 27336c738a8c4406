"""Callbacks of other engines in this trainer: which objects are taken, without any of the engines."""

from __future__ import annotations

from typing import Any

import pytest

from eventloop.bridges.foreign import Foreign
from eventloop.hooks import EMAHook


class Stranger:
    """An object of none of the systems."""

    def __repr__(self) -> str:
        return "Stranger()"


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (Stranger, r"takes a callback object, got the class Stranger: write Foreign\(Stranger\(\.\.\.\)\)"),
        (Stranger(), r"of lightning, pytorch_lightning, transformers, ignite or mmengine, got Stranger\(\)"),
        (EMAHook(), r"got EMAHook, which is a hook of this one: put it in hooks=\[\.\.\.\] itself"),
        (3, r"Foreign takes a callback of lightning.*, got 3"),
    ],
)
def test_what_is_no_callback_of_another_engine(given: Any, words: str) -> None:
    """A class, an object of another origin and an own hook are refused where the Foreign is made."""
    with pytest.raises(TypeError, match=words):
        Foreign(given)
