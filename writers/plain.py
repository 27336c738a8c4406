"""What the files that hold any event make of values that msgspec has no encoding for."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import msgspec

from eventloop.util.surrogates import without_surrogates

_BINARY = (bytes, bytearray, memoryview, datetime)
"""What msgpack has a form of its own for; JSON makes texts of them."""


class NoPlainValue(Exception):
    """A tensor or an array of several elements, or of one that cannot be read: its text would not be all of it, and
    whoever has it may be changing it."""


def plain(value: Any) -> Any:
    """The number that a scalar of numpy or a tensor of one element is, and anything else as its text.

    Raises:
        NoPlainValue: it has elements.
    """
    item = getattr(value, "item", None)
    if item is None:
        return str(value)
    try:
        return item()
    except Exception as error:
        raise NoPlainValue(str(error)) from error


def encodable(value: Any) -> Any:
    """A value that was refused for a lone surrogate in it, with an escape in place of each; objects are mappings, or
    what `plain` makes of them.

    Raises:
        NoPlainValue: there is something else in it that has no encoding.
    """
    return without_surrogates(msgspec.to_builtins(value, enc_hook=plain, builtin_types=_BINARY))
